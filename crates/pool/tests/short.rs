//! What a pool does when memory is short: each rung of the ladder, seen in the statistics.

mod common;

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use common::{HOME, MIB, Rig};
use vmm_pool::{Budget, Buffer, Error, Lane, Pool, Request};
use vmm_sys::Driver;
use vmm_sys::object::Stream;
use vmm_sys::sim::Sim;

#[test]
fn pending_frees_are_awaited_within_one_call() {
    let rig = Rig::new(|b| b.limit_bytes(64 * MIB));
    let other = Stream::create(&rig.driver, HOME).unwrap();
    let mut crossed = rig.lane.alloc(64 * MIB).unwrap();
    crossed.record_stream(&other).unwrap();
    rig.sim.busy(HOME, other.handle(), 5000).unwrap();
    drop(crossed);
    assert!(rig.lane.try_alloc(64 * MIB).unwrap_err().is_out_of_memory());
    let served = rig.lane.alloc(64 * MIB).unwrap();
    assert!(rig.stats().ladder.waited >= 1);
    drop((served, other));
    rig.end();
}

#[test]
fn a_true_shortage_fails_after_one_wait_a_rung_and_changes_nothing() {
    let rig = Rig::new(|b| b.limit_bytes(64 * MIB));
    let live = rig.lane.alloc(40 * MIB).unwrap();
    let before = rig.stats();
    let error = rig.lane.alloc(40 * MIB).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory(_)), "{error}");
    let after = rig.stats();
    let ladder = after.ladder;
    assert_eq!((ladder.failed, ladder.waited, ladder.callbacks), (1, 1, 1), "{ladder:?}");
    assert_eq!((before.live_bytes, before.buffers), (after.live_bytes, after.buffers));
    drop((live, rig.lane.alloc(24 * MIB).unwrap()));
    rig.end();
}

#[test]
fn idle_memory_of_other_lanes_serves() {
    let rig = Rig::new(|b| b.limit_bytes(64 * MIB));
    let other = Stream::create(&rig.driver, HOME).unwrap();
    let other_lane = rig.pool.lane(&other).unwrap();
    drop(other_lane.alloc(60 * MIB).unwrap());
    let served = rig.lane.alloc(60 * MIB).unwrap();
    assert!(rig.stats().ladder.other_lanes >= 1);
    assert!(rig.stats().held_bytes <= 64 * MIB);
    drop((served, other_lane, other));
    rig.end();
}

#[test]
fn an_idle_pool_gives_its_memory_to_another() {
    let sim = Sim::builder().device_bytes(1 << 30).build();
    let rig = Rig::on(sim, |b| b);
    let second = Pool::builder(rig.driver.clone()).background(false).build().unwrap();
    let stream = Stream::create(&rig.driver, HOME).unwrap();
    let second_lane = second.lane(&stream).unwrap();
    let free = rig.driver.mem_info(HOME).unwrap().free_bytes;
    drop(rig.lane.alloc(free - 64 * MIB).unwrap());
    let served = second_lane.alloc(free / 2).unwrap();
    assert!(second.device_stats(HOME).unwrap().ladder.other_pools >= 1);
    drop((served, second_lane, second, stream));
    rig.end();
}

#[test]
fn pools_share_a_budget_and_never_pass_it() {
    let budget = Budget::new(128 * MIB);
    let rig = Rig::new(|b| b.budget(HOME, budget.clone()));
    let second = Pool::builder(rig.driver.clone()).budget(HOME, budget.clone());
    let second = second.background(false).build().unwrap();
    let stream = Stream::create(&rig.driver, HOME).unwrap();
    let second_lane = second.lane(&stream).unwrap();
    let first_half = rig.lane.alloc(100 * MIB).unwrap();
    assert!(second_lane.alloc(100 * MIB).unwrap_err().is_out_of_memory());
    drop(first_half);
    let second_half = second_lane.alloc(100 * MIB).unwrap();
    assert!(budget.booked_bytes() <= budget.limit_bytes());
    drop((second_half, second_lane, second, stream));
    drop(rig.lane.alloc(128 * MIB).unwrap());
    rig.end();
    assert_eq!(budget.booked_bytes(), 0);
}

#[test]
fn callbacks_may_free_allocate_or_panic() {
    static LANE: OnceLock<Lane> = OnceLock::new();
    static KEPT: Mutex<Vec<Buffer>> = Mutex::new(Vec::new());
    static ASKED: AtomicU32 = AtomicU32::new(0);
    let rig = Rig::new(|b| {
        b.limit_bytes(64 * MIB).on_shortage(|_, _| panic!("a callback that panics")).on_shortage(
            |device, bytes| {
                assert_eq!(device, HOME);
                ASKED.fetch_add(1, Ordering::Relaxed);
                // Short itself: must neither deadlock nor ask the callbacks again.
                let lane = LANE.get().unwrap();
                assert!(lane.alloc(bytes).unwrap_err().is_out_of_memory());
                KEPT.lock().unwrap().pop().is_some()
            },
        )
    });
    LANE.set(rig.lane.clone()).unwrap();
    for _ in 0..3 {
        KEPT.lock().unwrap().push(rig.lane.alloc(20 * MIB).unwrap());
    }
    let served = rig.lane.alloc(36 * MIB).unwrap();
    assert_eq!((ASKED.load(Ordering::Relaxed), KEPT.lock().unwrap().len()), (2, 1));
    assert!(rig.lane.alloc(64 * MIB).unwrap_err().is_out_of_memory());
    assert!(KEPT.lock().unwrap().is_empty());
    drop(served);
    rig.stats();
}

#[test]
fn a_neighbour_and_the_host_are_asked_last_and_only_for_those_that_may_borrow() {
    let asked = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::new(Mutex::new(Vec::new()));
    let says = |name: &'static str, when: usize| {
        let (asked, kept) = (asked.clone(), kept.clone());
        move |device, request: &Request| {
            assert_eq!((device, request.bytes(), request.can_borrow()), (HOME, 20 * MIB, true));
            asked.lock().unwrap().push(name);
            assert!(asked.lock().unwrap().len() < 40, "asked for ever");
            let helps = asked.lock().unwrap().len() == when;
            // What it had moved away, say.
            let moved: Option<Buffer> = if helps { kept.lock().unwrap().pop() } else { None };
            moved.is_some()
        }
    };
    let rig = Rig::new(|b| {
        let panics = |_, _: &Request| -> bool { panic!("a relief that panics") };
        let once = AtomicU32::new(0);
        let host = says("host", 4);
        b.limit_bytes(64 * MIB).neighbour(says("neighbour", 2)).host(
            move |device, request: &Request| {
                let first = once.fetch_add(1, Ordering::Relaxed) == 0;
                if first { panics(device, request) } else { host(device, request) }
            },
        )
    });
    for _ in 0..3 {
        kept.lock().unwrap().push(rig.lane.alloc(20 * MIB).unwrap());
    }
    let plain = Request::new(20 * MIB);
    assert!(rig.lane.alloc_with(&plain).unwrap_err().is_out_of_memory());
    assert!(asked.lock().unwrap().is_empty());
    let ladder = rig.stats().ladder;
    assert_eq!((ladder.neighbour, ladder.host, ladder.failed), (0, 0, 1));
    // The neighbour has nothing, the host panics.
    assert!(rig.lane.alloc_with(&plain.may_borrow()).is_err());
    // The neighbour helps, without the host.
    let first = rig.lane.alloc_with(&plain.may_borrow()).unwrap();
    // Now the host.
    let second = rig.lane.alloc_with(&plain.may_borrow()).unwrap();
    assert_eq!(*asked.lock().unwrap(), ["neighbour", "neighbour", "neighbour", "host"]);
    let ladder = rig.stats().ladder;
    assert_eq!((ladder.neighbour, ladder.host, ladder.failed), (3, 2, 2), "{ladder:?}");
    let names = ladder.by_name();
    assert_eq!(names[names.len() - 3..], [("neighbour", 3), ("host", 2), ("failed", 2)]);
    kept.lock().unwrap().clear();
    drop((first, second));
    rig.end();
}

#[test]
fn a_rung_that_nobody_fills_is_not_there() {
    let rig = Rig::new(|b| b.limit_bytes(4 * MIB));
    let live = rig.lane.alloc(4 * MIB).unwrap();
    let fails = |request: Request| {
        rig.calls(|| assert!(rig.lane.alloc_with(&request).unwrap_err().is_out_of_memory())).total()
    };
    assert_eq!(fails(Request::new(MIB)), fails(Request::new(MIB).may_borrow()));
    let ladder = rig.stats().ladder;
    assert_eq!((ladder.neighbour, ladder.host, ladder.failed), (0, 0, 2));
    drop(live);
    rig.end();
}

#[test]
fn a_relief_that_always_claims_to_have_helped_ends() {
    let rig = Rig::new(|b| b.limit_bytes(4 * MIB).neighbour(|_, _: &Request| true));
    let live = rig.lane.alloc(4 * MIB).unwrap();
    let request = Request::new(MIB).may_borrow();
    assert!(rig.lane.alloc_with(&request).unwrap_err().is_out_of_memory());
    // Its own requests do not ask it again.
    let lane = Arc::new(OnceLock::<Lane>::new());
    let inner = lane.clone();
    let second = Rig::new(|b| {
        b.limit_bytes(4 * MIB).host(move |_, request: &Request| {
            assert!(inner.get().unwrap().alloc_with(request).unwrap_err().is_out_of_memory());
            false
        })
    });
    assert!(lane.set(second.lane.clone()).is_ok());
    let more = second.lane.alloc(4 * MIB).unwrap();
    assert!(second.lane.alloc_with(&request).unwrap_err().is_out_of_memory());
    assert_eq!(second.stats().ladder.host, 1);
    drop((live, more));
    rig.end();
}

#[test]
fn threads_together_never_pass_the_limit() {
    let rig = Rig::new(|b| b.limit_bytes(64 * MIB));
    let worst = AtomicU32::new(0);
    std::thread::scope(|scope| {
        for index in 0..8 {
            let (rig, worst) = (&rig, &worst);
            scope.spawn(move || {
                let stream = Stream::create(&rig.driver, HOME).unwrap();
                let lane = rig.pool.lane(&stream).unwrap();
                for round in 0..60 {
                    let got = lane.alloc((8 + (index * 7 + round) % 9) * MIB);
                    let held = rig.pool.device_stats(HOME).unwrap().held_bytes;
                    worst.fetch_max((held / MIB) as u32, Ordering::Relaxed);
                    assert!(got.is_ok() || got.unwrap_err().is_out_of_memory());
                }
                rig.pool.close_lane(&stream);
            });
        }
    });
    assert!(worst.load(Ordering::Relaxed) <= 64);
    drop(rig.lane.alloc(64 * MIB).unwrap());
    rig.stats();
    rig.end();
}

#[test]
fn a_lane_keeps_its_driver_alive() {
    let sim = Sim::builder().build();
    let driver: Arc<dyn Driver> = sim.clone();
    let stream = Stream::create(&driver, HOME).unwrap();
    let pool = Pool::builder(driver.clone()).build().unwrap();
    let buffer = pool.lane(&stream).unwrap().alloc(MIB).unwrap();
    drop((pool, stream, driver));
    buffer.write(0, &[1; 64]).unwrap();
    drop(buffer);
    sim.check_clean().unwrap();
}

/// A shortage looks at the pools of its own GPU only: one that it held for a moment would end later
/// than its last handle, and in the wrong thread.
#[test]
fn a_shortage_delays_the_end_of_no_other_drivers_pool() {
    let short = Rig::new(|b| b.limit_bytes(2 * MIB));
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                assert!(short.lane.alloc(4 * MIB).unwrap_err().is_out_of_memory());
            }
        });
        for _ in 0..300 {
            let rig = Rig::new(|b| b);
            let other = Stream::create(&rig.driver, HOME).unwrap();
            let mut crossed = rig.lane.alloc(MIB).unwrap();
            crossed.record_stream(&other).unwrap();
            drop(crossed);
            rig.pool.trim(HOME).unwrap(); // what is left is an event to use again
            drop(other);
            rig.end();
        }
        done.store(true, Ordering::Relaxed);
    });
    short.end();
}
