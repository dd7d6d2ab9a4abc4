//! [`Event`]: a point in a stream.

use std::sync::Arc;

use super::Stream;
use crate::driver::Driver;
use crate::error::DriverResult;
use crate::types::{DeviceId, EventHandle};

/// A point in the work of a stream, recorded and asked for. The only clock of stream order.
#[derive(Debug)]
pub struct Event {
    driver: Arc<dyn Driver>,
    device: DeviceId,
    handle: EventHandle,
}

impl Event {
    /// Makes an event without timing for streams of `device` (`cuEventCreate`).
    ///
    /// # Errors
    /// The driver's.
    pub fn create(driver: &Arc<dyn Driver>, device: DeviceId) -> DriverResult<Event> {
        let handle = driver.event_create(device)?;
        Ok(Event { driver: driver.clone(), device, handle })
    }

    /// Marks the work enqueued on `stream` so far (`cuEventRecord`). A later record moves the mark.
    /// For another thread's per-thread stream the mark is set in the legacy stream (row D-S2).
    ///
    /// # Errors
    /// The driver's: an invalid handle if the stream is of another device.
    pub fn record(&self, stream: &Stream) -> DriverResult<()> {
        // SAFETY: both objects own live handles.
        unsafe { self.driver.event_record(self.device, self.handle, stream.handle_here()) }
    }

    /// Whether the marked work is done (`cuEventQuery`); never waits. True if never recorded.
    /// Call it in relaxed capture mode ([`super::RelaxedCapture`]).
    ///
    /// # Errors
    /// The driver's: a sticky context error shows up here.
    pub fn passed(&self) -> DriverResult<bool> {
        // SAFETY: `self` owns a live handle.
        unsafe { self.driver.event_query(self.device, self.handle) }
    }

    /// Waits on the host until the marked work is done (`cuEventSynchronize`).
    ///
    /// # Errors
    /// The driver's.
    pub fn wait(&self) -> DriverResult<()> {
        // SAFETY: `self` owns a live handle.
        unsafe { self.driver.event_synchronize(self.device, self.handle) }
    }

    /// The device whose streams can record it.
    pub fn device(&self) -> DeviceId {
        self.device
    }

    pub(super) fn handle(&self) -> EventHandle {
        self.handle
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.driver.is_gone() {
            return;
        }
        // SAFETY: `self` owns the handle and is gone after this. An error leaves a few bytes of
        // the driver's own memory, nothing that could be given back later.
        let result = unsafe { self.driver.event_destroy(self.device, self.handle) };
        if let Err(error) = result {
            tracing::debug!(%error, "an event could not be destroyed");
        }
    }
}
