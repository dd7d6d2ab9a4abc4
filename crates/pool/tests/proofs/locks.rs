//! The locks themselves: the lanes' biased one, and the turn.

use std::sync::Arc;

use shuttle::sync::atomic::{AtomicU32, Ordering::SeqCst};
use shuttle::thread::yield_now;
use vmm_lock::BiasedMutex;

use crate::rig::{prove, spawn};
use crate::turn::Turn;

/// One thread at a time is inside, whether it entered by its bias or among all.
///
/// The fences are not tried: the scheduler's atomics are sequentially consistent anyway.
///
/// Meant to catch: an entry that does not look again whose bias it is (`BiasedMutex::lock`); a bias that is
/// taken back without waiting for its owner (`take_bias_back`), or that is given without `locked`.
#[test]
fn one_thread_at_a_time_is_inside() {
    prove("one_thread_at_a_time_is_inside", || {
        let counter = Arc::new(BiasedMutex::with_streak(0_u32, 1));
        let threads = [0, 1, 2].map(|_| {
            let counter = counter.clone();
            spawn(move || {
                for _ in 0..4 {
                    let mut inside = counter.lock();
                    let before = *inside;
                    yield_now();
                    *inside = before + 1;
                }
            })
        });
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(*counter.lock(), 12, "two were inside at once");
    });
}

/// One call at a time has the turn.
///
/// Meant to catch: a turn without its lock, for either kind of caller (`Turn::with`).
#[test]
fn one_call_at_a_time_has_the_turn() {
    prove("one_call_at_a_time_has_the_turn", || {
        let inside = Arc::new(AtomicU32::new(0));
        let kinds = [Turn::Requester, Turn::Background, Turn::Requester, Turn::Background];
        let threads = kinds.map(|turn| {
            let inside = inside.clone();
            spawn(move || {
                for _ in 0..3 {
                    turn.with(|| {
                        assert_eq!(inside.fetch_add(1, SeqCst), 0, "{turn:?}: two have the turn");
                        inside.fetch_sub(1, SeqCst);
                    });
                }
            })
        });
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}
