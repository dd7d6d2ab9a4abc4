//! Copies within an elastic buffer, in the order of a stream.
use std::ops::Range;
use std::time::Duration;

use crate::common::elastic::{G, Machine, hold, with_host, written};
use vmm_pool::{ElasticBuffer, ElasticError, Error, Move, Place};
use vmm_sys::sim::FaultPlan;
use vmm_sys::{Access, Call, DeviceId, ResultCode};

const HOME: DeviceId = DeviceId(0);
const AWAY: DeviceId = DeviceId(1);

fn bytes(buffer: &ElasticBuffer, range: Range<u64>) -> Vec<u8> {
    let mut found = vec![0; (range.end - range.start) as usize];
    buffer.read(range.start, &mut found).unwrap();
    found
}

fn copies(machine: &Machine, work: impl FnOnce()) -> (u64, u64) {
    let before = machine.driver.ledger().snapshot();
    work();
    let calls = machine.driver.ledger().snapshot().since(&before);
    (calls.of(Call::MemcpyDtoDAsync), calls.of(Call::EventRecord))
}

#[test]
fn bytes_are_copied_over_chunks_and_places_in_stream_order_and_as_one_use() {
    let machine = with_host();
    let stream = machine.stream(0);
    let buffer = written(&machine, 6);
    let (one, two) = (bytes(&buffer, 100..2 * G + 300), bytes(&buffer, 0..500));
    // Three chunks in one piece; an end that is not aligned; one that reads what another wrote.
    let batch = [(100..2 * G + 300, 3 * G + 7), (3 * G + 7..3 * G + 407, 0), (9..9, 5 * G)];
    let calls = copies(&machine, || buffer.copies_on(&stream, batch).unwrap());
    assert_eq!(calls, (2, 1));
    stream.synchronize().unwrap();
    assert_eq!(bytes(&buffer, 3 * G + 7..5 * G + 207), one);
    assert_eq!(bytes(&buffer, 0..400), two[100..]);
    assert_eq!((buffer.stats().uses, buffer.stats().open_uses), (1, 0));
    // Where places differ, it goes by parts: 1 and 4 lie on the host.
    for slot in [1, 4] {
        buffer.migrate(Move::to(Place::HostNuma(0)).range(slot * G..(slot + 1) * G)).unwrap();
    }
    let calls = copies(&machine, || buffer.copy_on(&stream, 10..2 * G, 3 * G).unwrap());
    assert_eq!(calls, (3, 1));
    stream.synchronize().unwrap();
    assert_eq!(bytes(&buffer, 3 * G..5 * G - 10), bytes(&buffer, 10..2 * G));
    drop((buffer, stream));
    machine.end();
}

#[test]
fn what_cannot_be_copied_is_refused_before_any_call() {
    let machine = with_host();
    let (stream, other) = (machine.stream(0), machine.stream(1));
    let buffer = written(&machine, 4);
    buffer.decommit(2 * G..3 * G).unwrap();
    let refused = |from: Range<u64>, to: u64| {
        let calls = machine.driver.ledger().snapshot();
        let batch = [(0..64, G), (from, to)];
        let error = buffer.copies_on(&stream, batch).unwrap_err();
        assert_eq!(machine.driver.ledger().snapshot().since(&calls).total(), 0);
        error
    };
    for (from, to) in [(0..G, G - 1), (G - 1..2 * G, 0), (5..6, 5)] {
        let error = refused(from, to);
        assert!(matches!(error, Error::Elastic(ElasticError::Overlap { .. })), "{error}");
    }
    for (from, to) in [(0..2, 64 * G - 1), (64 * G..64 * G + 1, 0), (u64::MAX - 1..u64::MAX, 0)] {
        assert!(matches!(refused(from, to), Error::OutOfBounds { .. }));
    }
    for (from, to) in [(0..2, 3 * G - 1), (2 * G - 1..2 * G + 1, 0), (0..1, 2 * G)] {
        let error = refused(from, to);
        assert!(
            matches!(error, Error::Elastic(ElasticError::NotCommitted { offset }) if offset == 2 * G),
            "{error}"
        );
    }
    for access in [Access::None, Access::Read] {
        buffer.grant(AWAY, access).unwrap();
        let error = buffer.copy_on(&other, 0..64, G).unwrap_err();
        assert!(matches!(error, Error::Elastic(ElasticError::NoAccess { device: AWAY })));
    }
    buffer.grant(AWAY, Access::ReadWrite).unwrap();
    buffer.copy_on(&other, 0..64, G).unwrap();
    other.synchronize().unwrap();
    assert_eq!(bytes(&buffer, G..G + 64), bytes(&buffer, 0..64));
    // A driver that refuses ends the use all the same.
    machine.sim.inject(FaultPlan::fail(ResultCode::UNKNOWN).on(Call::MemcpyDtoDAsync).once());
    assert!(matches!(buffer.copy_on(&stream, 0..64, G), Err(Error::Driver(_))));
    assert_eq!(buffer.stats().open_uses, 0);
    drop((buffer, stream, other));
    machine.end();
}

#[test]
fn memory_waits_for_a_copy_and_a_copy_for_a_move() {
    let machine = with_host();
    let stream = machine.stream(0);
    let buffer = written(&machine, 2);
    let held = hold(&machine, &stream);
    buffer.copy_on(&stream, 0..G, G).unwrap();
    buffer.decommit(0..G).unwrap();
    assert_eq!(machine.stats(0).limbo_bytes, G, "the copy may still read it");
    drop(held);
    stream.synchronize().unwrap();
    buffer.migrate(AWAY).unwrap();
    assert_eq!(bytes(&buffer, G..G + 64), (0..64).map(|at| at as u8).collect::<Vec<u8>>());
    // While a move holds users the thread waits: what it copies is not mapped now and then.
    buffer.grow_to(8 * G).unwrap();
    let held = hold(&machine, &stream);
    buffer.copy_on(&stream, G..2 * G, 2 * G).unwrap();
    let migration = buffer.migrate_async(HOME).unwrap();
    std::thread::scope(|scope| {
        let copier = scope.spawn(|| buffer.copy_on(&stream, G..2 * G, 3 * G));
        std::thread::sleep(Duration::from_millis(20));
        drop(held);
        copier.join().unwrap().unwrap();
    });
    let state = migration.wait(Duration::from_secs(20));
    assert!(matches!(state, vmm_pool::MigrationState::Done(_)), "{state:?}");
    stream.synchronize().unwrap();
    for slot in [2, 3] {
        assert_eq!(bytes(&buffer, slot * G..(slot + 1) * G), bytes(&buffer, G..2 * G));
    }
    drop((buffer, stream));
    machine.end();
}
