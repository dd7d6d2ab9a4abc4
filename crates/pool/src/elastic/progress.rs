//! [`Progress`]: how far something is that another thread does.

use std::time::{Duration, Instant};

use crate::sync::{Condvar, Mutex};

/// A state that one thread sets and others wait for.
#[derive(Debug)]
pub(super) struct Progress<T> {
    state: Mutex<T>,
    changed: Condvar,
}

impl<T: Clone> Progress<T> {
    pub(super) fn new(state: T) -> Progress<T> {
        Progress { state: Mutex::new(state), changed: Condvar::new() }
    }

    pub(super) fn get(&self) -> T {
        self.state.lock().clone()
    }

    /// Changes the state, and tells those who wait. Returns the new one.
    pub(super) fn update(&self, change: impl FnOnce(&mut T)) -> T {
        let mut state = self.state.lock();
        change(&mut state);
        self.changed.notify_all();
        state.clone()
    }

    /// Waits while it is `busy`, `timeout` at most.
    pub(super) fn wait_while(&self, busy: impl Fn(&T) -> bool, timeout: Duration) -> T {
        // Without an end, if it lies beyond the clock's.
        let deadline = Instant::now().checked_add(timeout);
        let mut state = self.state.lock();
        while busy(&state) {
            match deadline {
                Some(deadline) if self.changed.wait_until(&mut state, deadline).timed_out() => {
                    break;
                }
                Some(_) => {}
                None => self.changed.wait(&mut state),
            }
        }
        state.clone()
    }
}
