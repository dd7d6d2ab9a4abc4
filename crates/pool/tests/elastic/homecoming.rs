//! Borrowed memory that comes home: when its owner asks, and by itself when there is room.
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::common::elastic::{G, Machine, check, count, machine};
use vmm_pool::{Growth, PoolBuilder};
use vmm_sys::sim::FaultPlan;
use vmm_sys::{Call, DeviceId, ResultCode};

const LONG: Duration = Duration::from_secs(20);
const HOME: DeviceId = DeviceId(0);
const AWAY: DeviceId = DeviceId(1);

/// Two devices, of which the second lends; the home has room for four chunks.
fn two(settings: impl FnOnce(PoolBuilder) -> PoolBuilder) -> Machine {
    machine(2, |sim| sim.device_bytes_of(0, 4 * G), |pool| settings(pool.lend(AWAY, 64 * G)))
}

#[test]
fn a_buffer_comes_home_as_a_whole_or_not_at_all() {
    let machine = two(|pool| pool);
    let buffer = machine.borrower(AWAY, 2);
    let before = machine.picture(&buffer);
    let error = buffer.come_home(Duration::ZERO).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    assert_eq!(machine.picture(&buffer), before);
    buffer.decommit(0..2 * G).unwrap();
    buffer.commit_from(AWAY.into(), 0..G).unwrap();
    buffer.decommit(2 * G..3 * G).unwrap();
    // What was placed by name comes too: its owner asks.
    assert_eq!(buffer.come_home(Duration::ZERO).unwrap().bytes, 3 * G);
    assert_eq!((count(&buffer, HOME), machine.stats(1).lent_bytes), (4, 0));
    check(&buffer, 3..6);
    drop(buffer);
    machine.end();
}

/// A clock in the test's hand.
#[derive(Clone, Default)]
struct Hand(Arc<AtomicU64>);

impl Hand {
    fn pass(&self, ms: u64) {
        self.0.fetch_add(ms, Ordering::SeqCst);
    }

    fn on(&self, pool: PoolBuilder) -> PoolBuilder {
        let now = self.0.clone();
        let clock = move || Duration::from_millis(now.load(Ordering::SeqCst));
        pool.background(true).idle_lane_ms(None).clock(clock)
    }
}

/// Lets the time pass until `is_true` is.
fn wait(hand: &Hand, is_true: impl Fn() -> bool) {
    let deadline = Instant::now() + LONG;
    while !is_true() {
        assert!(Instant::now() < deadline, "it never was");
        std::thread::sleep(Duration::from_millis(2));
        hand.pass(50);
    }
}

/// Long enough for several looks of the background thread.
fn rest() {
    std::thread::sleep(Duration::from_millis(80));
}

#[test]
fn borrowed_memory_comes_home_by_itself_when_there_is_room_and_not_before() {
    let hand = Hand::default();
    let machine =
        machine(2, |sim| sim.device_bytes_of(0, 24 * G), |pool| hand.on(pool.lend(AWAY, 64 * G)));
    let stream = machine.stream(0);
    let other = machine.buffer(0, 64 * G);
    other.grow_to(24 * G).unwrap();
    let buffer = machine.buffer(0, 64 * G);
    let grown = buffer.grow(Growth::to(9 * G).borrow_from_any()).unwrap();
    assert_eq!(grown.borrowed, [(AWAY.into(), 9 * G)]);
    buffer.write(0, b"kept").unwrap();
    // Placed by name: it stays.
    buffer.commit_from(AWAY.into(), 9 * G..10 * G).unwrap();
    hand.pass(5000);
    rest();
    assert_eq!(count(&buffer, AWAY), 10, "home is full");
    // Room for all of it, but not for an eighth more.
    other.shrink_to(15 * G).unwrap();
    for _ in 0..3 {
        hand.pass(1000);
        rest();
    }
    assert_eq!(count(&buffer, AWAY), 10);
    // In use it is left alone.
    let guard = buffer.use_on(&stream).unwrap();
    other.shrink_to(13 * G).unwrap();
    for _ in 0..3 {
        hand.pass(1000);
        rest();
    }
    assert_eq!(count(&buffer, AWAY), 10);
    drop(guard);
    wait(&hand, || count(&buffer, HOME) == 9);
    assert_eq!((count(&buffer, AWAY), buffer.stats().borrowed.len()), (1, 0));
    let mut found = [0; 4];
    buffer.read(0, &mut found).unwrap();
    assert_eq!(&found, b"kept");
    drop((buffer, other, stream));
    machine.end();
}

#[test]
fn a_buffer_that_has_just_borrowed_rests() {
    let hand = Hand::default();
    let machine = two(|pool| hand.on(pool));
    let buffer = machine.buffer(0, 64 * G);
    let other = machine.buffer(0, 64 * G);
    other.grow_to(4 * G).unwrap();
    hand.pass(10_000);
    buffer.grow(Growth::to(G).borrow_from_any()).unwrap();
    drop(other);
    hand.pass(900);
    rest();
    assert_eq!(count(&buffer, AWAY), 1);
    hand.pass(100);
    wait(&hand, || count(&buffer, HOME) == 1);
    drop(buffer);
    machine.end();
}

#[test]
fn a_pool_that_is_told_not_to_brings_nothing_home() {
    let hand = Hand::default();
    let machine = two(|pool| hand.on(pool.return_home(false)));
    let buffer = machine.borrower(AWAY, 1);
    buffer.decommit(0..3 * G).unwrap();
    for _ in 0..3 {
        hand.pass(2000);
        rest();
    }
    assert_eq!(count(&buffer, AWAY), 1);
    drop(buffer);
    machine.end();
}

#[test]
fn a_way_home_that_fails_leaves_the_buffer_and_is_tried_again() {
    let hand = Hand::default();
    let machine = two(|pool| hand.on(pool));
    let buffer = machine.borrower(AWAY, 1);
    machine.sim.inject(FaultPlan::fail(ResultCode::UNKNOWN).on(Call::EventRecord).times(2));
    let fired = machine.sim.faults_fired();
    buffer.decommit(0..3 * G).unwrap();
    wait(&hand, || machine.sim.faults_fired() == fired + 1);
    assert_eq!(count(&buffer, AWAY), 1);
    check(&buffer, 3..5);
    wait(&hand, || count(&buffer, AWAY) == 0);
    check(&buffer, 3..5);
    machine.sim.clear_faults();
    drop(buffer);
    machine.end();
}
