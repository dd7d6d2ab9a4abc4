//! [`Joins`]: a hidden stream for each context, in which events are gathered and nothing runs.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, DriverError, result};
use parking_lot::Mutex;
use vmm_sys::process;

/// The hidden streams, made when slices are first used on several streams.
///
/// cudarc counts streams that it makes itself, and turns its events on while there are any; these are
/// made past it, so that a program without streams of its own goes on without events.
#[derive(Debug, Default)]
pub(crate) struct Joins(Mutex<Vec<Arc<CudaStream>>>);

impl Joins {
    /// The hidden stream of `context`. It never leaves this crate, nor outlives this object.
    pub(crate) fn of(&self, context: &Arc<CudaContext>) -> Result<Arc<CudaStream>, DriverError> {
        let mut streams = self.0.lock();
        if let Some(known) = streams.iter().find(|known| known.context() == context) {
            return Ok(known.clone());
        }
        context.bind_to_thread()?;
        let handle = result::stream::create(result::stream::StreamKind::NonBlocking)?;
        // SAFETY: the handle was made just now in this context, which the wrapper keeps alive; it is
        // destroyed by the drop of `self`, which all users of the wrapper are gone before.
        let stream = unsafe { context.wrap_borrowed_stream(handle) };
        streams.push(stream.clone());
        Ok(stream)
    }
}

impl Drop for Joins {
    fn drop(&mut self) {
        let streams = std::mem::take(self.0.get_mut());
        if is_gone() {
            std::mem::forget(streams);
            return;
        }
        for stream in streams {
            let destroyed = quietly(stream.context(), || {
                stream.context().bind_to_thread()?;
                // SAFETY: made by `of`, destroyed only here, and not used afterwards.
                unsafe { result::stream::destroy(stream.cu_stream()) }
            });
            if let Err(error) | Ok(Err(error)) = destroyed {
                tracing::debug!(%error, "a hidden stream could not be destroyed");
            }
        }
    }
}

/// Whether the driver must not be called any more: a forked child, or the process is exiting.
pub(crate) fn is_gone() -> bool {
    process::is_forked_child() || process::is_exiting()
}

/// Does `work` in `context` although an earlier error may be stored there, which would keep cudarc from
/// waiting for anything; it is stored again afterwards. An error that `work` stored is the answer.
pub(crate) fn quietly<R>(
    context: &CudaContext,
    work: impl FnOnce() -> R,
) -> Result<R, DriverError> {
    let earlier = context.check_err();
    let answer = work();
    let own = context.check_err();
    context.record_err(earlier);
    own.map(|()| answer)
}
