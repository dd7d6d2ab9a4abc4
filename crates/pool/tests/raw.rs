//! Allocation by plain address, on the simulated device.
//!
//! The directory is one for the process and every simulated machine has the same addresses, so
//! these stories take turns.

mod common;
#[path = "raw/ledger.rs"]
mod ledger;

use common::{HOME, MIB, Rig};
use parking_lot::{Mutex, MutexGuard};
use vmm_pool::{
    ChunkSize, Error, Pool, Request, block_of, free_raw, free_raw_on, record_stream_raw,
};
use vmm_sys::object::Stream;
use vmm_sys::sim::{FaultPlan, Sim};
use vmm_sys::{Call, DeviceId, Driver, ResultCode, StreamHandle};

static TURN: Mutex<()> = Mutex::new(());

fn turn() -> MutexGuard<'static, ()> {
    TURN.lock()
}

/// A number sequence, the same in every run (seed 20261129).
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}

#[test]
fn a_warm_pair_makes_no_driver_call_and_counts_like_a_buffer() {
    let _turn = turn();
    let rig = Rig::new(|b| b);
    for bytes in [1, 512, 64 << 10, 2 * MIB, 33 * MIB] {
        free_raw(rig.lane.alloc_raw(bytes).unwrap(), bytes).unwrap();
        let calls = rig.calls(|| {
            let address = rig.lane.alloc_raw(bytes).unwrap();
            assert_eq!(address % 512, 0);
            let stats = rig.stats();
            let block_bytes = bytes.next_multiple_of(512);
            assert_eq!((stats.buffers, stats.live_bytes), (1, block_bytes), "whole granules");
            assert_eq!(stats.rounding_bytes, 0);
            free_raw(address, bytes).unwrap();
        });
        assert_eq!(calls.total(), 0, "{bytes} bytes: {calls}");
        assert_eq!((rig.stats().buffers, rig.stats().live_bytes), (0, 0));
    }
    rig.end();
}

#[test]
fn zero_bytes_are_the_address_zero_both_ways() {
    let _turn = turn();
    let rig = Rig::new(|b| b);
    assert_eq!(rig.lane.alloc_raw(0).unwrap(), 0);
    free_raw(0, 0).unwrap();
    assert_eq!(rig.stats().buffers, 0);
    rig.end();
}

#[test]
fn what_can_never_be_served_is_refused_and_wishes_are_kept() {
    let _turn = turn();
    let rig = Rig::new(|b| b);
    assert!(matches!(rig.lane.alloc_raw(u64::MAX), Err(Error::TooLarge { .. })));
    let crooked = Request::new(512).align(3);
    assert!(matches!(rig.lane.alloc_raw_with(&crooked), Err(Error::BadAlignment { .. })));
    let aligned = rig.lane.alloc_raw_with(&Request::new(700).align(MIB)).unwrap();
    assert_eq!(aligned % MIB, 0);
    free_raw(aligned, 700).unwrap();
    rig.end();
}

/// Whatever is wrong with a free, nothing is changed by it.
#[test]
fn f_x11_wrong_frees_are_told_apart_and_change_nothing() {
    let _turn = turn();
    let rig = Rig::new(|b| b);
    let (small, large) = (rig.lane.alloc_raw(1000).unwrap(), rig.lane.alloc_raw(5 * MIB).unwrap());
    let unknown = |result| matches!(result, Err(Error::UnknownAddress { .. }));
    let absent = |result| matches!(result, Err(Error::NotAllocated { .. }));
    let wrong = |result| matches!(result, Err(Error::WrongBytes { .. }));
    let before = rig.stats();
    for address in [1, 4096, small + (1 << 46), 1 << 60, u64::MAX] {
        assert!(unknown(free_raw(address, 1000)), "{address:#x}");
        assert!(matches!(block_of(address), Err(Error::UnknownAddress { .. })));
    }
    for inside in [small + 1, small + 512, large + 8, large + 512, large + MIB] {
        assert!(absent(free_raw(inside, 1000)), "{inside:#x}");
        assert!(matches!(block_of(inside), Err(Error::NotAllocated { .. })));
        assert!(matches!(record_stream_raw(inside, &rig.stream), Err(Error::NotAllocated { .. })));
    }
    for bytes in [0, 1, 512, 1025, u64::MAX] {
        assert!(wrong(free_raw(small, bytes)), "{bytes}");
    }
    assert!(wrong(free_raw(large, 5 * MIB + 1)) && wrong(free_raw(large, 5 * MIB - 512)));
    let other = StreamHandle(rig.stream.handle().0 + 1);
    assert!(matches!(free_raw_on(small, 1000, other), Err(Error::OtherStream { .. })));
    assert_eq!(rig.stats(), before);
    // Off within the last granule: accepted, and no figure is off.
    free_raw_on(small, 513, rig.stream.handle()).unwrap();
    free_raw(large, 5 * MIB).unwrap();
    assert_eq!((rig.stats().buffers, rig.stats().live_bytes), (0, 0));
    let before = rig.stats();
    assert!(absent(free_raw(small, 1000)), "a second free");
    assert!(absent(free_raw(large, 5 * MIB)), "a second free");
    assert_eq!(rig.stats(), before);
    rig.end();
    assert!(unknown(free_raw(small, 1000)), "its lane is gone");
}

#[test]
fn a_block_says_what_it_is() {
    let _turn = turn();
    let rig = Rig::new(|b| b);
    let address = rig.lane.alloc_raw(1000).unwrap();
    let block = block_of(address).unwrap();
    assert_eq!((block.address, block.bytes, block.device), (address, 1024, HOME));
    assert_eq!(block.stream, rig.stream.id());
    free_raw(address, 1000).unwrap();
    assert!(matches!(block_of(address), Err(Error::NotAllocated { .. })));
    rig.end();
}

#[test]
fn a_lane_of_several_ranges_finds_its_blocks_in_each() {
    let _turn = turn();
    // A quarter of the device is reserved at a time.
    let sim = Sim::builder().device_bytes(1024 * MIB).honour_hints(false).build();
    let rig = Rig::on(sim, |b| b.chunk(ChunkSize::Fixed(2 * MIB)));
    let grown = |work: &mut dyn FnMut()| {
        let before = rig.stats().reserved_bytes;
        work();
        assert!(rig.stats().reserved_bytes > before, "a further range");
    };
    let mut held = Vec::new();
    let mut buffers = Vec::new();
    // Two ranges before the lane is in the directory, more while it is.
    for _ in 0..2 {
        grown(&mut || buffers.push(rig.lane.alloc(200 * MIB).unwrap()));
    }
    held.push((rig.lane.alloc_raw(MIB).unwrap(), MIB));
    buffers.pop();
    held.push((rig.lane.alloc_raw(150 * MIB).unwrap(), 150 * MIB));
    grown(&mut || held.push((rig.lane.alloc_raw(400 * MIB).unwrap(), 400 * MIB)));
    buffers.pop();
    held.push((rig.lane.alloc_raw(190 * MIB).unwrap(), 190 * MIB));
    let lowest = held.iter().map(|block| block.0).min().unwrap();
    let highest = held.iter().map(|block| block.0).max().unwrap();
    assert!(highest - lowest > 256 * MIB, "{held:x?}");
    for (address, bytes) in held {
        assert_eq!(block_of(address).unwrap().bytes, bytes);
        free_raw(address, bytes).unwrap();
    }
    rig.end();
}

#[test]
fn a_recorded_stream_is_waited_for_and_a_second_free_meanwhile_is_refused() {
    let _turn = turn();
    let rig = Rig::new(|b| b);
    let other = Stream::create(&rig.driver, HOME).unwrap();
    let address = rig.lane.alloc_raw(4 * MIB).unwrap();
    let plain = rig.lane.alloc_raw(4 * MIB).unwrap();
    record_stream_raw(address, &other).unwrap();
    record_stream_raw(address, &other).unwrap();
    record_stream_raw(plain, &rig.stream).unwrap(); // its own lane: nothing to wait for
    let hold = rig.sim.hold(HOME, other.handle()).unwrap();
    let records = rig.calls(|| free_raw(address, 4 * MIB).unwrap()).of(Call::EventRecord);
    assert_eq!(records, 1, "a stream recorded twice counts once");
    assert_eq!(rig.calls(|| free_raw(plain, 4 * MIB).unwrap()).total(), 0);
    let stats = rig.stats();
    assert_eq!((stats.limbo_buffers, stats.limbo_bytes, stats.live_bytes), (1, 4 * MIB, 0));
    assert!(matches!(free_raw(address, 4 * MIB), Err(Error::NotAllocated { .. })));
    assert!(matches!(record_stream_raw(address, &other), Err(Error::NotAllocated { .. })));
    assert!(matches!(block_of(address), Err(Error::NotAllocated { .. })));
    assert_eq!(rig.stats(), stats);
    let held: Vec<u64> = (0..3).map(|_| rig.lane.alloc_raw(4 * MIB).unwrap()).collect();
    assert!(!held.contains(&address));
    rig.sim.release_hold(hold);
    let held_bytes = rig.stats().held_bytes;
    // A miss sweeps, the memory comes back, and a free of it is a plain one again.
    let more: Vec<u64> = std::iter::from_fn(|| {
        let address = rig.lane.alloc_raw(4 * MIB).unwrap();
        (rig.stats().held_bytes == held_bytes).then_some(address).or_else(|| {
            free_raw(address, 4 * MIB).unwrap();
            None
        })
    })
    .collect();
    assert!(more.contains(&address), "{address:#x} is not among {more:x?}");
    assert_eq!(rig.stats().limbo_buffers, 0);
    for address in held.into_iter().chain(more) {
        assert_eq!(rig.calls(|| free_raw(address, 4 * MIB).unwrap()).of(Call::EventRecord), 0);
    }
    drop(other);
    rig.end();
}

#[test]
fn streams_of_another_driver_are_refused() {
    let _turn = turn();
    let rig = Rig::new(|b| b);
    let elsewhere: std::sync::Arc<dyn Driver> = Sim::builder().build();
    let foreign = Stream::create(&elsewhere, HOME).unwrap();
    let address = rig.lane.alloc_raw(1).unwrap();
    let refused = record_stream_raw(address, &foreign);
    assert!(matches!(refused, Err(Error::UnknownDevice { .. })));
    free_raw(address, 1).unwrap();
    assert_eq!(rig.stats().limbo_buffers, 0);
    rig.end();
}

#[test]
fn blocks_outlive_the_pool_and_take_the_lane_with_them() {
    let _turn = turn();
    let Rig { sim, driver, pool, stream, lane } = Rig::new(|b| b);
    let addresses = [lane.alloc_raw(1000).unwrap(), lane.alloc_raw(40 * MIB).unwrap()];
    drop((pool, lane, stream));
    assert_eq!(block_of(addresses[0]).unwrap().bytes, 1024);
    free_raw(addresses[0], 1000).unwrap();
    assert!(sim.check_clean().is_err(), "a block is left");
    free_raw(addresses[1], 40 * MIB).unwrap();
    drop(driver);
    sim.check_clean().unwrap();
    assert!(matches!(free_raw(addresses[1], 40 * MIB), Err(Error::UnknownAddress { .. })));
}

#[test]
fn a_closed_lane_takes_blocks_back_but_gives_none() {
    let _turn = turn();
    let rig = Rig::new(|b| b);
    let address = rig.lane.alloc_raw(1000).unwrap();
    rig.pool.close_lane(&rig.stream);
    assert!(matches!(rig.lane.alloc_raw(1000), Err(Error::LaneClosed)));
    free_raw(address, 1000).unwrap();
    assert_eq!(rig.stats().lanes, 0);
    assert!(matches!(free_raw(address, 1000), Err(Error::UnknownAddress { .. })));
    // The shell is another lane's now, perhaps at the same addresses.
    let again = rig.pool.lane(&rig.stream).unwrap();
    let second = again.alloc_raw(3 * MIB).unwrap();
    free_raw(second, 3 * MIB).unwrap();
    drop(again);
    rig.end();
}

#[test]
fn a_failure_of_growth_leaves_nothing_marked() {
    let _turn = turn();
    let rig = Rig::new(|b| b.chunk(ChunkSize::Fixed(2 * MIB)));
    let first = rig.lane.alloc_raw(MIB).unwrap();
    for call in [Call::MemCreate, Call::MemMap, Call::MemSetAccess] {
        rig.sim.inject(FaultPlan::fail(ResultCode::UNKNOWN).on(call).at(2).once());
        assert!(matches!(rig.lane.alloc_raw(10 * MIB), Err(Error::Driver(_))), "{call}");
        let block = rig.lane.alloc_raw(10 * MIB).unwrap();
        assert_eq!(rig.calls(|| free_raw(block, 10 * MIB).unwrap()).total(), 0);
        rig.pool.trim(HOME).unwrap();
    }
    free_raw(first, MIB).unwrap();
    rig.end();
}

#[test]
fn two_machines_with_the_same_addresses_are_told_so() {
    let _turn = turn();
    let (first, second) = (Rig::new(|b| b), Rig::new(|b| b));
    let address = first.lane.alloc_raw(1000).unwrap();
    // Buffers know their lane: they do not mind.
    drop(second.lane.alloc(1000).unwrap());
    assert!(matches!(second.lane.alloc_raw(1000), Err(Error::AddressTaken { .. })));
    assert_eq!(second.stats().live_bytes, 0);
    free_raw(address, 1000).unwrap();
    first.end();
    free_raw(second.lane.alloc_raw(1000).unwrap(), 1000).unwrap();
    second.end();
}

#[test]
fn a_buffer_whose_address_was_freed_does_not_end_the_program() {
    let _turn = turn();
    let rig = Rig::new(|b| b);
    free_raw(rig.lane.alloc_raw(1).unwrap(), 1).unwrap();
    let buffer = rig.lane.alloc(1).unwrap();
    free_raw(buffer.address(), 1).unwrap();
    drop(buffer);
    assert_eq!((rig.stats().buffers, rig.stats().live_bytes), (0, 0));
    rig.end();
}

#[test]
fn random_pairs_of_two_devices_agree_with_a_list() {
    let _turn = turn();
    let sim = Sim::builder().devices(2).build();
    let driver: std::sync::Arc<dyn Driver> = sim.clone();
    let builder = Pool::builder(driver.clone()).background(false);
    let pool = builder.device(HOME).device(DeviceId(1)).build().unwrap();
    let lanes: Vec<_> = [HOME, DeviceId(1), HOME]
        .map(|device| pool.lane(&Stream::create(&driver, device).unwrap()).unwrap())
        .into();
    let mut random = Random(20_261_129);
    let mut live: Vec<(u64, u64, usize)> = Vec::new();
    for _ in 0..20_000 {
        if live.len() < 50 || (random.below(2) == 0 && live.len() < 400) {
            let lane = random.below(3) as usize;
            let shift = 9 + random.below(14);
            let bytes = 1 + random.below(1 << shift);
            live.push((lanes[lane].alloc_raw(bytes).unwrap(), bytes, lane));
        } else {
            let (address, bytes, lane) = live.swap_remove(random.below(live.len() as u64) as usize);
            let block = block_of(address).unwrap();
            assert_eq!(block.device, lanes[lane].device());
            assert_eq!(block.stream, lanes[lane].stream().id());
            free_raw(address, bytes).unwrap();
        }
    }
    let mut spans: Vec<_> = live.iter().map(|(address, bytes, _)| (*address, *bytes)).collect();
    spans.sort_unstable();
    assert!(spans.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0));
    pool.verify().unwrap();
    for (address, bytes, _) in live {
        free_raw(address, bytes).unwrap();
    }
    drop((lanes, pool, driver));
    sim.check_clean().unwrap();
}

#[test]
fn threads_free_what_others_allocated_while_lanes_come_and_go() {
    let _turn = turn();
    let rig = Rig::new(|b| b);
    let (send, receive) = std::sync::mpsc::sync_channel::<(u64, u64)>(256);
    let receive = Mutex::new(receive);
    std::thread::scope(|scope| {
        for thread in 0..3u64 {
            let (send, pool, driver) = (send.clone(), &rig.pool, &rig.driver);
            scope.spawn(move || {
                let mut random = Random(20_261_129 + thread);
                for _ in 0..20 {
                    let stream = Stream::create(driver, HOME).unwrap();
                    let lane = pool.lane(&stream).unwrap();
                    for _ in 0..100 {
                        let bytes = 1 + random.below(MIB);
                        send.send((lane.alloc_raw(bytes).unwrap(), bytes)).unwrap();
                    }
                    pool.close_lane(&stream);
                }
            });
        }
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let Ok((address, bytes)) = receive.lock().recv() else { return };
                    free_raw(address, bytes).unwrap();
                    // Either nothing starts there any more, or somebody else's block does.
                    let _second = block_of(address);
                }
            });
        }
        drop(send);
    });
    let stats = rig.stats();
    assert_eq!((stats.buffers, stats.live_bytes, stats.lanes), (0, 0, 1));
    rig.end();
}
