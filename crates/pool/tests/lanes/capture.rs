//! Captures go on whatever the pool does meanwhile. Ids F-… are those of the reports that the stories
//! come from.
use std::thread;

use crate::common::graph::*;
use crate::common::{HOME, Held, MIB, Rig};
use vmm_pool::{ChunkSize, Error};
use vmm_sys::object::Stream;
use vmm_sys::sim::FaultPlan;
use vmm_sys::{Call, CaptureMode, ResultCode};

#[test]
fn f_j1_a_pool_in_full_use_harms_no_capture_in_any_mode() {
    for (mode, background) in MODES.into_iter().flat_map(|mode| [(mode, false), (mode, true)]) {
        let rig = busy_rig(background);
        let aside = Stream::create(&rig.driver, HOME).unwrap();
        let other = Stream::create(&rig.driver, HOME).unwrap();
        let other_lane = rig.pool.lane(&other).unwrap();
        churn(&rig, &rig.lane, &aside, 1); // leaves idle memory and limbo behind
        let out = rig.lane.alloc(MIB).unwrap();
        let scope = rig.lane.capture().unwrap();
        begin(&rig, &rig.stream, mode);
        let first = rig.lane.alloc(100).unwrap();
        let large = rig.lane.alloc(9 * MIB).unwrap(); // grows
        fill(&rig, &rig.stream, &large, 7);
        thread::scope(|scope| {
            scope.spawn(|| churn(&rig, &other_lane, &aside, 2));
        });
        churn(&rig, &other_lane, &rig.stream, 3); // in the capturing thread, on another stream
        copy(&rig, &rig.stream, &out, &large);
        let address = large.address();
        drop(large);
        rig.pool.trim(HOME).unwrap();
        let again = rig.lane.alloc(9 * MIB).unwrap();
        assert_eq!(again.address(), address, "reused in the capture's own order");
        drop((again, first));
        assert!(is_active(&rig.stream), "{mode:?}");
        let graph = Graph::end(&rig, &rig.stream);
        let memory = scope.finish();
        for _ in 0..3 {
            graph.launch(&rig.stream);
            rig.stream.synchronize().unwrap();
            assert!(holds(&out, 7));
            fill(&rig, &rig.stream, &out, 0);
            churn(&rig, &rig.lane, &aside, 4);
        }
        drop((graph, memory, out, other_lane, aside, other));
        rig.end();
    }
}

#[test]
fn f_j1_a_request_that_cannot_be_served_is_an_error_and_the_capture_goes_on() {
    let rig = Rig::new(|b| b.chunk(ChunkSize::Fixed(2 * MIB)).limit_bytes(16 * MIB));
    let idle = rig.lane.alloc(8 * MIB).unwrap();
    for mode in MODES {
        let scope = rig.lane.capture().unwrap();
        begin(&rig, &rig.stream, mode);
        let some = rig.lane.alloc(4 * MIB).unwrap();
        fill(&rig, &rig.stream, &some, 3);
        let error = rig.lane.alloc(32 * MIB).unwrap_err();
        assert!(matches!(error, Error::OutOfMemory(_)), "{error}");
        assert!(is_active(&rig.stream), "{mode:?}");
        drop(some);
        let graph = Graph::end(&rig, &rig.stream);
        let memory = scope.finish();
        graph.launch(&rig.stream);
        rig.stream.synchronize().unwrap();
        drop((graph, memory));
        assert_eq!(rig.stats().private_bytes, 0);
    }
    drop(idle);
    rig.end();
}

#[test]
fn f_j2_no_event_of_the_pool_dies_with_a_graph() {
    let rig = Rig::new(|b| b.chunk(ChunkSize::Fixed(2 * MIB)).soft_limit(None));
    for scoped in [true, false] {
        for drop_before_destroy in [true, false] {
            let other = Stream::create(&rig.driver, HOME).unwrap();
            let other_lane = rig.pool.lane(&other).unwrap();
            let mut foreign = other_lane.alloc(2 * MIB).unwrap();
            let mut dropped_meanwhile = other_lane.alloc(2 * MIB).unwrap();
            let mut dropped_before = other_lane.alloc(2 * MIB).unwrap();
            dropped_before.record_stream(&rig.stream).unwrap();
            let scope = scoped.then(|| rig.lane.capture().unwrap());
            // Another thread could be at this while the capture begins.
            let calls = rig.calls(|| drop(dropped_before));
            assert_eq!(calls.of(Call::EventRecord), u64::from(!scoped), "{calls}");
            begin(&rig, &rig.stream, CaptureMode::Global);
            let own = rig.lane.alloc(2 * MIB).unwrap();
            copy(&rig, &rig.stream, &own, &foreign);
            foreign.record_stream(&rig.stream).unwrap();
            dropped_meanwhile.record_stream(&rig.stream).unwrap();
            let calls = rig.calls(|| drop(dropped_meanwhile));
            assert_eq!(calls.of(Call::EventRecord), 0, "{calls}");
            let graph = Graph::end(&rig, &rig.stream);
            let memory = scope.map(|scope| scope.finish());
            if drop_before_destroy {
                drop((own, foreign));
                drop((graph, memory));
            } else {
                drop((graph, memory));
                drop((own, foreign));
            }
            // Nothing is stuck, and nothing surfaces at an unrelated call.
            drop(rig.lane.alloc(MIB).unwrap());
            rig.pool.trim(HOME).unwrap();
            let stats = rig.stats();
            assert_eq!((stats.limbo_buffers, stats.held_bytes), (0, 0), "{stats:?}");
            drop((other_lane, other));
        }
    }
    rig.end();
}

#[test]
fn without_a_scope_memory_of_a_capture_is_ordinary() {
    // What the stories above would see if the memory were not kept.
    let rig = busy_rig(false);
    let out = rig.lane.alloc(4 * WORDS).unwrap();
    begin(&rig, &rig.stream, CaptureMode::ThreadLocal);
    let scratch = rig.lane.alloc(3 * MIB).unwrap();
    copy(&rig, &rig.stream, &out, &scratch);
    let address = scratch.address();
    drop(scratch);
    let graph = Graph::end(&rig, &rig.stream);
    let other = rig.lane.alloc(3 * MIB).unwrap();
    assert_eq!((other.address(), rig.stats().private_bytes), (address, 0));
    drop((other, out));
    rig.pool.trim(HOME).unwrap();
    graph.launch(&rig.stream);
    assert!(rig.stream.synchronize().is_err(), "its memory is gone");
}

#[test]
fn without_a_scope_nothing_moves_while_the_stream_is_captured() {
    let rig = Rig::new(|b| {
        b.chunk(ChunkSize::Fixed(2 * MIB)).soft_limit(Some(0.0)).limit_bytes(24 * MIB)
    });
    let mut blocks: Vec<_> = (0..8).map(|_| rig.lane.alloc(2 * MIB).unwrap()).collect();
    for nth in [6, 4, 2, 0] {
        blocks.remove(nth);
    }
    begin(&rig, &rig.stream, CaptureMode::Global);
    let calls = rig.calls(|| {
        assert_eq!(rig.pool.trim(HOME).unwrap(), 0);
        assert_eq!((rig.stats().idle_bytes, rig.stats().retired_mappings), (8 * MIB, 0));
        let new = rig.lane.alloc(8 * MIB).unwrap(); // new memory, although 8 MiB are free in holes
        assert_eq!((rig.stats().idle_bytes, rig.stats().retired_mappings), (8 * MIB, 0));
        fill(&rig, &rig.stream, &new, 1);
        let error = rig.lane.alloc(4 * MIB).unwrap_err();
        assert!(matches!(error, Error::OutOfMemory(_)), "{error}");
        drop(new);
    });
    let unwanted = [Call::EventRecord, Call::EventQuery, Call::EventSynchronize, Call::MemUnmap];
    assert_eq!(unwanted.map(|call| calls.of(call)), [0; 4], "{calls}");
    assert!(is_active(&rig.stream));
    drop(Graph::end(&rig, &rig.stream));
    // Afterwards they do.
    let calls = rig.calls(|| blocks.push(rig.lane.alloc(16 * MIB).unwrap()));
    assert_eq!(calls.of(Call::MemCreate), 0, "{calls}");
    drop(blocks);
    rig.end();
}

#[test]
fn a_captured_per_thread_stream_is_not_spoilt_from_elsewhere() {
    for (scoped, mode) in MODES.into_iter().flat_map(|mode| [(true, mode), (false, mode)]) {
        let rig = busy_rig(true); // a thread that sweeps
        let stream = Stream::per_thread(&rig.driver, HOME).unwrap();
        let lane = rig.pool.lane(&stream).unwrap();
        let legacy = Stream::legacy(&rig.driver, HOME).unwrap();
        let legacy_lane = rig.pool.lane(&legacy).unwrap();
        let held = Held::new(&rig.sim, stream.handle());
        let mut crossed = rig.lane.alloc(2 * MIB).unwrap();
        crossed.record_stream(&stream).unwrap();
        crossed.record_stream(&legacy).unwrap();
        let mine = lane.alloc(2 * MIB).unwrap();
        let theirs = legacy_lane.alloc(2 * MIB).unwrap();
        drop(held);
        let scope = scoped.then(|| lane.capture().unwrap());
        begin(&rig, &stream, mode);
        let own = lane.alloc(2 * MIB).unwrap();
        fill(&rig, &stream, &own, 1);
        thread::scope(|scope| {
            // Each of these would have to be gated on the legacy stream.
            scope.spawn(|| {
                drop((crossed, mine, theirs));
                rig.pool.trim(HOME).unwrap();
                drop(legacy_lane.alloc(4 * MIB).unwrap());
            });
        });
        thread::sleep(std::time::Duration::from_millis(5)); // the background thread comes by
        assert!(is_active(&stream), "scoped {scoped}, {mode:?}");
        assert!(rig.stats().limbo_buffers > 0);
        drop(own);
        let graph = Graph::end(&rig, &stream);
        let memory = scope.map(|scope| scope.finish());
        drop((graph, memory));
        rig.pool.trim(HOME).unwrap();
        assert_eq!(rig.stats().limbo_buffers, 0);
        drop((lane, legacy_lane));
        rig.end();
    }
}

#[test]
fn a_gate_that_a_capture_took_is_recorded_anew() {
    let rig = Rig::new(|b| b);
    let other = Stream::create(&rig.driver, HOME).unwrap();
    for code in [ResultCode::CAPTURED_EVENT, ResultCode::INVALID_VALUE] {
        let mut crossed = rig.lane.alloc(MIB).unwrap();
        crossed.record_stream(&other).unwrap();
        drop(crossed);
        rig.sim.inject(FaultPlan::fail(code).on(Call::EventQuery).at(1).once());
        let calls = rig.calls(|| {
            rig.pool.trim(HOME).unwrap();
            rig.pool.trim(HOME).unwrap();
        });
        assert!(calls.of(Call::EventRecord) >= 1, "{calls}");
        assert_eq!(rig.stats().limbo_buffers, 0);
    }
    drop(other);
    rig.end();
}
