//! Where threads wait while it is quiet.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Lets threads go on or stop, between two operations of theirs.
pub(super) struct Gate {
    state: Mutex<State>,
    changed: Condvar,
    threads: u32,
}

#[derive(Default)]
struct State {
    closed: bool,
    over: bool,
    /// Threads that wait here with nothing in hand.
    arrived: u32,
    /// Of these, threads that have done all of their operations.
    finished: u32,
    /// Counts the openings.
    round: u64,
}

impl Gate {
    pub(super) fn new(threads: u32) -> Gate {
        Gate { state: Mutex::default(), changed: Condvar::new(), threads }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing in here panics half-way.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks every thread to come.
    pub(super) fn close(&self) {
        self.lock().closed = true;
    }

    /// Whether threads are asked to come.
    pub(super) fn is_closed(&self) -> bool {
        self.lock().closed
    }

    /// A thread comes with nothing in hand, and waits until it is let on. `finished` says that it has
    /// nothing left to do. Returns whether the run goes on.
    pub(super) fn arrive(&self, finished: bool) -> bool {
        let mut state = self.lock();
        state.arrived += 1;
        state.finished += u32::from(finished);
        let round = state.round;
        self.changed.notify_all();
        while state.round == round && !state.over {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        !state.over
    }

    /// Waits until all threads are here, `time` at most, and says whether they are.
    pub(super) fn wait_all(&self, time: Duration) -> bool {
        let state = self.lock();
        let threads = self.threads;
        let waited = self.changed.wait_timeout_while(state, time, |it| it.arrived < threads);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.arrived == threads
    }

    /// Whether all threads have done all of their operations.
    pub(super) fn ended(&self) -> bool {
        self.lock().finished == self.threads
    }

    /// Lets everybody on.
    pub(super) fn open(&self) {
        let mut state = self.lock();
        (state.closed, state.arrived, state.finished) = (false, 0, 0);
        state.round += 1;
        self.changed.notify_all();
    }

    /// Lets everybody go home.
    pub(super) fn end(&self) {
        self.lock().over = true;
        self.changed.notify_all();
    }
}
