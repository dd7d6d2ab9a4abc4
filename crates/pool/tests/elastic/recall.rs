//! Borrowed memory that is called back by its lender, and memory that moves out of the way where a
//! device is short.
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::common::elastic::{G, Machine, check, count, machine};
use vmm_pool::{Contents, ElasticError, Error, Growth, Place, PoolBuilder, Recall, Request};
use vmm_sys::sim::{FaultPlan, SimBuilder};
use vmm_sys::{Call, DeviceId, ResultCode};

const LONG: Duration = Duration::from_secs(20);
const HOME: DeviceId = DeviceId(0);
const AWAY: DeviceId = DeviceId(1);
const HOST: Place = Place::HostNuma(0);

fn small_home(sim: SimBuilder) -> SimBuilder {
    sim.device_bytes_of(0, 4 * G)
}

/// Two devices, of which the second lends; the home has room for four chunks.
fn two(settings: impl FnOnce(PoolBuilder) -> PoolBuilder) -> Machine {
    machine(2, small_home, |pool| settings(pool.lend(AWAY, 64 * G)))
}

fn bytes_of(recall: &Recall) -> (u64, u64, u64) {
    let refused = recall.refused.iter().map(|it| it.bytes).sum();
    (recall.moved_bytes, recall.to_host_bytes, refused)
}

#[test]
fn a_lender_gets_its_memory_back_from_a_borrower_whose_home_has_room() {
    let machine = two(|pool| pool);
    let buffer = machine.borrower(AWAY, 3);
    buffer.decommit(0..2 * G).unwrap();
    let address = buffer.address();
    // At least so much, in whole chunks.
    let recall = machine.pool.recall(AWAY, G + 1, Duration::ZERO).unwrap();
    assert_eq!(bytes_of(&recall), (2 * G, 0, 0));
    assert_eq!((count(&buffer, AWAY), count(&buffer, HOME), buffer.address()), (1, 4, address));
    let stats = machine.stats(1);
    assert_eq!((stats.lent_bytes, stats.lending_booked_bytes, stats.stock_bytes), (G, G, 2 * G));
    check(&buffer, 2..7);
    drop(buffer);
    machine.end();
}

#[test]
fn what_home_has_no_room_for_goes_to_the_host_or_is_refused_with_the_reason() {
    for with_host in [true, false] {
        let machine = two(|pool| if with_host { pool.host_memory(0, 64 * G, 0) } else { pool });
        let buffer = machine.borrower(AWAY, 3);
        buffer.decommit(0..G).unwrap();
        let recall = machine.pool.recall(AWAY, u64::MAX, Duration::ZERO).unwrap();
        if with_host {
            assert_eq!(bytes_of(&recall), (3 * G, 2 * G, 0));
            assert_eq!((count(&buffer, HOST), count(&buffer, HOME)), (2, 4));
            assert_eq!(buffer.stats().borrowed, [(HOST, 2 * G)], "it is borrowed still");
        } else {
            assert_eq!(bytes_of(&recall), (G, 0, 2 * G));
            assert_eq!((count(&buffer, AWAY), recall.refused[0].address), (2, buffer.address()));
            assert!(matches!(recall.refused[0].why, Error::OutOfMemory(_)), "{recall:?}");
        }
        machine.stats(1);
        check(&buffer, 1..7);
        drop(buffer);
        machine.end();
    }
}

#[test]
fn a_buffer_in_use_keeps_what_it_borrowed_and_others_give_first() {
    let machine = two(|pool| pool.host_memory(0, 64 * G, 0));
    let stream = machine.stream(0);
    let used = machine.borrower(AWAY, 2);
    let other = machine.buffer(0, 64 * G);
    other.grow(Growth::to(2 * G).borrow_from_any()).unwrap();
    let guard = used.use_on(&stream).unwrap();
    let before = machine.picture(&used);
    let recall = machine.pool.recall(AWAY, 2 * G, Duration::ZERO).unwrap();
    assert_eq!((bytes_of(&recall), count(&other, HOST)), ((2 * G, 2 * G, 0), 2));
    let recall = machine.pool.recall(AWAY, G, Duration::ZERO).unwrap();
    assert_eq!(bytes_of(&recall), (0, 0, G));
    let why = &recall.refused[0].why;
    assert!(matches!(why, Error::Elastic(ElasticError::InUse { open_uses: 1 })), "{why}");
    assert_eq!(machine.picture(&used).pieces(), before.pieces());
    // With patience the guard's end is waited for.
    std::thread::scope(|scope| {
        let recalled = scope.spawn(|| machine.pool.recall(AWAY, u64::MAX, LONG).unwrap());
        std::thread::sleep(Duration::from_millis(10));
        drop(guard);
        assert_eq!(bytes_of(&recalled.join().unwrap()), (2 * G, 2 * G, 0));
    });
    check(&used, 0..6);
    drop((used, other, stream));
    machine.end();
}

#[test]
fn what_was_placed_by_name_is_not_recalled_and_unknown_lenders_are_refused() {
    let machine = two(|pool| pool);
    let buffer = machine.buffer(0, 64 * G);
    buffer.commit_from(AWAY.into(), 0..2 * G).unwrap();
    let recall = machine.pool.recall(AWAY, u64::MAX, Duration::ZERO).unwrap();
    assert_eq!((bytes_of(&recall), count(&buffer, AWAY)), ((0, 0, 0), 2));
    let error = machine.pool.recall(DeviceId(9), G, LONG).unwrap_err();
    assert!(matches!(error, Error::Elastic(ElasticError::UnknownPlace { .. })), "{error}");
    drop(buffer);
    machine.end();
}

/// What the driver refuses while a failed move is taken back stays where it is, booked there.
#[test]
fn loans_stay_true_where_a_recall_cannot_be_taken_back() {
    for call in [Call::MemMap, Call::MemSetAccess, Call::MemUnmap] {
        for (first, times) in [(3, 20), (4, 20), (5, 3), (6, 2)] {
            let machine = two(|pool| pool.host_memory(0, 64 * G, 0));
            let buffer = machine.borrower(AWAY, 3);
            let plan = FaultPlan::fail(ResultCode::UNKNOWN).on(call).at(first).times(times);
            machine.sim.inject(plan);
            let recall = machine.pool.recall(AWAY, u64::MAX, Duration::ZERO).unwrap();
            machine.sim.clear_faults();
            machine.stats(0);
            machine.stats(1);
            assert_eq!(
                recall.moved_bytes + recall.refused.iter().map(|it| it.bytes).sum::<u64>(),
                3 * G
            );
            assert_eq!(buffer.stats().borrowed.iter().map(|it| it.1).sum::<u64>(), 3 * G);
            check(&buffer, 0..7);
            machine.pool.recall(AWAY, u64::MAX, Duration::ZERO).unwrap();
            assert_eq!(buffer.stats().borrowed, [(HOST, 3 * G)]);
            check(&buffer, 0..7);
            machine.pool.trim(HOME).unwrap();
            machine.pool.trim(AWAY).unwrap();
            machine.stats(0);
            drop(buffer);
            machine.end();
        }
    }
}

/// A request that may borrow.
fn asking(machine: &Machine, device: u32, bytes: u64) -> Result<vmm_pool::Buffer, Error> {
    let stream = machine.stream(device);
    machine.pool.lane(&stream).unwrap().alloc_with(&Request::new(bytes).may_borrow())
}

#[test]
fn a_lender_that_is_short_calls_its_memory_back_for_a_request_that_may_borrow() {
    let small = |sim: SimBuilder| sim.device_bytes_of(0, 4 * G).device_bytes_of(1, 4 * G);
    let machine = machine(2, small, |pool| pool.lend(AWAY, 64 * G));
    let buffer = machine.borrower(AWAY, 3); // and the anchor: the lender is full
    let stream = machine.stream(1);
    let lane = machine.pool.lane(&stream).unwrap();
    assert!(lane.alloc(2 * G).unwrap_err().is_out_of_memory(), "it did not ask");
    // The borrower's home has no room.
    assert!(asking(&machine, 1, 2 * G).unwrap_err().is_out_of_memory());
    assert_eq!(count(&buffer, AWAY), 3);
    buffer.decommit(0..2 * G).unwrap();
    let before = machine.stats(1).ladder;
    let served = asking(&machine, 1, 2 * G).unwrap();
    assert_eq!((count(&buffer, AWAY), count(&buffer, HOME)), (1, 4));
    let ladder = machine.stats(1).ladder;
    assert_eq!((ladder.neighbour - before.neighbour, ladder.host), (1, 0));
    check(&buffer, 2..7);
    drop((served, buffer, lane, stream));
    machine.end();
}

#[test]
fn a_device_that_is_short_lends_movable_buffers_to_a_neighbour_and_else_to_the_host() {
    let machine = two(|pool| pool.lend(AWAY, 2 * G).host_memory(0, 64 * G, 0));
    let build = |movable| {
        let builder = machine.pool.elastic(HOME).capacity_bytes(64 * G).chunk_bytes(G);
        builder.movable(movable).build().unwrap()
    };
    let (fixed, movable) = (build(false), build(true));
    fixed.grow_to(G).unwrap();
    movable.grow_to(3 * G).unwrap();
    movable.write(2 * G, b"kept").unwrap();
    let stream = machine.stream(0);
    // Not while it is in use, and not for a request that may not wait.
    let guard = movable.use_on(&stream).unwrap();
    assert!(asking(&machine, 0, G).unwrap_err().is_out_of_memory());
    drop(guard);
    let lane = machine.pool.lane(&stream).unwrap();
    let hasty = Request::new(G).may_borrow().no_wait();
    assert!(lane.alloc_with(&hasty).unwrap_err().is_out_of_memory());
    assert_eq!(count(&movable, HOME), 3);
    let first = asking(&machine, 0, 2 * G).unwrap();
    assert_eq!((count(&movable, AWAY), count(&movable, HOME)), (2, 1));
    assert_eq!(movable.stats().borrowed, [(AWAY.into(), 2 * G)]);
    // The neighbour lends no more.
    let second = asking(&machine, 0, G).unwrap();
    assert_eq!((count(&movable, AWAY), count(&movable, HOST), count(&fixed, HOME)), (2, 1, 1));
    let ladder = machine.stats(0).ladder;
    assert!(ladder.neighbour >= 2 && ladder.host >= 1, "{ladder:?}");
    let mut found = [0; 4];
    movable.read(2 * G, &mut found).unwrap();
    assert_eq!(&found, b"kept");
    // A sleeping buffer is left where it is.
    movable.sleep(Contents::Dropped, Duration::ZERO).unwrap();
    assert!(asking(&machine, 0, G).unwrap_err().is_out_of_memory());
    drop((first, second, fixed, movable, lane, stream));
    machine.end();
}

#[test]
fn who_was_set_to_make_room_goes_first_and_a_pool_without_lenders_has_no_such_rung() {
    let asked = Arc::new(AtomicU64::new(0));
    let log = asked.clone();
    let machine = two(|pool| {
        pool.neighbour(move |_, _: &Request| {
            log.fetch_add(1, Ordering::SeqCst);
            false
        })
    });
    let builder = machine.pool.elastic(HOME).capacity_bytes(64 * G).chunk_bytes(G);
    let movable = builder.movable(true).build().unwrap();
    movable.grow_to(4 * G).unwrap();
    let served = asking(&machine, 0, G).unwrap();
    assert_eq!((asked.load(Ordering::SeqCst), count(&movable, AWAY)), (1, 1));
    drop((served, movable));
    machine.end();

    let machine = crate::common::elastic::machine(2, small_home, |pool| pool);
    let builder = machine.pool.elastic(HOME).capacity_bytes(64 * G).chunk_bytes(G);
    let movable = builder.movable(true).build().unwrap();
    movable.grow_to(4 * G).unwrap();
    assert!(asking(&machine, 0, G).unwrap_err().is_out_of_memory());
    let ladder = machine.stats(0).ladder;
    assert_eq!((ladder.neighbour, ladder.host, count(&movable, HOME)), (0, 0, 4));
    drop(movable);
    machine.end();
}
