//! What the driver refuses to take back stays in the books, as it stays on the device.
use crate::common::{HOME, MIB, Rig};
use vmm_pool::{Budget, ChunkSize};
use vmm_sys::object::{failed_drops, retry_failed_drops};
use vmm_sys::sim::{FaultPlan, Sim};
use vmm_sys::{Call, ResultCode};

/// The bytes that the device has given out.
fn taken(sim: &Sim) -> u64 {
    sim.ledger_summary().devices[0].used_bytes
}

fn refuse(rig: &Rig, call: Call, times: u64) {
    rig.sim.inject(FaultPlan::fail(ResultCode::UNKNOWN).on(call).times(times));
}

#[test]
fn a_chunk_whose_release_fails_stays_in_stock() {
    let budget = Budget::new(1 << 30);
    let rig = Rig::new(|b| b.chunk(ChunkSize::Fixed(2 * MIB)).budget(HOME, budget.clone()));
    let before = taken(&rig.sim);
    drop(rig.lane.alloc(8 * MIB).unwrap());
    refuse(&rig, Call::MemRelease, 2);
    assert_eq!(rig.pool.trim(HOME).unwrap(), 4 * MIB, "two of four were refused");
    let stats = rig.stats();
    assert_eq!((stats.held_bytes, stats.stock_bytes), (4 * MIB, 4 * MIB));
    assert_eq!((taken(&rig.sim) - before, budget.booked_bytes()), (4 * MIB, 4 * MIB));
    // They are as good as others.
    let calls = rig.calls(|| drop(rig.lane.alloc(4 * MIB).unwrap()));
    assert_eq!(calls.of(Call::MemCreate), 0, "{calls}");
    assert_eq!(rig.pool.trim(HOME).unwrap(), 4 * MIB);
    assert_eq!((taken(&rig.sim), budget.booked_bytes()), (before, 0));
    rig.end();
}

#[test]
fn a_full_shelf_keeps_what_cannot_be_released() {
    let rig =
        Rig::new(|b| b.chunk(ChunkSize::Fixed(2 * MIB)).stock_marks(0, 0).limit_bytes(8 * MIB));
    let other = vmm_sys::object::Stream::create(&rig.driver, HOME).unwrap();
    let other_lane = rig.pool.lane(&other).unwrap();
    drop(other_lane.alloc(4 * MIB).unwrap());
    refuse(&rig, Call::MemRelease, 1000);
    rig.pool.close_lane(&other);
    drop(other_lane);
    assert_eq!((rig.stats().held_bytes, rig.stats().stock_bytes), (4 * MIB, 4 * MIB));
    // The limit counts them, and requests find them.
    let all = rig.lane.alloc(8 * MIB).unwrap();
    assert_eq!((rig.stats().held_bytes, rig.stats().stock_bytes), (8 * MIB, 0));
    rig.sim.clear_faults();
    drop((all, other));
    rig.end();
}

#[test]
fn what_outlives_its_pool_stays_booked_until_it_is_taken_back() {
    for call in [Call::MemRelease, Call::MemUnmap] {
        let budget = Budget::new(64 * MIB);
        let rig = Rig::new(|b| b.chunk(ChunkSize::Fixed(2 * MIB)).budget(HOME, budget.clone()));
        let before = taken(&rig.sim);
        drop(rig.lane.alloc(8 * MIB).unwrap());
        refuse(&rig, call, 1000);
        let Rig { sim, driver, pool, stream, lane } = rig;
        drop((lane, pool, stream));
        assert_eq!(failed_drops(&driver).len(), 4, "{call}");
        assert_eq!((taken(&sim) - before, budget.booked_bytes()), (8 * MIB, 8 * MIB), "{call}");
        sim.clear_faults();
        // The next pool of the driver tries again, when it is trimmed.
        let rig = Rig::on(sim, |b| b.budget(HOME, budget.clone()));
        assert_eq!(rig.pool.trim(HOME).unwrap(), 0, "nothing of its own");
        assert_eq!((taken(&rig.sim), budget.booked_bytes()), (before, 0), "{call}");
        assert_eq!(retry_failed_drops(&driver), 0);
        drop(driver);
        rig.end();
    }
}

#[test]
fn a_chunk_that_cannot_be_warmed_is_booked_as_long_as_it_is_there() {
    let rig = Rig::new(|b| b.limit_bytes(16 * MIB));
    let before = taken(&rig.sim);
    refuse(&rig, Call::MemUnmap, 1);
    assert!(rig.pool.prefill(HOME, 4 * MIB).is_err());
    assert_eq!(taken(&rig.sim) - before, rig.stats().held_bytes);
    assert!(rig.stats().held_bytes > 0);
    rig.pool.trim(HOME).unwrap();
    assert_eq!((taken(&rig.sim), rig.stats().held_bytes), (before, 0));
    rig.end();
}

/// Somebody else reset the primary context: streams and events are gone, chunks and mappings are not
/// of it. What needs a stream says so; drops are silent, and a new pool works.
#[test]
fn f_x2_a_context_that_somebody_reset_ends_no_program_and_a_new_pool_works() {
    for unwinding in [false, true] {
        let rig = Rig::new(|b| b.limit_bytes(64 * MIB).chunk(ChunkSize::Fixed(2 * MIB)));
        let other = vmm_sys::object::Stream::create(&rig.driver, HOME).unwrap();
        let mut blocks: Vec<_> = (0..20).map(|_| rig.lane.alloc(2 * MIB).unwrap()).collect();
        blocks[3].record_stream(&other).unwrap();
        drop(blocks.remove(3));
        blocks[5].record_stream(&other).unwrap();
        rig.sim.reset_context(HOME);
        let dead = rig.stream.synchronize().unwrap_err();
        assert!(!dead.is_out_of_memory(), "told to who asks: {dead}");
        let calls = rig.driver.ledger().snapshot();
        let _served_or_refused = rig.lane.alloc(30 * MIB);
        let Rig { sim, driver, pool, stream, lane } = rig;
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
            let _everything = (blocks, lane, pool, stream, other);
            if unwinding {
                std::panic::resume_unwind(Box::new("on purpose"));
            }
        }));
        assert_eq!(ended.is_err(), unwinding, "a drop panicked");
        let calls = driver.ledger().snapshot().since(&calls);
        assert!(calls.total() < 2000, "retried without end: {calls}");
        let rig = Rig::on(sim, |b| b);
        let block = rig.lane.alloc(100 * MIB).unwrap();
        block.write(0, b"fine").unwrap();
        drop(block);
        rig.pool.trim(HOME).unwrap();
        assert_eq!(rig.stats().held_bytes, 0);
    }
}
