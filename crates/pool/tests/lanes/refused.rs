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
