//! Small questions to buffers, lanes and pools, and what shortages say in words.

use std::sync::Arc;

use crate::common::graph::{Graph, WORDS, begin, capture_chain};
use crate::common::{HOME, MIB, Rig};
use vmm_pool::{ChunkSize, Error, Hint, OutOfMemory, Pool};
use vmm_sys::object::Stream;
use vmm_sys::sim::Sim;
use vmm_sys::{CaptureMode, Driver};

fn shortage<T: std::fmt::Debug>(result: Result<T, Error>) -> OutOfMemory {
    match result.unwrap_err() {
        Error::OutOfMemory(facts) => *facts,
        error => panic!("{error}"),
    }
}

#[test]
fn a_buffer_and_its_lane_say_what_they_are() {
    let rig = Rig::new(|b| b.chunk(ChunkSize::Fixed(2 * MIB)));
    let block = rig.lane.alloc(3 * MIB).unwrap();
    assert_eq!(block.device(), HOME);
    let text = format!("{block:?}");
    assert_eq!(text, format!("Buffer({} bytes at {:#x} of {HOME})", 3 * MIB, block.address()));
    assert_eq!(rig.lane.largest_free_bytes(), MIB, "the rest of the second chunk");
    drop(block);
    assert_eq!(rig.lane.largest_free_bytes(), 4 * MIB);
    // Without looking behind the lock, so that it can be written while somebody holds it.
    assert!(format!("{:?} {:?}", rig.lane, rig.pool).contains("Lane"));
    rig.end();
}

#[test]
fn a_stream_of_another_driver_gets_no_lane() {
    let rig = Rig::new(|b| b);
    let other: Arc<dyn Driver> = Sim::builder().build();
    let stream = Stream::create(&other, HOME).unwrap();
    let error = rig.pool.lane(&stream).unwrap_err();
    assert!(matches!(error, Error::UnknownDevice { device } if device == HOME), "{error}");
    drop((stream, other));
    rig.end();
}

/// Not the pool's limit, but the device.
#[test]
fn a_prefill_beyond_what_the_device_has_names_the_drivers_refusal() {
    let sim = Sim::builder().device_bytes(1 << 30).build();
    let driver: Arc<dyn Driver> = sim.clone();
    let pool = Pool::builder(driver).background(false).build().unwrap();
    let facts = shortage(pool.prefill(HOME, 2 << 30));
    assert!(facts.cause.is_some(), "{facts}");
    assert!(facts.stats.stock_bytes > 0, "what could be made is there: {facts}");
    let text = facts.to_string();
    assert!(text.contains("no limit set; ") && text.contains("CUDA_ERROR_OUT_OF_MEMORY"), "{text}");
    drop(pool);
    sim.check_clean().unwrap();
}

#[test]
fn memory_of_graphs_and_of_captures_is_named_where_it_lacks() {
    let rig = Rig::new(|b| b.chunk(ChunkSize::Fixed(2 * MIB)).limit_bytes(32 * MIB));
    let out = rig.lane.alloc(4 * WORDS).unwrap();
    let scope = rig.lane.capture().unwrap();
    let graph = capture_chain(&rig, &out, 5);
    let memory = scope.finish();
    let private_bytes = rig.stats().private_bytes;
    let facts = shortage(rig.lane.alloc(30 * MIB));
    assert!(facts.hints.contains(&Hint::DropGraphs { private_bytes }), "{facts}");
    assert!(facts.to_string().contains("drop captured graphs"), "{facts}");
    drop((graph, memory));

    // What a capture uses has no end that could be waited for.
    let captured = Stream::create(&rig.driver, HOME).unwrap();
    let mut used = rig.lane.alloc(8 * MIB).unwrap();
    begin(&rig, &captured, CaptureMode::Relaxed);
    used.record_stream(&captured).unwrap();
    drop(used);
    let facts = shortage(rig.lane.alloc(30 * MIB));
    let limbo_bytes = facts.stats.limbo_bytes;
    assert!(limbo_bytes >= 8 * MIB, "{facts}");
    assert!(facts.hints.contains(&Hint::EndCapture { limbo_bytes }), "{facts}");
    assert!(facts.to_string().contains("end stream captures"), "{facts}");
    drop(Graph::end(&rig, &captured));
    drop(rig.lane.alloc(30 * MIB).unwrap());
    drop((out, captured));
    rig.end();
}

#[test]
fn every_hint_has_words_of_its_own_and_its_figure() {
    const BYTES: u64 = 123_456_789;
    let hints = [
        Hint::RaiseLimit { limit_bytes: BYTES },
        Hint::RaiseBudget { limit_bytes: BYTES },
        Hint::SmallerChunks { chunk_bytes: BYTES },
        Hint::Wait { limbo_bytes: BYTES },
        Hint::EndCapture { limbo_bytes: BYTES },
        Hint::LeaveGuardMode { rounding_bytes: BYTES },
        Hint::DropGraphs { private_bytes: BYTES },
        Hint::OthersHold { bytes: BYTES },
    ];
    let mut words: Vec<String> = hints.iter().map(ToString::to_string).collect();
    assert!(words.iter().all(|words| words.contains("123456789")), "{words:?}");
    words.sort_unstable();
    words.dedup();
    assert_eq!(words.len(), hints.len());
}
