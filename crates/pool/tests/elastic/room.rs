//! What a growth could get: the pool says it, and a growth of just that much succeeds.
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::common::elastic::{G, Machine, machine, on};
use vmm_pool::{Budget, Growth, Place, PoolBuilder, Request};
use vmm_sys::DeviceId;
use vmm_sys::sim::{Link, SimBuilder};

const HOME: DeviceId = DeviceId(0);
const HOST: Place = Place::HostNuma(0);

/// A growth of just so many bytes at home succeeds, and one chunk more does not.
fn check_own(machine: &Machine, what: &str) -> u64 {
    let buffer = machine.buffer(0, 256 * G);
    let room = buffer.room();
    assert_eq!((room.device, room.chunk_bytes), (HOME, G));
    assert_eq!(room, machine.pool.room(HOME).unwrap(), "plain chunks of the shortest length");
    assert_eq!(room.own_bytes % G, 0);
    let more = buffer.grow_to(room.own_bytes + G).unwrap_err();
    assert!(more.is_out_of_memory(), "{what}: {more}");
    let own_bytes = buffer.room().own_bytes;
    assert_eq!(own_bytes, room.own_bytes, "{what}: nothing is lost by a growth that failed");
    buffer.grow_to(own_bytes).unwrap_or_else(|error| panic!("{what}: {error}"));
    assert_eq!(buffer.room().own_bytes, 0, "{what}");
    own_bytes
}

/// Live memory, a lane's idle chunks, stock in another length, and what has left a buffer.
fn furnished(settings: impl Fn(PoolBuilder) -> PoolBuilder) -> (Machine, impl Sized) {
    let machine = machine(1, |sim| sim.device_bytes(64 * G + G / 2), settings);
    let stream = machine.stream(0);
    let lane = machine.pool.lane(&stream).unwrap();
    let live = lane.alloc(3 * G + 5).unwrap();
    drop(lane.alloc(6 * G).unwrap());
    machine.pool.prefill(HOME, 16 * G).unwrap();
    let other = machine.buffer(0, 16 * G);
    other.grow_to(5 * G).unwrap();
    drop(other.use_on(&stream).unwrap());
    other.decommit(2 * G..4 * G).unwrap();
    (machine, (live, other, lane, stream))
}

#[test]
fn a_growth_of_just_the_room_succeeds_and_of_a_chunk_more_does_not() {
    let budget = Budget::new(40 * G + 1);
    let cases: [(&str, &dyn Fn(PoolBuilder) -> PoolBuilder); 3] = [
        ("the driver ends it", &|pool| pool),
        ("the limit ends it", &|pool| pool.limit_bytes(40 * G + 1)),
        ("a shared budget ends it", &|pool| pool.budget(HOME, budget.clone())),
    ];
    for (what, settings) in cases {
        let (machine, kept) = furnished(settings);
        let own = check_own(&machine, what) / G;
        let live = machine.stats(0).live_bytes;
        assert!(own > 20 && live > 0, "{what}: {own} chunks");
        drop(kept);
        machine.end();
    }
}

#[test]
fn room_is_an_answer_only_for_devices_of_the_pool_and_takes_nothing() {
    let (machine, kept) = furnished(|pool| pool);
    let before = machine.stats(0);
    let room = machine.pool.room(HOME).unwrap();
    assert_eq!(room.lenders, []);
    assert_eq!(room.with_any_lender_bytes(), room.own_bytes);
    assert!(machine.pool.room(DeviceId(7)).is_err());
    assert_eq!(machine.stats(0), before);
    drop(kept);
    machine.end();
}

#[test]
fn lenders_are_named_in_their_order_with_what_they_would_give() {
    let far = |sim: SimBuilder| {
        let sim = sim.device_bytes_of(0, 4 * G).device_bytes_of(3, 6 * G);
        sim.link(0, 1, Link::Pcie)
    };
    let machine = machine(4, far, |pool| {
        let pool = pool.lend(DeviceId(1), 5 * G).lend(DeviceId(3), 64 * G);
        pool.host_memory(0, 7 * G, 0)
    });
    // Some of it is lent already, and some is its own.
    let other = machine.buffer(2, 16 * G);
    let buffer = machine.buffer(0, 256 * G);
    machine.buffer(3, 4 * G).grow_to(G).unwrap();
    drop(other);
    buffer.grow(Growth::to(5 * G).borrow_from([on(1)])).unwrap();
    let room = buffer.room();
    assert_eq!(room.own_bytes, 0);
    let lenders: Vec<_> = room
        .lenders
        .iter()
        .map(|it| (it.place, it.bytes / G, it.is_host, it.only_if_named))
        .collect();
    // A chunk of device 3 is going to be its anchor.
    let expected = [(on(3), 5, false, false), (on(1), 4, false, false), (HOST, 7, true, true)];
    assert_eq!(lenders, expected);
    assert_eq!(room.with_any_lender_bytes(), 9 * G);
    let named = [on(3), on(1), HOST];
    let grow = |bytes: u64| buffer.grow(Growth::to(5 * G + bytes).borrow_from(named));
    assert!(grow(17 * G).unwrap_err().is_out_of_memory());
    let grown = grow(16 * G).unwrap();
    assert_eq!(grown.borrowed, [(on(3), 5 * G), (on(1), 4 * G), (HOST, 7 * G)]);
    assert!(buffer.room().lenders.iter().all(|it| it.bytes == 0));
    drop(buffer);
    machine.end();
}

#[test]
fn a_callback_that_comes_later_is_asked_by_growth_too_until_its_hook_is_dropped() {
    let machine = machine(1, |sim| sim.device_bytes(8 * G), |pool| pool);
    let stream = machine.stream(0);
    let lane = machine.pool.lane(&stream).unwrap();
    let buffer = Arc::new(machine.buffer(0, 16 * G));
    buffer.grow_to(8 * G).unwrap();
    let asked = Arc::new(AtomicU64::new(0));
    let (cache, count) = (Arc::downgrade(&buffer), asked.clone());
    let hook = machine.pool.on_shortage(move |device, bytes| {
        assert_eq!(device, HOME);
        count.fetch_add(bytes, Ordering::Relaxed);
        let Some(cache) = cache.upgrade() else { return false };
        let keeps = cache.committed_bytes().saturating_sub(2 * G);
        cache.shrink_to(keeps).is_ok_and(|bytes| bytes > 0)
    });
    let panics = machine.pool.on_shortage(|_, _| panic!("it counts as no help"));
    // A lane asks, and so does elastic growth.
    let block = lane.alloc_with(&Request::new(2 * G)).unwrap();
    assert_eq!((asked.swap(0, Ordering::Relaxed), buffer.committed_bytes()), (2 * G, 6 * G));
    let other = machine.buffer(0, 16 * G);
    other.grow_to(3 * G).unwrap();
    assert_eq!((asked.swap(0, Ordering::Relaxed), buffer.committed_bytes()), (2 * G, 2 * G));
    assert!(machine.stats(0).ladder.callbacks >= 2);
    drop(hook);
    assert!(other.grow_to(5 * G).unwrap_err().is_out_of_memory());
    assert_eq!((asked.load(Ordering::Relaxed), buffer.committed_bytes()), (0, 2 * G));
    drop((panics, block, lane, stream, other, buffer));
    machine.end();
}

#[test]
fn a_hook_may_outlive_its_pool_and_builders_do_not_share_their_callbacks() {
    let machine = machine(1, |sim| sim, |pool| pool.on_shortage(|_, _| false));
    let hook = machine.pool.on_shortage(|_, _| false);
    assert!(format!("{hook:?}").contains("ShortageHook"));
    let builder = vmm_pool::Pool::builder(machine.driver.clone()).background(false);
    let asked = Arc::new(AtomicU64::new(0));
    let count = asked.clone();
    let first = builder.clone().limit_bytes(G).on_shortage(move |_, _| {
        count.fetch_add(1, Ordering::Relaxed);
        false
    });
    let (first, second) = (first.build().unwrap(), builder.limit_bytes(G).build().unwrap());
    for (pool, times) in [(&second, 0), (&first, 1)] {
        let buffer = pool.elastic(HOME).capacity_bytes(8 * G).chunk_bytes(G).build().unwrap();
        assert!(buffer.grow_to(2 * G).unwrap_err().is_out_of_memory());
        assert_eq!(asked.load(Ordering::Relaxed), times);
    }
    drop((first, second));
    machine.end();
    drop(hook);
}
