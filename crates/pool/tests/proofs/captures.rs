//! Captures: requests are diverted and come back while other threads ask, close and free.

use std::collections::BTreeSet;
use std::sync::Arc;

use shuttle::sync::atomic::{AtomicU32, Ordering::SeqCst};
use vmm_pool::{Error, free_raw};
use vmm_sys::object::{Event, Stream};
use vmm_sys::{CaptureMode, GraphHandle};

use crate::rig::{CHUNK, HOME, Rig, prove, spawn};

fn begin(rig: &Rig, stream: &Stream) {
    // SAFETY: the stream is live.
    unsafe { rig.driver.capture_begin(HOME, stream.handle(), CaptureMode::Global) }.unwrap();
}

fn end(rig: &Rig, stream: &Stream) -> GraphHandle {
    // SAFETY: the stream is live.
    unsafe { rig.driver.capture_end(HOME, stream.handle()) }.unwrap()
}

fn destroy(rig: &Rig, graph: GraphHandle) {
    // SAFETY: the graph is live, and not used afterwards.
    unsafe { rig.driver.graph_destroy(HOME, graph) }.unwrap();
}

const BEFORE: u32 = 0;
const OPEN: u32 = 2;
const AFTER: u32 = 4;

/// A request that is made while a scope is open is served from the memory of its graph, and one
/// that is made before or after is not.
///
/// Meant to catch: a lane that stays open while it is diverted (`open_id` in `divert`); one that stays
/// diverted (`undivert`).
#[test]
fn requests_go_where_the_scope_says() {
    prove("requests_go_where_the_scope_says", || {
        let rig = Rig::new(|pool| pool);
        let lane = rig.lane();
        // One that is warm.
        drop(lane.alloc(1000).unwrap());
        let phase = Arc::new(AtomicU32::new(BEFORE));
        let asks = spawn({
            let (lane, phase) = (lane.clone(), phase.clone());
            move || {
                let (mut inside, mut outside, mut kept) =
                    (BTreeSet::new(), BTreeSet::new(), Vec::new());
                for bytes in [1000, CHUNK, 1000, 2000, 1000] {
                    let before = phase.load(SeqCst);
                    let buffer = lane.alloc(bytes).unwrap();
                    let chunk = buffer.address() / CHUNK;
                    kept.push(buffer);
                    match (before, phase.load(SeqCst)) {
                        (OPEN, OPEN) => drop(inside.insert(chunk)),
                        (BEFORE, BEFORE) | (AFTER, AFTER) => drop(outside.insert(chunk)),
                        _ => {}
                    }
                }
                (inside, outside, kept)
            }
        });
        phase.store(BEFORE + 1, SeqCst);
        let scope = lane.capture().unwrap();
        phase.store(OPEN, SeqCst);
        let mine = lane.alloc(1000).unwrap();
        let private = mine.address() / CHUNK;
        drop(mine);
        phase.store(OPEN + 1, SeqCst);
        let memory = scope.finish();
        phase.store(AFTER, SeqCst);
        let after = lane.alloc(1000).unwrap().address() / CHUNK;
        let (mut inside, mut outside, kept) = asks.join().unwrap();
        inside.insert(private);
        outside.insert(after);
        assert!(inside.is_disjoint(&outside), "{inside:x?} and {outside:x?}");
        rig.sound();
        drop((kept, memory, lane));
        rig.end();
    });
}

/// The memory of a scope is dropped as soon as the scope has ended, while another thread asks: its
/// request was on the way to that memory, and is served by the lane itself.
///
/// Found: a request that is refused with the private lane it was diverted to
/// (`alloc_cold`, `alloc_raw_cold`).
#[test]
fn a_request_outlives_the_scope_it_was_sent_to() {
    prove("a_request_outlives_the_scope_it_was_sent_to", || {
        let rig = Rig::new(|pool| pool);
        let lane = rig.lane();
        let scope = lane.capture().unwrap();
        let asks = [
            spawn({
                let lane = lane.clone();
                move || drop(lane.alloc(1000).unwrap())
            }),
            spawn({
                let lane = lane.clone();
                move || free_raw(lane.alloc_raw(1000).unwrap(), 1000).unwrap()
            }),
        ];
        drop(scope.finish());
        asks.into_iter().for_each(|thread| thread.join().unwrap());
        rig.sound();
        drop(lane);
        rig.end();
    });
}

/// A lane that is closed during a scope stays closed after it.
///
/// Meant to catch: `undivert` that opens a lane which is closing.
#[test]
fn a_lane_closed_in_a_scope_stays_closed() {
    prove("a_lane_closed_in_a_scope_stays_closed", || {
        let rig = Rig::new(|pool| pool);
        let lane = rig.lane();
        let outer = lane.alloc(1000).unwrap();
        let scope = lane.capture().unwrap();
        let inner = lane.alloc(1000).unwrap();
        let finishes = spawn(move || scope.finish());
        let closes = spawn({
            let (pool, stream) = (rig.pool.clone(), lane.stream().clone());
            move || pool.close_lane(&stream)
        });
        let memory = finishes.join().unwrap();
        closes.join().unwrap();
        let answer = lane.alloc(1000);
        assert!(matches!(answer, Err(Error::LaneClosed)), "{answer:?}");
        rig.sound();
        let (frees, drops) = (spawn(move || drop(outer)), spawn(move || drop(memory)));
        drop((inner, lane));
        frees.join().unwrap();
        drops.join().unwrap();
        assert_eq!(rig.sound().lanes, 0);
        rig.end();
    });
}

/// A lane that is found in the capture just as the scope ends is not left behind in it.
///
/// Meant to catch: a scope that does not refuse to be joined once it has ended (`take` in `Scope::end`).
#[test]
fn who_joins_late_is_not_left_behind() {
    prove("who_joins_late_is_not_left_behind", || {
        let rig = Rig::new(|pool| pool);
        let (origin, other) = (rig.lane(), rig.lane());
        let event = Event::create(&rig.driver, HOME).unwrap();
        let scope = origin.capture().unwrap();
        begin(&rig, origin.stream());
        event.record(origin.stream()).unwrap();
        other.stream().wait_event(&event).unwrap();
        let joins = spawn({
            let other = other.clone();
            move || drop(other.alloc(CHUNK).unwrap())
        });
        let memory = scope.finish();
        joins.join().unwrap();
        // Nobody is diverted any more.
        let again = other.capture().unwrap();
        drop(again);
        event.record(other.stream()).unwrap();
        origin.stream().wait_event(&event).unwrap();
        destroy(&rig, end(&rig, origin.stream()));
        rig.sound();
        drop((memory, origin, other, event));
        rig.end();
    });
}

/// No gate is recorded where it would spoil a capture that begins meanwhile.
///
/// Meant to catch: `Device::gate` that lets go of the open scopes before it has recorded.
#[test]
fn a_capture_begins_while_gates_are_recorded() {
    prove("a_capture_begins_while_gates_are_recorded", || {
        let rig = Rig::new(|pool| pool);
        let legacy = Stream::legacy(&rig.driver, HOME).unwrap();
        let lane = rig.lane();
        let mut crossed = lane.alloc(CHUNK).unwrap();
        crossed.record_stream(&legacy).unwrap();
        let captures = spawn({
            let rig = rig.clone();
            move || {
                let stream = Stream::per_thread(&rig.driver, HOME).unwrap();
                let lane = rig.pool.lane(&stream).unwrap();
                let scope = lane.capture().unwrap();
                begin(&rig, &stream);
                let graph = end(&rig, &stream); // which fails if the capture was spoilt
                let memory = scope.finish();
                destroy(&rig, graph);
                drop(memory);
            }
        });
        drop(crossed);
        drop(lane.alloc(CHUNK).unwrap());
        captures.join().unwrap();
        rig.sound();
        drop((lane, legacy));
        rig.end();
    });
}
