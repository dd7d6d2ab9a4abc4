//! Shells: `CudaSlice`s that own nothing, with events of their own, over memory of the pool.

use std::mem::{self, ManuallyDrop};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use cudarc::driver::{
    CudaEvent, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DriverError, SyncOnDrop, result, sys,
};
use vmm_sys::caught::thrown;

use crate::error::Error;
use crate::homes::device_of;

/// A shell over `len` elements at `address`, with events if cudarc makes any now. It must never be
/// dropped, only leaked: cudarc would free the address.
///
/// # Safety
/// The address is mapped for the stream's context as long as the shell is used, and has room for `len`
/// elements; whoever reads them has seen to it that they are valid.
pub(crate) unsafe fn shell<T>(
    stream: &Arc<CudaStream>,
    address: u64,
    len: usize,
) -> Result<ManuallyDrop<CudaSlice<T>>, Error> {
    // Takes a stored error out, on which cudarc would panic.
    stream.context().bind_to_thread()?;
    thrown(|| {
        // SAFETY: by this function's own condition; it is not dropped.
        ManuallyDrop::new(unsafe { stream.upgrade_device_ptr(address, len) })
    })
    .map_err(|message| Error::Events { device: device_of(stream.context()), message })
}

/// The event that would be recorded. Nothing is.
pub(crate) fn event_of(sync: SyncOnDrop<'_>) -> Option<&CudaEvent> {
    let event = match &sync {
        SyncOnDrop::Record(Some((event, _))) => Some(*event),
        _ => None,
    };
    mem::forget(sync);
    event
}

/// What serves one further stream that reads: the same address, with events of its own.
pub(crate) struct Shell<T> {
    slice: ManuallyDrop<CudaSlice<T>>,
    /// The slice's own events.
    read: sys::CUevent,
    write: sys::CUevent,
    /// Which write of the slice its write event stands behind.
    seen: AtomicU64,
    /// Whether it was handed out since somebody waited for its reads.
    is_lent: AtomicBool,
}

// SAFETY: events may be used in any thread, as those of `CudaEvent` are; the slice is sendable itself.
unsafe impl<T> Send for Shell<T> {}
// SAFETY: as above; what changes is atomic.
unsafe impl<T> Sync for Shell<T> {}

impl<T> Shell<T> {
    /// # Safety
    /// As [`shell`], for the address and length of `main`.
    pub(crate) unsafe fn new(
        main: &CudaSlice<T>,
        address: u64,
        join: &CudaStream,
    ) -> Result<Shell<T>, Error> {
        // SAFETY: by this function's own condition.
        let mut slice = unsafe { shell::<T>(main.stream(), address, main.len())? };
        let read = event_of(slice.device_ptr(join).1).map(CudaEvent::cu_event);
        let write = event_of(slice.device_ptr_mut(join).1).map(CudaEvent::cu_event);
        // Only with tracking turned off meanwhile has it no events, and then nothing is recorded.
        let (Some(read), Some(write)) = (read, write) else {
            end(&mut slice);
            return Err(DriverError(sys::CUresult::CUDA_ERROR_INVALID_HANDLE).into());
        };
        let (seen, is_lent) = (AtomicU64::new(u64::MAX), AtomicBool::new(false));
        Ok(Shell { slice, read, write, seen, is_lent })
    }

    /// The shell for one more use, which waits for write number `written` of `main`.
    pub(crate) fn lend(
        &self,
        main: &CudaSlice<T>,
        written: u64,
        join: &CudaStream,
    ) -> Result<&CudaSlice<T>, DriverError> {
        if self.seen.load(Ordering::Relaxed) != written {
            event_of(main.device_ptr(join).1); // `join` waits for the write
            // SAFETY: the event lives as long as the slice; both are of the context that the call
            // before has made current.
            unsafe { result::event::record(self.write, join.cu_stream())? };
            self.seen.store(written, Ordering::Relaxed);
        }
        self.is_lent.store(true, Ordering::Relaxed);
        Ok(&self.slice)
    }

    pub(crate) fn is_lent(&self) -> bool {
        self.is_lent.load(Ordering::Relaxed)
    }

    /// Later work of `stream` waits for its reads.
    pub(crate) fn wait_for_reads(&mut self, stream: &CudaStream) -> Result<(), DriverError> {
        if !mem::take(self.is_lent.get_mut()) {
            return Ok(());
        }
        self.hold_up(stream)
    }

    /// Serves another stream from now on, which waits for the reads until now: so they are waited for
    /// with its own.
    pub(crate) fn pass_on(&self, join: &CudaStream) -> Result<(), DriverError> {
        self.seen.store(u64::MAX, Ordering::Relaxed);
        self.hold_up(join)
    }

    fn hold_up(&self, stream: &CudaStream) -> Result<(), DriverError> {
        stream.context().bind_to_thread()?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: the event lives as long as the slice, the stream as long as the reference.
        unsafe { result::stream::wait_event(stream.cu_stream(), self.read, flags) }
    }

    /// Drops what it owns: its events.
    pub(crate) fn end(&mut self) {
        end(&mut self.slice);
    }
}

/// Gives a shell's events up. cudarc lets its stream wait for them first, if it manages streams now.
pub(crate) fn end<T>(slice: &mut ManuallyDrop<CudaSlice<T>>) {
    // SAFETY: the callers are ends, and do not use the slice afterwards.
    unsafe { ManuallyDrop::take(slice) }.leak();
}
