//! [`Guest`]: a stream of another context that uses a slice.
//!
//! cudarc cannot record an event of one context on a stream of another. So a stream of another GPU has
//! a shell whose events are made in its own context; what the two contexts wait for of each other are
//! two events that are recorded here, whether cudarc manages streams or not.

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use cudarc::driver::{CudaEvent, CudaSlice, CudaStream, DevicePtrMut, DriverError};

use crate::error::Error;
use crate::joins::quietly;
use crate::key::StreamKey;
use crate::shell::{end, shell};

/// A stream of another context than the slice's own.
pub(crate) struct Guest<T> {
    stream: Arc<CudaStream>,
    shell: ManuallyDrop<CudaSlice<T>>,
    /// Of the slice's context: how far its own stream was when the guest came.
    fence: ManuallyDrop<CudaEvent>,
    /// Of the guest's context: how far the guest was when its last view ended.
    done: ManuallyDrop<CudaEvent>,
    /// Views that are alive, or were forgotten.
    open: AtomicUsize,
    /// Whether a view has ended since somebody waited for `done`.
    is_used: AtomicBool,
}

impl<T> Guest<T> {
    /// # Safety
    /// As [`shell`], for `stream` and the address and length of `main`.
    pub(crate) unsafe fn new(
        main: &CudaSlice<T>,
        address: u64,
        stream: &Arc<CudaStream>,
    ) -> Result<Guest<T>, Error> {
        let fence = main.context().new_event(None)?;
        let done = stream.context().new_event(None)?;
        // SAFETY: by this function's own condition.
        let shell = unsafe { shell(stream, address, main.len())? };
        Ok(Guest {
            stream: stream.clone(),
            shell,
            fence: ManuallyDrop::new(fence),
            done: ManuallyDrop::new(done),
            open: AtomicUsize::new(0),
            is_used: AtomicBool::new(false),
        })
    }

    pub(crate) fn is(&self, stream: &CudaStream) -> bool {
        self.stream.context() == stream.context()
            && StreamKey::of(&self.stream) == StreamKey::of(stream)
    }

    pub(crate) fn shell(&self) -> &CudaSlice<T> {
        &self.shell
    }

    pub(crate) fn shell_mut(&mut self) -> &mut CudaSlice<T> {
        &mut self.shell
    }

    /// Later work of the guest waits for all work that `own` has now.
    pub(crate) fn follow(&self, own: &CudaStream) -> Result<(), DriverError> {
        self.fence.record(own)?;
        self.stream.wait(&self.fence)
    }

    pub(crate) fn enter(&self) {
        self.open.fetch_add(1, Ordering::Relaxed);
    }

    /// A view has ended: all that the guest has enqueued until now is to be waited for.
    pub(crate) fn leave(&self) {
        let recorded = quietly(self.stream.context(), || self.done.record(&self.stream));
        if let Ok(Ok(())) = recorded {
            self.is_used.store(true, Ordering::Relaxed);
            self.open.fetch_sub(1, Ordering::Relaxed);
        }
        // Else it stays open, and whoever comes next waits for its stream on the host.
    }

    /// As [`Guest::leave`], of a view that could write: the guest's stream first waits for what cudarc
    /// knows of the shell, on whichever of its context's streams that was.
    pub(crate) fn leave_written(&mut self) {
        let stream = self.stream.clone();
        let gathered = quietly(stream.context(), || drop(self.shell.device_ptr_mut(&stream)));
        if gathered.is_ok() {
            self.leave();
        }
    }

    /// Whether its stream is held by nobody else, and no view of it is alive.
    pub(crate) fn is_left(&self) -> bool {
        // By the guest and by its shell.
        Arc::strong_count(&self.stream) == 2 && self.open.load(Ordering::Relaxed) == 0
    }

    /// Waits for what `left` has enqueued, so that who waits for this guest waits for both; and ends it.
    pub(crate) fn inherit(&self, left: &mut Guest<T>) -> Result<(), DriverError> {
        let waited = match std::mem::take(left.is_used.get_mut()) {
            true => self.stream.wait(&left.done).and_then(|()| self.done.record(&self.stream)),
            false => Ok(()),
        };
        if waited.is_err() {
            left.stream.synchronize()?;
        }
        self.is_used.store(true, Ordering::Relaxed);
        left.end();
        Ok(())
    }

    pub(crate) fn is_owed(&self) -> bool {
        self.is_used.load(Ordering::Relaxed) || self.open.load(Ordering::Relaxed) > 0
    }

    /// Later work of `stream` waits for what the guest has enqueued. Called while no view is alive.
    pub(crate) fn wait_for_uses(&mut self, stream: &CudaStream) -> Result<(), DriverError> {
        let was_forgotten = std::mem::take(self.open.get_mut()) > 0;
        if was_forgotten {
            quietly(self.stream.context(), || self.stream.synchronize())??;
        }
        if std::mem::take(self.is_used.get_mut()) {
            stream.wait(&self.done)?;
        }
        Ok(())
    }

    /// Drops what it owns: events, and its hold on the stream.
    pub(crate) fn end(&mut self) {
        let context = self.stream.context().clone();
        let ended = quietly(&context, || {
            end(&mut self.shell);
            // SAFETY: an end, once: nobody uses them afterwards.
            drop(unsafe { ManuallyDrop::take(&mut self.done) });
        });
        // SAFETY: as above.
        drop(unsafe { ManuallyDrop::take(&mut self.fence) });
        if let Err(error) = ended {
            tracing::debug!(%error, "events of another GPU could not be given back");
        }
    }
}
