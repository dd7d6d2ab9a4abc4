//! What is left of moves: addresses that stay mapped, and what moves have used, when buffers and pools
//! end.
use std::time::Duration;

use crate::common::elastic::{G, Machine, check_bytes, machine, with_host, written};
use vmm_pool::{Budget, Contents, ElasticError, MigrationState, Place, Pool};
use vmm_sys::object::Stream;
use vmm_sys::sim::{FaultPlan, Link, TimeMode};
use vmm_sys::{Access, Call, CaptureMode, DeviceId, ResultCode};

const LONG: Duration = Duration::from_secs(20);
const HOME: DeviceId = DeviceId(0);
const AWAY: DeviceId = DeviceId(1);
const HOST: Place = Place::HostNuma(0);

/// Addresses of a move that the driver refuses to unmap keep their chunk; it is counted once, and
/// comes back when they are gone.
#[test]
fn addresses_of_a_move_that_cannot_be_unmapped_stay_with_their_chunk() {
    let fails = |machine: &Machine, at, times| {
        let plan = FaultPlan::fail(ResultCode::UNKNOWN).on(Call::MemUnmap).at(at).times(times);
        machine.sim.inject(plan);
    };
    for (at, times) in [(1, 1), (2, 1), (3, 1), (3, 2), (3, 20), (4, 1), (2, 20)] {
        for end in 0..6 {
            let machine = with_host();
            let buffer = written(&machine, 2);
            buffer.migrate(AWAY).unwrap();
            buffer.migrate(HOME).unwrap();
            fails(&machine, at, times);
            let _moved = buffer.migrate(AWAY);
            machine.pool.verify().unwrap();
            if end == 3 {
                // Once more, with what is left of the first.
                let _moved = buffer.migrate(HOST);
                machine.pool.verify().unwrap();
            }
            if end == 4 {
                // What is taken away cannot be unmapped, and comes back as it is.
                buffer.shrink_to(0).unwrap();
                let _grown = buffer.grow_to(2 * G);
                machine.pool.verify().unwrap();
            }
            if end == 5 {
                let _slept = buffer.sleep(Contents::Dropped, Duration::ZERO);
                machine.pool.verify().unwrap();
            }
            machine.sim.clear_faults();
            match end {
                0 => {}
                1 => drop(buffer.sleep(Contents::Dropped, Duration::ZERO).unwrap()),
                2 => drop(buffer.shrink_to(G).unwrap()),
                4 => {}
                5 => drop(buffer.wake().unwrap()),
                _ => check_bytes(&buffer, 2),
            }
            machine.pool.verify().unwrap();
            drop(buffer);
            for device in [HOME, AWAY] {
                machine.pool.trim(device).unwrap();
                let stats = machine.stats(device.0);
                assert_eq!(stats.held_bytes, stats.anchor_bytes, "{at} {times} {end}");
            }
            machine.end();
        }
    }
}

/// What moves have used goes with the pool: streams, events, the word that held streams.
#[test]
fn the_end_of_a_pool_that_has_moved_something_harms_no_capture() {
    let Machine { sim, driver, pool } = with_host();
    for mode in [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed] {
        let stream = Stream::create(&driver, HOME).unwrap();
        // SAFETY: a live stream.
        unsafe { driver.capture_begin(HOME, stream.handle(), mode) }.unwrap();
        let other = Pool::builder(driver.clone()).device(HOME).device(AWAY).build().unwrap();
        let moving = other.elastic(HOME).capacity_bytes(G).chunk_bytes(G).build().unwrap();
        moving.grow_to(G).unwrap();
        moving.migrate(AWAY).unwrap();
        drop((moving, other));
        // SAFETY: live handles.
        unsafe {
            let graph = driver.capture_end(HOME, stream.handle()).unwrap();
            driver.graph_destroy(HOME, graph).unwrap();
        }
    }
    drop((pool, driver));
    sim.check_clean().unwrap();
}

/// The thread that moves keeps nothing of a buffer once it has said that the move is over.
#[test]
fn a_buffer_that_is_dropped_after_its_move_is_gone_at_once() {
    let machine = with_host();
    for round in 0..300 {
        let buffer = machine.buffer(0, 4 * G);
        buffer.grow_to(G).unwrap();
        let migration = buffer.migrate_async(AWAY).unwrap();
        assert!(matches!(migration.wait(LONG), MigrationState::Done(_)), "{migration:?}");
        drop(buffer);
        assert_eq!(machine.stats(1).elastic_buffers, 0, "round {round}");
    }
    machine.end();
}

/// A question about a copy that the driver does not answer says nothing: nobody unmaps the target of a
/// copy that is under way.
#[test]
fn a_copy_of_a_move_that_failed_is_waited_for_though_questions_about_it_fail() {
    for (to, at) in [(HOST, 1), (HOST, 2), (AWAY.into(), 1), (AWAY.into(), 2)] {
        let machine =
            machine(2, |sim| sim.time(TimeMode::Modelled), |pool| pool.host_memory(0, 64 * G, 0));
        let buffer = written(&machine, 2);
        let plan = FaultPlan::fail(ResultCode::UNKNOWN).on(Call::EventQuery).at(at).times(9);
        machine.sim.inject(plan);
        assert!(buffer.migrate(to).is_err());
        machine.sim.clear_faults();
        buffer.migrate(to).unwrap();
        check_bytes(&buffer, 2);
        drop(buffer);
        machine.end();
    }
}

/// A device without memory for an anchor is left all the same: the pair is tried by what is there.
#[test]
fn a_buffer_moves_off_a_device_that_has_no_memory_for_an_anchor() {
    for (by_budget, grants) in [(false, false), (true, false), (false, true)] {
        let machine = machine(
            2,
            |sim| if by_budget { sim } else { sim.device_bytes_of(0, 4 * G) },
            |pool| if by_budget { pool.budget(HOME, Budget::new(4 * G)) } else { pool },
        );
        let buffer = written(&machine, 4);
        if grants {
            buffer.grant(AWAY, Access::Read).unwrap();
            let mut found = [1; 64];
            buffer.read_by(AWAY, 0, &mut found).unwrap();
            assert_eq!(found[..4], [0, 1, 2, 3]);
        }
        buffer.migrate(AWAY).unwrap();
        check_bytes(&buffer, 4);
        assert_eq!(machine.stats(0).elastic_bytes, 0);
        assert_eq!(machine.stats(0).anchor_bytes, 0);
        // With memory left again, the pair is tried as ever.
        let other = machine.buffer(0, 4 * G);
        other.grow_to(G).unwrap();
        other.grant(AWAY, Access::Read).unwrap();
        assert_eq!(machine.stats(0).anchor_bytes, G);
        drop((other, buffer));
        machine.end();
    }
}

/// A pair that does not work is found out without an anchor too.
#[test]
fn a_full_device_does_not_hide_a_pair_that_does_not_work() {
    let machine = machine(2, |sim| sim.device_bytes_of(0, 2 * G).links(Link::None), |pool| pool);
    let buffer = written(&machine, 2);
    let before = machine.picture(&buffer);
    let error = buffer.migrate(AWAY).unwrap_err();
    assert!(matches!(error, vmm_pool::Error::Elastic(ElasticError::NoPeer { .. })), "{error}");
    assert_eq!(machine.picture(&buffer), before);
    drop(buffer);
    machine.end();
}
