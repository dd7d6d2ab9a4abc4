//! Throughput of 1 to 16 threads, each with its own stream: the lanes of one pool, and on a GPU
//! `cudaMallocAsync` beside them. See docs/BENCHMARKS.md.

#![forbid(unsafe_code)]

use std::sync::Barrier;
use std::time::Instant;

use serde::Serialize;
use vmm_pool::{Placement, Pool};
use vmm_pool_benches::mix::{Mix, ROUND_STEPS, WARM_UP_STEPS};
use vmm_pool_benches::samples::{Spread, spread};
use vmm_pool_benches::setup::{Setup, fail, no_arguments, repetitions};
use vmm_pool_benches::subject::{Peer, PoolLane, Subject};
use vmm_pool_cli::replay::Cause;
use vmm_pool_cli::target::{CudaMallocAsync, CurrentContext};

const THREADS: [u32; 5] = [1, 2, 4, 8, 16];
const ROUNDS: u32 = 9;

/// What is recorded of one number of threads.
#[derive(Serialize)]
struct Row<'a> {
    subject: &'a str,
    threads: u32,
    /// Operations of one thread in one round; an operation is an alloc or a free.
    operations: u64,
    rounds: u32,
    /// Million operations a second, all threads together, over the rounds.
    total_mops: Spread,
    /// Nanoseconds per operation of the slowest thread.
    operation_ns: Spread,
    /// Driver calls of all threads, round by round. What the mix needs at its peaks was not all
    /// mapped when it warmed up.
    driver_calls: Vec<u64>,
    /// How often a thread was taken off its core while it ran, all rounds together.
    involuntary_switches: u64,
}

/// One thread's rounds.
struct Rounds {
    seconds: Vec<f64>,
    switches: u64,
}

/// Warms up, then runs the rounds in step with the other threads.
fn rounds<S: Subject>(
    subject: S,
    thread: u32,
    count: u32,
    barrier: &Barrier,
) -> Result<Rounds, Cause> {
    let mut mix = Mix::new(subject, thread);
    mix.steps(WARM_UP_STEPS)?;
    let mut seconds = Vec::with_capacity(count as usize);
    let switches = involuntary_switches();
    for _ in 0..count {
        barrier.wait(); // all are ready
        barrier.wait(); // the driver calls so far were noted
        let start = Instant::now();
        mix.steps(ROUND_STEPS)?;
        seconds.push(start.elapsed().as_secs_f64());
        barrier.wait();
    }
    let switches = involuntary_switches() - switches;
    // Nothing is given back before the last round's calls were noted.
    barrier.wait();
    mix.end()?;
    Ok(Rounds { seconds, switches })
}

/// Of the calling thread, so far.
fn involuntary_switches() -> u64 {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("nonvoluntary_ctxt_switches:"));
    line.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
}

/// Runs `threads` threads, each on the subject that `make` gives it.
fn run<S: Subject>(
    setup: &Setup,
    name: &'static str,
    threads: u32,
    count: u32,
    make: impl Fn() -> Result<S, Cause> + Sync,
) -> Result<Row<'static>, Cause> {
    let barrier = Barrier::new(threads as usize + 1);
    let one = |thread: u32| {
        let _context = CurrentContext::enter(&setup.driver, setup.device)?;
        rounds(make()?, thread, count, &barrier)
    };
    let (all, driver_calls) = std::thread::scope(|scope| {
        // A thread that fails ends the program: the others would wait for it for ever.
        let body = |thread| one(thread).unwrap_or_else(|error| fail(name, error));
        let running: Vec<_> =
            (0..threads).map(|thread| scope.spawn(move || body(thread))).collect();
        let mut calls = Vec::with_capacity(count as usize);
        for _ in 0..count {
            barrier.wait();
            let before = setup.driver.ledger().snapshot();
            barrier.wait();
            barrier.wait();
            calls.push(setup.driver.ledger().snapshot().since(&before).total());
        }
        barrier.wait();
        let joined = running.into_iter().map(|thread| thread.join());
        (joined.collect::<Result<Vec<Rounds>, _>>(), calls)
    });
    let all = all.map_err(|_| "a thread panicked")?;
    let slowest = |round: usize| all.iter().map(|t| t.seconds[round]).fold(0.0, f64::max);
    let slowest: Vec<f64> = (0..count as usize).map(slowest).collect();
    let operations = ROUND_STEPS as f64;
    let mops: Vec<f64> =
        slowest.iter().map(|s| f64::from(threads) * operations / s / 1e6).collect();
    let each_ns: Vec<f64> = slowest.iter().map(|s| s / operations * 1e9).collect();
    Ok(Row {
        subject: name,
        threads,
        operations: ROUND_STEPS,
        rounds: count,
        total_mops: spread(&mops).ok_or("no rounds")?,
        operation_ns: spread(&each_ns).ok_or("no rounds")?,
        driver_calls,
        involuntary_switches: all.iter().map(|t| t.switches).sum(),
    })
}

fn pool_row(
    setup: &Setup,
    placement: Placement,
    threads: u32,
    rounds: u32,
) -> Result<Row<'static>, Cause> {
    // Its own pool for each number of threads: none starts from what another left behind.
    let builder = Pool::builder(setup.driver.clone()).device(setup.device);
    let pool = builder.placement(placement).build()?;
    let name = PoolLane::name(placement);
    let row = run(setup, name, threads, rounds, || PoolLane::of(&pool, setup.device))?;
    pool.verify()?;
    Ok(row)
}

fn async_row(setup: &Setup, threads: u32, rounds: u32) -> Result<Row<'static>, Cause> {
    let make = || Ok(Peer(CudaMallocAsync::new(&setup.driver, setup.device, 1)?));
    run(setup, "cudaMallocAsync", threads, rounds, make)
}

fn report(setup: &mut Setup, row: &Row<'_>) -> Result<(), Cause> {
    let Spread { median, min, max } = row.total_mops;
    println!(
        "{:16} {:2} threads: {median:7.2} Mop/s in all ({min:.2}..{max:.2}), {:6.1} ns/op a \
         thread, driver calls {:?}, {} involuntary switches",
        row.subject,
        row.threads,
        row.operation_ns.median,
        row.driver_calls,
        row.involuntary_switches,
    );
    setup.record(row)
}

fn run_all() -> Result<(), Cause> {
    no_arguments()?;
    let mut setup = Setup::start("threads")?;
    let rounds = repetitions(ROUNDS)?;
    for threads in THREADS {
        for placement in [Placement::FirstFit, Placement::Buddy] {
            let row = pool_row(&setup, placement, threads, rounds)?;
            report(&mut setup, &row)?;
        }
        if setup.is_gpu() {
            let row = async_row(&setup, threads, rounds)?;
            report(&mut setup, &row)?;
        }
    }
    setup.say_where();
    Ok(())
}

fn main() {
    if let Err(error) = run_all() {
        fail("threads", error);
    }
}
