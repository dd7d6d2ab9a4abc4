//! One chunk at several addresses of an elastic buffer: what is seen, what counts, and when it goes.
use std::time::Duration;

use crate::common::elastic::{G, Machine, check_bytes, count, hold, machine, with_host, written};
use vmm_pool::{
    Budget, Cause, Contents, ElasticBuffer, ElasticError, Error, Growth, Move, Phase, Place,
};
use vmm_sys::sim::FaultPlan;
use vmm_sys::{Access, Call, DeviceId, ResultCode};

const LONG: Duration = Duration::from_secs(20);
const HOME: DeviceId = DeviceId(0);
const AWAY: DeviceId = DeviceId(1);
const HOST: Place = Place::HostNuma(0);

/// These slots hold the bytes of the slot that was written first.
fn check_slots(buffer: &ElasticBuffer, slots: &[(u64, u64)]) {
    let (mut found, mut expected) = (vec![0; G as usize], vec![0; G as usize]);
    for (slot, as_of) in slots {
        buffer.read(slot * G, &mut found).unwrap();
        for (at, byte) in (0..).zip(&mut expected) {
            *byte = (at ^ (at >> 8) ^ (as_of * 37)) as u8;
        }
        assert!(found == expected, "slot {slot} does not hold what slot {as_of} had");
    }
}

/// Committed, physical and shared chunks of a buffer.
fn figures(buffer: &ElasticBuffer) -> (u64, u64, u64) {
    let stats = buffer.stats();
    (stats.committed_bytes / G, stats.physical_bytes / G, stats.shared_bytes / G)
}

/// In elastic buffers, on its way, and ready, on a device, in chunks.
fn columns(machine: &Machine, device: u32) -> (u64, u64, u64) {
    let stats = machine.stats(device);
    (stats.elastic_bytes / G, stats.limbo_bytes / G, stats.stock_bytes / G)
}

#[test]
fn a_chunk_at_two_addresses_counts_once_and_goes_with_the_last() {
    let machine = with_host();
    let stream = machine.stream(0);
    let buffer = written(&machine, 3);
    let generation = buffer.generation();
    assert_eq!(buffer.share(G..3 * G, 10 * G).unwrap(), 2 * G);
    assert_eq!(buffer.share(G..2 * G, 20 * G).unwrap(), G, "and at a third");
    assert_eq!((figures(&buffer), buffer.generation()), ((6, 3, 5), generation + 2));
    assert_eq!(columns(&machine, 0), (3, 0, 0));
    let shared: Vec<bool> = buffer.pieces().iter().map(|piece| piece.shared).collect();
    assert_eq!(shared, [false, true, true, true, true, true]);
    check_slots(&buffer, &[(1, 1), (2, 2), (10, 1), (11, 2), (20, 1)]);
    for slot in [1, 10, 20] {
        buffer.write(slot * G + 5, &[slot as u8; 3]).unwrap();
        let mut found = [0; 3];
        for other in [1, 10, 20] {
            buffer.read(other * G + 5, &mut found).unwrap();
            assert_eq!(found, [slot as u8; 3]);
        }
    }
    // Work at one address keeps the memory after all addresses are gone.
    let held = hold(&machine, &stream);
    drop(buffer.use_on(&stream).unwrap());
    buffer.decommit(G..2 * G).unwrap();
    buffer.decommit(10 * G..11 * G).unwrap();
    assert_eq!((figures(&buffer), columns(&machine, 0)), ((4, 3, 2), (3, 0, 0)));
    buffer.decommit(20 * G..21 * G).unwrap();
    assert_eq!((figures(&buffer), columns(&machine, 0)), ((3, 2, 2), (2, 1, 0)));
    drop(held);
    stream.synchronize().unwrap();
    buffer.decommit(2 * G..3 * G).unwrap();
    assert!(!buffer.pieces().iter().any(|piece| piece.shared));
    assert_eq!(columns(&machine, 0), (2, 0, 1));
    drop((buffer, stream));
    assert_eq!(columns(&machine, 0), (0, 0, 3));
    machine.end();
}

#[test]
fn what_cannot_be_shared_is_refused_before_any_call() {
    let machine = with_host();
    let quota = Budget::new(5 * G);
    let builder = machine.pool.elastic(HOME).capacity_bytes(16 * G).chunk_bytes(G);
    let buffer = builder.quota(quota.clone()).build().unwrap();
    buffer.grow_to(3 * G).unwrap();
    let before = machine.picture(&buffer);
    let calls = machine.driver.ledger().snapshot();
    let refused = |from: std::ops::Range<u64>, to: u64| match buffer.share(from, to).unwrap_err() {
        Error::Elastic(error) => error,
        other => panic!("{other}"),
    };
    for (from, to) in [(0..G, 8 * G + 1), (1..G, 8 * G), (0..G - 1, 8 * G), (1..G + 1, 8 * G)] {
        assert!(matches!(refused(from, to), ElasticError::NotWhole { chunk_bytes: G, .. }));
    }
    assert!(
        matches!(refused(2 * G..4 * G, 8 * G), ElasticError::NotCommitted { offset } if offset == 3 * G)
    );
    assert!(
        matches!(refused(0..2 * G, 2 * G), ElasticError::Occupied { offset } if offset == 2 * G)
    );
    assert!(matches!(refused(0..G, 0), ElasticError::Occupied { offset: 0 }));
    assert!(matches!(refused(0..2 * G, 15 * G), ElasticError::BeyondCapacity { .. }));
    assert!(matches!(refused(0..2 * G, u64::MAX / G * G), ElasticError::BeyondCapacity { .. }));
    assert!(matches!(refused(0..3 * G, 8 * G), ElasticError::OverQuota { .. }));
    assert_eq!(buffer.share(G..G, 8 * G).unwrap(), 0);
    assert_eq!(machine.driver.ledger().snapshot().since(&calls).total(), 0);
    assert_eq!(machine.picture(&buffer), before);
    // Quotas count addresses.
    buffer.share(0..2 * G, 8 * G).unwrap();
    assert_eq!(quota.booked_bytes(), 5 * G);
    buffer.decommit(0..G).unwrap();
    assert_eq!(quota.booked_bytes(), 4 * G);
    // A copy from a shared chunk to itself.
    let stream = machine.stream(0);
    let overlap = buffer.copy_on(&stream, G..G + 64, 9 * G + 63).unwrap_err();
    assert!(matches!(overlap, Error::Elastic(ElasticError::Overlap { .. })), "{overlap}");
    buffer.copy_on(&stream, G..G + 64, 9 * G + 64).unwrap();
    buffer.sleep(Contents::Dropped, LONG).unwrap();
    assert!(matches!(refused(0..G, 4 * G), ElasticError::Asleep));
    drop((buffer, stream));
    assert_eq!(quota.booked_bytes(), 0);
    machine.end();
}

#[test]
fn a_share_that_fails_at_any_call_leaves_everything_as_it_was() {
    let machine = with_host();
    let buffer = written(&machine, 3);
    buffer.grant(AWAY, Access::Read).unwrap();
    buffer.share(0..G, 30 * G).unwrap();
    let work = || buffer.share(0..3 * G, 10 * G).map(drop);
    let undo = || {
        buffer.decommit(10 * G..13 * G).unwrap();
    };
    let calls = machine.fail_each_call(&buffer, ResultCode::UNKNOWN, work, undo);
    assert!(calls >= 6, "{calls}");
    check_slots(&buffer, &[(0, 0), (10, 0), (11, 1), (12, 2), (30, 0)]);
    // Where the driver refuses to undo it too, the address is free at the next chance.
    machine.sim.inject(FaultPlan::fail(ResultCode::UNKNOWN).on(Call::MemSetAccess).at(2).once());
    machine.sim.inject(FaultPlan::fail(ResultCode::UNKNOWN).on(Call::MemUnmap).times(2));
    let before = machine.picture(&buffer);
    buffer.share(0..2 * G, 20 * G).unwrap_err();
    assert_eq!(machine.picture(&buffer), before);
    machine.sim.clear_faults();
    buffer.share(0..2 * G, 20 * G).unwrap();
    assert_eq!((figures(&buffer), columns(&machine, 0)), ((9, 3, 9), (3, 0, 0)));
    drop(buffer);
    machine.pool.trim(HOME).unwrap();
    machine.end();
}

#[test]
fn addresses_that_a_chunk_has_left_do_not_get_it_back_while_it_stands_elsewhere() {
    let machine = with_host();
    let stream = machine.stream(0);
    let buffer = written(&machine, 2);
    buffer.share(0..2 * G, 4 * G).unwrap();
    let using = buffer.use_on(&stream).unwrap();
    buffer.decommit(4 * G..5 * G).unwrap();
    // A guard cannot be waited for: neither memory nor another chunk can come there.
    for refused in [buffer.commit(4 * G..5 * G), buffer.share(G..2 * G, 4 * G)] {
        let error = refused.unwrap_err();
        assert!(
            matches!(error, Error::Elastic(ElasticError::StillUsed { offset }) if offset == 4 * G),
            "{error}"
        );
    }
    drop(using);
    buffer.commit(4 * G..5 * G).unwrap();
    buffer.write(4 * G, &[9; 64]).unwrap();
    check_slots(&buffer, &[(0, 0), (5, 1)]);
    // The same where both addresses left: work may use the chunk at either.
    let held = hold(&machine, &stream);
    drop(buffer.use_on(&stream).unwrap());
    buffer.decommit(G..2 * G).unwrap();
    buffer.decommit(5 * G..6 * G).unwrap();
    assert_eq!(columns(&machine, 0), (2, 1, 0));
    std::thread::scope(|scope| {
        let committing = scope.spawn(|| buffer.commit(G..2 * G));
        std::thread::sleep(Duration::from_millis(20));
        assert!(!committing.is_finished(), "it waits for the work");
        drop(held);
        committing.join().unwrap().unwrap();
    });
    assert_eq!((figures(&buffer), buffer.stats().returned_bytes), ((3, 3, 0), 0));
    // Memory that nobody shares any more comes back as ever.
    buffer.share(0..G, 8 * G).unwrap();
    buffer.decommit(8 * G..9 * G).unwrap();
    machine.stats(0);
    machine.pool.trim(HOME).unwrap();
    let held = hold(&machine, &stream);
    drop(buffer.use_on(&stream).unwrap());
    buffer.decommit(0..G).unwrap();
    buffer.commit(0..G).unwrap();
    assert_eq!(buffer.stats().returned_bytes, G);
    drop(held);
    drop((buffer, stream));
    machine.end();
}

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
fn a_move_of_shared_chunks_that_fails_at_any_call_leaves_everything_as_it_was() {
    for (to, back) in [(Place::from(AWAY), Place::from(HOME)), (HOST, HOME.into())] {
        let machine = with_host();
        let buffer = written(&machine, 2);
        buffer.migrate(to).unwrap();
        buffer.migrate(back).unwrap();
        buffer.share(0..2 * G, 4 * G).unwrap();
        let shape = || (figures(&buffer), columns(&machine, 0).0);
        let before = shape();
        // Two of four: the others stay.
        let work = || {
            let moved = buffer.migrate(Move::to(to).range(G..5 * G)).map(drop);
            assert!(moved.is_ok() || shape() == before);
            moved
        };
        let undo = || {
            buffer.decommit(G..2 * G).unwrap();
            buffer.decommit(4 * G..5 * G).unwrap();
            machine.pool.trim(HOME).unwrap();
            machine.pool.trim(AWAY).unwrap();
            buffer.share(0..G, 4 * G).unwrap();
            buffer.share(5 * G..6 * G, G).unwrap();
        };
        let calls = machine.fail_each_call(&buffer, ResultCode::UNKNOWN, work, undo);
        assert!(calls > 12, "{calls}");
        assert_eq!((figures(&buffer), count(&buffer, to)), ((4, 4, 0), 2));
        check_slots(&buffer, &[(0, 0), (1, 1), (4, 0), (5, 1)]);
        drop(buffer);
        machine.pool.trim(HOME).unwrap();
        machine.end();
    }
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
fn an_unsharing_that_fails_at_any_call_leaves_everything_as_it_was() {
    let machine = with_host();
    let stream = machine.stream(0);
    let buffer = written(&machine, 2);
    buffer.share(0..2 * G, 4 * G).unwrap();
    drop(buffer.use_on(&stream).unwrap());
    let before = figures(&buffer);
    let work = || {
        let unshared = buffer.unshare(4 * G..6 * G, Duration::ZERO).map(drop);
        assert!(unshared.is_ok() || figures(&buffer) == before);
        unshared
    };
    let undo = || {
        buffer.decommit(4 * G..6 * G).unwrap();
        machine.pool.trim(HOME).unwrap();
        buffer.share(0..2 * G, 4 * G).unwrap();
    };
    let calls = machine.fail_each_call(&buffer, ResultCode::UNKNOWN, work, undo);
    assert!(calls > 12, "{calls}");
    assert_eq!(figures(&buffer), (4, 4, 0));
    check_slots(&buffer, &[(0, 0), (1, 1), (4, 0), (5, 1)]);
    let using = buffer.use_on(&stream).unwrap();
    buffer.share(0..G, 8 * G).unwrap();
    let refused = buffer.unshare(8 * G..9 * G, Duration::ZERO).unwrap_err();
    assert!(matches!(refused, Error::Elastic(ElasticError::InUse { open_uses: 1 })), "{refused}");
    drop(using);
    drop((buffer, stream));
    machine.pool.trim(HOME).unwrap();
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

#[test]
fn a_sleep_of_shared_chunks_that_fails_at_any_call_leaves_everything_as_it_was() {
    for contents in [Contents::Kept { node: 0 }, Contents::Dropped] {
        let machine = with_host();
        let buffer = written(&machine, 1);
        buffer.sleep(Contents::Kept { node: 0 }, LONG).unwrap();
        buffer.wake().unwrap();
        buffer.share(0..G, 4 * G).unwrap();
        let work = || buffer.sleep(contents, LONG).map(drop);
        let undo = || {
            buffer.wake().unwrap();
            buffer.decommit(4 * G..5 * G).unwrap();
            machine.pool.trim(HOME).unwrap();
            buffer.share(0..G, 4 * G).unwrap();
        };
        if contents == Contents::Dropped {
            // It gives memory back, which cannot fail half-way: each refusal is tried again.
            for k in 1..=4 {
                machine.sim.inject(FaultPlan::fail(ResultCode::UNKNOWN).at(k).once());
                drop(work());
                machine.sim.clear_faults();
                machine.stats(0);
                undo();
                machine.stats(0);
            }
        } else {
            machine.fail_each_call(&buffer, ResultCode::UNKNOWN, work, undo);
        }
        drop(buffer);
        machine.pool.trim(HOME).unwrap();
        machine.end();
    }
}

/// A home with room for four chunks, and a neighbour that lends.
fn lenders() -> Machine {
    let small = |sim: vmm_sys::sim::SimBuilder| sim.device_bytes_of(0, 4 * G);
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
fn a_recall_of_shared_memory_that_fails_at_any_call_leaves_the_buffer_as_it_was() {
    let machine = lenders();
    let buffer = machine.borrower(AWAY, 1);
    buffer.share(4 * G..5 * G, 10 * G).unwrap();
    let recall = || {
        let recall = machine.pool.recall(AWAY, u64::MAX, LONG).unwrap();
        let refused = recall.refused.into_iter().next();
        refused.map_or(Ok(()), |refused| Err(refused.why))
    };
    let undo = || {
        buffer.decommit(10 * G..11 * G).unwrap();
        buffer.migrate(Move::to(AWAY).range(4 * G..5 * G)).unwrap();
        buffer.decommit(4 * G..5 * G).unwrap();
        machine.pool.trim(AWAY).unwrap();
        buffer.grow(Growth::range(4 * G..5 * G).borrow_from([AWAY])).unwrap();
        buffer.write(4 * G, &[5; 64]).unwrap();
        buffer.share(4 * G..5 * G, 10 * G).unwrap();
    };
    recall().unwrap();
    undo();
    machine.fail_each_call(&buffer, ResultCode::UNKNOWN, recall, undo);
    assert_eq!(figures(&buffer), (6, 6, 0));
    drop(buffer);
    machine.pool.trim(HOME).unwrap();
    machine.end();
}

#[test]
fn access_export_and_hooks_know_every_address() {
    let machine = machine(2, |sim| sim, |pool| pool);
    let builder = machine.pool.elastic(HOME).capacity_bytes(16 * G).chunk_bytes(G);
    let buffer = builder.exportable(true).build().unwrap();
    buffer.grow_to(2 * G).unwrap();
    buffer.write(G, &[8; 64]).unwrap();
    let seen = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let told = seen.clone();
    let hook = buffer.on_backing_change(move |change| {
        told.lock().unwrap().push((
            change.cause,
            change.phase,
            change.offset / G,
            change.bytes / G,
        ));
    });
    buffer.share(0..2 * G, 4 * G).unwrap();
    buffer.unshare(4 * G..5 * G, LONG).unwrap();
    drop(hook);
    let both = |cause, at, slots| [Phase::Before, Phase::After].map(|it| (cause, it, at, slots));
    let expected = [both(Cause::Share, 4, 2), both(Cause::Unshare, 4, 1)].concat();
    assert_eq!(*seen.lock().unwrap(), expected);
    for access in [Access::Read, Access::None, Access::ReadWrite] {
        buffer.grant(AWAY, access).unwrap();
        let picture = machine.picture(&buffer);
        assert_eq!(picture.access_of(1), [access; 4]);
    }
    let mut found = [0; 64];
    buffer.read_by(AWAY, 5 * G, &mut found).unwrap();
    assert_eq!(found, [8; 64]);
    machine.fail_each_call(
        &buffer,
        ResultCode::UNKNOWN,
        || buffer.revoke(AWAY),
        || buffer.grant(AWAY, Access::ReadWrite).unwrap(),
    );
    let exported = buffer.export_pieces().unwrap();
    assert_eq!(exported.iter().filter(|(piece, _)| piece.shared).count(), 2);
    assert_eq!(exported.len(), 4);
    drop((exported, buffer));
    machine.end();
}

#[test]
fn a_device_that_is_short_gets_shared_memory_with_all_of_its_slots() {
    let small = |sim: vmm_sys::sim::SimBuilder| sim.device_bytes_of(0, 6 * G);
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

#[test]
fn what_is_shared_ends_with_its_buffer_behind_its_users() {
    let machine = with_host();
    let stream = machine.stream(0);
    let buffer = written(&machine, 2);
    buffer.share(0..2 * G, 4 * G).unwrap();
    check_bytes(&buffer, 2);
    let held = hold(&machine, &stream);
    drop(buffer.use_on(&stream).unwrap());
    drop(buffer);
    assert_eq!(columns(&machine, 0), (0, 2, 0));
    drop(held);
    stream.synchronize().unwrap();
    machine.pool.trim(HOME).unwrap();
    assert_eq!(machine.stats(0).held_bytes, 0);
    drop(stream);
    machine.end();
}

#[test]
fn growth_over_all_addresses_of_a_chunk_that_left_finds_them_free() {
    let refused = FaultPlan::fail(ResultCode::UNKNOWN).on(Call::MemUnmap);
    let machine = with_host();
    let buffer = written(&machine, 1);
    buffer.share(0..G, 4 * G).unwrap();
    // Nobody uses it, and it is still mapped at both: as it is until a pool's thread has looked.
    machine.sim.inject(refused);
    buffer.shrink_to(0).unwrap();
    machine.sim.clear_faults();
    assert_eq!((figures(&buffer), columns(&machine, 0)), ((0, 0, 0), (0, 1, 0)));
    let both = Growth::ranges([0..G, 4 * G..5 * G]);
    assert_eq!(buffer.grow(both).unwrap().bytes, 2 * G);
    assert_eq!((figures(&buffer), columns(&machine, 0).0), ((2, 2, 0), 2));
    buffer.write(0, &[1; 64]).unwrap();
    buffer.write(4 * G, &[2; 64]).unwrap();
    let mut found = [0; 64];
    buffer.read(0, &mut found).unwrap();
    assert_eq!(found, [1; 64]);
    drop(buffer);
    machine.end();
}
