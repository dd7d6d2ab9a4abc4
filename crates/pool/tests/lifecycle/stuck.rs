//! A thread that is stuck in the driver, and a refill that fails for ever: others are served, and ends end.

use std::sync::Arc;
use std::time::{Duration, Instant};

use vmm_pool::{Error, Pool};
use vmm_sys::object::Stream;
use vmm_sys::sim::{CallGate, FaultPlan, Sim};
use vmm_sys::{Call, Driver, ResultCode};

use crate::common::{HOME, MIB, Rig};
use crate::scene::LONG;

/// A pool whose thread keeps 16 MiB in stock, once it has them.
fn stocked() -> Rig {
    let rig = Rig::new(|pool| pool.background(true).stock_marks(16 * MIB, 64 * MIB));
    let deadline = Instant::now() + LONG;
    while rig.pool.device_stats(HOME).unwrap().stock_bytes < 16 * MIB {
        assert!(Instant::now() < deadline, "the thread does not fill the stock");
        std::thread::yield_now();
    }
    rig
}

/// Has the pool's thread stand still in a create, the turn in its hands.
fn stuck(rig: &Rig) -> CallGate {
    let gate = CallGate::new();
    rig.sim.inject(FaultPlan::stop_at(&gate).on(Call::MemCreate).once());
    // Out of the stock, which the thread fills again.
    drop(rig.lane.alloc(4 * MIB).unwrap());
    assert!(gate.wait_for(1, LONG), "the thread did not refill the stock");
    gate
}

#[test]
fn requests_are_served_while_the_pools_thread_is_stuck_and_the_end_waits_no_longer_than_it_says() {
    let rig = stocked();
    let gate = stuck(&rig);
    // Needs calls of its own: it does not wait for that one for ever.
    let block = rig.lane.alloc(60 * MIB).unwrap();
    block.write(0, &[7; 8]).unwrap();
    drop(block);
    assert!(rig.stats().held_bytes > 0 && !gate.gave_up());
    // Another driver's pool has nothing to do with it.
    let other = Rig::new(|pool| pool);
    drop(other.lane.alloc(40 * MIB).unwrap());
    other.end();
    assert!(!gate.gave_up());
    let Rig { sim, driver, pool, stream, lane } = rig;
    drop((lane, stream, pool));
    assert!(!gate.gave_up(), "the end of the pool waited for the call");
    gate.open();
    drop(driver);
    // The thread has the last of the pool, and gives it back.
    let deadline = Instant::now() + LONG;
    while let Err(left) = sim.check_clean() {
        assert!(Instant::now() < deadline, "{left}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_refill_that_fails_for_ever_leaves_clear_errors_and_what_is_warm() {
    for code in [ResultCode::OUT_OF_MEMORY, ResultCode::UNKNOWN] {
        let rig = stocked();
        let warm = rig.lane.alloc(1000).unwrap();
        rig.sim.inject(FaultPlan::fail(code).on(Call::MemCreate));
        let mut served = Vec::new();
        let error = loop {
            match rig.lane.alloc(8 * MIB) {
                Ok(block) => served.push(block),
                Err(error) => break error,
            }
            assert!(served.len() < 20, "memory from nowhere");
        };
        assert_eq!(error.is_out_of_memory(), code == ResultCode::OUT_OF_MEMORY, "{error}");
        if code == ResultCode::UNKNOWN {
            let Error::Driver(error) = &error else { panic!("{error}") };
            assert_eq!((error.call(), error.code()), (Call::MemCreate, code));
        }
        for _ in 0..100 {
            drop(rig.lane.alloc(1000).unwrap());
        }
        // No endless loop: the thread tries anew with each of its looks, and rests between them.
        let before = rig.driver.ledger().snapshot();
        std::thread::sleep(Duration::from_millis(50));
        let calls = rig.driver.ledger().snapshot().since(&before).of(Call::MemCreate);
        assert!(calls < 500, "{calls} tries in 50 ms");
        rig.sim.clear_faults();
        drop(rig.lane.alloc(60 * MIB).unwrap());
        drop((served, warm));
        rig.end();
    }
}

#[test]
fn pools_on_one_device_help_each_other_and_end_in_any_order() {
    for order in [[0, 1], [1, 0]] {
        let sim = Sim::builder().device_bytes(128 * MIB).build();
        let driver: Arc<dyn Driver> = sim.clone();
        let mut pools = [(); 2].map(|()| {
            let pool = Pool::builder(driver.clone()).background(false).build().unwrap();
            let lane = pool.lane(&Stream::create(&driver, HOME).unwrap()).unwrap();
            Some((pool, lane))
        });
        // All memory of the device, in turns: what the other one holds idle is given up for it.
        for round in 0..4 {
            let (pool, lane) = pools[round % 2].as_ref().unwrap();
            let block = lane.alloc(100 * MIB).unwrap_or_else(|error| panic!("{round}: {error}"));
            // What the other one has alive is nobody's to give.
            let (_, other) = pools[(round + 1) % 2].as_ref().unwrap();
            assert!(other.alloc(100 * MIB).unwrap_err().is_out_of_memory());
            drop(block);
            pool.verify().unwrap();
        }
        let kept = pools[order[0]].as_ref().unwrap().1.alloc(90 * MIB).unwrap();
        pools[order[0]] = None;
        let (_, lane) = pools[order[1]].as_ref().unwrap();
        // The pool is gone, its buffer is not.
        assert!(lane.alloc(100 * MIB).unwrap_err().is_out_of_memory());
        drop(kept);
        drop(lane.alloc(100 * MIB).unwrap());
        pools[order[1]] = None;
        drop((pools, driver));
        sim.check_clean().unwrap();
    }
}
