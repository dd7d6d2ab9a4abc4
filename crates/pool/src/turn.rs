//! One mapping thread at a time in a process.
//!
//! The driver serialises mapping work anyway, and eight threads are twice as slow in all, with
//! tails of 33 ms. So every create, map, set access, unmap and release is made under one turn,
//! which is handed over after each call: requesters first, background work when nobody asks.
//!
//! The turn saves time and guards nothing. So a thread that is stuck in the driver keeps nobody: who has
//! waited for [`PATIENCE`] makes its call without, and from then on nobody waits until the turn is free
//! again.

use std::time::Duration;

#[cfg(not(shuttle))]
use crate::sync::atomic::AtomicBool;
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::{Mutex, MutexGuard, across_calls, global, thread};

global! {
    static TURN: Mutex<()> = across_calls(());
}
global! {
    static REQUESTERS: AtomicUsize = AtomicUsize::new(0);
}
#[cfg(not(shuttle))]
global! {
    /// Whoever has the turn has had it for too long.
    static STUCK: AtomicBool = AtomicBool::new(false);
}

/// How long a call is waited for: far longer than any that was measured takes.
#[cfg(not(shuttle))]
const PATIENCE: Duration = Duration::from_secs(1);

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
                let guard = take();
                REQUESTERS.fetch_sub(1, Ordering::Relaxed);
                guard
            }
            Turn::Background => {
                while REQUESTERS.load(Ordering::Relaxed) != 0 {
                    // About one driver call.
                    thread::sleep(Duration::from_micros(20));
                }
                take()
            }
        };
        let result = call();
        if let Some(guard) = guard {
            MutexGuard::unlock_fair(guard);
        }
        result
    }
}

/// The turn; `None` if a thread is stuck with it.
#[cfg(not(shuttle))]
fn take() -> Option<MutexGuard<'static, ()>> {
    let is_stuck = STUCK.load(Ordering::Relaxed);
    let guard = if is_stuck { TURN.try_lock() } else { TURN.try_lock_for(PATIENCE) };
    if is_stuck != guard.is_none() {
        STUCK.store(guard.is_none(), Ordering::Relaxed);
        if guard.is_none() {
            vmm_sys::say!(warn, "a thread is stuck in a driver call: others do not wait for it");
        }
    }
    guard
}

/// The turn. In a proof no time passes.
#[cfg(shuttle)]
fn take() -> Option<MutexGuard<'static, ()>> {
    Some(TURN.lock())
}
