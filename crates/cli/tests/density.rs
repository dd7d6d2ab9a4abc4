//! How much the pool holds over what is alive, and what that costs in driver calls, on the recorded
//! traces: the promises of docs/BENCHMARKS.md. Counts on the simulated device, so a failure is a
//! change of behaviour and never a slow machine.

#![allow(clippy::unwrap_used, reason = "a failure ends the test")]

use std::num::NonZeroU16;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use vmm_pool_cli::replay::{HostClock, PassFigures, Plan, Spread, count};
use vmm_pool_cli::target::{Late, LateDriver, PoolOptions, PoolTarget};
use vmm_pool_cli::trace::Trace;
use vmm_sys::sim::Sim;
use vmm_sys::{Call, CallCounts, DeviceId, Driver};

const TRACES: [&str; 5] = ["gnn", "llama_generate", "llama_train", "serve_mixed", "unet_seg"];
const DEVICE: DeviceId = DeviceId(0);

/// How a replay differs from the default.
#[derive(Clone, Copy, Default)]
struct How {
    passes: u32,
    streams: Option<NonZeroU16>,
    soft_limit_off: bool,
    late_us: Option<u64>,
}

/// The passes of one trace.
struct Passes {
    trace: &'static str,
    ratios: Vec<f64>,
    calls: Vec<CallCounts>,
}

fn replay(trace: &'static str, how: How) -> Passes {
    let path: PathBuf =
        Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../tests/traces/{trace}.trace.gz"));
    let read = Trace::open(&path).unwrap();
    let spread = how.streams.map(|streams| Spread { streams, seed: 1 });
    let plan = Plan::new(&read, spread);
    let options =
        PoolOptions { soft_limit: (!how.soft_limit_off).then_some(0.01), ..PoolOptions::default() };
    let sim = Sim::builder().build();
    let driver: Arc<dyn Driver> = sim.clone();
    let clock = HostClock::new();
    let figures: Vec<PassFigures> = match how.late_us {
        None => {
            let make = || PoolTarget::new(&driver, DEVICE, &options, plan.streams);
            count(&plan, how.passes, &clock, make, || ())
        }
        Some(late_us) => {
            let on = LateDriver::Sim(sim);
            let make = || Late::new(&on, DEVICE, &options, plan.streams, late_us);
            count(&plan, how.passes, &clock, make, || ())
        }
    }
    .unwrap();
    let live = read.peak_live_bytes as f64;
    Passes {
        trace,
        ratios: figures.iter().map(|pass| pass.peak_held_bytes as f64 / live).collect(),
        calls: figures.into_iter().map(|pass| pass.calls).collect(),
    }
}

fn replay_all(how: How) -> Vec<Passes> {
    thread::scope(|scope| {
        let runs = TRACES.map(|trace| scope.spawn(move || replay(trace, how)));
        runs.into_iter().map(|run| run.join().unwrap()).collect()
    })
}

/// Geometric mean of a pass, counted from 1, over the traces.
fn mean(runs: &[Passes], pass: usize) -> f64 {
    let sum: f64 = runs.iter().map(|run| run.ratios[pass - 1].ln()).sum();
    (sum / runs.len() as f64).exp()
}

fn mapping_calls(calls: &CallCounts) -> u64 {
    [Call::MemCreate, Call::MemMap, Call::MemSetAccess, Call::MemUnmap, Call::MemRelease]
        .iter()
        .map(|call| calls.of(*call))
        .sum()
}

fn host_waits(calls: &CallCounts) -> u64 {
    [Call::EventSynchronize, Call::StreamSynchronize, Call::CtxSynchronize]
        .iter()
        .map(|call| calls.of(*call))
        .sum()
}

#[test]
fn after_a_hundred_passes_it_is_still_dense() {
    let runs = replay_all(How { passes: 100, ..How::default() });
    for pass in [1, 2, 5, 10, 20, 50, 75, 100] {
        println!("pass {pass}: geometric mean {:.4}", mean(&runs, pass));
    }
    assert!(mean(&runs, 100) <= 1.045, "{:.4}", mean(&runs, 100));
    // Fragments differ from pass to pass, but they do not pile up.
    let creep = mean(&runs, 100) - mean(&runs, 50);
    assert!(creep <= 0.005, "{creep:.4} in fifty passes");
    for run in &runs {
        let worst = run.ratios.iter().copied().fold(0.0, f64::max);
        assert!(worst <= 1.09, "{}: {worst:.4}", run.trace);
    }
}

#[test]
fn later_passes_make_few_driver_calls_and_none_with_the_soft_limit_off() {
    for run in replay_all(How { passes: 10, ..How::default() }) {
        for (pass, calls) in (1..).zip(&run.calls).skip(1) {
            assert!(calls.total() <= 1400, "{} pass {pass}: {calls}", run.trace);
        }
    }
    for run in replay_all(How { passes: 10, soft_limit_off: true, ..How::default() }) {
        for (pass, calls) in (1..).zip(&run.calls).skip(1) {
            assert_eq!(calls.total(), 0, "{} pass {pass}: {calls}", run.trace);
        }
    }
}

#[test]
fn four_streams_share_what_the_device_holds() {
    let runs = replay_all(How { passes: 10, streams: NonZeroU16::new(4), ..How::default() });
    for pass in 1..=10 {
        let calls: u64 = runs.iter().map(|run| mapping_calls(&run.calls[pass - 1])).sum();
        let mean = mean(&runs, pass);
        println!("pass {pass}: geometric mean {mean:.4}, {calls} mapping calls");
        assert!(mean <= 1.10, "pass {pass}: {mean:.4}");
    }
    for run in &runs {
        assert!(run.calls.iter().all(|calls| host_waits(calls) == 0), "{}", run.trace);
    }
}

/// Work of 2 ms stands behind every free, while the host goes on at once.
#[test]
fn late_frees_cost_no_memory_and_nobody_waits() {
    for streams in [None, NonZeroU16::new(4)] {
        let how = How { passes: 3, streams, ..How::default() };
        let (idle, late) = (replay_all(how), replay_all(How { late_us: Some(2000), ..how }));
        for run in &late {
            for (pass, calls) in (1..).zip(&run.calls) {
                assert_eq!(host_waits(calls), 0, "{} pass {pass}: {calls}", run.trace);
            }
        }
        for pass in 1..=3 {
            let (idle, late) = (mean(&idle, pass), mean(&late, pass));
            println!("{streams:?} pass {pass}: idle {idle:.4}, late {late:.4}");
            if streams.is_none() {
                assert!((late - idle).abs() <= 0.01, "pass {pass}: {late:.4} against {idle:.4}");
            }
        }
    }
}
