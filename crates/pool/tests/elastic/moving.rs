//! Memory that changes place under a stable address: what is kept, who waits, and what a failure
//! leaves.
use std::sync::mpsc;
use std::time::Duration;

use crate::common::elastic::{G, Machine, check_bytes, hold, machine, with_host, written};
use vmm_pool::{Cause, ElasticBuffer, ElasticError, Error, MigrationState, Move, Phase, Place};
use vmm_sys::object::Stream;
use vmm_sys::sim::FaultPlan;
use vmm_sys::{Access, Call, CaptureMode, DeviceId, ProbeKernel, ResultCode};

const LONG: Duration = Duration::from_secs(20);
const HOME: DeviceId = DeviceId(0);
const AWAY: DeviceId = DeviceId(1);
const HOST: Place = Place::HostNuma(0);

fn places(buffer: &ElasticBuffer) -> Vec<Place> {
    buffer.pieces().iter().map(|piece| piece.place).collect()
}

fn fill(machine: &Machine, stream: &Stream, address: u64, value: u32) {
    let kernel = ProbeKernel::FillWords { dst: address, words: 4, value };
    // SAFETY: a live stream, and an address of the pool.
    unsafe { machine.driver.launch(stream.device(), &kernel, stream.handle()) }.unwrap();
}

fn word(buffer: &ElasticBuffer, offset: u64) -> u32 {
    let mut bytes = [0; 4];
    buffer.read(offset, &mut bytes).unwrap();
    u32::from_le_bytes(bytes)
}

#[test]
fn a_buffer_moves_to_a_neighbour_to_the_host_and_back_under_its_address() {
    let machine = with_host();
    let buffer = written(&machine, 3);
    let address = buffer.address();
    for (to, place) in
        [(AWAY.into(), Place::Device(AWAY)), (HOST, HOST), (HOME.into(), HOME.into())]
    {
        let generation = buffer.generation();
        let moved = buffer.migrate(to).unwrap();
        assert_eq!((moved.bytes, moved.generation), (3 * G, generation + 1));
        assert_eq!((buffer.address(), places(&buffer)), (address, vec![place; 3]));
        assert!(buffer.pieces().iter().all(|piece| piece.generation == moved.generation));
        check_bytes(&buffer, 3);
        machine.stats(0);
        machine.stats(1);
    }
    let stats = buffer.stats();
    assert_eq!((stats.moved_bytes, stats.incoming_bytes), (9 * G, 0));
    // What is left behind is ready for the next.
    assert_eq!(machine.stats(1).stock_bytes, 3 * G);
    assert_eq!(machine.pool.stats().hosts[0].stock_bytes, 3 * G);
    // A move to where it is does nothing.
    let calls = machine.driver.ledger().snapshot();
    assert_eq!(buffer.migrate(HOME).unwrap().bytes, 0);
    assert_eq!(machine.driver.ledger().snapshot().since(&calls).total(), 0);
    drop(buffer);
    machine.end();
}

#[test]
fn graphs_captured_before_a_move_go_on_working_after_it() {
    let machine = with_host();
    let stream = machine.stream(0);
    let buffer = written(&machine, 2);
    let driver = &machine.driver;
    // SAFETY: live handles; the graph is not used after its end.
    let graph = unsafe {
        driver.capture_begin(HOME, stream.handle(), CaptureMode::Global).unwrap();
        fill(&machine, &stream, buffer.address() + G, 0x1234);
        let graph = driver.capture_end(HOME, stream.handle()).unwrap();
        let exec = driver.graph_instantiate(HOME, graph).unwrap();
        driver.graph_destroy(HOME, graph).unwrap();
        exec
    };
    for (round, to) in [AWAY.into(), HOST, HOME.into()].into_iter().enumerate() {
        buffer.migrate(to).unwrap();
        fill(&machine, &stream, buffer.address() + G, round as u32);
        let using = buffer.use_on(&stream).unwrap();
        // SAFETY: live handles.
        unsafe { driver.graph_launch(HOME, graph, stream.handle()) }.unwrap();
        drop(using);
        stream.synchronize().unwrap();
        assert_eq!(word(&buffer, G), 0x1234);
    }
    // SAFETY: a live handle.
    unsafe { driver.graph_exec_destroy(HOME, graph) }.unwrap();
    drop((buffer, stream));
    machine.end();
}

#[test]
fn a_device_that_gets_all_becomes_the_home_and_nobody_loses_access() {
    let machine = with_host();
    let buffer = written(&machine, 2);
    assert_eq!(buffer.access(AWAY), Access::None);
    buffer.migrate(Move::to(AWAY).range(0..G)).unwrap();
    assert_eq!(places(&buffer), [AWAY.into(), HOME.into()]);
    assert_eq!((buffer.device(), buffer.access(AWAY)), (HOME, Access::None), "a part does not");
    buffer.migrate(AWAY).unwrap();
    assert_eq!((buffer.device(), buffer.access(AWAY)), (AWAY, Access::ReadWrite));
    assert_eq!(buffer.access(HOME), Access::ReadWrite);
    let counts = |device| {
        let stats = machine.stats(device);
        (stats.elastic_buffers, stats.elastic_bytes, stats.reserved_bytes)
    };
    assert_eq!((counts(0), counts(1)), ((0, 0, 0), (1, 2 * G, 64 * G)));
    buffer.grow_to(3 * G).unwrap();
    assert_eq!(places(&buffer), vec![AWAY.into(); 3], "later memory is the new home's");
    check_bytes(&buffer, 2);
    let refused = buffer.revoke(AWAY).unwrap_err();
    assert!(matches!(refused, Error::Elastic(ElasticError::HomeAccess { device: AWAY })));
    drop(buffer);
    machine.end();
}

#[test]
fn a_new_home_lets_those_use_the_buffer_whom_its_policy_names() {
    let machine = machine(3, |sim| sim, |pool| pool);
    let third = DeviceId(2);
    machine.pool.grant(AWAY, third, Access::Read).unwrap();
    let buffer = written(&machine, 1);
    let own = machine.pool.elastic(HOME).capacity_bytes(G).chunk_bytes(G);
    let own = own.access([]).build().unwrap();
    for buffer in [&buffer, &own] {
        assert_eq!(buffer.access(third), Access::None);
        buffer.migrate(AWAY).unwrap();
    }
    assert_eq!((buffer.access(third), own.access(third)), (Access::Read, Access::None));
    machine.pool.grant(AWAY, third, Access::None).unwrap();
    assert_eq!(buffer.access(third), Access::None, "it follows its new home's policy");
    drop((buffer, own));
    machine.end();
}

#[test]
fn a_move_that_has_no_memory_leaves_everything_as_it_was() {
    let machine = machine(2, |sim| sim.device_bytes(4 * G), |pool| pool);
    let buffer = written(&machine, 3);
    let other = machine.pool.elastic(AWAY).chunk_bytes(G).capacity_bytes(4 * G).build().unwrap();
    other.grow_to(2 * G).unwrap();
    let before = machine.picture(&buffer);
    let error = buffer.migrate(AWAY).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    // The device that was to be the home keeps nothing of it.
    assert_eq!((machine.picture(&buffer), buffer.access(AWAY)), (before, Access::None));
    drop(other);
    buffer.migrate(AWAY).unwrap();
    check_bytes(&buffer, 3);
    drop(buffer);
    machine.end();
}

/// What the driver refuses while a failed move is taken back is kept, and comes back later.
#[test]
fn memory_that_cannot_be_brought_back_keeps_its_contents_until_it_can() {
    for call in [Call::MemMap, Call::MemSetAccess, Call::MemUnmap] {
        for (first, times) in [(3, 20), (4, 20), (3, 2), (4, 3), (5, 20), (6, 2)] {
            let machine = with_host();
            let stream = machine.stream(0);
            let buffer = written(&machine, 3);
            buffer.migrate(AWAY).unwrap();
            buffer.migrate(HOME).unwrap();
            machine
                .sim
                .inject(FaultPlan::fail(ResultCode::UNKNOWN).on(call).at(first).times(times));
            let moved = buffer.migrate(AWAY);
            let stuck = buffer.use_on(&stream).map(drop);
            machine.sim.clear_faults();
            if let Err(error) = stuck {
                assert!(moved.is_err());
                assert!(matches!(error, Error::Elastic(ElasticError::Stuck { .. })), "{error}");
            }
            machine.pool.verify().unwrap();
            drop(buffer.use_on(&stream).unwrap());
            assert_eq!(buffer.committed_bytes(), 3 * G);
            check_bytes(&buffer, 3);
            buffer.migrate(AWAY).unwrap();
            check_bytes(&buffer, 3);
            machine.pool.trim(HOME).unwrap();
            machine.pool.trim(AWAY).unwrap();
            machine.stats(0);
            machine.stats(1);
            drop((buffer, stream));
            machine.end();
        }
    }
}

#[test]
fn work_that_was_enqueued_before_is_waited_for_and_is_not_lost() {
    let machine = with_host();
    let buffer = written(&machine, 2);
    let streams = [machine.stream(0), machine.stream(0), machine.stream(0)];
    let held: Vec<_> = streams.iter().map(|stream| hold(&machine, stream)).collect();
    for (at, stream) in streams.iter().enumerate() {
        let _using = buffer.use_on(stream).unwrap();
        fill(&machine, stream, buffer.address() + 64 * at as u64, 100 + at as u32);
    }
    let migration = buffer.migrate_async(AWAY).unwrap();
    for held in held {
        std::thread::sleep(Duration::from_millis(5));
        assert!(!migration.is_finished(), "a stream may still write to the old memory");
        assert_eq!(places(&buffer), vec![HOME.into(); 2]);
        drop(held);
    }
    let MigrationState::Done(moved) = migration.wait(LONG) else { panic!("{migration:?}") };
    assert_eq!(moved.bytes, 2 * G);
    for at in 0..3 {
        assert_eq!(word(&buffer, 64 * at), 100 + at as u32);
    }
    drop((buffer, streams));
    machine.end();
}

#[test]
fn a_use_that_begins_during_a_move_is_held_on_its_stream_and_no_thread_waits() {
    let machine = with_host();
    let buffer = written(&machine, 2);
    let (early, late) = (machine.stream(0), machine.stream(0));
    let held = hold(&machine, &early);
    {
        let _using = buffer.use_on(&early).unwrap();
        fill(&machine, &early, buffer.address(), 1);
    }
    let migration = buffer.migrate_async(AWAY).unwrap();
    // The first call of the move while it keeps the door: from then on uses are held.
    let waits = |machine: &Machine| machine.driver.ledger().snapshot().of(Call::StreamWaitEvent);
    while waits(&machine) == 0 {
        std::thread::yield_now();
    }
    {
        let _using = buffer.use_on(&late).unwrap();
        fill(&machine, &late, buffer.address(), 2);
    }
    assert_eq!(machine.driver.ledger().snapshot().of(Call::StreamWaitValue32), 1);
    // SAFETY: a live stream.
    let passed = || unsafe { machine.driver.stream_query(HOME, late.handle()) }.unwrap();
    assert!(!passed() && !migration.is_finished());
    // Figures do not wait either.
    assert_eq!((buffer.stats().incoming_bytes, buffer.committed_bytes()), (2 * G, 2 * G));
    machine.pool.verify().unwrap();
    drop(held);
    assert!(matches!(migration.wait(LONG), MigrationState::Done(_)));
    late.synchronize().unwrap();
    assert_eq!(word(&buffer, 0), 2, "it came after the move, to the new memory");
    assert_eq!(places(&buffer), vec![AWAY.into(); 2]);
    drop((buffer, early, late));
    machine.end();
}

#[test]
fn a_guard_that_is_alive_is_waited_for_as_long_as_patience_lasts() {
    let machine = with_host();
    let stream = machine.stream(0);
    let buffer = written(&machine, 1);
    let using = buffer.use_on(&stream).unwrap();
    // Its own guard cannot end while it waits.
    let error = buffer.migrate(Move::to(AWAY).patience(LONG)).unwrap_err();
    assert!(matches!(error, Error::Elastic(ElasticError::InUse { open_uses: 1 })), "{error}");
    let impatient = buffer.migrate_async(Move::to(AWAY).patience(Duration::ZERO)).unwrap();
    assert!(matches!(
        impatient.wait(LONG),
        MigrationState::Failed(Error::Elastic(ElasticError::InUse { open_uses: 1 }))
    ));
    let patient = buffer.migrate_async(Move::to(AWAY).patience(LONG)).unwrap();
    std::thread::sleep(Duration::from_millis(10));
    assert!(!patient.is_finished());
    // The thread that has a guard may begin more meanwhile, and they are waited for too.
    let second = buffer.use_on(&stream).unwrap();
    drop(using);
    std::thread::sleep(Duration::from_millis(5));
    assert!(!patient.is_finished());
    drop(second);
    assert!(matches!(patient.wait(LONG), MigrationState::Done(_)));
    check_bytes(&buffer, 1);
    drop((buffer, stream));
    machine.end();
}

#[test]
fn other_threads_wait_outside_while_a_move_waits_for_guards() {
    let machine = with_host();
    let stream = machine.stream(0);
    let buffer = written(&machine, 1);
    let using = buffer.use_on(&stream).unwrap();
    let migration = buffer.migrate_async(Move::to(AWAY).patience(LONG)).unwrap();
    // Nothing says when the move has come to wait; by then, others do not get in.
    std::thread::sleep(Duration::from_millis(20));
    let (tells, told) = mpsc::channel();
    std::thread::scope(|scope| {
        let (buffer, stream) = (&buffer, &stream);
        scope.spawn(move || {
            drop(buffer.use_on(stream).unwrap());
            tells.send(()).unwrap();
        });
        assert!(told.recv_timeout(Duration::from_millis(20)).is_err());
        drop(using);
        told.recv_timeout(LONG).unwrap();
    });
    assert!(matches!(migration.wait(LONG), MigrationState::Done(_)));
    drop((buffer, stream));
    machine.end();
}

#[test]
fn a_capture_in_the_way_of_a_move_refuses_it() {
    let machine = with_host();
    let stream = machine.stream(0);
    let buffer = written(&machine, 1);
    let before = machine.picture(&buffer);
    // SAFETY: a live stream.
    unsafe { machine.driver.capture_begin(HOME, stream.handle(), CaptureMode::Global) }.unwrap();
    drop(buffer.use_on(&stream).unwrap());
    let error = buffer.migrate(AWAY).unwrap_err();
    assert!(matches!(error, Error::Elastic(ElasticError::StillUsed { .. })), "{error}");
    // SAFETY: live handles.
    unsafe {
        let graph = machine.driver.capture_end(HOME, stream.handle()).unwrap();
        machine.driver.graph_destroy(HOME, graph).unwrap();
    }
    assert_eq!(machine.picture(&buffer), before);
    buffer.migrate(AWAY).unwrap();
    drop((buffer, stream));
    machine.end();
}

#[test]
fn hooks_hear_of_a_move_while_uses_may_still_begin() {
    let machine = with_host();
    let buffer = std::sync::Arc::new(written(&machine, 2));
    let heard = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let (log, asked) = (heard.clone(), std::sync::Arc::downgrade(&buffer));
    let hook = buffer.on_backing_change(move |change| {
        let buffer = asked.upgrade().unwrap();
        let mut bytes = [0];
        buffer.read(0, &mut bytes).unwrap();
        log.lock().unwrap().push((change.phase, change.cause, change.generation, change.bytes));
    });
    let first = buffer.generation();
    buffer.migrate(AWAY).unwrap();
    machine.sim.inject(FaultPlan::fail(ResultCode::UNKNOWN).on(Call::LaunchKernel).at(2));
    buffer.migrate(HOME).unwrap_err();
    let expected = [
        (Phase::Before, Cause::Move, first, 2 * G),
        (Phase::After, Cause::Move, first + 1, 2 * G),
        (Phase::Before, Cause::Move, first + 1, 2 * G),
        (Phase::Failed, Cause::Move, first + 1, 2 * G),
    ];
    assert_eq!(*heard.lock().unwrap(), expected);
    drop((hook, buffer));
    machine.end();
}

#[test]
fn moves_that_nobody_has_begun_end_with_the_pool() {
    let Machine { sim, driver, pool } = with_host();
    let builder = pool.elastic(HOME).capacity_bytes(4 * G).chunk_bytes(G);
    let (busy, waiting) = (builder.clone().build().unwrap(), builder.build().unwrap());
    busy.grow_to(G).unwrap();
    waiting.grow_to(G).unwrap();
    let slow = FaultPlan::delay_real(Duration::from_millis(100)).on(Call::LaunchKernel).once();
    sim.inject(slow);
    let under_way = busy.migrate_async(AWAY).unwrap();
    while !matches!(under_way.state(), MigrationState::Moving) {
        std::thread::yield_now();
    }
    let not_begun = waiting.migrate_async(AWAY).unwrap();
    drop((busy, waiting, pool));
    assert!(matches!(under_way.state(), MigrationState::Done(_)), "{under_way:?}");
    assert!(matches!(
        not_begun.state(),
        MigrationState::Failed(Error::Elastic(ElasticError::Ended))
    ));
    drop(driver);
    sim.check_clean().unwrap();
}

#[test]
fn impossible_moves_are_refused_before_any_call() {
    let machine = with_host();
    let buffer = written(&machine, 1);
    let calls = machine.driver.ledger().snapshot();
    let error = buffer.migrate(DeviceId(7)).unwrap_err();
    assert!(matches!(error, Error::Elastic(ElasticError::UnknownPlace { .. })), "{error}");
    let error = buffer.migrate_async(Place::HostNuma(5)).unwrap_err();
    assert!(matches!(error, Error::Elastic(ElasticError::UnknownPlace { .. })), "{error}");
    let error = buffer.migrate(Move::to(AWAY).range(0..65 * G)).unwrap_err();
    assert!(matches!(error, Error::Elastic(ElasticError::BeyondCapacity { .. })), "{error}");
    assert_eq!(machine.driver.ledger().snapshot().since(&calls).total(), 0);
    drop(buffer);
    machine.end();
}
