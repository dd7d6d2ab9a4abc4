//! Chunks at several addresses that move, sleep, are lent, or get one address each again.
use std::time::Duration;

use crate::common::elastic::{G, Machine, count, machine, with_host, written};
use crate::share::{check_slots, columns, figures};
use vmm_pool::{Contents, ElasticError, Error, Move, Place};
use vmm_sys::sim::{FaultPlan, SimBuilder};
use vmm_sys::{Call, DeviceId, ResultCode};

const LONG: Duration = Duration::from_secs(20);
const HOME: DeviceId = DeviceId(0);
const AWAY: DeviceId = DeviceId(1);
const HOST: Place = Place::HostNuma(0);

#[test]
fn a_slot_that_moves_gets_its_own_and_the_others_stay() {
    let machine = with_host();
    let buffer = written(&machine, 2);
    buffer.share(0..2 * G, 4 * G).unwrap();
    for (to, slot) in [(AWAY.into(), 4), (HOST, 1)] {
        buffer.migrate(Move::to(to).range(slot * G..(slot + 1) * G)).unwrap();
        assert_eq!(count(&buffer, to), 1);
        buffer.write(slot * G, &[0; 64]).unwrap();
    }
    assert_eq!((figures(&buffer), columns(&machine, 0)), ((4, 4, 0), (2, 0, 0)));
    check_slots(&buffer, &[(0, 0), (5, 1)]);
    drop(buffer);
    // All at once: each has its own afterwards, and what is left behind is one chunk.
    let buffer = written(&machine, 2);
    buffer.share(0..2 * G, 4 * G).unwrap();
    buffer.share(0..G, 9 * G).unwrap();
    for to in [HOST, Place::Device(AWAY), HOST, Place::Device(HOME)] {
        buffer.migrate(to).unwrap();
        assert_eq!((figures(&buffer), count(&buffer, to)), ((5, 5, 0), 5));
        check_slots(&buffer, &[(0, 0), (1, 1), (4, 0), (5, 1), (9, 0)]);
        machine.stats(1);
    }
    assert_eq!(columns(&machine, 0), (5, 0, 0));
    drop(buffer);
    machine.end();
}

/// A chunk on the host is mapped once more, ready for the next contents: not while a slot has it.
#[test]
fn a_chunk_of_the_host_is_ready_for_the_next_only_when_no_slot_has_it() {
    let machine = with_host();
    let buffer = written(&machine, 2);
    buffer.migrate(HOST).unwrap();
    buffer.share(0..2 * G, 4 * G).unwrap();
    buffer.migrate(Move::to(HOME).range(0..2 * G)).unwrap();
    let other = machine.buffer(0, 4 * G);
    other.grow_to(4 * G).unwrap();
    other.write(0, &vec![0xee; 4 * G as usize]).unwrap();
    other.migrate(HOST).unwrap();
    check_slots(&buffer, &[(0, 0), (1, 1), (4, 0), (5, 1)]);
    buffer.migrate(HOST).unwrap();
    buffer.migrate(HOME).unwrap();
    check_slots(&buffer, &[(0, 0), (1, 1), (4, 0), (5, 1)]);
    machine.pool.verify().unwrap();
    drop((buffer, other));
    machine.end();
}

#[test]
fn what_cannot_be_brought_back_keeps_its_contents_and_the_others_theirs() {
    for call in [Call::MemMap, Call::MemSetAccess, Call::MemUnmap] {
        for (first, times) in [(3, 20), (4, 20), (3, 2), (4, 3), (5, 20), (6, 2), (7, 20)] {
            let machine = with_host();
            let buffer = written(&machine, 2);
            buffer.migrate(AWAY).unwrap();
            buffer.migrate(HOME).unwrap();
            buffer.share(0..2 * G, 4 * G).unwrap();
            machine
                .sim
                .inject(FaultPlan::fail(ResultCode::UNKNOWN).on(call).at(first).times(times));
            drop(buffer.migrate(Move::to(AWAY).range(0..5 * G)));
            machine.sim.clear_faults();
            machine.pool.verify().unwrap();
            check_slots(&buffer, &[(0, 0), (1, 1), (4, 0), (5, 1)]);
            buffer.write(5 * G, &[7; 1]).unwrap();
            machine.stats(0);
            machine.stats(1);
            drop(buffer);
            machine.pool.trim(HOME).unwrap();
            machine.pool.trim(AWAY).unwrap();
            machine.end();
        }
    }
}

#[test]
fn unsharing_gives_each_address_its_own_at_its_place_and_moves_nothing_else() {
    let machine = with_host();
    let buffer = written(&machine, 3);
    buffer.migrate(Move::to(AWAY).range(G..2 * G)).unwrap();
    buffer.share(0..3 * G, 10 * G).unwrap();
    buffer.share(0..G, 20 * G).unwrap();
    assert_eq!(figures(&buffer), (7, 3, 7));
    let generation = buffer.generation();
    // One of three addresses; then the other two, of which one keeps the chunk.
    let moved = buffer.unshare(0..G, LONG).unwrap();
    assert_eq!((moved.bytes, moved.generation, figures(&buffer)), (G, generation + 1, (7, 4, 6)));
    let moved = buffer.unshare(10 * G..21 * G, LONG).unwrap();
    assert_eq!((moved.bytes, figures(&buffer)), (3 * G, (7, 7, 0)));
    assert_eq!((count(&buffer, AWAY), columns(&machine, 0).0, columns(&machine, 1).0), (2, 5, 2));
    let calls = machine.driver.ledger().snapshot();
    assert_eq!(buffer.unshare(0..64 * G, LONG).unwrap().bytes, 0);
    assert_eq!(machine.driver.ledger().snapshot().since(&calls).total(), 0);
    for slot in [0, 1, 2, 10, 11, 12, 20] {
        check_slots(&buffer, &[(slot, slot % 10)]);
        buffer.write(slot * G, &vec![slot as u8; G as usize]).unwrap();
    }
    for slot in [0, 1, 2, 10, 11, 12, 20] {
        let mut found = [0; 64];
        buffer.read(slot * G, &mut found).unwrap();
        assert_eq!(found, [slot as u8; 64], "nobody writes into another's memory");
    }
    drop(buffer);
    machine.end();
}

#[test]
fn an_unsharing_waits_for_guards_no_longer_than_it_is_told() {
    let machine = with_host();
    let stream = machine.stream(0);
    let buffer = written(&machine, 1);
    buffer.share(0..G, 8 * G).unwrap();
    let using = buffer.use_on(&stream).unwrap();
    let refused = buffer.unshare(8 * G..9 * G, Duration::ZERO).unwrap_err();
    assert!(matches!(refused, Error::Elastic(ElasticError::InUse { open_uses: 1 })), "{refused}");
    drop(using);
    assert_eq!(buffer.unshare(8 * G..9 * G, Duration::ZERO).unwrap().bytes, G);
    drop((buffer, stream));
    machine.end();
}

#[test]
fn sleep_gives_back_each_chunk_once_and_waking_brings_one_for_each_address() {
    for contents in [Contents::Kept { node: 0 }, Contents::Dropped] {
        let machine = with_host();
        let buffer = written(&machine, 2);
        buffer.share(0..2 * G, 4 * G).unwrap();
        assert_eq!(buffer.sleep(contents, LONG).unwrap(), 2 * G);
        assert_eq!(columns(&machine, 0), (0, 0, 0));
        assert_eq!(machine.stats(0).held_bytes - machine.stats(0).anchor_bytes, 0);
        assert_eq!(buffer.wake().unwrap(), 4 * G);
        assert_eq!((figures(&buffer), columns(&machine, 0)), ((4, 4, 0), (4, 0, 0)));
        if contents != Contents::Dropped {
            check_slots(&buffer, &[(0, 0), (1, 1), (4, 0), (5, 1)]);
        }
        drop(buffer);
        machine.end();
    }
}

/// A home with room for four chunks, and a neighbour that lends.
fn lenders() -> Machine {
    let small = |sim: SimBuilder| sim.device_bytes_of(0, 4 * G);
    machine(2, small, |pool| pool.lend(AWAY, 8 * G).host_memory(0, 64 * G, 0))
}

#[test]
fn what_is_borrowed_and_shared_is_booked_once_and_given_back_with_its_last_slot() {
    let machine = lenders();
    let buffer = machine.borrower(AWAY, 2);
    buffer.share(4 * G..6 * G, 10 * G).unwrap();
    let booked = || {
        let lender = machine.stats(1);
        (lender.lent_bytes / G, lender.lending_booked_bytes / G, lender.elastic_bytes / G)
    };
    assert_eq!((booked(), machine.stats(0).borrowed_bytes), ((2, 2, 2), 2 * G));
    assert!(buffer.pieces().iter().filter(|it| it.shared).all(|it| it.borrowed));
    buffer.decommit(4 * G..5 * G).unwrap();
    assert_eq!(booked(), (2, 2, 2));
    // A chunk of its own is borrowed too.
    buffer.unshare(5 * G..6 * G, LONG).unwrap();
    assert_eq!(booked(), (3, 3, 3));
    buffer.share(5 * G..6 * G, 12 * G).unwrap();
    // The home has room for one: a chunk goes with all of its slots, to the host if need be.
    buffer.decommit(0..G).unwrap();
    machine.pool.trim(HOME).unwrap();
    let recall = machine.pool.recall(AWAY, G, LONG).unwrap();
    assert_eq!((recall.moved_bytes, recall.to_host_bytes, recall.refused.len()), (G, G, 0));
    assert_eq!((booked(), count(&buffer, HOST), count(&buffer, HOME)), ((2, 2, 2), 1, 4));
    let recall = machine.pool.recall(AWAY, u64::MAX, LONG).unwrap();
    assert_eq!((recall.moved_bytes, recall.refused.len()), (2 * G, 0));
    assert_eq!(booked(), (0, 0, 0));
    drop(buffer);
    machine.end();
}

#[test]
fn a_device_that_is_short_gets_shared_memory_with_all_of_its_slots() {
    let small = |sim: SimBuilder| sim.device_bytes_of(0, 6 * G);
    let machine = machine(2, small, |pool| pool.lend(AWAY, 64 * G));
    let builder = machine.pool.elastic(HOME).capacity_bytes(16 * G).chunk_bytes(G);
    let buffer = builder.movable(true).build().unwrap();
    buffer.grow_to(4 * G).unwrap();
    buffer.write(3 * G, &[4; 64]).unwrap();
    buffer.share(3 * G..4 * G, 8 * G).unwrap();
    let stream = machine.stream(0);
    let lane = machine.pool.lane(&stream).unwrap();
    let block = lane.alloc_with(&vmm_pool::Request::new(3 * G).may_borrow()).unwrap();
    machine.stats(0);
    machine.stats(1);
    let mut found = [0; 64];
    for slot in [3, 8] {
        buffer.read(slot * G, &mut found).unwrap();
        assert_eq!(found, [4; 64]);
    }
    drop((block, lane, stream));
    buffer.come_home(LONG).unwrap();
    assert_eq!((figures(&buffer), count(&buffer, HOME)), ((5, 5, 0), 5));
    drop(buffer);
    machine.end();
}
