//! Ends: of pools, of their threads, of lanes, and of what the driver would not take back.

use std::sync::Arc;

use vmm_pool::Pool;
use vmm_sys::object::{Chunk, Mapping, Range, retry_failed_drops};
use vmm_sys::sim::{FaultPlan, Sim};
use vmm_sys::{AccessGrant, Call, Driver, ResultCode};

use crate::rig::{CHUNK, HOME, MIB, Owned, Rig, clean, prove, spawn};

/// The thread of a pool starts, works and stops at any moment; once the pool is dropped it holds
/// nothing of it.
///
/// Meant to catch: a thread that says it has ended before it lets go of the devices (`_ended` after
/// `devices` in `background::run`); an end that is not notified (`Ended`); a stop that is not
/// notified (`Background::drop`).
#[test]
fn the_thread_of_a_pool_ends_with_it() {
    prove("the_thread_of_a_pool_ends_with_it", || {
        let rig = Rig::new(|pool| pool.background(true).stock_marks(2 * CHUNK, 4 * CHUNK));
        let (lane, owned) = (rig.lane(), Owned::default());
        let other = rig.stream();
        let mut crossed = owned.take(lane.alloc(MIB).unwrap());
        crossed.buffer().record_stream(&other).unwrap();
        drop(crossed);
        drop(owned.take(lane.alloc(CHUNK).unwrap()));
        drop((lane, other));
        rig.end();
    });
}

/// The last handles of a pool, a lane and a buffer are dropped in three threads.
///
/// Meant to catch: `should_retire` without `closing`, and without the count of buffers.
#[test]
fn the_last_handles_go_in_any_order() {
    prove("the_last_handles_go_in_any_order", || {
        let Rig { sim, driver, pool } = Rig::new(|pool| pool);
        let rig = Rig { sim: sim.clone(), driver: driver.clone(), pool };
        let (lane, other) = (rig.lane(), rig.stream());
        let plain = lane.alloc(CHUNK).unwrap();
        let mut crossed = lane.alloc(1000).unwrap();
        crossed.record_stream(&other).unwrap();
        let memory = lane.capture().unwrap().finish();
        let threads = [
            spawn(move || drop(rig)),
            spawn(move || drop(lane)),
            spawn(move || drop(plain)),
            spawn(move || drop((crossed, other))),
            spawn(move || drop(memory)),
        ];
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        clean(&sim, driver);
    });
}

/// Lanes end in two threads while a third one wants their memory: it leaves once, to the stock.
///
/// Found: a request that was refused while another thread was ending a lane. Meant to catch: a lane whose
/// memory is on its way unsaid (`Carries::begin` in `retire`).
#[test]
fn the_memory_of_lanes_that_ended_is_found_by_who_needs_it() {
    prove("the_memory_of_lanes_that_ended_is_found_by_who_needs_it", || {
        let rig = Rig::new(|pool| pool.limit_bytes(4 * CHUNK));
        let (one, two) = (rig.lane(), rig.lane());
        drop((one.alloc(2 * CHUNK).unwrap(), two.alloc(2 * CHUNK).unwrap()));
        let ends = [one, two].map(|lane| {
            let pool = rig.pool.clone();
            spawn(move || {
                pool.close_lane(lane.stream());
            })
        });
        let lane = rig.lane();
        let all = lane.alloc(4 * CHUNK).unwrap();
        ends.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(rig.sound().held_bytes, 4 * CHUNK);
        drop((all, lane));
        rig.end();
    });
}

/// What the driver refused to take back is given back once, whoever tries again.
///
/// Meant to catch: a try that leaves its entries in the list while it works (`retry_failed_drops`); one
/// that writes the list back as it was before.
#[test]
fn what_was_refused_is_given_back_once() {
    prove("what_was_refused_is_given_back_once", || {
        let sim = Sim::builder().build();
        let driver: Arc<dyn Driver> = sim.clone();
        let map = || {
            let props = vmm_sys::ChunkProps::on_device(HOME);
            let chunk = Chunk::create(&driver, CHUNK, &props).unwrap();
            let range = Range::reserve(&driver, CHUNK, 0, 0).unwrap();
            let mapping = Mapping::map(&range, 0, Arc::new(chunk)).unwrap();
            mapping.set_access(&[AccessGrant::read_write(HOME)]).unwrap();
            mapping
        };
        let mappings = [map(), map(), map()];
        let before = driver.ledger().snapshot();
        for call in [Call::MemUnmap, Call::MemRelease, Call::MemAddressFree] {
            sim.inject(FaultPlan::fail(ResultCode::UNKNOWN).on(call).times(2));
        }
        let threads = mappings.map(|mapping| {
            let driver = driver.clone();
            spawn(move || {
                drop(mapping);
                retry_failed_drops(&driver)
            })
        });
        let left = threads.map(|thread| thread.join().unwrap());
        assert!(left.iter().all(|left| *left <= 6), "{left:?}");
        while retry_failed_drops(&driver) > 0 {}
        let calls = driver.ledger().snapshot().since(&before);
        let fired = sim.faults_fired();
        for call in [Call::MemUnmap, Call::MemRelease, Call::MemAddressFree] {
            assert_eq!(calls.of(call), 3 + 2, "{call}: {calls}, {fired} refused");
        }
        clean(&sim, driver);
    });
}

/// A pool ends while another one of the same device wants its memory, which may come to it either
/// way, and is there once the end is over.
///
/// Meant to catch: lanes that are not closed when their pool is dropped (`PoolInner::drop`).
#[test]
fn a_pool_ends_beside_one_that_is_short() {
    prove("a_pool_ends_beside_one_that_is_short", || {
        let sim = Sim::builder().device_bytes(64 * MIB).context_bytes(0).build();
        let driver: Arc<dyn Driver> = sim.clone();
        let pool = || Pool::builder(driver.clone()).background(false).build().unwrap();
        let rig = || Rig { sim: sim.clone(), driver: driver.clone(), pool: pool() };
        let (ends, short) = (rig(), rig());
        let lane = ends.lane();
        drop(lane.alloc(40 * MIB).unwrap());
        let end = spawn(move || drop((lane, ends)));
        let lane = short.lane();
        // Refused while the other pool is in its end: then this one did not wait for it.
        drop(lane.alloc(40 * MIB));
        end.join().unwrap();
        drop(lane.alloc(40 * MIB).unwrap());
        short.sound();
        drop((lane, short));
        clean(&sim, driver);
    });
}
