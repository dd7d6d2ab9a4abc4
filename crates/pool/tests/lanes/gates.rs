//! Memory that waits: for other streams, for the end of work at an old address, for the driver.

use crate::common::{HOME, MIB, Rig};
use vmm_pool::ChunkSize;
use vmm_sys::object::Stream;
use vmm_sys::sim::FaultPlan;
use vmm_sys::{Call, ResultCode};

#[test]
fn a_rollback_that_cannot_unmap_is_finished_later() {
    let rig = Rig::new(|b| b.chunk(ChunkSize::Fixed(2 * MIB)));
    let forever = 1000;
    rig.sim.inject(FaultPlan::fail(ResultCode::UNKNOWN).on(Call::MemSetAccess).at(3).once());
    let stuck = FaultPlan::fail(ResultCode::UNKNOWN).on(Call::MemUnmap).at(1).times(forever);
    let stuck = rig.sim.inject(stuck);
    rig.lane.alloc(10 * MIB).unwrap_err();
    assert!(rig.stats().retired_mappings > 0);
    let big = rig.lane.alloc(10 * MIB).unwrap();
    rig.sim.clear_fault(stuck);
    rig.pool.trim(HOME).unwrap();
    assert_eq!(rig.stats().retired_mappings, 0);
    drop(big);
    rig.end();
}

#[test]
fn a_buffer_used_on_another_stream_waits_for_it() {
    let rig = Rig::new(|b| b);
    let other = Stream::create(&rig.driver, HOME).unwrap();
    let mut crossed = rig.lane.alloc(4 * MIB).unwrap();
    let address = crossed.address();
    crossed.record_stream(&other).unwrap();
    crossed.record_stream(&rig.stream).unwrap(); // its own lane: nothing to wait for
    let hold = rig.sim.hold(HOME, other.handle()).unwrap();
    drop(crossed);
    assert_eq!((rig.stats().limbo_buffers, rig.stats().live_bytes), (1, 0));
    assert!(rig.stats().limbo_bytes >= 4 * MIB);
    let meanwhile = rig.lane.alloc(4 * MIB).unwrap();
    assert_ne!(meanwhile.address(), address);
    rig.sim.release_hold(hold);
    drop(meanwhile);
    // The first free block is taken, then a miss brings limbo back before anything grows.
    let held = rig.stats().held_bytes;
    let both = [rig.lane.alloc(4 * MIB).unwrap(), rig.lane.alloc(4 * MIB).unwrap()];
    assert!(both.iter().any(|buffer| buffer.address() == address));
    assert_eq!(rig.stats().held_bytes, held);
    drop((both, other));
    rig.end();
}

#[test]
fn one_slow_event_does_not_hide_finished_ones() {
    let rig = Rig::new(|b| b.chunk(ChunkSize::Fixed(2 * MIB)).soft_limit(None));
    let (slow, quick) = (Stream::create(&rig.driver, HOME), Stream::create(&rig.driver, HOME));
    let (slow, quick) = (slow.unwrap(), quick.unwrap());
    let hold = rig.sim.hold(HOME, slow.handle()).unwrap();
    let mut stuck = rig.lane.alloc(2 * MIB).unwrap();
    stuck.record_stream(&slow).unwrap();
    drop(stuck);
    for _ in 0..100 {
        let mut buffer = rig.lane.alloc(2 * MIB).unwrap();
        buffer.record_stream(&quick).unwrap();
        drop(buffer);
    }
    assert_eq!(rig.stats().held_bytes, 4 * MIB);
    rig.sim.release_hold(hold);
    drop((slow, quick));
    rig.end();
}

#[test]
fn beyond_the_soft_limit_free_chunks_move_and_the_old_address_waits_for_its_gate() {
    let rig = Rig::new(|b| b.chunk(ChunkSize::Fixed(2 * MIB)).soft_limit(Some(0.0)));
    // Live and free blocks alternate, so that no hole fits a block of twice the size.
    let mut blocks: Vec<_> = (0..8).map(|_| rig.lane.alloc(4 * MIB).unwrap()).collect();
    let text = vec![7u8; 100];
    let mut index = 0;
    blocks.retain(|_| {
        index += 1;
        index % 2 == 0
    });
    for block in &blocks {
        block.write(0, &text).unwrap();
    }
    let held = rig.stats().held_bytes;
    let hold = rig.sim.hold(HOME, rig.stream.handle()).unwrap();
    let calls = rig.calls(|| {
        let big = rig.lane.alloc(8 * MIB).unwrap();
        blocks.push(big);
    });
    assert_eq!(calls.of(Call::MemCreate), 0, "{calls}");
    assert_eq!(calls.of(Call::MemUnmap), 0, "the stream has not passed: {calls}");
    assert_eq!(rig.stats().held_bytes, held);
    let retired = rig.stats().retired_mappings;
    assert!(retired > 0);
    rig.sim.release_hold(hold);
    rig.pool.trim(HOME).unwrap();
    assert_eq!(rig.stats().retired_mappings, 0);
    for block in &blocks[..4] {
        let mut back = vec![0; 100];
        block.read(0, &mut back).unwrap();
        assert_eq!(back, text);
    }
    drop(blocks);
    rig.end();
}

#[test]
fn a_gate_is_not_taken_for_another_at_the_same_host_address() {
    let rig = Rig::new(|b| b.chunk(ChunkSize::Fixed(2 * MIB)).soft_limit(Some(0.0)));
    let other = Stream::create(&rig.driver, HOME).unwrap();
    let mut crossed = rig.lane.alloc(4096).unwrap();
    crossed.record_stream(&other).unwrap();
    let mut blocks: Vec<_> = (0..4).map(|_| rig.lane.alloc(2 * MIB).unwrap()).collect();
    let hold = rig.sim.hold(HOME, rig.stream.handle()).unwrap();
    drop((blocks.remove(0), blocks.remove(1)));
    blocks.push(rig.lane.alloc(4 * MIB).unwrap()); // the free chunks get a second address
    assert_eq!(rig.stats().retired_mappings, 2);
    drop(crossed); // parked behind an idle stream: its event passes and is let go
    let calls = rig.calls(|| blocks.push(rig.lane.alloc(8 * MIB).unwrap()));
    assert_eq!(calls.of(Call::MemUnmap), 0, "the lane's own stream is held: {calls}");
    rig.sim.release_hold(hold);
    drop((blocks, other));
    rig.end();
}

#[test]
fn events_are_made_once_and_recorded_again() {
    let rig = Rig::new(|b| b.chunk(ChunkSize::Fixed(2 * MIB)).soft_limit(Some(0.0)));
    let other = Stream::create(&rig.driver, HOME).unwrap();
    let round = || {
        let mut crossed = rig.lane.alloc(3 * MIB).unwrap();
        crossed.record_stream(&other).unwrap();
        drop(crossed);
        drop(rig.lane.alloc(9 * MIB).unwrap());
        rig.pool.trim(HOME).unwrap();
    };
    round();
    let calls = rig.calls(|| (0..20).for_each(|_| round()));
    assert!(calls.of(Call::EventRecord) >= 20, "{calls}");
    assert_eq!((calls.of(Call::EventCreate), calls.of(Call::EventDestroy)), (0, 0), "{calls}");
    drop(other);
    rig.end();
}
