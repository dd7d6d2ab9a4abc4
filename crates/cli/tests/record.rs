//! What a pool records is what it was asked: recorded, read back, replayed.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use vmm_pool::{Lane, Pool, free_raw};
use vmm_pool_cli::trace::{Op, Trace};
use vmm_sys::object::Stream;
use vmm_sys::sim::Sim;
use vmm_sys::{DeviceId, Driver};

fn folder() -> &'static Path {
    Path::new(env!("CARGO_TARGET_TMPDIR"))
}

/// A pool that records to `file`, and lanes of it.
fn recording(file: &Path, lanes: usize) -> (Pool, Vec<Stream>, Vec<Lane>) {
    let driver: Arc<dyn Driver> = Sim::builder().build();
    let pool = Pool::builder(driver.clone()).trace_to(file).background(false).build().unwrap();
    let streams: Vec<_> =
        (0..lanes).map(|_| Stream::create(&driver, DeviceId(0)).unwrap()).collect();
    let lanes = streams.iter().map(|stream| pool.lane(stream).unwrap()).collect();
    (pool, streams, lanes)
}

/// Does what a trace says.
fn act(trace: &Trace, lanes: &[Lane]) {
    let mut slots: Vec<_> = (0..trace.slots).map(|_| None).collect();
    let mut blocks = trace.blocks.iter();
    for op in &trace.ops {
        match *op {
            Op::Alloc { slot } => {
                let block = blocks.next().unwrap();
                let buffer = lanes[block.stream as usize].alloc(block.bytes).unwrap();
                slots[slot as usize] = Some(buffer);
            }
            Op::Free { slot } => drop(slots[slot as usize].take().unwrap()),
        }
    }
    // What the trace leaves live must not be freed by the recording either.
    slots.into_iter().flatten().for_each(std::mem::forget);
}

/// All that a replay sees of a trace: names and numbers of blocks are the recorder's own.
fn seen(trace: &Trace) -> (&[Op], Vec<(u64, u32)>, usize) {
    let blocks = trace.blocks.iter().map(|block| (block.bytes, block.stream)).collect();
    (&trace.ops, blocks, trace.streams)
}

#[test]
fn a_run_that_was_recorded_reads_as_the_run() {
    for name in ["unet_seg", "serve_mixed"] {
        let source = format!("../../tests/traces/{name}.trace.gz");
        let original = Trace::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join(source)).unwrap();
        let file = folder().join(format!("{name}-again.trace"));
        let (pool, streams, lanes) = recording(&file, original.streams);
        act(&original, &lanes);
        // Blocks that are still live keep the recorder: the file is behind by its period at most.
        drop((lanes, streams, pool));
        let recorded = read_when(&file, |trace| trace.ops.len() == original.ops.len());
        assert_eq!(seen(&recorded), seen(&original), "{name}");
        assert_eq!(recorded.peak_live_bytes, original.peak_live_bytes);
    }
}

/// Reads the file once it is as expected.
fn read_when(file: &Path, ready: impl Fn(&Trace) -> bool) -> Trace {
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
    loop {
        match Trace::open(file) {
            Ok(trace) if ready(&trace) => return trace,
            other => assert!(std::time::Instant::now() < deadline, "{other:?}"),
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

#[test]
fn lanes_of_many_threads_crossings_and_raw_blocks_make_one_good_trace() {
    let file = folder().join("threads.trace");
    let (pool, streams, lanes) = recording(&file, 4);
    std::thread::scope(|scope| {
        for (index, lane) in lanes.iter().enumerate() {
            let other = &streams[(index + 1) % streams.len()];
            scope.spawn(move || {
                let mut kept = Vec::new();
                for round in 0..500_u64 {
                    let mut buffer = lane.alloc(1 + round * 977 % 100_000).unwrap();
                    if round % 3 == 0 {
                        buffer.record_stream(other).unwrap();
                    }
                    kept.push(buffer);
                    if kept.len() > 20 {
                        kept.swap_remove(round as usize % 20);
                    }
                    let address = lane.alloc_raw(4096).unwrap();
                    free_raw(address, 4096).unwrap();
                    drop(lane.alloc(0).unwrap());
                }
            });
        }
    });
    drop((lanes, streams, pool));
    // Everything was freed: the recorder is gone, and the file complete. Reading it checks that no
    // block is live twice or freed twice.
    let trace = Trace::open(&file).unwrap();
    let per_lane = 500 * 2 * 2;
    assert_eq!((trace.ops.len(), trace.left_live, trace.streams), (4 * per_lane, 0, 4));
    let output = replay(&file);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn replay(file: &PathBuf) -> std::process::Output {
    Command::new(env!("CARGO_BIN_EXE_vmm-pool"))
        .args(["replay", "--driver", "sim", "--passes", "1", "--json"])
        .arg(file)
        .output()
        .unwrap()
}
