//! Elastic buffers and threads: growth in the background, many threads at one buffer.
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, TryRecvError};
use std::time::Duration;

use crate::common::elastic::{G, machine};
use vmm_pool::{AheadState, ElasticError, Error, MigrationState};
use vmm_sys::sim::FaultPlan;
use vmm_sys::{Call, DeviceId, ResultCode};

const LONG: Duration = Duration::from_secs(20);

#[test]
fn growth_ahead_is_done_by_the_background_thread() {
    let machine = machine(1, |sim| sim, |pool| pool.background(true));
    let buffer = machine.buffer(0, 64 * G);
    // The thread is slow: the caller does not wait for it.
    let slow = FaultPlan::delay_real(Duration::from_millis(30)).on(Call::MemMap).times(3);
    machine.sim.inject(slow);
    let growth = buffer.grow_ahead(3 * G).unwrap();
    assert!(!growth.is_finished(), "it takes 90 ms");
    assert_eq!(buffer.committed_bytes(), 0, "nothing is seen before all is there");
    assert!(matches!(growth.wait(LONG), AheadState::Done));
    assert_eq!((buffer.committed_bytes(), growth.target_bytes()), (3 * G, 3 * G));
    // What is there already is no work.
    let calls = machine.driver.ledger().snapshot();
    assert_eq!(buffer.grow_to(3 * G).unwrap(), 0);
    assert_eq!(machine.driver.ledger().snapshot().since(&calls).total(), 0);
    drop(buffer);
    machine.end();
}

#[test]
fn growth_ahead_that_fails_says_so_and_leaves_everything_as_it_was() {
    let machine = machine(1, |sim| sim.device_bytes(8 * G), |pool| pool.background(true));
    let buffer = machine.buffer(0, 64 * G);
    buffer.grow_to(2 * G).unwrap();
    let growth = buffer.grow_ahead(9 * G).unwrap();
    let AheadState::Failed(error) = growth.wait(LONG) else { panic!("{growth:?}") };
    assert!(error.is_out_of_memory(), "{error}");
    assert_eq!(buffer.committed_bytes(), 2 * G);
    let beyond = buffer.grow_ahead(65 * G).unwrap_err();
    assert!(matches!(beyond, Error::Elastic(ElasticError::BeyondCapacity { .. })));
    assert!(matches!(buffer.grow_ahead(8 * G).unwrap().wait(LONG), AheadState::Done));
    drop(buffer);
    machine.end();
}

#[test]
fn requests_for_growth_ahead_are_joined() {
    let machine = machine(1, |sim| sim, |pool| pool.background(true));
    let buffer = machine.buffer(0, 64 * G);
    let slow = FaultPlan::delay_real(Duration::from_millis(50)).on(Call::MemCreate).once();
    machine.sim.inject(slow);
    let first = buffer.grow_ahead(G).unwrap();
    while matches!(first.state(), AheadState::Waiting) {
        std::thread::yield_now();
    }
    let later: Vec<_> = [3, 7, 5].map(|n| buffer.grow_ahead(n * G).unwrap()).into();
    assert!(later.iter().all(|growth| growth.target_bytes() == 7 * G), "{later:?}");
    assert!(matches!(first.wait(LONG), AheadState::Done));
    assert!(later.iter().all(|growth| matches!(growth.wait(LONG), AheadState::Done)));
    assert_eq!(buffer.committed_bytes(), 7 * G);
    drop(buffer);
    machine.end();
}

#[test]
fn without_a_background_thread_growth_ahead_is_done_at_once() {
    let machine = machine(1, |sim| sim, |pool| pool);
    let buffer = machine.buffer(0, 64 * G);
    let growth = buffer.grow_ahead(3 * G).unwrap();
    assert!(matches!(growth.state(), AheadState::Done));
    assert_eq!(buffer.committed_bytes(), 3 * G);
    drop(buffer);
    machine.end();
}

#[test]
fn a_buffer_may_end_while_it_grows_ahead() {
    let mut seen = [0; 2];
    for delay_ms in [0, 0, 0, 1, 5, 20] {
        let machine = machine(1, |sim| sim, |pool| pool.background(true));
        machine.sim.inject(FaultPlan::delay_real(Duration::from_millis(2)).on(Call::MemMap));
        let buffer = machine.buffer(0, 64 * G);
        let growth = buffer.grow_ahead(4 * G).unwrap();
        std::thread::sleep(Duration::from_millis(delay_ms));
        drop(buffer);
        match growth.wait(LONG) {
            AheadState::Done => seen[0] += 1,
            AheadState::Failed(Error::Elastic(ElasticError::Ended)) => seen[1] += 1,
            other => panic!("{other:?}"),
        }
        machine.end();
    }
    assert!(seen[0] > 0, "after 20 ms it had begun: {seen:?}");
}

#[test]
fn figures_do_not_wait_for_the_driver() {
    let machine = machine(1, |sim| sim, |pool| pool);
    let buffer = machine.buffer(0, 64 * G);
    buffer.grow_to(G).unwrap();
    let slow = FaultPlan::delay_real(Duration::from_millis(200)).on(Call::MemMap).once();
    machine.sim.inject(slow);
    std::thread::scope(|scope| {
        let growing = scope.spawn(|| buffer.grow_to(2 * G).unwrap());
        while machine.sim.faults_fired() == 0 {
            std::thread::yield_now();
        }
        assert_eq!((buffer.committed_bytes(), buffer.pieces().len()), (G, 1));
        let stats = machine.pool.device_stats(DeviceId(0)).unwrap();
        assert!(stats.adds_up(), "{stats:?}");
        assert_eq!(buffer.stats().generation, 1);
        assert!(!growing.is_finished(), "nothing of this waited for the growth");
    });
    assert_eq!(buffer.committed_bytes(), 2 * G);
    drop(buffer);
    machine.end();
}

#[test]
fn many_threads_change_and_use_one_buffer() {
    let machine = machine(2, |sim| sim.device_bytes(256 * G), |pool| pool.background(true));
    let buffer = machine.buffer(0, 64 * G);
    buffer.grant(DeviceId(1), vmm_sys::Access::Read).unwrap();
    let streams: Vec<_> = (0..4).map(|device| machine.stream(device % 2)).collect();
    machine.sim.inject(FaultPlan::fail(ResultCode::OUT_OF_MEMORY).on(Call::MemCreate).random(50));
    machine.sim.inject(FaultPlan::fail(ResultCode::UNKNOWN).on(Call::MemSetAccess).random(20));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for (number, stream) in streams.iter().enumerate() {
            let buffer = &buffer;
            scope.spawn(move || {
                for round in 0..200_u64 {
                    let n = (round * 7 + number as u64 * 11) % 32;
                    let using = buffer.use_on(stream).unwrap();
                    // Failures are injected: all that matters is what they leave.
                    let _failed = match round % 4 {
                        0 => buffer.grow_to(n * G).err(),
                        1 => buffer.commit(n * G..(n + 2) * G).err(),
                        2 => buffer.decommit(n * G..(n + 3) * G).err(),
                        _ => buffer.shrink_to(n * G).err(),
                    };
                    drop(using);
                }
            });
        }
        let (walker, stop, machine) = (&machine.pool, &stop, &machine);
        let walking = scope.spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                walker.verify().unwrap();
                for device in [0, 1] {
                    let stats = machine.pool.device_stats(DeviceId(device)).unwrap();
                    assert!(stats.adds_up(), "{stats:?}");
                }
            }
        });
        // The workers are done when only the walker is left.
        while buffer.stats().uses < 4 * 200 {
            std::thread::sleep(Duration::from_millis(1));
        }
        stop.store(true, Ordering::Relaxed);
        walking.join().unwrap();
    });
    machine.sim.clear_faults();
    assert_eq!(buffer.stats().open_uses, 0);
    let pieces = buffer.pieces();
    assert_eq!(pieces.iter().map(|piece| piece.bytes).sum::<u64>(), buffer.committed_bytes());
    drop((buffer, streams));
    machine.end();
}

/// Whoever looks at all buffers meanwhile, or is to move it, does not keep a dropped one's memory.
#[test]
fn a_dropped_buffer_has_no_memory_whoever_looks_at_it() {
    let machine = machine(2, |sim| sim, |pool| pool.background(true));
    let (working, is_working) = mpsc::channel::<()>();
    let elastic_bytes = || machine.pool.device_stats(DeviceId(0)).unwrap().elastic_bytes;
    std::thread::scope(|scope| {
        // Dropped by a panic too.
        let (working, pool) = (working, &machine.pool);
        scope.spawn(move || {
            while is_working.try_recv() == Err(TryRecvError::Empty) {
                pool.verify().unwrap();
                pool.elastic_stats();
            }
        });
        for round in 0..300 {
            let buffer = machine.buffer(0, 64 * G);
            buffer.grow_to(4 * G).unwrap();
            let asked = (round % 3 == 0).then(|| buffer.migrate_async(DeviceId(1)).unwrap());
            drop(buffer);
            if let Some(migration) = asked {
                // Begun or not: it ends, and then there is nothing.
                let state = migration.wait(LONG);
                assert!(matches!(state, MigrationState::Done(_) | MigrationState::Failed(_)));
                continue;
            }
            assert_eq!(elastic_bytes(), 0, "round {round}");
        }
        drop(working);
    });
    machine.end();
}
