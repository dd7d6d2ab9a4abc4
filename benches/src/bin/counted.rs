//! Warm operations whose instructions are held to what `benches/instructions.txt` says:
//! `benches/instructions.sh` runs this under callgrind.
//!
//! What is counted is each function whose name begins with `countme`, with all that it calls. All
//! of it is one thread's work, on simulated devices, in the same order each time: so one build has
//! one count.

#![forbid(unsafe_code)]

use std::hint::black_box;
use std::path::Path;
use std::sync::Arc;

use vmm_pool::{Buffer, Lane, Placement, Pool, free_raw};
use vmm_pool_benches::subject::{Nothing, PoolLane};
use vmm_pool_benches::work::{Live, Sizes};
use vmm_pool_cli::replay::{Cause, Plan, Step};
use vmm_pool_cli::trace::Trace;
use vmm_sys::object::Stream;
use vmm_sys::sim::Sim;
use vmm_sys::{DeviceId, Driver};

/// Operations of one case: pairs of an allocation and a free.
const PAIRS: u64 = 2000;
/// Passes over a trace until one is warm, at most.
const WARMING_PASSES: u32 = 5;

/// A small request: served by slabs.
const SMALL_BYTES: u64 = 64 << 10;
const HOME: DeviceId = DeviceId(0);

/// Says how many operations a function counts, for the script.
fn say(function: &str, operations: u64) {
    println!("counted {function} {operations}");
}

/// Runs `counted`, which must be warm.
fn warm<T>(
    driver: &Arc<dyn Driver>,
    function: &str,
    operations: u64,
    counted: impl FnOnce() -> Result<T, Cause>,
) -> Result<T, Cause> {
    let before = driver.ledger().snapshot();
    let answer = counted()?;
    let calls = driver.ledger().snapshot().since(&before);
    if calls.total() != 0 {
        return Err(format!("{function}: not warm: {calls}").into());
    }
    say(function, operations);
    Ok(answer)
}

/// A pool without a thread of its own: it would be counted or not as it happens.
fn pool(driver: &Arc<dyn Driver>, placement: Placement) -> Result<Pool, Cause> {
    let builder = Pool::builder(driver.clone()).background(false).placement(placement);
    // Work that repeats is warm then.
    Ok(builder.soft_limit(None).build()?)
}

/// One function for each case, so that each has a count of its own.
macro_rules! pairs {
    ($name:ident, $subject:ty, $kind:ident) => {
        #[inline(never)]
        fn $name(live: &mut Live<$subject>) -> Result<(), Cause> {
            // Else the compiler makes one function of those that do the same.
            black_box(stringify!($name));
            live.$kind(PAIRS).map_err(Into::into)
        }
    };
}

pairs!(countme_loop_hot, Nothing, hot);
pairs!(countme_pool_hot_small, PoolLane, hot);
pairs!(countme_pool_replace_small, PoolLane, replace);
pairs!(countme_pool_hot_large, PoolLane, hot);
pairs!(countme_pool_replace_large, PoolLane, replace);
pairs!(countme_buddy_replace_large, PoolLane, replace);

#[inline(never)]
fn countme_raw_hot_small(lane: &Lane) -> Result<(), Cause> {
    for _ in 0..PAIRS {
        free_raw(lane.alloc_raw(black_box(SMALL_BYTES))?, SMALL_BYTES)?;
    }
    Ok(())
}

/// A case of the pool: its function, prepared with `live` blocks of these sizes.
type PoolCase = (&'static str, fn(&mut Live<PoolLane>) -> Result<(), Cause>);

fn pool_case(case: PoolCase, placement: Placement, sizes: Sizes, live: usize) -> Result<(), Cause> {
    let driver: Arc<dyn Driver> = Sim::builder().build();
    let subject = PoolLane::of(&pool(&driver, placement)?, HOME)?;
    let mut live = Live::new(subject, sizes, live)?;
    let (function, counted) = case;
    warm(&driver, function, PAIRS, || counted(&mut live))?;
    live.end()
}

/// One pass over a trace.
type Pass = fn(&[Lane], &[Step], &mut [Option<Buffer>]) -> Result<(), Cause>;

macro_rules! pass {
    ($name:ident) => {
        #[inline(never)]
        fn $name(
            lanes: &[Lane],
            steps: &[Step],
            blocks: &mut [Option<Buffer>],
        ) -> Result<(), Cause> {
            black_box(stringify!($name));
            for step in steps {
                match *step {
                    Step::Alloc { bytes, slot, stream } => {
                        blocks[slot as usize] = Some(lanes[usize::from(stream)].alloc(bytes)?);
                    }
                    Step::Free { slot } => blocks[slot as usize] = None,
                    Step::Cross { .. } => {} // only where blocks are spread over streams
                }
            }
            Ok(())
        }
    };
}

pass!(countme_trace_gnn);
pass!(countme_trace_unet_seg);
pass!(countme_trace_llama_train);
pass!(countme_trace_serve_mixed);

fn trace_case(folder: &Path, file: &str, function: &str, pass: Pass) -> Result<(), Cause> {
    let path = folder.join(file);
    let trace = Trace::open(&path)?;
    let plan = Plan::new(&trace, None);
    let driver: Arc<dyn Driver> = Sim::builder().build();
    let pool = pool(&driver, Placement::FirstFit)?;
    let lane = || -> Result<Lane, Cause> { Ok(pool.lane(&Stream::create(&driver, HOME)?)?) };
    let lanes: Vec<Lane> = (0..plan.streams).map(|_| lane()).collect::<Result<_, _>>()?;
    let mut blocks: Vec<Option<Buffer>> = (0..trace.slots).map(|_| None).collect();
    for warming in 0.. {
        let before = driver.ledger().snapshot();
        walk(&lanes, &plan.steps, &mut blocks)?;
        blocks.fill_with(|| None);
        let calls = driver.ledger().snapshot().since(&before);
        if calls.total() == 0 {
            break;
        }
        if warming == WARMING_PASSES {
            return Err(format!("{file}: no pass is warm: {calls}").into());
        }
    }
    let operations = trace.ops.len() as u64;
    warm(&driver, function, operations, || pass(&lanes, &plan.steps, &mut blocks))
}

pass!(walk);

fn run() -> Result<(), Cause> {
    let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/traces"));
    let mut live = Live::new(Nothing, Sizes::one(SMALL_BYTES), 0)?;
    countme_loop_hot(&mut live)?;
    say("countme_loop_hot", PAIRS);

    let (first_fit, buddy) = (Placement::FirstFit, Placement::Buddy);
    let small = || Sizes::one(SMALL_BYTES);
    let large = || Sizes::log_uniform(300 << 10, 16 << 20);
    let hot: PoolCase = ("countme_pool_hot_small", countme_pool_hot_small);
    pool_case(hot, first_fit, small(), 0)?;
    let replace: PoolCase = ("countme_pool_replace_small", countme_pool_replace_small);
    pool_case(replace, first_fit, small(), 500)?;
    let hot: PoolCase = ("countme_pool_hot_large", countme_pool_hot_large);
    pool_case(hot, first_fit, Sizes::one(4 << 20), 0)?;
    let replace: PoolCase = ("countme_pool_replace_large", countme_pool_replace_large);
    pool_case(replace, first_fit, large(), 500)?;
    let replace: PoolCase = ("countme_buddy_replace_large", countme_buddy_replace_large);
    pool_case(replace, buddy, large(), 500)?;

    let driver: Arc<dyn Driver> = Sim::builder().build();
    let lane = pool(&driver, first_fit)?.lane(&Stream::create(&driver, HOME)?)?;
    free_raw(lane.alloc_raw(SMALL_BYTES)?, SMALL_BYTES)?;
    warm(&driver, "countme_raw_hot_small", PAIRS, || countme_raw_hot_small(&lane))?;

    let traces: [(&str, &str, Pass); 4] = [
        ("gnn.trace.gz", "countme_trace_gnn", countme_trace_gnn),
        ("unet_seg.trace.gz", "countme_trace_unet_seg", countme_trace_unet_seg),
        ("llama_train.trace.gz", "countme_trace_llama_train", countme_trace_llama_train),
        ("serve_mixed.trace.gz", "countme_trace_serve_mixed", countme_trace_serve_mixed),
    ];
    for (file, function, pass) in traces {
        trace_case(folder, file, function, pass)?;
    }
    Ok(())
}

fn main() {
    if let Err(error) = run() {
        eprintln!("counted: {error}");
        std::process::exit(1);
    }
}
