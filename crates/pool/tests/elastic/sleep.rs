//! Buffers that sleep and wake: what is given back, what is kept, and what a failure leaves.
use std::time::Duration;

use crate::common::elastic::{G, Machine, hold, machine};
use vmm_pool::{
    Budget, Cause, Contents, ElasticBuffer, ElasticError, Error, Phase, Place, PoolBuilder,
};
use vmm_sys::sim::SimBuilder;
use vmm_sys::{Call, DeviceId};

const NOW: Duration = Duration::ZERO;
const HOME: DeviceId = DeviceId(0);
const KEPT: Contents = Contents::Kept { node: 0 };

fn with_host(
    sim: impl FnOnce(SimBuilder) -> SimBuilder,
    pool: impl FnOnce(PoolBuilder) -> PoolBuilder,
) -> Machine {
    machine(2, sim, |builder| pool(builder.host_memory(0, 64 * G, 0)))
}

fn tagged(machine: &Machine, device: u32, tag: &str, chunks: u64) -> ElasticBuffer {
    let builder = machine.pool.elastic(DeviceId(device)).capacity_bytes(16 * G).chunk_bytes(G);
    let buffer = builder.tag(tag).build().unwrap();
    buffer.grow_to(chunks * G).unwrap();
    for chunk in 0..chunks {
        buffer.write(chunk * G, &[chunk as u8 + 1; 4096]).unwrap();
    }
    buffer
}

fn is_written(buffer: &ElasticBuffer, chunks: u64) -> bool {
    let mut found = [0; 4096];
    (0..chunks).all(|chunk| {
        buffer.read(chunk * G, &mut found).unwrap();
        found == [chunk as u8 + 1; 4096]
    })
}

/// Physical memory that the driver has given out on a device.
fn taken(machine: &Machine, device: u32) -> u64 {
    let info = machine.driver.mem_info(DeviceId(device)).unwrap();
    info.total_bytes - info.free_bytes
}

fn is_asleep(outcome: Result<impl Sized, Error>) -> bool {
    matches!(outcome, Err(Error::Elastic(ElasticError::Asleep)))
}

#[test]
fn a_tag_sleeps_with_its_contents_and_wakes_as_it_was() {
    let machine = with_host(|sim| sim, |pool| pool);
    let before: Vec<u64> = (0..2).map(|device| taken(&machine, device)).collect();
    let buffers = [tagged(&machine, 0, "a", 3), tagged(&machine, 1, "a", 2)];
    let other = tagged(&machine, 0, "b", 1);
    let addresses = buffers.each_ref().map(|buffer| buffer.address());
    let slept = machine.pool.sleep("a", KEPT, NOW).unwrap();
    assert_eq!((slept.buffers, slept.bytes), (2, 5 * G));
    // Within the call, and to the driver, not to a stock.
    assert_eq!((taken(&machine, 0), taken(&machine, 1)), (before[0] + G, before[1]));
    assert_eq!((machine.stats(0).elastic_bytes, machine.stats(1).held_bytes), (G, 0));
    assert!(buffers.iter().all(|buffer| buffer.stats().asleep == Some(KEPT)));
    assert!(other.asleep().is_none() && is_written(&other, 1));
    // Again is no error.
    assert_eq!(machine.pool.sleep("a", KEPT, NOW).unwrap().buffers, 0);
    let woken = machine.pool.wake("a").unwrap();
    assert_eq!((woken.buffers, woken.bytes), (2, 5 * G));
    assert_eq!(machine.pool.wake("a").unwrap().buffers, 0);
    assert_eq!(buffers.each_ref().map(|buffer| buffer.address()), addresses);
    assert!(is_written(&buffers[0], 3) && is_written(&buffers[1], 2));
    assert!(buffers[1].pieces().iter().all(|piece| piece.place == Place::Device(DeviceId(1))));
    // What kept the contents is ready for the next sleep.
    assert_eq!(machine.pool.stats().hosts[0].stock_bytes, 5 * G);
    drop((buffers, other));
    machine.end();
}

#[test]
fn a_sleeping_buffer_is_used_by_nobody_and_changed_by_nobody() {
    let machine = with_host(|sim| sim, |pool| pool);
    let stream = machine.stream(0);
    for contents in [KEPT, Contents::Dropped] {
        let buffer = tagged(&machine, 0, "a", 2);
        assert_eq!(buffer.sleep(contents, NOW).unwrap(), 2 * G);
        assert_eq!(buffer.asleep(), Some(contents));
        assert!(is_asleep(buffer.use_on(&stream)));
        assert!(is_asleep(buffer.write(0, &[1])) && is_asleep(buffer.read(0, &mut [0])));
        assert!(is_asleep(buffer.grow_to(4 * G)) && is_asleep(buffer.shrink_to(0)));
        assert!(is_asleep(buffer.migrate(DeviceId(1))));
        let ahead = buffer.grow_ahead(4 * G).unwrap();
        assert!(ahead.is_finished() && buffer.asleep() == Some(contents));
        assert_eq!(buffer.wake().unwrap(), 2 * G);
        assert_eq!(buffer.committed_bytes(), 2 * G);
        drop(buffer.use_on(&stream).unwrap());
    }
    drop(stream);
    machine.end();
}

#[test]
fn dropped_contents_cost_no_memory_anywhere() {
    let machine = with_host(|sim| sim, |pool| pool);
    let before = taken(&machine, 0);
    let quota = Budget::new(4 * G);
    let builder = machine.pool.elastic(HOME).capacity_bytes(8 * G).chunk_bytes(G);
    let buffer = builder.quota(quota.clone()).build().unwrap();
    buffer.commit(0..G).unwrap();
    buffer.commit_from(DeviceId(1).into(), 2 * G..4 * G).unwrap();
    assert_eq!(buffer.sleep(Contents::Dropped, NOW).unwrap(), 3 * G);
    // But for the anchor of the pair.
    let taken = [taken(&machine, 0), taken(&machine, 1), quota.booked_bytes()];
    assert_eq!(taken, [before, machine.stats(1).anchor_bytes, 0]);
    assert_eq!(machine.pool.stats().hosts[0].held_bytes, 0);
    assert_eq!(buffer.wake().unwrap(), 3 * G);
    let places: Vec<_> =
        buffer.pieces().iter().map(|piece| (piece.offset / G, piece.place)).collect();
    let away = Place::Device(DeviceId(1));
    assert_eq!(places, [(0, HOME.into()), (2, away), (3, away)]);
    assert_eq!(quota.booked_bytes(), 3 * G);
    drop(buffer);
    machine.end();
}

#[test]
fn kept_contents_can_be_dropped_later() {
    let machine = with_host(|sim| sim, |pool| pool);
    let buffer = tagged(&machine, 0, "a", 2);
    buffer.sleep(KEPT, NOW).unwrap();
    buffer.sleep(Contents::Dropped, NOW).unwrap();
    assert_eq!((buffer.asleep(), buffer.committed_bytes()), (Some(Contents::Dropped), 0));
    assert_eq!(machine.pool.stats().hosts[0].held_bytes, 0);
    // The other way round there is nothing to keep.
    buffer.sleep(KEPT, NOW).unwrap();
    assert_eq!(buffer.asleep(), Some(Contents::Dropped));
    assert_eq!(buffer.wake().unwrap(), 2 * G);
    assert!(buffer.pieces().iter().all(|piece| piece.place == HOME.into()));
    drop(buffer);
    machine.end();
}

#[test]
fn sleep_waits_for_work_in_flight_and_not_for_guards_beyond_its_patience() {
    let machine = with_host(|sim| sim, |pool| pool);
    let stream = machine.stream(0);
    for contents in [KEPT, Contents::Dropped] {
        let buffer = tagged(&machine, 0, "a", 1);
        let using = buffer.use_on(&stream).unwrap();
        let error = machine.pool.sleep("a", contents, NOW).unwrap_err();
        assert!(matches!(error, Error::Elastic(ElasticError::InUse { open_uses: 1 })), "{error}");
        assert!(buffer.asleep().is_none() && is_written(&buffer, 1));
        let held = hold(&machine, &stream);
        drop(using);
        std::thread::scope(|scope| {
            let asleep = scope.spawn(|| machine.pool.sleep("a", contents, NOW).unwrap());
            std::thread::sleep(Duration::from_millis(10));
            assert!(!asleep.is_finished(), "the stream may still write there");
            drop(held);
            assert_eq!(asleep.join().unwrap().bytes, G);
        });
        drop(buffer);
    }
    drop(stream);
    machine.end();
}

#[test]
fn a_use_that_was_refused_holds_nobody_up() {
    let machine = with_host(|sim| sim, |pool| pool);
    let stream = machine.stream(0);
    for contents in [KEPT, Contents::Dropped] {
        let buffer = tagged(&machine, 0, "a", 1);
        buffer.sleep(contents, NOW).unwrap();
        let held = hold(&machine, &stream);
        assert!(is_asleep(buffer.use_on(&stream)));
        let waits = machine.driver.ledger().snapshot();
        assert_eq!(buffer.wake().unwrap(), G);
        let waits = machine.driver.ledger().snapshot().since(&waits);
        assert_eq!(waits.of(Call::StreamWaitEvent), 0, "the stream has nothing to do with it");
        assert_eq!((buffer.stats().uses, buffer.stats().open_uses), (0, 0));
        drop(held);
    }
    drop(stream);
    machine.end();
}

/// Nothing has to move then; the rules are the same.
#[test]
fn a_buffer_whose_memory_is_on_the_host_already_waits_for_its_users_before_it_sleeps() {
    let machine = with_host(|sim| sim, |pool| pool);
    let stream = machine.stream(0);
    let buffer = machine.buffer(0, 4 * G);
    for committed in [0, G] {
        buffer.commit_from(Place::HostNuma(0), 0..committed).unwrap();
        let using = buffer.use_on(&stream).unwrap();
        let error = buffer.sleep(KEPT, NOW).unwrap_err();
        assert!(matches!(error, Error::Elastic(ElasticError::InUse { open_uses: 1 })), "{error}");
        assert!(buffer.asleep().is_none());
        let held = hold(&machine, &stream);
        drop(using);
        std::thread::scope(|scope| {
            let asleep = scope.spawn(|| buffer.sleep(KEPT, NOW).unwrap());
            std::thread::sleep(Duration::from_millis(10));
            assert!(!asleep.is_finished(), "the stream may still write there");
            drop(held);
            assert_eq!(asleep.join().unwrap(), 0);
        });
        buffer.wake().unwrap();
    }
    drop((buffer, stream));
    machine.end();
}

#[test]
fn a_wake_without_memory_sleeps_on_and_succeeds_later() {
    for contents in [KEPT, Contents::Dropped] {
        let machine = with_host(|sim| sim.device_bytes(4 * G), |pool| pool);
        let buffer = tagged(&machine, 0, "a", 3);
        buffer.sleep(contents, NOW).unwrap();
        let other = tagged(&machine, 0, "b", 2);
        for _ in 0..2 {
            let error = machine.pool.wake("a").unwrap_err();
            assert!(error.is_out_of_memory(), "{error}");
            assert_eq!(buffer.asleep(), Some(contents));
            assert_eq!(machine.stats(0).elastic_bytes, 2 * G);
        }
        drop(other);
        assert_eq!(machine.pool.wake("a").unwrap().bytes, 3 * G);
        assert!(contents == Contents::Dropped || is_written(&buffer, 3));
        drop(buffer);
        machine.end();
    }
}

#[test]
fn hooks_hear_of_sleep_and_waking() {
    let machine = with_host(|sim| sim, |pool| pool);
    let buffer = tagged(&machine, 0, "a", 2);
    let heard = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let log = heard.clone();
    let hook = buffer.on_backing_change(move |change| {
        log.lock().unwrap().push((change.phase, change.cause));
    });
    for contents in [KEPT, Contents::Dropped] {
        buffer.sleep(contents, NOW).unwrap();
        buffer.wake().unwrap();
    }
    let one = [Cause::Sleep, Cause::Wake].map(|it| [(Phase::Before, it), (Phase::After, it)]);
    assert_eq!(*heard.lock().unwrap(), [one.concat(), one.concat()].concat());
    drop((hook, buffer));
    machine.end();
}

#[test]
fn a_tag_that_nobody_has_is_an_error_as_is_a_host_that_gives_nothing() {
    let machine = machine(1, |sim| sim, |pool| pool);
    let buffer = tagged(&machine, 0, "a", 1);
    let error = machine.pool.sleep("b", KEPT, NOW).unwrap_err();
    assert_eq!(error.to_string(), r#"no elastic buffer has the tag "b""#);
    let error = machine.pool.sleep("a", KEPT, NOW).unwrap_err();
    assert!(matches!(error, Error::Elastic(ElasticError::UnknownPlace { .. })), "{error}");
    assert!(is_written(&buffer, 1));
    drop(buffer);
    machine.end();
}

/// Memory of the host is dear to grant: what kept contents once stands ready for the next.
#[test]
fn what_kept_contents_is_granted_once_and_given_back_when_memory_is_short() {
    let machine = with_host(|sim| sim, |pool| pool);
    let buffer = tagged(&machine, 0, "a", 3);
    let calls = |work: &dyn Fn()| {
        let before = machine.driver.ledger().snapshot();
        work();
        let calls = machine.driver.ledger().snapshot().since(&before);
        (calls.of(Call::MemCreate), calls.of(Call::MemMap))
    };
    let sleep = || assert_eq!(buffer.sleep(KEPT, NOW).unwrap(), 3 * G);
    assert_eq!(calls(&sleep), (3, 6), "made, and mapped at two places");
    buffer.wake().unwrap();
    assert_eq!(calls(&sleep), (0, 3));
    assert!(buffer.wake().is_ok() && is_written(&buffer, 3));
    // Somebody else may use it there: not with these grants.
    buffer.grant(DeviceId(1), vmm_sys::Access::Read).unwrap();
    assert_eq!(calls(&sleep).1, 6);
    buffer.wake().unwrap();
    assert_eq!(machine.pool.stats().hosts[0].stock_bytes, 6 * G);
    // All of the node's memory, in other lengths.
    let other = machine.pool.elastic(HOME).capacity_bytes(64 * G).chunk_bytes(64 * G);
    let other = other.build().unwrap();
    other.commit_from(Place::HostNuma(0), 0..64 * G).unwrap();
    let host = machine.pool.stats().hosts.remove(0);
    assert_eq!((host.elastic_bytes, host.stock_bytes), (64 * G, 0));
    machine.pool.verify().unwrap();
    drop((other, buffer));
    machine.end();
}

#[test]
fn an_empty_buffer_cannot_keep_contents_where_no_place_is() {
    let machine = machine(1, |sim| sim, |pool| pool);
    let buffer = machine.buffer(0, 4 * G);
    for _ in 0..2 {
        let error = buffer.sleep(Contents::Kept { node: 0 }, Duration::ZERO).unwrap_err();
        assert!(matches!(error, Error::Elastic(ElasticError::UnknownPlace { .. })), "{error}");
        assert_eq!(buffer.asleep(), None);
        buffer.grow_to(G).unwrap();
    }
    drop(buffer);
    machine.end();
}

/// Paused twice, freed while paused, resumed with room for half, and then with room for all.
#[test]
fn f_e5_states_are_explicit_and_a_wake_that_failed_can_be_tried_again() {
    for contents in [KEPT, Contents::Dropped] {
        let machine = with_host(|sim| sim.device_bytes(8 * G), |pool| pool);
        let buffers = [(); 2].map(|()| {
            let buffer = tagged(&machine, 0, "a", 3);
            buffer.grant(DeviceId(1), vmm_sys::Access::Read).unwrap();
            buffer
        });
        let freed = tagged(&machine, 0, "a", 1);
        let pictures = buffers.each_ref().map(|buffer| machine.picture(buffer));
        let asleep = || buffers.each_ref().map(ElasticBuffer::asleep) == [Some(contents); 2];
        assert_eq!(machine.pool.sleep("a", contents, NOW).unwrap().buffers, 3);
        assert_eq!(machine.pool.sleep("a", contents, NOW).unwrap().buffers, 0, "paused already");
        assert!(asleep() && is_asleep(buffers[0].shrink_to(0)), "a state, and a typed error");
        drop(freed);
        // Room for half of what sleeps: exactly that wakes, and each buffer says what it is.
        let other = tagged(&machine, 0, "b", 4);
        let calls = machine.driver.ledger().snapshot();
        let error = machine.pool.wake("a").unwrap_err();
        assert!(error.is_out_of_memory(), "{error}");
        let states = buffers.each_ref().map(ElasticBuffer::asleep);
        assert_eq!(states, [None, Some(contents)], "a buffer wakes whole or not at all");
        let again = machine.pool.wake("a").unwrap_err();
        assert!(again.is_out_of_memory(), "{again}");
        assert!(machine.driver.ledger().snapshot().since(&calls).total() < 200, "it ends");
        drop(other);
        let woken = machine.pool.wake("a").unwrap();
        assert_eq!((woken.buffers, woken.bytes), (1, 3 * G), "what was freed stays away");
        assert_eq!(machine.stats(0).elastic_bytes, 6 * G);
        for (buffer, before) in buffers.iter().zip(&pictures) {
            let now = machine.picture(buffer);
            assert_eq!(now.access_of(1), before.access_of(1), "the same access");
            assert_eq!(now.access_of(0), before.access_of(0), "the same access");
            let places = |of: &crate::common::elastic::Picture| {
                of.pieces().iter().map(|it| (it.address, it.bytes, it.place)).collect::<Vec<_>>()
            };
            assert_eq!(places(&now), places(before), "the same addresses");
            assert!(contents == Contents::Dropped || is_written(buffer, 3));
        }
        drop(buffers);
        machine.end();
    }
}
