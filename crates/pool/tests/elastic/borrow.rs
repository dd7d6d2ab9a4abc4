//! Growth beyond the home: who lends, how much, and that it is said; all of it, or nothing.
use std::time::Duration;

use crate::common::elastic::{G, Machine, four, hold, machine, on};
use vmm_pool::{Contents, ElasticBuffer, ElasticError, Error, Growth, Move, Place};
use vmm_sys::sim::FaultPlan;
use vmm_sys::{Access, Call, DeviceId, ResultCode};

const HOME: DeviceId = DeviceId(0);
const HOST: Place = Place::HostNuma(0);

/// Two devices; the home has room for four chunks, the neighbour lends six.
fn two() -> Machine {
    with_home(4 * G)
}

fn with_home(bytes: u64) -> Machine {
    machine(
        2,
        |sim| sim.device_bytes_of(0, bytes),
        |pool| pool.lend(DeviceId(1), 6 * G).host_memory(0, 64 * G, 0),
    )
}

/// Both sides' figures: home, lender.
fn sides(machine: &Machine) -> [(u64, u64, u64); 2] {
    [0, 1].map(|device| {
        let stats = machine.stats(device);
        (stats.lent_bytes, stats.borrowed_bytes, stats.lending_booked_bytes)
    })
}

fn places(buffer: &ElasticBuffer) -> Vec<Place> {
    buffer.pieces().iter().map(|piece| piece.place).collect()
}

#[test]
fn what_home_cannot_give_is_borrowed_along_the_fastest_links_and_said() {
    let machine = four(|pool| {
        let pool = pool.lend(DeviceId(1), 9 * G).lend(DeviceId(2), 2 * G).lend(DeviceId(3), 2 * G);
        pool.host_memory(0, 64 * G, 0).lend(HOST, 3 * G)
    });
    let buffer = machine.buffer(0, 64 * G);
    let grown = buffer.grow(Growth::to(3 * G).borrow_from_any()).unwrap();
    assert_eq!((grown.bytes, grown.borrowed.as_slice()), (3 * G, &[][..]), "home has it");
    let grown = buffer.grow(Growth::to(9 * G).borrow_from_any()).unwrap();
    assert_eq!(
        (grown.bytes, grown.borrowed),
        (6 * G, vec![(on(2), 2 * G), (on(3), 2 * G), (on(1), G)])
    );
    let stats = buffer.stats();
    assert_eq!(stats.borrowed, [(on(1), G), (on(2), 2 * G), (on(3), 2 * G)]);
    assert_eq!(stats.by_place[0], (on(0), 4 * G));
    let borrowed = buffer.pieces().iter().filter(|piece| piece.borrowed).count();
    assert_eq!(borrowed, 5);
    // The host is the last.
    let grown = buffer.grow(Growth::to(19 * G).borrow_from_any()).unwrap();
    assert_eq!(grown.borrowed, [(on(1), 8 * G), (HOST, 2 * G)]);
    assert_eq!(machine.stats(0).borrowed_bytes, 15 * G);
    let lent = |device| {
        let stats = machine.stats(device);
        (stats.lent_bytes, stats.lending_booked_bytes, stats.lending_bytes)
    };
    assert_eq!([lent(1), lent(2)], [(9 * G, 9 * G, 9 * G), (2 * G, 2 * G, 2 * G)]);
    let host = machine.pool.stats().hosts.remove(0);
    assert_eq!((host.lending_booked_bytes, host.lending_bytes), (2 * G, 3 * G));
    // Every byte works.
    let bytes: Vec<u8> = (0..19 * G).map(|at| (at / 4096) as u8).collect();
    buffer.write(0, &bytes).unwrap();
    let mut read = vec![0; bytes.len()];
    buffer.read(0, &mut read).unwrap();
    assert!(read == bytes);
    drop(buffer);
    assert_eq!((lent(1), machine.stats(0).borrowed_bytes), ((0, 0, 9 * G), 0));
    machine.end();
}

#[test]
fn a_budget_comes_back_on_every_way_out() {
    let machine = with_home(5 * G);
    let buffer = machine.buffer(0, 64 * G);
    // Once the lender is to be the home, it has to reach memory of the old one: its anchor.
    buffer.grant(DeviceId(1), Access::ReadWrite).unwrap();
    let borrow = || {
        let grown = buffer.grow(Growth::to(8 * G).borrow_from_any()).unwrap();
        assert_eq!(grown.borrowed, [(on(1), 4 * G)]);
        assert_eq!(sides(&machine), [(0, 4 * G, 0), (4 * G, 0, 4 * G)]);
    };
    // Shrinking and taking away.
    borrow();
    buffer.shrink_to(6 * G).unwrap();
    assert_eq!(sides(&machine), [(0, 2 * G, 0), (2 * G, 0, 2 * G)]);
    buffer.decommit(4 * G..6 * G).unwrap();
    assert_eq!(sides(&machine), [(0, 0, 0); 2]);
    // Moving to the host, by the owner's own choice.
    borrow();
    buffer.migrate(Move::to(HOST).range(4 * G..8 * G)).unwrap();
    assert_eq!(sides(&machine), [(0, 4 * G, 0), (0, 0, 0)]);
    assert!(buffer.stats().borrowed.is_empty());
    buffer.shrink_to(4 * G).unwrap();
    // Home.
    borrow();
    buffer.decommit(0..4 * G).unwrap();
    assert_eq!(buffer.come_home(Duration::ZERO).unwrap().bytes, 4 * G);
    assert_eq!((sides(&machine), places(&buffer)), ([(0, 0, 0); 2], vec![on(0); 4]));
    buffer.decommit(4 * G..8 * G).unwrap();
    // The lender becomes the home: what it lent is its own.
    borrow();
    buffer.migrate(DeviceId(1)).unwrap();
    assert_eq!((sides(&machine), buffer.stats().borrowed), ([(0, 0, 0); 2], vec![]));
    buffer.shrink_to(0).unwrap();
    buffer.migrate(HOME).unwrap();
    // The end.
    borrow();
    drop(buffer);
    assert_eq!(sides(&machine), [(0, 0, 0); 2]);
    machine.end();
}

#[test]
fn what_was_borrowed_sleeps_off_its_lender_and_wakes_where_there_is_room() {
    for contents in [Contents::Dropped, Contents::Kept { node: 0 }] {
        let machine = two();
        let buffer = machine.buffer(0, 64 * G);
        buffer.grow(Growth::to(6 * G).borrow_from_any()).unwrap();
        buffer.commit_from(on(1), 6 * G..7 * G).unwrap();
        buffer.write(5 * G, b"kept").unwrap();
        assert_eq!(sides(&machine), [(0, 3 * G, 0), (3 * G, 0, 2 * G)]);
        buffer.sleep(contents, Duration::ZERO).unwrap();
        assert_eq!(sides(&machine)[1], (0, 0, 0));
        // Home has room for four chunks, so it borrows again, and what was placed is placed.
        assert_eq!(buffer.wake().unwrap(), 7 * G);
        assert_eq!(sides(&machine), [(0, 3 * G, 0), (3 * G, 0, 2 * G)]);
        assert_eq!((buffer.stats().borrowed, places(&buffer)[6]), (vec![(on(1), 2 * G)], on(1)));
        let mut found = [0; 4];
        buffer.read(5 * G, &mut found).unwrap();
        assert!(contents == Contents::Dropped || &found == b"kept");
        // With room at home, it wakes there.
        buffer.decommit(0..4 * G).unwrap();
        buffer.sleep(contents, Duration::ZERO).unwrap();
        buffer.wake().unwrap();
        assert_eq!(places(&buffer), [on(0), on(0), on(1)]);
        assert_eq!(sides(&machine), [(0, G, 0), (G, 0, 0)]);
        // The lender's budget is gone meanwhile, and home is full: it sleeps on.
        buffer.grow(Growth::to(6 * G).borrow_from_any()).unwrap();
        buffer.sleep(contents, Duration::ZERO).unwrap();
        let other = machine.buffer(0, 64 * G);
        other.grow(Growth::to(9 * G).borrow_from_any()).unwrap();
        let error = buffer.wake().unwrap_err();
        assert!(error.is_out_of_memory(), "{error}");
        assert_eq!(
            (buffer.asleep(), machine.stats(1).lending_booked_bytes),
            (Some(contents), 5 * G)
        );
        drop(other);
        buffer.wake().unwrap();
        drop(buffer);
        machine.end();
    }
}

#[test]
fn memory_placed_by_name_is_lent_but_needs_no_budget() {
    let machine = machine(2, |sim| sim, |pool| pool);
    let buffer = machine.buffer(0, 64 * G);
    assert_eq!(buffer.commit_from(on(1), 0..2 * G).unwrap(), 2 * G);
    assert_eq!(sides(&machine), [(0, 2 * G, 0), (2 * G, 0, 0)]);
    assert!(buffer.stats().borrowed.is_empty() && !buffer.pieces()[0].borrowed);
    buffer.migrate(Move::to(HOME).range(0..G)).unwrap();
    assert_eq!(sides(&machine), [(0, G, 0), (G, 0, 0)]);
    drop(buffer);
    machine.end();
}

#[test]
fn a_quota_holds_over_what_is_borrowed() {
    let machine = two();
    let builder = machine.pool.elastic(HOME).capacity_bytes(64 * G).chunk_bytes(G);
    let buffer = builder.quota_bytes(5 * G).build().unwrap();
    let error = buffer.grow(Growth::to(6 * G).borrow_from_any()).unwrap_err();
    assert!(matches!(error, Error::Elastic(ElasticError::OverQuota { .. })), "{error}");
    buffer.grow(Growth::to(5 * G).borrow_from_any()).unwrap();
    assert_eq!(buffer.stats().quota_booked_bytes, 5 * G);
    drop(buffer);
    machine.end();
}

#[test]
fn borrowed_memory_that_left_comes_back_before_it_is_gone_under_its_budget() {
    let machine = two();
    let stream = machine.stream(0);
    let buffer = machine.buffer(0, 64 * G);
    buffer.grow(Growth::to(6 * G).borrow_from_any()).unwrap();
    let held = hold(&machine, &stream);
    drop(buffer.use_on(&stream).unwrap());
    buffer.shrink_to(4 * G).unwrap();
    assert_eq!(machine.stats(1).lending_booked_bytes, 0);
    let guard = buffer.use_on(&stream).unwrap();
    let grown = buffer.grow(Growth::to(6 * G).borrow_from_any()).unwrap();
    assert_eq!(grown.borrowed, [(on(1), 2 * G)]);
    assert_eq!((sides(&machine)[1], buffer.stats().returned_bytes), ((2 * G, 0, 2 * G), 2 * G));
    drop((guard, held));
    drop((buffer, stream));
    machine.end();
}

#[test]
fn other_errors_than_want_of_memory_are_not_borrowed_around() {
    let machine = two();
    let buffer = machine.buffer(0, 64 * G);
    machine.sim.inject(FaultPlan::fail(ResultCode::UNKNOWN).on(Call::MemCreate).at(2).once());
    let error = buffer.grow(Growth::to(2 * G).borrow_from_any()).unwrap_err();
    machine.sim.clear_faults();
    assert!(matches!(error, Error::Driver(_)), "{error}");
    assert_eq!(sides(&machine), [(0, 0, 0); 2]);
    let calls = machine.driver.ledger().snapshot();
    let error = buffer.grow(Growth::to(G).borrow_from([on(7)])).unwrap_err();
    assert!(matches!(error, Error::Elastic(ElasticError::UnknownPlace { .. })), "{error}");
    let error = buffer.grow(Growth::range(0..65 * G).borrow_from_any()).unwrap_err();
    assert!(matches!(error, Error::Elastic(ElasticError::BeyondCapacity { .. })), "{error}");
    assert_eq!(machine.driver.ledger().snapshot().since(&calls).total(), 0);
    drop(buffer);
    machine.end();
}

#[test]
fn who_has_access_has_it_to_borrowed_memory_too() {
    let machine = machine(3, |sim| sim.device_bytes_of(0, G), |pool| pool.lend(DeviceId(1), 8 * G));
    let buffer = machine.buffer(0, 64 * G);
    buffer.grant(DeviceId(2), Access::Read).unwrap();
    buffer.grow(Growth::to(2 * G).borrow_from_any()).unwrap();
    buffer.write(G, b"lent").unwrap();
    let mut found = [0; 4];
    buffer.read_by(DeviceId(2), G, &mut found).unwrap();
    assert_eq!(&found, b"lent");
    drop(buffer);
    machine.end();
}
