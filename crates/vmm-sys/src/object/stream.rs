//! [`Stream`]: a queue of GPU work, owned or borrowed, with its identity.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::Event;
use super::drops::{Leftover, give_back_or_keep};
use super::thread::ThreadKey;
use crate::call::Call;
use crate::caught::caught;
use crate::driver::Driver;
use crate::error::{DriverResult, ResultCode};
use crate::types::{
    CaptureInfo, CaptureStatus, DeviceId, ProbeKernel, StreamHandle, StreamId, Transfer,
};

/// A stream of one device. Clones share it.
///
/// Handle values are given out again by the driver after a destroy, so identity is
/// [`Stream::id`], taken once when the object is made (row D-S1).
///
/// # Per-thread streams
///
/// Handle 2 names another stream in each thread. An object made for it stands for the stream of the
/// thread that made it, wherever it is used: in other threads its methods name the legacy stream in
/// its place, which is ordered after everything enqueued on per-thread streams before, and before
/// everything enqueued on them later (row D-S2). So what they record or wait for covers at least
/// the stream's own work.
#[derive(Clone)]
pub struct Stream(Arc<Inner>);

struct Inner {
    driver: Arc<dyn Driver>,
    device: DeviceId,
    handle: StreamHandle,
    id: StreamId,
    owned: bool,
    /// The thread whose own stream this is, if it is a per-thread stream.
    thread: Option<ThreadKey>,
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
        if self.owned {
            give_back_or_keep(&self.driver, Leftover::Stream(self.device, self.handle));
        }
    }
}

impl Stream {
    /// Makes a non-blocking stream (`cuStreamCreate`).
    ///
    /// # Errors
    /// The driver's.
    pub fn create(driver: &Arc<dyn Driver>, device: DeviceId) -> DriverResult<Stream> {
        let handle = caught(Call::StreamCreate, || driver.stream_create(device))?;
        // SAFETY: the handle was made just now.
        let id = caught(Call::StreamGetId, || unsafe { driver.stream_id(device, handle) });
        let stream = |id| {
            let (driver, thread) = (driver.clone(), None);
            Stream(Arc::new(Inner { driver, device, handle, id, owned: true, thread, _keep: None }))
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

    /// The calling thread's own default stream of `device` (handle 2). See [`Stream`] for what it
    /// stands for in other threads.
    ///
    /// # Errors
    /// The driver's.
    pub fn per_thread(driver: &Arc<dyn Driver>, device: DeviceId) -> DriverResult<Stream> {
        // SAFETY: it lives as long as its thread and its context; in other threads, and so once
        // the thread has ended, the object names the legacy stream, which lives as long as the
        // context.
        unsafe { Stream::from_raw(driver, device, StreamHandle::PER_THREAD, None) }
    }

    /// Takes a stream that somebody else owns. `keep` is dropped with the last clone: put there
    /// what keeps the stream alive. Handle 0 is taken as handle 1, the same stream; handle 2 as
    /// the calling thread's own.
    ///
    /// # Safety
    /// The handle is a live stream of `device`'s primary context whenever the returned object, or a
    /// clone of it, makes a driver call, and for as long as `keep` lives.
    ///
    /// # Errors
    /// The driver's.
    pub unsafe fn from_raw(
        driver: &Arc<dyn Driver>,
        device: DeviceId,
        handle: StreamHandle,
        keep: Option<Box<dyn Any + Send + Sync>>,
    ) -> DriverResult<Stream> {
        let handle = if handle == StreamHandle::NULL { StreamHandle::LEGACY } else { handle };
        // SAFETY: live by this function's own condition.
        let id = unsafe { identity_of(driver, device, handle)? }.unwrap_or_else(unheard_of);
        let driver = driver.clone();
        let thread = (handle == StreamHandle::PER_THREAD).then(ThreadKey::current);
        let inner = Inner { driver, device, handle, id, owned: false, thread, _keep: keep };
        Ok(Stream(Arc::new(inner)))
    }

    /// The device.
    pub fn device(&self) -> DeviceId {
        self.0.device
    }

    /// The identity, never given out twice. A stream that was being captured when the object was made
    /// has one that only this object and its clones have.
    pub fn id(&self) -> StreamId {
        self.0.id
    }

    /// The driver's handle, valid while `self` lives; of a per-thread stream, only in its thread.
    pub fn handle(&self) -> StreamHandle {
        self.0.handle
    }

    /// Whether `handle`, in a call of the calling thread for this device, names this stream.
    pub fn is_named_by(&self, handle: StreamHandle) -> bool {
        let handle = if handle == StreamHandle::NULL { StreamHandle::LEGACY } else { handle };
        handle == self.0.handle && !self.is_elsewhere()
    }

    /// Whether this is the legacy stream of its device.
    pub fn is_legacy(&self) -> bool {
        self.0.handle == StreamHandle::LEGACY
    }

    /// Whether this is some thread's own default stream.
    pub fn is_per_thread(&self) -> bool {
        self.0.thread.is_some()
    }

    /// Whether this is the default stream of a thread other than the calling one, so that the
    /// legacy stream stands for it here.
    pub fn is_elsewhere(&self) -> bool {
        self.0.thread.as_ref().is_some_and(|owner| !owner.is_current())
    }

    /// Whether this is the default stream of a thread that has ended: nothing will be enqueued on
    /// it any more.
    pub fn has_ended(&self) -> bool {
        self.0.thread.as_ref().is_some_and(ThreadKey::has_ended)
    }

    /// Whether its owner may destroy it while this object lives: it was taken from a raw handle,
    /// and nothing was given that keeps it alive.
    pub fn is_borrowed(&self) -> bool {
        let inner = &self.0;
        let lasting = inner.owned || inner._keep.is_some() || inner.thread.is_some();
        !lasting && !self.is_legacy()
    }

    /// Whether the legacy stream of its device may be ordered with this stream, in both directions.
    /// A borrowed stream's flags are not known.
    pub fn may_follow_legacy(&self) -> bool {
        // Those made by `Stream::create` are non-blocking.
        !self.0.owned
    }

    /// The handle that stands for this stream in calls of the calling thread.
    pub(super) fn handle_here(&self) -> StreamHandle {
        if self.is_elsewhere() { StreamHandle::LEGACY } else { self.0.handle }
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
        let wait = || unsafe {
            self.0.driver.stream_wait_event(self.0.device, self.handle_here(), event.handle())
        };
        caught(Call::StreamWaitEvent, wait)
    }

    /// Runs `function` on a thread of the driver once all work enqueued until now is done
    /// (`cuLaunchHostFunc`); later work waits for it. It must make no driver call, and is not run if
    /// the context is lost before.
    ///
    /// # Errors
    /// The driver's.
    pub fn call_on_host(&self, function: impl FnOnce() + Send + 'static) -> DriverResult<()> {
        let (inner, function) = (&self.0, Box::new(function));
        // SAFETY: `self` owns a live handle.
        let launch = || unsafe {
            inner.driver.launch_host_function(inner.device, self.handle_here(), function)
        };
        caught(Call::LaunchHostFunc, launch)
    }

    /// Waits on the host for all work (`cuStreamSynchronize`).
    ///
    /// # Errors
    /// The driver's.
    pub fn synchronize(&self) -> DriverResult<()> {
        // SAFETY: `self` owns a live handle.
        let wait =
            || unsafe { self.0.driver.stream_synchronize(self.0.device, self.handle_here()) };
        caught(Call::StreamSynchronize, wait)
    }

    /// Whether the stream is being captured (`cuStreamGetCaptureInfo`).
    ///
    /// # Errors
    /// The driver's: `CUDA_ERROR_STREAM_CAPTURE_IMPLICIT` of the legacy stream, and so of another
    /// thread's per-thread stream, while a stream that it is ordered with is being captured.
    pub fn capture_info(&self) -> DriverResult<CaptureInfo> {
        // SAFETY: `self` owns a live handle.
        let ask = || unsafe { self.0.driver.capture_info(self.0.device, self.handle_here()) };
        caught(Call::StreamGetCaptureInfo, ask)
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
        let enqueue =
            || unsafe { self.0.driver.copy_async(self.0.device, &transfer, self.handle_here()) };
        caught(Call::MemsetD8Async, enqueue)
    }

    /// Enqueues a copy of `bytes` bytes from `src` to `dst` (`cuMemcpyDtoDAsync`). Either side may lie
    /// on another device or on the host, mapped with access for this stream's device, whose engines
    /// copy; an address without access is refused (rows D-A5, D-A8). An event recorded behind it says
    /// when the bytes are there.
    ///
    /// # Safety
    /// As [`Stream::fill`], for both addresses.
    ///
    /// # Errors
    /// The driver's.
    pub unsafe fn copy(&self, dst: u64, src: u64, bytes: u64) -> DriverResult<()> {
        let transfer = Transfer::DeviceToDevice { dst, src, bytes };
        // SAFETY: `self` owns a live handle; the addresses are the driver's by this function's own
        // condition.
        let enqueue =
            || unsafe { self.0.driver.copy_async(self.0.device, &transfer, self.handle_here()) };
        caught(Call::MemcpyDtoDAsync, enqueue)
    }

    /// Enqueues a kernel that copies `words` words of 4 bytes from `src` to `dst`.
    ///
    /// # Safety
    /// As [`Stream::fill`], for both addresses; the stream's device has access to both, else the
    /// kernel faults its context (row D-M6).
    ///
    /// # Errors
    /// The driver's.
    pub unsafe fn copy_words(&self, dst: u64, src: u64, words: u64) -> DriverResult<()> {
        let kernel = ProbeKernel::CopyWords { dst, src, words };
        // SAFETY: `self` owns a live handle; the addresses are the driver's by this function's own
        // condition.
        let launch = || unsafe { self.0.driver.launch(self.0.device, &kernel, self.handle_here()) };
        caught(Call::LaunchKernel, launch)
    }

    /// Enqueues a kernel that does nothing, so that the driver has loaded what
    /// [`Stream::copy_words`] needs: a first load may take milliseconds.
    ///
    /// # Errors
    /// The driver's: it cannot launch kernels.
    pub fn load_kernels(&self) -> DriverResult<()> {
        // SAFETY: no word is read or written.
        unsafe { self.copy_words(0, 0, 0) }
    }
}

/// The identity of a stream (`cuStreamGetId`); `None` while it is being captured, or is the legacy stream
/// beside a capture that it is ordered with: the question itself would spoil the capture, in every mode
/// (row D-N20).
///
/// # Safety
/// The handle is a live stream of `device`'s primary context.
///
/// # Errors
/// The driver's.
pub unsafe fn identity_of(
    driver: &Arc<dyn Driver>,
    device: DeviceId,
    handle: StreamHandle,
) -> DriverResult<Option<StreamId>> {
    // SAFETY: live by this function's own condition.
    match caught(Call::StreamGetCaptureInfo, || unsafe { driver.capture_info(device, handle) }) {
        Ok(info) if info.status == CaptureStatus::None => {}
        Ok(_) => return Ok(None),
        Err(error) if error.code() == ResultCode::STREAM_CAPTURE_IMPLICIT => return Ok(None),
        Err(error) => return Err(error),
    }
    // SAFETY: as above.
    caught(Call::StreamGetId, || unsafe { driver.stream_id(device, handle) }).map(Some)
}

/// An identity that the driver gives to nobody: it counts from small numbers.
fn unheard_of() -> StreamId {
    static LAST: AtomicU64 = AtomicU64::new(1 << 63);
    StreamId(LAST.fetch_add(1, Ordering::Relaxed))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::Sim;
    use crate::types::CaptureMode;
    use std::sync::mpsc;
    use std::time::Duration;

    #[test]
    fn a_captured_stream_is_taken_without_harm_under_an_identity_of_its_own() {
        let sim = Sim::builder().build();
        let (driver, device): (Arc<dyn Driver>, _) = (sim.clone(), DeviceId(0));
        let captured = sim.stream_create_blocking(device).unwrap();
        // SAFETY: live streams, here and below.
        let before = unsafe { Stream::from_raw(&driver, device, captured, None) }.unwrap();
        // SAFETY: as above.
        unsafe { sim.capture_begin(device, captured, CaptureMode::Global) }.unwrap();
        for handle in [captured, StreamHandle::LEGACY] {
            // SAFETY: as above.
            let taken = || unsafe { Stream::from_raw(&driver, device, handle, None) }.unwrap();
            let (one, other) = (taken(), taken());
            assert_ne!(one.id(), other.id());
            assert_ne!(one.id(), before.id());
            assert_eq!(one.clone().id(), one.id());
        }
        assert_eq!(before.capture_info().unwrap().status, CaptureStatus::Active);
        // SAFETY: as above; the graph is not used afterwards.
        unsafe {
            let graph = sim.capture_end(device, captured).unwrap();
            sim.graph_destroy(device, graph).unwrap();
            assert_eq!(identity_of(&driver, device, captured), Ok(Some(before.id())));
            sim.stream_destroy(device, captured).unwrap();
        }
    }

    #[test]
    fn the_host_is_called_when_the_work_before_is_done() {
        let sim = Sim::builder().build();
        let driver: Arc<dyn Driver> = sim.clone();
        let stream = Stream::create(&driver, DeviceId(0)).unwrap();
        let hold = sim.hold(DeviceId(0), stream.handle()).unwrap();
        let (called, calls) = mpsc::channel();
        stream.call_on_host(move || called.send(()).unwrap()).unwrap();
        assert!(calls.try_recv().is_err(), "the work before is not done");
        sim.release_hold(hold);
        calls.recv_timeout(Duration::from_secs(10)).unwrap();
        stream.synchronize().unwrap();
        drop(stream);
        sim.check_clean().unwrap();
    }
}
