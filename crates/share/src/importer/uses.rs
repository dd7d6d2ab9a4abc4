//! Which streams use an import, so that nothing is unmapped under their work.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use vmm_sys::object::{Event, RelaxedCapture, Stream};
use vmm_sys::process;

use super::body::Body;

/// How often events are asked for, where there is nothing else to wait for.
const LOOK: Duration = Duration::from_micros(200);

/// The uses of one import.
#[derive(Debug, Default)]
pub(super) struct Uses {
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Guards that are alive, and reads and writes from the host.
    open: usize,
    /// The youngest use of each stream.
    last: Vec<(Stream, Event)>,
}

impl Uses {
    pub(super) fn begin(&self) {
        self.state.lock().open += 1;
    }

    pub(super) fn end(&self) {
        self.state.lock().open -= 1;
        self.ended.notify_all();
    }

    /// The use of a stream is over as far as the host is concerned.
    fn end_on(&self, stream: &Stream) {
        let recorded = Event::create(stream.driver(), stream.device())
            .and_then(|event| event.record(stream).map(|()| event));
        let mut state = self.state.lock();
        match recorded {
            Ok(event) => {
                state.last.retain(|(it, _)| it.id() != stream.id());
                state.last.push((stream.clone(), event));
            }
            // The stream has lost its context, or is captured: all that is left is to wait for it.
            Err(error) => {
                vmm_sys::say!(warn, %error, "the end of a use could not be marked");
                drop(state);
                let waited = RelaxedCapture::enter(stream.driver())
                    .and_then(|_relaxed| stream.synchronize());
                if let Err(error) = waited {
                    vmm_sys::say!(warn, %error, "a stream could not be waited for");
                }
                state = self.state.lock();
            }
        }
        state.open -= 1;
        drop(state);
        self.ended.notify_all();
    }

    /// Whether all is done that ever used the memory.
    pub(super) fn are_done(&self) -> bool {
        let mut state = self.state.lock();
        // A context that is lost does nothing any more.
        let is_done = |(stream, event): &(Stream, Event)| {
            let asked = RelaxedCapture::enter(stream.driver()).and_then(|_relaxed| event.passed());
            asked.unwrap_or_else(|error| error.is_sticky() || error.is_driver_gone())
        };
        state.last.retain(|it| !is_done(it));
        state.open == 0 && state.last.is_empty()
    }

    /// Waits until all is done, or the time is over. Says whether it is.
    pub(super) fn wait(&self, deadline: Instant) -> bool {
        loop {
            if self.are_done() {
                return true;
            }
            let now = Instant::now();
            if now >= deadline {
                return false;
            }
            let mut state = self.state.lock();
            let _ = self.ended.wait_until(&mut state, deadline.min(now + LOOK));
        }
    }
}

/// While it lives, work that is enqueued on its stream may use the import. Drop it once all such work
/// is enqueued: what is mapped stays until that work is done, whatever becomes of the import.
///
/// Made by [`Import::use_on`](super::Import::use_on).
pub struct ImportUse {
    body: Arc<Body>,
    stream: Stream,
}

impl ImportUse {
    pub(super) fn new(body: Arc<Body>, stream: &Stream) -> ImportUse {
        ImportUse { body, stream: stream.clone() }
    }

    /// The stream.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }
}

impl fmt::Debug for ImportUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ImportUse({:?})", self.stream)
    }
}

impl Drop for ImportUse {
    fn drop(&mut self) {
        if !process::is_forked_child() {
            self.body.uses.end_on(&self.stream);
        }
    }
}
