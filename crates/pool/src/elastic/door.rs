//! [`Door`]: what happens to uses that begin while the buffer's memory changes place.
//!
//! A move waits until no guard is alive, shuts the door, and enqueues its copies. From then on
//! whoever begins a use is let in at once, its stream held by a latch until the memory stands at its
//! new place (`cuStreamWaitValue32`, row D-V5): no thread waits. Where a stream cannot be held, as one
//! that is being captured, or the host itself, the thread waits for as long as a move takes.
//!
//! Nothing is enqueued while a stream is held: beside a `cuMemFree` of somebody, which waits for that
//! stream, it would wait too, and the stream for it. Mapping calls and questions for events go on
//! (row D-N18).
//!
//! While the move still waits for guards, threads that have one may begin more: what they are
//! going to enqueue may depend on it. Others wait outside, so that guards which overlap do not keep
//! a move away for ever. It gives up after its patience.

use std::sync::Arc;
use std::time::{Duration, Instant};

use vmm_sys::object::{Latch, Stream};

use super::error::ElasticError;
use super::uses::{State, Uses};
use crate::error::Error;
use crate::lane::Gate;
use crate::sync::{Mutex, MutexGuard};

/// Who may begin a use now.
#[derive(Clone, Debug, Default)]
pub(super) enum Door {
    /// Everybody.
    #[default]
    Open,
    /// Threads that have a guard already: a change waits for the last of them.
    Closing,
    /// Everybody, but their streams wait for the latch.
    Held(Held),
    /// Nobody: threads wait.
    Shut,
}

/// One closing of a latch.
#[derive(Clone, Debug)]
pub(crate) struct Held {
    latch: Arc<Latch>,
    turn: u32,
}

impl Held {
    /// Later work of `stream` waits until the latch opens. It may be open already.
    pub(super) fn hold(&self, stream: &Stream) -> Result<(), Error> {
        Ok(self.latch.hold(stream, self.turn)?)
    }
}

/// Latches that are not in use: one is needed for each move under way.
#[derive(Debug, Default)]
pub(crate) struct Latches(Mutex<Vec<Held>>);

impl Latches {
    /// A latch that nobody has closed yet.
    pub(super) fn take(&self, make: impl FnOnce() -> Result<Latch, Error>) -> Result<Held, Error> {
        let spare = self.0.lock().pop();
        match spare {
            // Streams that are still on their way to an earlier turn find it over.
            Some(Held { latch, turn }) => Ok(Held { latch, turn: turn.wrapping_add(1) }),
            None => Ok(Held { latch: Arc::new(make()?), turn: 1 }),
        }
    }

    pub(super) fn put(&self, held: Held) {
        self.0.lock().push(held);
    }
}

/// A door that is shut: dropping it opens it, and lets the streams go on.
pub(super) struct Closed<'a> {
    uses: &'a Uses,
    held: Option<(Held, &'a Latches)>,
    /// What the buffer's earlier users have enqueued.
    pub(super) gates: Vec<Gate>,
    /// When it was closed.
    pub(super) since: Instant,
}

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        let mut state = self.uses.state();
        state.door = Door::Open;
        drop(state);
        if let Some((held, latches)) = self.held.take() {
            held.latch.open(held.turn);
            latches.put(held);
        }
        self.uses.changed.notify_all();
    }
}

impl<'a> Closed<'a> {
    /// Whether who begins a use is let in, and held by the latch.
    pub(super) fn holds(&self) -> bool {
        self.held.is_some()
    }

    /// From here on nobody waits outside: who begins a use is let in, and held by the latch.
    pub(super) fn hold(&mut self, held: Held, latches: &'a Latches) {
        self.uses.state().door = Door::Held(held.clone());
        self.held = Some((held, latches));
        self.uses.changed.notify_all();
    }
}

impl Uses {
    /// Waits until no guard is alive, `patience` at most, and shuts the door.
    pub(super) fn close(&self, patience: Duration) -> Result<Closed<'_>, Error> {
        let deadline = Instant::now().checked_add(patience);
        let mut state = self.state();
        state.door = Door::Closing;
        while state.open_count() > 0 {
            let timed_out = match deadline {
                // Its own guard cannot end while the thread is here.
                _ if state.is_open_here() => true,
                Some(deadline) => self.changed.wait_until(&mut state, deadline).timed_out(),
                None => {
                    self.changed.wait(&mut state);
                    false
                }
            };
            if timed_out && state.open_count() > 0 {
                let open_uses = state.open_count() as u64;
                state.door = Door::Open;
                drop(state);
                self.changed.notify_all();
                return Err(ElasticError::InUse { open_uses }.into());
            }
        }
        state.door = Door::Shut;
        let gates = state.gates();
        Ok(Closed { uses: self, held: None, gates, since: Instant::now() })
    }

    /// Waits for as long as the calling thread may not begin a use. The latch is for its stream,
    /// unless `must_wait` says that it cannot be held.
    pub(super) fn pass(
        &self,
        must_wait: impl Fn() -> bool,
    ) -> (MutexGuard<'_, State>, Option<Held>) {
        let mut waits = None;
        loop {
            let mut state = self.state();
            match &state.door {
                Door::Open => return (state, None),
                Door::Closing if state.is_open_here() => return (state, None),
                Door::Held(held) if waits == Some(false) => {
                    let held = held.clone();
                    return (state, Some(held));
                }
                Door::Held(_) if waits.is_none() => {
                    // May ask the driver.
                    drop(state);
                    waits = Some(must_wait());
                }
                Door::Closing | Door::Held(_) | Door::Shut => self.changed.wait(&mut state),
            }
        }
    }
}
