//! One mapping thread at a time in a process.
//!
//! The driver serialises mapping work anyway, and eight threads are twice as slow in all, with
//! tails of 33 ms. So every create, map, set access, unmap and release is made under one turn,
//! which is handed over after each call: requesters first, background work when nobody asks.

use std::time::Duration;

use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::{Mutex, MutexGuard, global, thread};

global! {
    static TURN: Mutex<()> = Mutex::new(());
}
global! {
    static REQUESTERS: AtomicUsize = AtomicUsize::new(0);
}

/// Who wants the turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// Somebody waits for the result.
    Requester,
    /// Nobody does.
    Background,
}

impl Turn {
    /// Makes one driver call under the turn, and hands the turn to whoever waited longest.
    pub(crate) fn with<T>(self, call: impl FnOnce() -> T) -> T {
        let guard = match self {
            Turn::Requester => {
                REQUESTERS.fetch_add(1, Ordering::Relaxed);
                let guard = TURN.lock();
                REQUESTERS.fetch_sub(1, Ordering::Relaxed);
                guard
            }
            Turn::Background => {
                while REQUESTERS.load(Ordering::Relaxed) != 0 {
                    // About one driver call.
                    thread::sleep(Duration::from_micros(20));
                }
                TURN.lock()
            }
        };
        let result = call();
        MutexGuard::unlock_fair(guard);
        result
    }
}
