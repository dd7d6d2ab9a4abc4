//! Guard mode: stray writers meet unmapped addresses, and all else is as ever.

#![allow(clippy::unwrap_used, reason = "a failure ends the story")]

mod common;

use std::collections::HashSet;
use std::sync::Arc;

use common::graph::{Graph, begin, fill, holds};
use common::{HOME, Held, MIB, Rig};
use vmm_pool::{DebugMode, Error, Hint, Pool, Request, block_of, free_raw, record_stream_raw};
use vmm_sys::object::Stream;
use vmm_sys::sim::Sim;
use vmm_sys::{CaptureMode, Driver, ProbeKernel, ResultCode, Transfer};

fn rig() -> Rig {
    Rig::new(|b| b.debug_mode(DebugMode::Guard))
}

/// A write from the host to a device address.
fn poke(rig: &Rig, address: u64) -> Result<(), ResultCode> {
    let word = [1_u8; 4];
    let transfer = Transfer::HostToDevice { dst: address, src: word.as_ptr(), bytes: 4 };
    // SAFETY: on the simulated device, which looks where the bytes go; the word outlives the call.
    unsafe { rig.driver.copy(HOME, &transfer) }.map_err(|error| error.code())
}

/// A write by work on the lane's stream, and what the stream says then.
fn stray(rig: &Rig, address: u64) -> Result<(), ResultCode> {
    let kernel = ProbeKernel::FillWords { dst: address, words: 1, value: 1 };
    // SAFETY: on the simulated device, which looks where the words go.
    unsafe { rig.driver.launch(HOME, &kernel, rig.stream.handle()) }.unwrap();
    rig.stream.synchronize().map_err(|error| error.code())
}

/// Where unmapped addresses begin behind `end`.
fn gap_behind(rig: &Rig, end: u64) -> u64 {
    (0..).map(|nth| end + 4 * nth).find(|at| rig.sim.peek(*at, 1).is_none()).unwrap()
}

#[test]
fn a_stray_write_after_the_free_is_an_error() {
    let rig = rig();
    let buffer = rig.lane.alloc(3 * MIB).unwrap();
    let address = buffer.address();
    assert_eq!(poke(&rig, address), Ok(()));
    drop(buffer);
    for at in [address, address + MIB, address + 3 * MIB - 4] {
        assert_eq!(poke(&rig, at), Err(ResultCode::INVALID_VALUE));
    }
    // Also when others have come since.
    let others: Vec<_> = (0..50).map(|_| rig.lane.alloc(3 * MIB).unwrap()).collect();
    assert_eq!(poke(&rig, address), Err(ResultCode::INVALID_VALUE));
    drop(others);
    assert_eq!(stray(&rig, address), Err(ResultCode::ILLEGAL_ADDRESS));
}

#[test]
fn a_stray_write_past_the_end_is_an_error() {
    let rig = rig();
    for (bytes, align_bytes) in
        [(2 * MIB, 256), (512, 256), (256, 1), (5 * MIB + 256, 256), (64 << 10, 64 << 10)]
    {
        let buffer = rig.lane.alloc_with(&Request::new(bytes).align(align_bytes)).unwrap();
        let end = buffer.address() + bytes;
        assert_eq!(poke(&rig, end - 4), Ok(()));
        assert_eq!(poke(&rig, end), Err(ResultCode::INVALID_VALUE), "{bytes} bytes");
    }
    let buffer = rig.lane.alloc(256).unwrap();
    assert_eq!(stray(&rig, buffer.address() + 256), Err(ResultCode::ILLEGAL_ADDRESS));
}

#[test]
fn a_block_ends_as_near_to_the_gap_as_its_alignment_allows() {
    let rig = rig();
    for bytes in [1, 4, 255, 257, 1000, MIB + 1, 2 * MIB - 1, 2 * MIB + 1, 40 * MIB + 12] {
        for align_bytes in [1, 256, 4096, MIB, 32 * MIB] {
            let buffer = rig.lane.alloc_with(&Request::new(bytes).align(align_bytes)).unwrap();
            let (address, end) = (buffer.address(), buffer.address() + bytes);
            let align_bytes = align_bytes.max(256);
            assert_eq!(address % align_bytes, 0);
            let gap = gap_behind(&rig, end.next_multiple_of(2 * MIB).min(end + align_bytes + 4));
            assert!(gap - end < align_bytes.min(2 * MIB), "{bytes} at {align_bytes}: {end:#x}");
            // The first and the last byte are there, and the block shares no chunk.
            buffer.write(0, &[1]).unwrap();
            buffer.write(bytes - 1, &[2]).unwrap();
        }
    }
    rig.stats();
    rig.end();
}

#[test]
fn nothing_is_unmapped_before_its_last_users_are_done() {
    let rig = rig();
    let other = Stream::create(&rig.driver, HOME).unwrap();
    let mut buffer = rig.lane.alloc(MIB).unwrap();
    let address = buffer.address();
    let own = Held::new(&rig.sim, rig.stream.handle());
    let crossed = Held::new(&rig.sim, other.handle());
    fill(&rig, &rig.stream, &buffer, 1);
    fill(&rig, &other, &buffer, 2);
    buffer.record_stream(&other).unwrap();
    drop(buffer);
    let looks = |limbo_buffers: u64| {
        drop(rig.lane.alloc(MIB).unwrap()); // a sweep
        assert!(rig.sim.peek(address, 4).is_some(), "unmapped under its users");
        assert_eq!(rig.stats().limbo_buffers, limbo_buffers);
    };
    looks(1);
    drop(crossed);
    looks(1);
    drop(own);
    rig.stream.synchronize().unwrap();
    other.synchronize().unwrap();
    drop(rig.lane.alloc(MIB).unwrap());
    assert!(rig.sim.peek(address, 4).is_none());
    // The lane's own stream alone.
    let buffer = rig.lane.alloc(MIB).unwrap();
    let address = buffer.address();
    let own = Held::new(&rig.sim, rig.stream.handle());
    fill(&rig, &rig.stream, &buffer, 3);
    drop(buffer);
    assert!(rig.sim.peek(address, 4).is_some());
    assert_eq!(rig.stats().retired_mappings, 1);
    drop(own);
    rig.pool.trim(HOME).unwrap();
    assert!(rig.sim.peek(address, 4).is_none());
    rig.stream.synchronize().unwrap();
    drop(other);
    rig.end();
}

#[test]
fn addresses_are_not_reused_soon_and_come_round_in_the_end() {
    let sim = Sim::builder().device_bytes(1 << 30).build();
    let rig = Rig::on(sim, |b| b.debug_mode(DebugMode::Guard));
    let live: Vec<_> = (0..20).map(|_| rig.lane.alloc(MIB).unwrap()).collect();
    let reserved_bytes = rig.stats().reserved_bytes;
    let mut recent: Vec<u64> =
        live.iter().map(|buffer| buffer.address() & !(2 * MIB - 1)).collect();
    let mut reused = 0;
    for nth in 0..1000 {
        let page = rig.lane.alloc(1 + nth * 997 % MIB).unwrap().address() & !(2 * MIB - 1);
        let age = recent.iter().rev().position(|known| *known == page);
        reused += u64::from(age.is_some());
        assert!(age.is_none_or(|age| age >= 80), "{page:#x} after {age:?}");
        recent.push(page);
    }
    assert!(reused > 500);
    assert_eq!(rig.stats().reserved_bytes, reserved_bytes, "they come round");
    // A lane that fills its addresses gets more.
    let full: Vec<_> = (0..200).map(|_| rig.lane.alloc(MIB).unwrap()).collect();
    assert!(rig.stats().reserved_bytes > reserved_bytes);
    drop((full, live));
    rig.end();
}

#[test]
fn where_addresses_run_out_they_come_round_at_once() {
    let sim = Sim::builder().device_bytes(1 << 30).address_space_bytes(1 << 30).build();
    let rig = Rig::on(sim, |b| b.debug_mode(DebugMode::Guard));
    let mut live = Vec::new();
    for _ in 0..130 {
        live.push(rig.lane.alloc(MIB).unwrap());
    }
    for _ in 0..200 {
        drop(rig.lane.alloc(MIB).unwrap());
    }
    while live.len() < 500 {
        match rig.lane.alloc(MIB) {
            Ok(buffer) => live.push(buffer),
            Err(error) => {
                assert!(matches!(error, Error::OutOfAddresses { .. }), "{error}");
                break;
            }
        }
    }
    rig.stats();
    drop(live);
    rig.end();
}

#[test]
fn wrong_frees_of_plain_addresses_are_typed_errors_that_change_nothing() {
    let rig = rig();
    let other = Stream::create(&rig.driver, HOME).unwrap();
    for bytes in [1000, 2 * MIB, 4 * MIB + 5] {
        let address = rig.lane.alloc_raw(bytes).unwrap();
        assert_eq!(block_of(address).unwrap().bytes, bytes.next_multiple_of(512));
        let before = rig.stats();
        let wrong = [
            (address + 256, bytes, "NotAllocated"),
            (
                address & !(2 * MIB - 1),
                bytes,
                if address.is_multiple_of(2 * MIB) { "" } else { "NotAllocated" },
            ),
            (address, bytes + 512, "WrongBytes"),
            (address, 0, "WrongBytes"),
            (0x1234, bytes, "UnknownAddress"),
        ];
        for (at, length, kind) in wrong.into_iter().filter(|wrong| !wrong.2.is_empty()) {
            let error = free_raw(at, length).unwrap_err();
            assert!(format!("{error:?}").starts_with(kind), "{at:#x}, {length}: {error:?}");
        }
        assert_eq!(rig.stats(), before);
        record_stream_raw(address, &other).unwrap();
        let held = Held::new(&rig.sim, other.handle());
        assert_eq!(poke(&rig, address), Ok(()));
        free_raw(address, bytes).unwrap();
        let twice = |when: &str| {
            let error = free_raw(address, bytes).unwrap_err();
            assert!(matches!(error, Error::NotAllocated { .. }), "{when}: {error:?}");
            assert!(block_of(address).is_err() && record_stream_raw(address, &other).is_err());
        };
        twice("in limbo");
        assert_eq!(poke(&rig, address), Ok(()), "its users are not done");
        drop(held);
        other.synchronize().unwrap();
        drop(rig.lane.alloc(1).unwrap());
        twice("unmapped");
        assert_eq!(poke(&rig, address), Err(ResultCode::INVALID_VALUE));
        // Without a stream of its own.
        let address = rig.lane.alloc_raw(bytes).unwrap();
        free_raw(address, bytes).unwrap();
        assert_eq!(poke(&rig, address), Err(ResultCode::INVALID_VALUE));
        assert!(matches!(free_raw(address, bytes), Err(Error::NotAllocated { .. })));
    }
    assert_eq!(rig.stats().live_bytes, 0);
    drop(other);
    rig.end();
}

#[test]
fn the_limit_and_the_ladder_work_as_ever() {
    let rig = Rig::new(|b| b.debug_mode(DebugMode::Guard).limit_bytes(8 * MIB));
    let mut live: Vec<_> = (0..4).map(|_| rig.lane.alloc(1000).unwrap()).collect();
    let stats = rig.stats();
    assert_eq!((stats.live_bytes, stats.rounding_bytes), (4000, 8 * MIB - 4000));
    let Err(Error::OutOfMemory(facts)) = rig.lane.alloc(1) else { panic!("beyond the limit") };
    assert_eq!((facts.largest_bytes, facts.rounded_bytes), (Some(0), 2 * MIB));
    assert!(facts.hints.contains(&Hint::LeaveGuardMode { rounding_bytes: 8 * MIB - 4000 }));
    assert!(!facts.is_scattered());
    // What is freed behind unfinished work is waited for within one call.
    let last = live.pop().unwrap();
    rig.sim.busy(HOME, rig.stream.handle(), 5000).unwrap();
    fill(&rig, &rig.stream, &last, 7);
    drop(last);
    assert!(rig.lane.try_alloc(1000).unwrap_err().is_out_of_memory());
    live.push(rig.lane.alloc(1000).unwrap());
    assert!(rig.stats().ladder.waited >= 1);
    // The memory of another lane serves, also behind a stream that it was recorded on.
    let other = Stream::create(&rig.driver, HOME).unwrap();
    let lane = rig.pool.lane(&other).unwrap();
    live[0].record_stream(&other).unwrap();
    rig.sim.busy(HOME, other.handle(), 5000).unwrap();
    drop(live);
    let all = lane.alloc(8 * MIB).unwrap();
    assert_eq!(rig.stats().held_bytes, 8 * MIB);
    drop((all, lane, other));
    rig.end();
}

#[test]
fn a_pool_that_ends_with_blocks_alive_and_in_limbo_leaves_nothing() {
    for background in [false, true] {
        let rig = Rig::new(|b| b.debug_mode(DebugMode::Guard).background(background));
        let other = Stream::create(&rig.driver, HOME).unwrap();
        let mut blocks: Vec<_> =
            (1..30).map(|nth| rig.lane.alloc(nth * 100_000).unwrap()).collect();
        for buffer in blocks.iter_mut().step_by(3) {
            buffer.record_stream(&other).unwrap();
        }
        rig.sim.busy(HOME, other.handle(), 500).unwrap();
        rig.sim.busy(HOME, rig.stream.handle(), 500).unwrap();
        blocks.drain(5..20);
        rig.stats();
        let Rig { sim, driver, pool, stream, lane } = rig;
        drop((lane, stream, pool));
        drop((blocks, other));
        drop(driver);
        sim.check_clean().unwrap();
    }
}

#[test]
fn a_pair_costs_a_mapping_and_makes_no_chunk() {
    let rig = rig();
    drop(rig.lane.alloc(1000).unwrap());
    let calls = rig.calls(|| drop(rig.lane.alloc(1000).unwrap()));
    // What docs/CONFIGURATION.md says that it costs.
    let expected = "cuMemMap 1, cuMemUnmap 1, cuMemSetAccess 1, cuStreamGetCaptureInfo 1, \
                    cuThreadExchangeStreamCaptureMode 4, cuEventRecord 1, cuEventQuery 1";
    assert_eq!(calls.to_string(), expected);
    rig.end();
}

#[test]
fn a_graph_keeps_the_memory_of_its_capture() {
    let rig = rig();
    let outside = rig.lane.alloc(MIB).unwrap();
    let scope = rig.lane.capture().unwrap();
    begin(&rig, &rig.stream, CaptureMode::Global);
    let inside = rig.lane.alloc(MIB).unwrap();
    fill(&rig, &rig.stream, &inside, 5);
    common::graph::copy(&rig, &rig.stream, &outside, &inside);
    drop(inside); // baked into the graph
    let graph = Graph::end(&rig, &rig.stream);
    let memory = scope.finish();
    for _ in 0..3 {
        graph.launch(&rig.stream);
        rig.stream.synchronize().unwrap();
        assert!(holds(&outside, 5));
        drop(rig.lane.alloc(MIB).unwrap());
    }
    drop(graph);
    drop((memory, outside));
    rig.end();
}

#[test]
fn many_threads_share_a_guarded_lane() {
    let rig = Rig::new(|b| b.debug_mode(DebugMode::Guard).background(true));
    let pages = std::sync::Mutex::new(HashSet::new());
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let (rig, pages) = (&rig, &pages);
            scope.spawn(move || {
                for nth in 0..60 {
                    let buffer = rig.lane.alloc(1 + (thread * 61 + nth) * 9973).unwrap();
                    buffer.write(0, &[thread as u8]).unwrap();
                    let page = buffer.address() & !(2 * MIB - 1);
                    assert!(pages.lock().unwrap().insert(page), "two blocks in one chunk");
                    let mut byte = [0];
                    buffer.read(0, &mut byte).unwrap();
                    assert_eq!(byte, [thread as u8]);
                }
            });
        }
    });
    rig.stats();
    rig.end();
}

#[test]
fn a_per_thread_stream_is_guarded_too() {
    let sim = Sim::builder().build();
    let driver: Arc<dyn Driver> = sim.clone();
    let pool = Pool::builder(driver.clone()).background(false).debug_mode(DebugMode::Guard);
    let pool = pool.build().unwrap();
    let stream = Stream::per_thread(&driver, HOME).unwrap();
    let lane = pool.lane(&stream).unwrap();
    let here = lane.alloc(MIB).unwrap();
    let there = lane.alloc(MIB).unwrap();
    let address = there.address();
    drop(here);
    std::thread::spawn(move || drop(there)).join().unwrap();
    drop(lane.alloc(MIB).unwrap());
    assert!(sim.peek(address, 1).is_none());
    pool.verify().unwrap();
    drop((lane, stream, pool, driver));
    sim.check_clean().unwrap();
}
