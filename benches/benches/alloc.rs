//! One allocation and one free, warm: the pool against the driver's own allocators, with what the
//! pool is made of (its heap, its lock) beside it. See docs/BENCHMARKS.md.

use std::cell::RefCell;
use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, SamplingMode};
use parking_lot::Mutex;
use serde::Serialize;
use vmm_pool::Placement;
use vmm_pool_benches::samples::spread;
use vmm_pool_benches::setup::{Setup, fail};
use vmm_pool_benches::subject::{BareHeap, Peer, PoolLane, Subject};
use vmm_pool_benches::work::{Live, Sizes};
use vmm_pool_cli::replay::Cause;
use vmm_pool_cli::target::{CudaMalloc, CudaMallocAsync, CurrentContext};
use vmm_sys::CallCounts;

/// One load. With no live blocks it is a hot pair, else random replacement among them.
struct Case {
    name: &'static str,
    sizes: Sizes,
    live: usize,
}

const LIVE: usize = 10_000;

fn cases() -> Vec<Case> {
    let case = |name, sizes, live| Case { name, sizes, live };
    vec![
        case("hot-512B", Sizes::one(512), 0),
        case("hot-64KiB", Sizes::one(64 << 10), 0),
        case("hot-2MiB", Sizes::one(2 << 20), 0),
        case("hot-32MiB", Sizes::one(32 << 20), 0),
        case("replace-512B", Sizes::one(512), LIVE),
        case("replace-64KiB", Sizes::one(64 << 10), LIVE),
        case("replace-512B-4MiB", Sizes::log_uniform(512, 4 << 20), LIVE),
    ]
}

/// What is recorded of one subject under one load.
#[derive(Serialize)]
struct Row<'a> {
    case: &'a str,
    subject: &'a str,
    live_blocks: usize,
    /// Of the means of the samples, per pair.
    median_ns: f64,
    min_ns: f64,
    max_ns: f64,
    samples: usize,
    /// Driver calls during warm-up and measurement.
    driver_calls: u64,
}

/// Means per pair of criterion's samples, without those of its warm-up: there it doubles the
/// length of the run each time.
#[derive(Default)]
struct Samples {
    last_iters: u64,
    measuring: bool,
    means_ns: Vec<f64>,
}

/// Fewer samples than this come from a test run, which measures nothing.
const SAMPLES_MIN: usize = 10;

impl Samples {
    fn add(&mut self, iters: u64, elapsed: Duration) {
        self.measuring |= self.last_iters != 0 && iters != 2 * self.last_iters;
        self.last_iters = iters;
        if self.measuring {
            self.means_ns.push(elapsed.as_nanos() as f64 / iters as f64);
        }
    }
}

/// A subject under load, once criterion has decided to run it: a filter may leave it out.
struct Running<S: Subject> {
    live: Live<S>,
    before: CallCounts,
    misses: u64,
}

/// Whether a warm operation of the subject calls the driver.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Calls {
    None,
    Each,
}

fn measure<S: Subject>(
    group: &mut BenchmarkGroup<'_, WallTime>,
    setup: &mut Setup,
    case: &Case,
    name: &str,
    calls: Calls,
    make: impl Fn(&Setup) -> Result<S, Cause>,
) {
    let what = format!("{} of {name}", case.name);
    let mut running: Option<Running<S>> = None;
    let mut samples = Samples::default();
    let on = &*setup;
    group.bench_function(name, |bencher| {
        let running = running.get_or_insert_with(|| {
            let prepared = make(on).and_then(|s| Live::new(s, case.sizes.clone(), case.live));
            let live = prepared.unwrap_or_else(|error| fail(&what, error));
            let misses = live.subject().misses();
            Running { live, before: on.driver.ledger().snapshot(), misses }
        });
        bencher.iter_custom(|iters| {
            let start = Instant::now();
            let done = match case.live {
                0 => running.live.hot(iters),
                _ => running.live.replace(iters),
            };
            let elapsed = start.elapsed();
            if let Err(error) = done {
                fail(&what, error.into());
            }
            samples.add(iters, elapsed);
            elapsed
        });
    });
    let Some(Running { live, before, misses }) = running else { return };
    let made = setup.driver.ledger().snapshot().since(&before);
    assert!(calls == Calls::Each || made.total() == 0, "{what} called the driver: {made}");
    assert_eq!(live.subject().misses(), misses, "{what} grew");
    if let Err(error) = live.end() {
        fail(&what, error);
    }
    record(setup, case, name, &samples, made.total());
}

fn record(setup: &mut Setup, case: &Case, name: &str, samples: &Samples, driver_calls: u64) {
    let Some(figures) = spread(&samples.means_ns) else { return };
    if samples.means_ns.len() < SAMPLES_MIN {
        return;
    }
    let row = Row {
        case: case.name,
        subject: name,
        live_blocks: case.live,
        median_ns: figures.median,
        min_ns: figures.min,
        max_ns: figures.max,
        samples: samples.means_ns.len(),
        driver_calls,
    };
    if let Err(error) = setup.record(&row) {
        fail("the record", error);
    }
}

/// The floors: what one uncontended lock costs, and one trip through the driver contract.
fn floors(criterion: &mut Criterion, setup: &mut Setup) {
    let case = Case { name: "floor", sizes: Sizes::one(0), live: 0 };
    let mut group = criterion.benchmark_group(case.name);
    let lock = Mutex::new(0u64);
    let mut floor = |setup: &mut Setup, name: &str, step: &dyn Fn(u64)| {
        let samples = RefCell::new(Samples::default());
        let before = setup.driver.ledger().snapshot();
        group.bench_function(name, |bencher| {
            bencher.iter_custom(|iters| {
                let start = Instant::now();
                step(iters);
                let elapsed = start.elapsed();
                samples.borrow_mut().add(iters, elapsed);
                elapsed
            });
        });
        let made = setup.driver.ledger().snapshot().since(&before);
        record(setup, &case, name, &samples.borrow(), made.total());
    };
    floor(setup, "lock-unlock", &|iters| {
        for _ in 0..iters {
            *black_box(&lock).lock() += 1;
        }
    });
    if setup.is_gpu() {
        let driver = setup.driver.clone();
        floor(setup, "cuCtxGetCurrent", &|iters| {
            for _ in 0..iters {
                // The answer does not matter: the trip is what is timed.
                let _ = black_box(driver.context_current());
            }
        });
    }
    group.finish();
}

fn subjects(criterion: &mut Criterion, setup: &mut Setup, case: &Case) {
    let mut group = criterion.benchmark_group(case.name);
    for placement in [Placement::FirstFit, Placement::Buddy] {
        let make = |_: &Setup| Ok(BareHeap::new(placement));
        measure(&mut group, setup, case, BareHeap::name(placement), Calls::None, make);
        let make = |on: &Setup| PoolLane::new(&on.driver, on.device, placement);
        measure(&mut group, setup, case, PoolLane::name(placement), Calls::None, make);
    }
    if setup.is_gpu() {
        let make = |on: &Setup| Ok(Peer(CudaMallocAsync::new(&on.driver, on.device, 1)?));
        measure(&mut group, setup, case, "cudaMallocAsync", Calls::Each, make);
        // Its samples take milliseconds: the same length for all of them bounds the time.
        group.sampling_mode(SamplingMode::Flat);
        let make = |on: &Setup| Ok(Peer(CudaMalloc::new(&on.driver, on.device)?));
        measure(&mut group, setup, case, "cudaMalloc", Calls::Each, make);
    }
    group.finish();
}

fn main() {
    let mut setup = Setup::start("alloc").unwrap_or_else(|error| fail("alloc", error));
    if !setup.is_gpu() {
        println!(
            "no rows of cudaMalloc and cudaMallocAsync: without a GPU their times would be the \
             model's; the pool's own are host time, as it makes no driver call here"
        );
    }
    let _context = CurrentContext::enter(&setup.driver, setup.device)
        .unwrap_or_else(|error| fail("alloc", error));
    let mut criterion = Criterion::default()
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2))
        .sample_size(50)
        .configure_from_args();
    floors(&mut criterion, &mut setup);
    for case in cases() {
        subjects(&mut criterion, &mut setup, &case);
    }
    criterion.final_summary();
    setup.say_where();
}
