//! The pool's first form, story by story, on the simulated device.

use crate::common::{HOME, MIB, Rig};
use vmm_pool::{ChunkSize, Error, Request};
use vmm_sys::object::Stream;
use vmm_sys::sim::{FaultPlan, Sim};
use vmm_sys::{Call, ResultCode};

#[test]
fn a_warm_alloc_and_free_make_no_driver_call() {
    let rig = Rig::new(|b| b);
    for bytes in [1, 512, 64 << 10, 2 * MIB, 33 * MIB] {
        drop(rig.lane.alloc(bytes).unwrap());
        let calls = rig.calls(|| drop(rig.lane.alloc(bytes).unwrap()));
        assert_eq!(calls.total(), 0, "{bytes} bytes: {calls}");
    }
    rig.stats();
    rig.end();
}

#[test]
fn zero_bytes_have_one_answer_and_count_nowhere() {
    let rig = Rig::new(|b| b);
    let calls = rig.calls(|| {
        let buffer = rig.lane.alloc(0).unwrap();
        assert_eq!((buffer.address(), buffer.bytes(), buffer.is_empty()), (0, 0, true));
        assert_eq!(rig.stats().buffers, 0);
    });
    assert_eq!(calls.total(), 0);
    rig.end();
}

#[test]
fn bytes_stay_while_neighbours_come_and_go() {
    let rig = Rig::new(|b| b.chunk(ChunkSize::Fixed(2 * MIB)));
    let kept = rig.lane.alloc(3 * MIB + 5).unwrap();
    let text: Vec<u8> = (0..kept.bytes()).map(|i| (i * 31 % 251) as u8).collect();
    kept.write(0, &text).unwrap();
    for bytes in [100, 5 * MIB, 777, 20 * MIB] {
        let other = rig.lane.alloc(bytes).unwrap();
        other.write(0, &vec![0xEE; bytes as usize]).unwrap();
    }
    let mut back = vec![0; text.len()];
    kept.read(0, &mut back).unwrap();
    assert!(back == text);
    assert!(matches!(kept.read(1, &mut back), Err(Error::OutOfBounds { .. })));
    drop(kept);
    rig.end();
}

#[test]
fn growth_fails_at_each_call_and_leaves_everything_as_before() {
    for call in [Call::MemCreate, Call::MemMap, Call::MemSetAccess] {
        for k in 1..=5 {
            let rig = Rig::new(|b| b.chunk(ChunkSize::Fixed(2 * MIB)));
            let small = rig.lane.alloc(3 * MIB).unwrap();
            let before = rig.stats();
            let plan = FaultPlan::fail(ResultCode::UNKNOWN).on(call).at(k).once();
            rig.sim.inject(plan);
            let error = rig.lane.alloc(10 * MIB).unwrap_err();
            let Error::Driver(driver_error) = &error else { panic!("{error}") };
            assert_eq!((driver_error.call(), driver_error.code()), (call, ResultCode::UNKNOWN));
            let after = rig.stats();
            // Chunks that were made are kept as stock: nothing is lost, nothing is mapped.
            assert_eq!(after.idle_bytes, before.idle_bytes, "{call} {k}");
            assert_eq!(after.live_bytes, before.live_bytes);
            assert_eq!(after.held_bytes - after.stock_bytes, before.held_bytes);
            let big = rig.lane.alloc(10 * MIB).unwrap();
            assert_eq!(rig.stats().stock_bytes, 0, "what was made serves the retry");
            drop((small, big));
            rig.end();
        }
    }
}

#[test]
fn trim_gives_everything_idle_back() {
    let rig = Rig::new(|b| b);
    let kept = rig.lane.alloc(1000).unwrap();
    drop(rig.lane.alloc(100 * MIB).unwrap());
    let given = rig.pool.trim(HOME).unwrap();
    let stats = rig.stats();
    assert!(given >= 100 * MIB && stats.stock_bytes == 0, "{given} {stats:?}");
    assert!(stats.held_bytes <= 32 * MIB, "{stats:?}");
    drop(kept);
    rig.pool.trim(HOME).unwrap();
    assert_eq!(rig.stats().held_bytes, 0);
    rig.end();
}

#[test]
fn the_limit_can_be_reached_and_not_passed() {
    let rig = Rig::new(|b| b.limit_bytes(64 * MIB + 12345));
    let whole = rig.lane.alloc(64 * MIB).unwrap();
    assert_eq!(rig.stats().held_bytes, 64 * MIB);
    let error = rig.lane.alloc(1).unwrap_err();
    let Error::OutOfMemory(facts) = &error else { panic!("{error}") };
    assert_eq!((facts.asked_bytes, facts.stats.limit_bytes), (1, 64 * MIB));
    assert!(!facts.is_scattered() && error.to_string().contains("too full"), "{error}");
    drop(whole);
    let small: Vec<_> = (0..8).map(|_| rig.lane.alloc(8 * MIB).unwrap()).collect();
    assert_eq!(rig.stats().held_bytes, 64 * MIB);
    drop(small);
    rig.end();
}

#[test]
fn a_full_device_is_helped_by_other_lanes_and_by_what_is_pending() {
    let sim = Sim::builder().device_bytes(1 << 30).build();
    let rig = Rig::on(sim, |b| b.soft_limit(None));
    let other = Stream::create(&rig.driver, HOME).unwrap();
    let other_lane = rig.pool.lane(&other).unwrap();
    let free = rig.driver.mem_info(HOME).unwrap().free_bytes;
    drop(other_lane.alloc(free - 64 * MIB).unwrap());
    let big = rig.lane.alloc(free - 256 * MIB).unwrap();
    let error = rig.lane.alloc(free).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    assert!(error.to_string().contains("CUDA_ERROR_OUT_OF_MEMORY"), "{error}");
    drop((big, other_lane, other));
    rig.end();
}

#[test]
fn stock_made_ahead_serves_growth_without_creation() {
    let rig = Rig::new(|b| b.chunk(ChunkSize::Fixed(32 * MIB)));
    assert_eq!(rig.pool.prefill(HOME, 1 << 30).unwrap(), 1 << 30);
    assert_eq!(rig.stats().stock_bytes, 1 << 30);
    drop(rig.lane.alloc(1).unwrap()); // reserves the addresses
    let calls = rig.calls(|| drop(rig.lane.alloc(900 * MIB).unwrap()));
    assert_eq!(calls.of(Call::MemCreate), 0);
    assert_eq!(calls.of(Call::MemMap), calls.of(Call::MemSetAccess));
    assert_eq!(calls.total(), calls.of(Call::MemMap) * 2, "{calls}");
    rig.end();
}

#[test]
fn requests_that_can_never_be_served_are_refused_before_any_call() {
    let rig = Rig::new(|b| b);
    let calls = rig.calls(|| {
        for bytes in [u64::MAX, u64::MAX - 255, 1 << 63, (1 << 63) - 1, (1 << 46) + 1] {
            let error = rig.lane.alloc(bytes).unwrap_err();
            assert!(matches!(error, Error::TooLarge { .. }), "{error}");
        }
        for align in [0, 3, 1 << 63] {
            let error = rig.lane.alloc_with(&Request::new(64).align(align)).unwrap_err();
            assert!(matches!(error, Error::BadAlignment { .. }), "{error}");
        }
    });
    assert_eq!(calls.total(), 0);
    rig.end();
}

#[test]
fn alignments_up_to_the_chunk_are_honoured() {
    let rig = Rig::new(|b| b);
    let mut kept = Vec::new();
    for (bytes, align) in
        [(32, 32), (1, 1), (100, 512), (100, 4096), (300, 2 * MIB), (5 * MIB, 32 * MIB)]
    {
        let buffer = rig.lane.alloc_with(&Request::new(bytes).align(align)).unwrap();
        assert!(buffer.address().is_multiple_of(align.max(256)), "{buffer:?}");
        kept.push(buffer);
        kept.push(rig.lane.alloc(777).unwrap());
    }
    drop(kept);
    rig.end();
}

#[test]
fn buffers_outlive_lane_pool_and_stream() {
    let rig = Rig::new(|b| b);
    let buffer = rig.lane.alloc(5 * MIB).unwrap();
    let Rig { sim, driver, pool, stream, lane } = rig;
    drop((lane, pool, stream));
    buffer.write(0, b"still here").unwrap();
    assert!(sim.check_clean().is_err());
    drop((buffer, driver));
    sim.check_clean().unwrap();
}

#[test]
fn a_closed_lane_refuses_and_gives_back_with_its_last_buffer() {
    let rig = Rig::new(|b| b);
    let buffer = rig.lane.alloc(5 * MIB).unwrap();
    rig.pool.close_lane(&rig.stream);
    assert!(matches!(rig.lane.alloc(1), Err(Error::LaneClosed)));
    assert_eq!(rig.stats().lanes, 1);
    drop(buffer);
    let stats = rig.stats();
    assert_eq!((stats.lanes, stats.held_bytes), (0, stats.stock_bytes));
    // The stream may come again: a new lane, served from what the old one left.
    let again = rig.pool.lane(&rig.stream).unwrap();
    let calls = rig.calls(|| drop(again.alloc(5 * MIB).unwrap()));
    assert_eq!(calls.of(Call::MemCreate), 0, "{calls}");
    drop(again);
    rig.end();
}

#[test]
fn address_space_that_is_short_is_told_apart_and_smaller_ranges_are_tried() {
    let sim = Sim::builder().max_reservation_bytes(1 << 30).build();
    let rig = Rig::on(sim, |b| b);
    let many: Vec<_> = (0..6).map(|_| rig.lane.alloc(700 * MIB).unwrap()).collect();
    for (index, buffer) in many.iter().enumerate() {
        buffer.write(buffer.bytes() - 4, &[index as u8; 4]).unwrap();
    }
    let error = rig.lane.alloc(2 << 30).unwrap_err();
    assert!(matches!(error, Error::OutOfAddresses { .. }), "{error}");
    drop(many);
    rig.end();
}

#[test]
fn stock_made_ahead_stays_below_the_high_mark() {
    let rig = Rig::new(|b| b.stock_marks(0, 24 * MIB));
    rig.pool.prefill(HOME, 18 * MIB).unwrap();
    assert!((18 * MIB..=24 * MIB).contains(&rig.stats().stock_bytes), "{:?}", rig.stats());
    // Unless more is asked for by name.
    rig.pool.prefill(HOME, 70 * MIB).unwrap();
    assert_eq!(rig.stats().stock_bytes, 70 * MIB);
    rig.end();
}

#[test]
fn threads_that_make_stock_at_once_stay_below_the_high_mark() {
    let rig = Rig::new(|b| b.chunk(ChunkSize::Fixed(2 * MIB)).stock_marks(0, 8 * MIB));
    let start = std::sync::Barrier::new(4);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                start.wait();
                rig.pool.prefill(HOME, 8 * MIB).unwrap();
            });
        }
    });
    assert_eq!(rig.stats().stock_bytes, 8 * MIB);
    rig.end();
}

#[test]
fn the_background_thread_keeps_the_low_mark_and_ends_with_the_pool() {
    let rig = Rig::new(|b| {
        b.chunk(ChunkSize::Fixed(8 * MIB)).stock_marks(32 * MIB, 64 * MIB).background(true)
    });
    assert_eq!(rig.stats().stock_bytes, 32 * MIB);
    let buffer = rig.lane.alloc(20 * MIB).unwrap();
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while rig.stats().stock_bytes < 32 * MIB {
        assert!(std::time::Instant::now() < deadline, "{:?}", rig.stats());
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    drop(buffer);
    rig.end();
}

#[test]
fn work_that_repeats_makes_no_driver_call_with_the_soft_limit_off() {
    let rig = Rig::new(|b| b.soft_limit(None));
    let round = || {
        let mut seed = 0x9E37_79B9_7F4A_7C15_u64;
        let mut live = Vec::new();
        for _ in 0..3000 {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            if live.len() < 50 || seed & 1 == 0 {
                // Log-uniform from 512 B to 8 MiB, so that magazines, slabs and large blocks mix.
                let bytes = (512 << ((seed >> 8) % 14)) + (seed >> 32) % 4096;
                live.push(rig.lane.alloc(bytes).unwrap());
            } else {
                live.swap_remove((seed >> 8) as usize % live.len());
            }
        }
    };
    let first = rig.calls(round);
    assert!(first.of(Call::MemCreate) > 10, "{first}");
    for repeat in 0..3 {
        let calls = rig.calls(round);
        assert_eq!(calls.total(), 0, "repeat {repeat}: {calls}");
    }
    rig.stats();
    rig.end();
}

#[test]
fn a_hint_that_the_driver_dislikes_is_left_out() {
    let sim = Sim::builder().device_bytes(4 << 30).build();
    let rig = Rig::on(sim, |b| b);
    let first = rig.lane.alloc(900 * MIB).unwrap();
    assert_eq!(rig.stats().reserved_bytes, 1 << 30);
    // The next range is asked for with a hint: behind the first.
    let refusal = FaultPlan::fail(ResultCode::INVALID_VALUE).on(Call::MemAddressReserve);
    rig.sim.inject(refusal.once());
    let second = rig.lane.alloc(900 * MIB).unwrap();
    assert_eq!(rig.stats().reserved_bytes, 2 << 30, "not halved for a wish");
    drop((first, second));
    rig.end();
}
