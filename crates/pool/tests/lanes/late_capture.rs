//! Captures beside the end of things: lanes that are closed, pools that are dropped. Work from before a
//! capture may still run, and no event that is recorded during it can say when it is done.
use std::sync::Arc;

use crate::common::graph::*;
use crate::common::{HOME, Held, MIB, Rig};
use vmm_pool::{ChunkSize, Pool};
use vmm_sys::object::Stream;
use vmm_sys::{Call, CaptureMode, StreamHandle};

/// Takes a stream by its handle, as an adapter of another framework does.
fn borrowed(rig: &Rig) -> Stream {
    let handle = rig.driver.stream_create(HOME).unwrap();
    // SAFETY: the stories destroy it once they may.
    unsafe { Stream::from_raw(&rig.driver, HOME, handle, None) }.unwrap()
}

fn destroy(rig: &Rig, handle: StreamHandle) {
    // SAFETY: a live stream, which nobody needs any more.
    unsafe { rig.driver.stream_destroy(HOME, handle) }.unwrap();
}

/// All work ends without a fault, and then nothing is held.
fn ends_soundly(rig: Rig, stream: Stream) {
    rig.driver.device_synchronize(HOME).unwrap();
    rig.pool.trim(HOME).unwrap();
    assert_eq!(rig.stats().held_bytes, 0);
    drop(stream);
    rig.end();
}

#[test]
fn a_lane_that_is_closed_during_its_capture_is_gated_after_it() {
    for (mode, outlived) in MODES.into_iter().flat_map(|mode| [(mode, false), (mode, true)]) {
        let rig = Rig::new(|b| b.chunk(ChunkSize::Fixed(2 * MIB)));
        let stream = borrowed(&rig);
        let lane = rig.pool.lane(&stream).unwrap();
        let buffer = lane.alloc(2 * MIB).unwrap();
        let last = outlived.then(|| lane.alloc(2 * MIB).unwrap());
        let held = Held::new(&rig.sim, stream.handle());
        fill(&rig, &stream, &buffer, 1); // work from before, which is held
        begin(&rig, &stream, mode);
        drop((buffer, lane));
        let calls = rig.calls(|| assert!(!rig.pool.close_lane(&stream), "its handle is needed"));
        assert_eq!([Call::EventRecord, Call::MemUnmap].map(|call| calls.of(call)), [0; 2]);
        rig.pool.trim(HOME).unwrap();
        assert!(!rig.pool.close_lane(&stream), "as before");
        assert!(is_active(&stream), "{mode:?}");
        let held_bytes = rig.stats().held_bytes;
        assert!(held_bytes >= 2 * MIB);
        drop(Graph::end(&rig, &stream));
        assert!(rig.pool.close_lane(&stream), "recorded now");
        destroy(&rig, stream.handle());
        drop(rig.lane.alloc(MIB).unwrap());
        assert_eq!(rig.calls(|| drop(last)).of(Call::MemUnmap), 0, "the work is still held");
        drop(held);
        ends_soundly(rig, stream);
    }
}

#[test]
fn old_places_of_a_borrowed_stream_are_gated_before_it_goes() {
    let rig = Rig::new(|b| b.chunk(ChunkSize::Fixed(2 * MIB)).soft_limit(Some(0.0)));
    let stream = borrowed(&rig);
    let lane = rig.pool.lane(&stream).unwrap();
    let (hole, kept) = (lane.alloc(2 * MIB).unwrap(), lane.alloc(2 * MIB).unwrap());
    let held = Held::new(&rig.sim, stream.handle());
    fill(&rig, &stream, &hole, 1);
    drop(hole);
    let moved = lane.alloc(4 * MIB).unwrap(); // the hole's chunk and a new one
    assert_eq!(rig.stats().retired_mappings, 1);
    assert!(rig.pool.close_lane(&stream));
    destroy(&rig, stream.handle());
    // Whoever comes by asks an event, and names no handle that is gone.
    rig.pool.verify().unwrap();
    drop(rig.lane.alloc(MIB).unwrap());
    let calls = rig.calls(|| drop(rig.lane.alloc(20 * MIB).unwrap()));
    assert_eq!((calls.of(Call::EventRecord), rig.stats().retired_mappings), (0, 1), "{calls}");
    drop(held);
    rig.pool.trim(HOME).unwrap();
    assert_eq!(rig.stats().retired_mappings, 0);
    drop((moved, kept, lane, stream));
    rig.end();
}

#[test]
fn memory_of_graphs_does_not_name_a_stream_that_is_gone() {
    let rig = Rig::new(|b| b.chunk(ChunkSize::Fixed(2 * MIB)));
    let stream = borrowed(&rig);
    let lane = rig.pool.lane(&stream).unwrap();
    let scope = lane.capture().unwrap();
    begin(&rig, &stream, CaptureMode::Global);
    let scratch = lane.alloc(2 * MIB).unwrap();
    fill(&rig, &stream, &scratch, 3);
    drop(scratch);
    let graph = Graph::end(&rig, &stream);
    let memory = scope.finish();
    let held = Held::new(&rig.sim, stream.handle());
    graph.launch(&stream);
    assert!(rig.pool.close_lane(&stream));
    destroy(&rig, stream.handle());
    let calls = rig.calls(|| drop((graph, memory, lane)));
    assert_eq!([Call::EventRecord, Call::MemUnmap].map(|call| calls.of(call)), [0; 2], "{calls}");
    assert!(rig.stats().limbo_bytes >= 2 * MIB);
    drop(held);
    ends_soundly(rig, stream);
}

#[test]
fn a_pool_that_ends_during_a_capture_leaves_what_may_be_in_use() {
    for mode in MODES {
        let rig = Rig::new(|b| b.chunk(ChunkSize::Fixed(2 * MIB)));
        let buffer = rig.lane.alloc(4 * MIB).unwrap();
        let held = Held::new(&rig.sim, rig.stream.handle());
        fill(&rig, &rig.stream, &buffer, 1);
        begin(&rig, &rig.stream, mode);
        let Rig { sim, driver, pool, stream, lane } = rig;
        drop((buffer, lane, pool)); // neither waits nor unmaps under the held work
        assert!(is_active(&stream), "{mode:?}");
        let mapped = |sim: &vmm_sys::sim::Sim| sim.ledger_summary().mapped_bytes;
        assert_eq!(mapped(&sim), 4 * MIB);
        // A pool that comes by meanwhile cannot tell either.
        let rig = Rig::on(sim, |b| b);
        rig.pool.trim(HOME).unwrap();
        assert_eq!(mapped(&rig.sim), 4 * MIB);
        drop(Graph::end(&rig, &stream));
        drop(rig.lane.alloc(MIB).unwrap()); // records what can be recorded now
        assert!(mapped(&rig.sim) >= 4 * MIB, "the work is still held");
        drop(held);
        stream.synchronize().unwrap(); // no fault
        rig.pool.trim(HOME).unwrap();
        assert_eq!(mapped(&rig.sim), 0);
        drop((driver, stream));
        rig.end();
    }
}

#[test]
fn a_pool_that_ends_beside_a_captured_blocking_stream_leaves_the_legacy_streams_memory() {
    let rig = Rig::new(|b| b.chunk(ChunkSize::Fixed(2 * MIB)));
    let legacy = Stream::legacy(&rig.driver, HOME).unwrap();
    let legacy_lane = rig.pool.lane(&legacy).unwrap();
    let buffer = legacy_lane.alloc(4 * MIB).unwrap();
    let handle = rig.driver.stream_create_blocking(HOME).unwrap();
    // SAFETY: destroyed at the end of the story.
    let blocking = unsafe { Stream::from_raw(&rig.driver, HOME, handle, None) }.unwrap();
    let held = Held::new(&rig.sim, legacy.handle());
    fill(&rig, &legacy, &buffer, 1);
    begin(&rig, &blocking, CaptureMode::Global);
    let Rig { sim, driver, pool, stream, lane } = rig;
    drop((buffer, legacy_lane, lane, pool, stream));
    assert!(is_active(&blocking));
    let driver: Arc<dyn vmm_sys::Driver> = driver;
    let pool = Pool::builder(driver.clone()).background(false).build().unwrap();
    pool.trim(HOME).unwrap();
    assert_eq!(sim.ledger_summary().mapped_bytes, 4 * MIB);
    // SAFETY: a live stream; the graph is not used.
    unsafe {
        let graph = driver.capture_end(HOME, handle).unwrap();
        driver.graph_destroy(HOME, graph).unwrap();
    }
    drop(held);
    pool.trim(HOME).unwrap();
    assert_eq!(sim.ledger_summary().mapped_bytes, 0);
    drop((pool, legacy, blocking));
    // SAFETY: a live stream, which nobody needs any more.
    unsafe { driver.stream_destroy(HOME, handle) }.unwrap();
    drop(driver);
    sim.check_clean().unwrap();
}
