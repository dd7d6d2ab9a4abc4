//! Limits and waits: what is booked, what is in limbo, and what another thread has in its hands.

use std::sync::Arc;

use shuttle::sync::atomic::{AtomicBool, Ordering::SeqCst};
use vmm_pool::{Budget, Request};
use vmm_sys::sim::Sim;

use crate::rig::{CHUNK, HOME, MIB, Owned, Rig, clean, prove, spawn};

/// Two pools share a budget, and each has a limit of its own: at no moment more is booked, and all
/// of it can be had in the end.
///
/// Meant to catch: a booking in two steps (`Budget::book`, `Device::book`); one that is not undone when the
/// other limit refuses.
#[test]
fn limits_are_never_passed() {
    prove("limits_are_never_passed", || {
        let (sim, budget) = (Sim::builder().build(), Budget::new(4 * CHUNK));
        let shared = || {
            let budget = budget.clone();
            Rig::on(sim.clone(), |pool| pool.limit_bytes(3 * CHUNK).budget(HOME, budget))
        };
        let rigs = [shared(), shared()];
        let mut threads = Vec::new();
        for rig in rigs.iter().flat_map(|rig| [rig, rig]) {
            let (rig, budget) = (rig.clone(), budget.clone());
            threads.push(spawn(move || {
                let lane = rig.lane();
                let kept = lane.alloc_with(&Request::new(2 * CHUNK).no_wait());
                let stats = rig.pool.device_stats(HOME).unwrap();
                assert!(stats.held_bytes <= 3 * CHUNK, "{stats:?}");
                assert!(budget.booked_bytes() <= 4 * CHUNK, "{budget:?}");
                drop((lane.alloc(MIB), kept));
            }));
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        for rig in &rigs {
            drop(rig.lane().alloc(3 * CHUNK).unwrap());
            rig.sound();
        }
        let driver = rigs[0].driver.clone();
        drop(rigs);
        assert_eq!(budget.booked_bytes(), 0);
        clean(&sim, driver);
    });
}

/// Two threads sweep one limbo: a block comes back once, and not before its gate has passed.
///
/// Meant to catch: a sweep that frees what it did not find passed (`sweep_once`), or puts back less than is
/// pending (`publish`).
#[test]
fn a_block_leaves_limbo_behind_its_gate() {
    prove("a_block_leaves_limbo_behind_its_gate", || {
        let rig = Rig::new(|pool| pool);
        let (lane, other) = (rig.lane(), rig.stream());
        let mut crossed = lane.alloc(CHUNK).unwrap();
        crossed.record_stream(&other).unwrap();
        let hold = rig.sim.hold(HOME, other.handle()).unwrap();
        let address = crossed.address();
        let is_done = Arc::new(AtomicBool::new(false));
        let frees = spawn(move || drop(crossed));
        let threads = [CHUNK, 1000].map(|bytes| {
            let (lane, is_done) = (lane.clone(), is_done.clone());
            spawn(move || {
                let kept = [lane.try_alloc(bytes).unwrap(), lane.try_alloc(bytes).unwrap()];
                // Read behind the answers: if it was not done yet, nothing of it can be in them.
                let was_done = is_done.load(SeqCst);
                for buffer in &kept {
                    let (start, end) = (buffer.address(), buffer.address() + buffer.bytes());
                    let shares = start < address + CHUNK && address < end;
                    assert!(!shares || was_done, "{buffer:?} is part of what is still used");
                }
                kept
            })
        });
        is_done.store(true, SeqCst);
        rig.sim.release_hold(hold);
        frees.join().unwrap();
        let kept = threads.map(|thread| thread.join().unwrap());
        rig.pool.trim(HOME).unwrap();
        let stats = rig.sound();
        assert_eq!((stats.limbo_bytes, stats.buffers), (0, 4), "{stats:?}");
        drop((kept, lane, other));
        rig.end();
    });
}

/// A request that may wait gets what another thread has in its hands at the moment: to ask its
/// gates, or to bring it to the stock.
///
/// Found: a request that was refused while another thread was bringing the very memory to the stock.
/// Meant to catch: a request that does not begin anew then (`Climb::next`); memory that is taken into a
/// thread's hands without saying so (`Carries::begin` in `release_stock` and `sweep_once`).
#[test]
fn what_another_thread_sweeps_is_waited_for() {
    prove("what_another_thread_sweeps_is_waited_for", || {
        let rig = Rig::new(|pool| pool.limit_bytes(4 * CHUNK));
        let (lane, other) = (rig.lane(), rig.stream());
        let mut crossed = lane.alloc(4 * CHUNK).unwrap();
        crossed.record_stream(&other).unwrap();
        drop(crossed);
        let sweeps = spawn({
            let lane = lane.clone();
            // Never fits, and finds that out after it has swept.
            move || assert!(lane.try_alloc(5 * CHUNK).is_err())
        });
        let all = lane.alloc(4 * CHUNK);
        assert!(all.is_ok(), "{all:?}");
        sweeps.join().unwrap();
        rig.sound();
        drop((all, lane, other));
        rig.end();
    });
}

/// Two lanes at a limit that leaves room for what both of them ever have alive: neither is refused,
/// whatever the other one is doing.
///
/// Meant to catch: as above, and `Carries::begin` in `plan`.
#[test]
fn nobody_is_refused_what_fits() {
    prove("nobody_is_refused_what_fits", || {
        let rig = Rig::new(|pool| pool.limit_bytes(4 * CHUNK));
        let owned = Owned::default();
        let threads = [0, 1].map(|_| {
            let (rig, owned) = (rig.clone(), owned.clone());
            spawn(move || {
                let lane = rig.lane();
                for bytes in [2 * CHUNK, CHUNK, 2 * CHUNK] {
                    drop(owned.take(lane.alloc(bytes).unwrap()));
                }
            })
        });
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert!(rig.sound().held_bytes <= 4 * CHUNK);
        rig.end();
    });
}
