//! Streams that use an elastic buffer: what is waited for, and by whom.
use std::time::Duration;

use crate::common::elastic::{G, Machine, hold, machine};
use vmm_pool::{Contents, ElasticError, Error};
use vmm_sys::object::Stream;
use vmm_sys::sim::FaultPlan;
use vmm_sys::{Call, CaptureMode, CaptureStatus, DeviceId, ProbeKernel, ResultCode};

fn fill(machine: &Machine, stream: &Stream, address: u64, value: u32) {
    let kernel = ProbeKernel::FillWords { dst: address, words: 64, value };
    // SAFETY: a live stream, and an address of the pool.
    unsafe { machine.driver.launch(stream.device(), &kernel, stream.handle()) }.unwrap();
}

fn mapped(machine: &Machine, address: u64) -> bool {
    machine.sim.peek(address, 1).is_some()
}

/// Lets the pool do what it would do in the background.
fn tidy(machine: &Machine) {
    // Growth of another buffer looks at nothing of this one; the figures of a trim do.
    let stream = machine.stream(0);
    let lane = machine.pool.lane(&stream).unwrap();
    drop(lane.alloc(1).unwrap());
    machine.pool.close_lane(&stream);
}

#[test]
fn nothing_is_unmapped_before_its_uses_are_done() {
    let machine = machine(2, |sim| sim, |pool| pool);
    let buffer = machine.buffer(0, 16 * G);
    buffer.grow_to(4 * G).unwrap();
    buffer.grant(DeviceId(1), vmm_sys::Access::ReadWrite).unwrap();
    let streams = [machine.stream(0), machine.stream(1)];
    let mut held: Vec<_> = streams.iter().map(|stream| hold(&machine, stream)).collect();
    for stream in &streams {
        let using = buffer.use_on(stream).unwrap();
        fill(&machine, stream, buffer.address() + 3 * G, 1);
        drop(using);
    }
    let address = buffer.address() + 3 * G;
    assert_eq!(buffer.shrink_to(G).unwrap(), 3 * G);
    assert_eq!(buffer.committed_bytes(), G, "the caller does not wait");
    let stats = machine.stats(0);
    assert_eq!((stats.elastic_bytes, stats.limbo_bytes), (G, 3 * G));
    for _ in 0..2 {
        tidy(&machine);
        assert!(mapped(&machine, address), "a stream may still write there");
        held.pop();
    }
    tidy(&machine);
    assert!(!mapped(&machine, address));
    assert_eq!(machine.stats(0).limbo_bytes, 0);
    for stream in &streams {
        stream.synchronize().unwrap();
    }
    drop((held, streams, buffer));
    machine.end();
}

#[test]
fn a_guard_that_is_alive_is_waited_for() {
    let machine = machine(1, |sim| sim, |pool| pool);
    let stream = machine.stream(0);
    let buffer = machine.buffer(0, 16 * G);
    buffer.grow_to(2 * G).unwrap();
    let address = buffer.address();
    let using = buffer.use_on(&stream).unwrap();
    assert_eq!(buffer.stats().open_uses, 1);
    buffer.shrink_to(0).unwrap();
    tidy(&machine);
    assert!(mapped(&machine, address), "the guard is alive");
    let held = hold(&machine, &stream);
    fill(&machine, &stream, address, 5);
    drop(using);
    tidy(&machine);
    assert!(mapped(&machine, address), "its work is not done");
    drop(held);
    tidy(&machine);
    assert!(!mapped(&machine, address));
    stream.synchronize().unwrap();
    drop((buffer, stream));
    machine.end();
}

#[test]
fn a_buffer_ends_behind_its_uses_and_nobody_waits() {
    let machine = machine(1, |sim| sim, |pool| pool);
    let stream = machine.stream(0);
    let buffer = machine.buffer(0, 16 * G);
    buffer.grow_to(2 * G).unwrap();
    let address = buffer.address();
    let held = hold(&machine, &stream);
    let using = buffer.use_on(&stream).unwrap();
    fill(&machine, &stream, address, 5);
    drop(buffer);
    assert_eq!(machine.stats(0).elastic_bytes, 2 * G, "the guard keeps it");
    drop(using);
    let stats = machine.stats(0);
    assert_eq!((stats.elastic_bytes, stats.limbo_bytes, stats.elastic_buffers), (0, 2 * G, 0));
    assert!(mapped(&machine, address));
    drop(held);
    drop(stream);
    machine.end();
}

#[test]
fn memory_that_comes_back_early_is_used_behind_its_earlier_users() {
    let machine = machine(1, |sim| sim, |pool| pool);
    let (old, new) = (machine.stream(0), machine.stream(0));
    let buffer = machine.buffer(0, 16 * G);
    buffer.grow_to(G).unwrap();
    let held = hold(&machine, &old);
    let using = buffer.use_on(&old).unwrap();
    fill(&machine, &old, buffer.address(), 5);
    drop(using);
    buffer.shrink_to(0).unwrap();
    let calls = machine.driver.ledger().snapshot();
    assert_eq!(buffer.grow_to(G).unwrap(), G);
    let calls = machine.driver.ledger().snapshot().since(&calls);
    assert_eq!(calls.total(), 1, "it is granted again, nothing else: {calls}");
    assert_eq!(buffer.stats().returned_bytes, G);
    let using = buffer.use_on(&new).unwrap();
    fill(&machine, &new, buffer.address(), 9);
    drop(using);
    drop(held);
    old.synchronize().unwrap();
    new.synchronize().unwrap();
    let word = |bytes: Vec<u8>| u32::from_le_bytes(bytes.try_into().unwrap());
    assert_eq!(word(machine.sim.peek(buffer.address(), 4).unwrap()), 9, "the new user is last");
    // Now that they are done nobody waits for them any more.
    let calls = machine.driver.ledger().snapshot();
    drop(buffer.use_on(&old).unwrap());
    drop(buffer.use_on(&old).unwrap());
    let calls = machine.driver.ledger().snapshot().since(&calls);
    assert_eq!(calls.of(Call::StreamWaitEvent), 0, "{calls}");
    drop((buffer, old, new));
    machine.end();
}

#[test]
fn growth_to_addresses_in_use_by_other_memory_waits_or_says_so() {
    let machine = machine(2, |sim| sim, |pool| pool);
    let stream = machine.stream(0);
    let buffer = machine.buffer(0, 16 * G);
    let far = vmm_pool::Place::Device(DeviceId(1));
    buffer.commit_from(far, 0..G).unwrap();
    let using = buffer.use_on(&stream).unwrap();
    buffer.shrink_to(0).unwrap();
    let before = machine.picture(&buffer);
    let refused = buffer.grow_to(G).unwrap_err();
    assert!(matches!(refused, Error::Elastic(ElasticError::StillUsed { offset: 0 })), "{refused}");
    assert_eq!(machine.picture(&buffer), before);
    drop(using);
    assert_eq!(buffer.grow_to(G).unwrap(), G);
    assert_eq!(buffer.pieces()[0].place, vmm_pool::Place::Device(DeviceId(0)));
    drop((buffer, stream));
    machine.end();
}

#[test]
fn uses_harm_no_capture() {
    for mode in [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed] {
        let machine = machine(1, |sim| sim, |pool| pool);
        let (captured, other) = (machine.stream(0), machine.stream(0));
        let buffer = machine.buffer(0, 16 * G);
        buffer.grow_to(2 * G).unwrap();
        // SAFETY: the stream is live.
        unsafe { machine.driver.capture_begin(DeviceId(0), captured.handle(), mode) }.unwrap();
        for stream in [&captured, &other] {
            let using = buffer.use_on(stream).unwrap();
            fill(&machine, stream, buffer.address() + G, 3);
            drop(using);
        }
        buffer.shrink_to(G).unwrap();
        tidy(&machine);
        assert!(mapped(&machine, buffer.address() + G), "the capture may still be extended");
        buffer.grow_to(4 * G).unwrap();
        // What the captured stream did before its capture may be running, and no event can say.
        let refused = buffer.use_on(&other).map(drop).unwrap_err();
        assert!(matches!(refused, Error::Elastic(ElasticError::StillUsed { .. })), "{refused}");
        drop(buffer.use_on(&captured).unwrap());
        assert_eq!(captured.capture_info().unwrap().status, CaptureStatus::Active);
        // SAFETY: the stream is live; the graph is not used afterwards.
        unsafe {
            let graph = machine.driver.capture_end(DeviceId(0), captured.handle()).unwrap();
            machine.driver.graph_destroy(DeviceId(0), graph).unwrap();
        }
        drop(buffer.use_on(&other).unwrap());
        drop((buffer, captured, other));
        machine.end();
    }
}

/// Found by tests/simulate.sh (seed 4246): all work of the stream was waited for in the event's place, which
/// ends a capture that began after the event was recorded.
#[test]
fn an_event_that_cannot_be_waited_for_harms_no_capture() {
    let machine = machine(1, |sim| sim, |pool| pool);
    let (buffer, stream) = (machine.buffer(0, 16 * G), machine.stream(0));
    buffer.grow_to(2 * G).unwrap();
    let held = hold(&machine, &stream);
    drop(buffer.use_on(&stream).unwrap());
    // SAFETY: the stream is live.
    unsafe { machine.driver.capture_begin(DeviceId(0), stream.handle(), CaptureMode::Relaxed) }
        .unwrap();
    machine.sim.inject(FaultPlan::fail(ResultCode::UNKNOWN).on(Call::EventSynchronize));
    let refused = buffer.sleep(Contents::Dropped, Duration::ZERO).unwrap_err();
    assert!(matches!(refused, Error::Elastic(ElasticError::StillUsed { .. })), "{refused}");
    assert_eq!(stream.capture_info().unwrap().status, CaptureStatus::Active);
    // SAFETY: the stream is live; the graph is not used afterwards.
    unsafe {
        let graph = machine.driver.capture_end(DeviceId(0), stream.handle()).unwrap();
        machine.driver.graph_destroy(DeviceId(0), graph).unwrap();
    }
    drop(held);
    // Without a capture in the way the stream is waited for.
    buffer.sleep(Contents::Dropped, Duration::ZERO).unwrap();
    machine.sim.clear_faults();
    drop((buffer, stream));
    machine.end();
}

#[test]
fn streams_that_come_and_go_do_not_add_up() {
    let machine = machine(1, |sim| sim.stream_slots(usize::MAX), |pool| pool);
    let buffer = machine.buffer(0, 16 * G);
    buffer.grow_to(G).unwrap();
    for _ in 0..200 {
        let stream = machine.stream(0);
        drop(buffer.use_on(&stream).unwrap());
    }
    let left = machine.sim.ledger_summary();
    assert!(left.streams <= 40 && left.events <= 80, "{left:?}");
    assert_eq!(buffer.stats().uses, 200);
    drop(buffer);
    machine.end();
}

#[test]
fn only_devices_with_access_use_it() {
    let machine = machine(2, |sim| sim, |pool| pool);
    let buffer = machine.buffer(0, 16 * G);
    let far = machine.stream(1);
    let refused = buffer.use_on(&far).unwrap_err();
    assert!(matches!(refused, Error::Elastic(ElasticError::NoAccess { device: DeviceId(1) })));
    let elsewhere = vmm_sys::sim::Sim::builder().build();
    let other: std::sync::Arc<dyn vmm_sys::Driver> = elsewhere.clone();
    let foreign = Stream::create(&other, DeviceId(0)).unwrap();
    assert!(matches!(buffer.use_on(&foreign), Err(Error::UnknownDevice { .. })));
    drop((buffer, far, foreign));
    machine.end();
}
