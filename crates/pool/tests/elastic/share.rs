//! One chunk at several addresses of an elastic buffer: what is seen, what counts, and when it goes.
use std::time::Duration;

use crate::common::elastic::{G, Machine, check_bytes, hold, machine, with_host, written};
use vmm_pool::{Budget, Cause, Contents, ElasticBuffer, ElasticError, Error, Growth, Phase};
use vmm_sys::sim::FaultPlan;
use vmm_sys::{Access, Call, DeviceId, ResultCode};

const LONG: Duration = Duration::from_secs(20);
const HOME: DeviceId = DeviceId(0);
const AWAY: DeviceId = DeviceId(1);

/// These slots hold the bytes of the slot that was written first.
pub(crate) fn check_slots(buffer: &ElasticBuffer, slots: &[(u64, u64)]) {
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
pub(crate) fn figures(buffer: &ElasticBuffer) -> (u64, u64, u64) {
    let stats = buffer.stats();
    (stats.committed_bytes / G, stats.physical_bytes / G, stats.shared_bytes / G)
}

/// In elastic buffers, on its way, and ready, on a device, in chunks.
pub(crate) fn columns(machine: &Machine, device: u32) -> (u64, u64, u64) {
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
fn an_address_that_the_driver_did_not_take_back_is_free_at_the_next_chance() {
    let machine = with_host();
    let buffer = written(&machine, 3);
    buffer.grant(AWAY, Access::Read).unwrap();
    machine.sim.inject(FaultPlan::fail(ResultCode::UNKNOWN).on(Call::MemSetAccess).at(2).once());
    machine.sim.inject(FaultPlan::fail(ResultCode::UNKNOWN).on(Call::MemUnmap).times(2));
    let before = machine.picture(&buffer);
    buffer.share(0..2 * G, 20 * G).unwrap_err();
    assert_eq!(machine.picture(&buffer), before);
    machine.sim.clear_faults();
    buffer.share(0..2 * G, 20 * G).unwrap();
    assert_eq!((figures(&buffer), columns(&machine, 0)), ((5, 3, 4), (3, 0, 0)));
    check_slots(&buffer, &[(0, 0), (20, 0), (21, 1)]);
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
    let exported = buffer.export_pieces().unwrap();
    assert_eq!(exported.iter().filter(|(piece, _)| piece.shared).count(), 2);
    assert_eq!(exported.len(), 4);
    drop((exported, buffer));
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
