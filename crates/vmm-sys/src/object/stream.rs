//! [`Stream`]: a queue of GPU work, owned or borrowed, with its identity.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use super::Event;
use crate::driver::Driver;
use crate::error::DriverResult;
use crate::types::{CaptureInfo, DeviceId, StreamHandle, StreamId, Transfer};

/// A stream of one device. Clones share it.
///
/// Handle values are given out again by the driver after a destroy, so identity is
/// [`Stream::id`], taken once when the object is made (row D-S1).
#[derive(Clone)]
pub struct Stream(Arc<Inner>);

struct Inner {
    driver: Arc<dyn Driver>,
    device: DeviceId,
    handle: StreamHandle,
    id: StreamId,
    owned: bool,
    /// What keeps a borrowed stream alive, if its owner gave something.
    _keep: Option<Box<dyn Any + Send + Sync>>,
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({:?} of {}, handle {:#x})", self.0.id, self.0.device, self.0.handle.0)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if !self.owned || self.driver.is_gone() {
            return;
        }
        // SAFETY: `self` owns the handle and is gone after this; work enqueued goes on.
        let result = unsafe { self.driver.stream_destroy(self.device, self.handle) };
        if let Err(error) = result {
            tracing::debug!(%error, "a stream could not be destroyed");
        }
    }
}

impl Stream {
    /// Makes a non-blocking stream (`cuStreamCreate`).
    ///
    /// # Errors
    /// The driver's.
    pub fn create(driver: &Arc<dyn Driver>, device: DeviceId) -> DriverResult<Stream> {
        let handle = driver.stream_create(device)?;
        // SAFETY: the handle was made just now.
        let id = unsafe { driver.stream_id(device, handle) };
        let stream = |id| {
            let driver = driver.clone();
            Stream(Arc::new(Inner { driver, device, handle, id, owned: true, _keep: None }))
        };
        match id {
            Ok(id) => Ok(stream(id)),
            Err(error) => {
                drop(stream(StreamId(0))); // destroys the stream
                Err(error)
            }
        }
    }

    /// The legacy stream of `device` (handles 0 and 1 are the same stream).
    ///
    /// # Errors
    /// The driver's.
    pub fn legacy(driver: &Arc<dyn Driver>, device: DeviceId) -> DriverResult<Stream> {
        // SAFETY: the legacy stream lives as long as its context.
        unsafe { Stream::from_raw(driver, device, StreamHandle::LEGACY, None) }
    }

    /// Takes a stream that somebody else owns. `keep` is dropped with the last clone: put there
    /// what keeps the stream alive.
    ///
    /// # Safety
    /// The handle is a live stream of `device`'s primary context for as long as any clone of the
    /// returned object, or of `keep`, lives.
    ///
    /// # Errors
    /// The driver's.
    pub unsafe fn from_raw(
        driver: &Arc<dyn Driver>,
        device: DeviceId,
        handle: StreamHandle,
        keep: Option<Box<dyn Any + Send + Sync>>,
    ) -> DriverResult<Stream> {
        // SAFETY: live by this function's own condition.
        let id = unsafe { driver.stream_id(device, handle)? };
        let driver = driver.clone();
        Ok(Stream(Arc::new(Inner { driver, device, handle, id, owned: false, _keep: keep })))
    }

    /// The device.
    pub fn device(&self) -> DeviceId {
        self.0.device
    }

    /// The identity, never given out twice.
    pub fn id(&self) -> StreamId {
        self.0.id
    }

    /// The driver's handle, valid while `self` lives.
    pub fn handle(&self) -> StreamHandle {
        self.0.handle
    }

    /// The driver it belongs to.
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.0.driver
    }

    /// Later work of this stream waits for `event` (`cuStreamWaitEvent`), the host does not.
    ///
    /// # Errors
    /// The driver's.
    pub fn wait_event(&self, event: &Event) -> DriverResult<()> {
        // SAFETY: both objects own live handles.
        unsafe { self.0.driver.stream_wait_event(self.0.device, self.0.handle, event.handle()) }
    }

    /// Waits on the host for all work (`cuStreamSynchronize`).
    ///
    /// # Errors
    /// The driver's.
    pub fn synchronize(&self) -> DriverResult<()> {
        // SAFETY: `self` owns a live handle.
        unsafe { self.0.driver.stream_synchronize(self.0.device, self.0.handle) }
    }

    /// Whether the stream is being captured (`cuStreamGetCaptureInfo`).
    ///
    /// # Errors
    /// The driver's.
    pub fn capture_info(&self) -> DriverResult<CaptureInfo> {
        // SAFETY: `self` owns a live handle.
        unsafe { self.0.driver.capture_info(self.0.device, self.0.handle) }
    }

    /// Enqueues a fill of `bytes` bytes at device address `address` (`cuMemsetD8Async`). The
    /// driver checks the address: one without access is refused (rows D-M5, D-A8).
    ///
    /// # Safety
    /// The address was given out by this driver: with unified addressing the driver would follow
    /// a host address in its place.
    ///
    /// # Errors
    /// The driver's.
    pub unsafe fn fill(&self, address: u64, bytes: u64, value: u8) -> DriverResult<()> {
        let transfer = Transfer::Fill8 { dst: address, value, bytes };
        // SAFETY: `self` owns a live handle; the address is the driver's by this function's own
        // condition.
        unsafe { self.0.driver.copy_async(self.0.device, &transfer, self.0.handle) }
    }
}
