//! Whether kernels slow down while a pool maps and unmaps: a kernel bound by memory bandwidth runs in
//! a loop on a stream of its own, alone and beside the cold replay of a trace, in turns. See
//! docs/BENCHMARKS.md.
//!
//! Kernels are enqueued in batches, one batch ahead of the one that is waited for, so the GPU has
//! always something to do and a launch that is held up by a mapping call is hidden: what is measured
//! is the time between the ends of two batches.

#![deny(unsafe_code)]

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use serde::Serialize;
use vmm_pool::{Buffer, Pool};
use vmm_pool_benches::samples::{Spread, spread};
use vmm_pool_benches::setup::{Setup, fail, repetitions};
use vmm_pool_cli::replay::{Cause, HostClock, Plan, count};
use vmm_pool_cli::target::{CurrentContext, PoolOptions, PoolTarget};
use vmm_pool_cli::trace::Trace;
use vmm_sys::object::{Event, Stream};
use vmm_sys::{DeviceId, Driver, ProbeKernel};

const ROUNDS: u32 = 5;
/// How much slower kernels may be beside mapping: what two quiet rounds may differ by too.
const RATIO_MAX: f64 = 1.02;

/// How much work a phase is.
struct Size {
    /// Bytes that a kernel reads, and as many that it writes.
    kernel_bytes: u64,
    batch_kernels: u32,
    phase_batches: u32,
}

/// A batch is about 20 ms on an H200, a phase about a second.
const ON_GPU: Size = Size { kernel_bytes: 1 << 30, batch_kernels: 32, phase_batches: 40 };
/// Enough to see that the program works: times there are the model's.
const ON_SIM: Size = Size { kernel_bytes: 1 << 16, batch_kernels: 2, phase_batches: 3 };

/// The kernel loop: a copy from one buffer to the other.
struct Kernels<'a> {
    driver: Arc<dyn Driver>,
    device: DeviceId,
    stream: Stream,
    from: Buffer,
    to: Buffer,
    size: &'a Size,
    _pool: Pool,
}

impl Kernels<'_> {
    fn new<'a>(setup: &Setup, size: &'a Size) -> Result<Kernels<'a>, Cause> {
        let (driver, device) = (setup.driver.clone(), setup.device);
        let pool = Pool::builder(driver.clone()).device(device).background(false).build()?;
        let stream = Stream::create(&driver, device)?;
        let lane = pool.lane(&stream)?;
        let (from, to) = (lane.alloc(size.kernel_bytes)?, lane.alloc(size.kernel_bytes)?);
        Ok(Kernels { driver, device, stream, from, to, size, _pool: pool })
    }

    /// Enqueues one batch; the event is its end.
    #[allow(unsafe_code, reason = "the contract's launch takes a stream as a handle")]
    fn enqueue(&self, event: &Event) -> Result<(), Cause> {
        let (dst, src) = (self.to.address(), self.from.address());
        let kernel = ProbeKernel::CopyWords { dst, src, words: self.size.kernel_bytes / 4 };
        for _ in 0..self.size.batch_kernels {
            // SAFETY: the stream lives as long as `self`, and so do the two buffers, which are as
            // long as the kernel is told.
            unsafe { self.driver.launch(self.device, &kernel, self.stream.handle())? };
        }
        Ok(event.record(&self.stream)?)
    }

    /// Microseconds of one kernel, batch by batch.
    fn phase(&self) -> Result<Vec<f64>, Cause> {
        let _context = CurrentContext::enter(&self.driver, self.device)?;
        let event = || Event::create(&self.driver, self.device);
        let (mut running, mut queued) = (event()?, event()?);
        self.enqueue(&running)?;
        self.enqueue(&queued)?;
        running.wait()?;
        let mut samples = Vec::new();
        let mut start = Instant::now();
        for _ in 0..self.size.phase_batches {
            std::mem::swap(&mut running, &mut queued);
            self.enqueue(&queued)?;
            running.wait()?;
            let end = Instant::now();
            let took_us = (end - start).as_secs_f64() * 1e6;
            samples.push(took_us / f64::from(self.size.batch_kernels));
            start = end;
        }
        queued.wait()?;
        Ok(samples)
    }
}

/// What was mapped beside the kernels.
#[derive(Default)]
struct Mapped {
    passes: u64,
    calls: u64,
}

/// Replays cold passes until told to stop.
fn map_and_unmap(setup: &Setup, plan: &Plan<'_>, stop: &AtomicBool) -> Result<Mapped, Cause> {
    let options = PoolOptions::default();
    let mut mapped = Mapped::default();
    loop {
        let make = || PoolTarget::new(&setup.driver, setup.device, &options, plan.streams);
        for pass in count(plan, 1, &HostClock::new(), make, || ())? {
            mapped.passes += 1;
            mapped.calls += pass.calls.total();
        }
        if stop.load(Ordering::Acquire) {
            return Ok(mapped);
        }
    }
}

/// One phase of kernels beside cold passes.
fn beside(
    setup: &Setup,
    kernels: &Kernels<'_>,
    plan: &Plan<'_>,
) -> Result<(Vec<f64>, Mapped), Cause> {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let loops = scope.spawn(|| {
            let samples = kernels.phase().map_err(|error| error.to_string());
            stop.store(true, Ordering::Release);
            samples
        });
        let mapped = map_and_unmap(setup, plan, &stop);
        let samples = loops.join().map_err(|_| "the kernel thread panicked")??;
        Ok((samples, mapped?))
    })
}

/// What is recorded of one trace.
#[derive(Serialize)]
struct Row<'a> {
    trace: &'a str,
    kernel_bytes: u64,
    rounds: u32,
    /// `measured` on a GPU, `modelled` on the simulated device.
    time: &'static str,
    quiet_us: Spread,
    beside_us: Spread,
    /// Of the medians.
    ratio: f64,
    /// Of the medians of the quiet rounds, the greatest by the least: what means nothing.
    quiet_ratio: f64,
    cold_passes: u64,
    driver_calls: u64,
}

fn measure<'a>(setup: &Setup, trace: &'a Trace, rounds: u32) -> Result<Row<'a>, Cause> {
    let size = if setup.is_gpu() { &ON_GPU } else { &ON_SIM };
    let kernels = Kernels::new(setup, size)?;
    let plan = Plan::new(trace, None);
    kernels.phase()?; // the kernels are compiled, the clocks go up
    let (mut quiet, mut quiet_medians) = (Vec::new(), Vec::new());
    let (mut busy, mut mapped) = (Vec::new(), Mapped::default());
    for _ in 0..rounds {
        let samples = kernels.phase()?;
        quiet_medians.extend(spread(&samples).map(|it| it.median));
        quiet.extend(samples);
        let (samples, beside) = beside(setup, &kernels, &plan)?;
        busy.extend(samples);
        mapped.passes += beside.passes;
        mapped.calls += beside.calls;
    }
    let of = |samples: &[f64]| spread(samples).ok_or("no samples");
    let (quiet_us, beside_us, medians) = (of(&quiet)?, of(&busy)?, of(&quiet_medians)?);
    Ok(Row {
        trace: &trace.name,
        kernel_bytes: size.kernel_bytes,
        rounds,
        time: if setup.is_gpu() { "measured" } else { "modelled" },
        quiet_us,
        beside_us,
        ratio: beside_us.median / quiet_us.median,
        quiet_ratio: medians.max / medians.min,
        cold_passes: mapped.passes,
        driver_calls: mapped.calls,
    })
}

fn run() -> Result<(), Cause> {
    let files: Vec<_> = std::env::args_os().skip(1).collect();
    if files.is_empty() {
        return Err("usage: overlap TRACE…".into());
    }
    let mut setup = Setup::start("overlap")?;
    let _context = CurrentContext::enter(&setup.driver, setup.device)?;
    let rounds = repetitions(ROUNDS)?;
    for file in files {
        let trace = Trace::open(Path::new(&file))?;
        let row = measure(&setup, &trace, rounds)?;
        let Row { time, quiet_us, beside_us, ratio, quiet_ratio, .. } = &row;
        let verdict = if *ratio <= RATIO_MAX { "within" } else { "beyond" };
        println!(
            "{}: a kernel takes {:.1} us alone, {:.1} us beside {} cold passes with {} driver \
             calls ({time}): ratio {ratio:.4}, {verdict} the aim of {RATIO_MAX}; quiet rounds \
             differ by {quiet_ratio:.4}",
            trace.name, quiet_us.median, beside_us.median, row.cold_passes, row.driver_calls,
        );
        println!(
            "  alone {:.1}..{:.1} us, beside {:.1}..{:.1} us",
            quiet_us.min, quiet_us.max, beside_us.min, beside_us.max
        );
        setup.record(&row)?;
    }
    setup.say_where();
    Ok(())
}

fn main() {
    if let Err(error) = run() {
        fail("overlap", error);
    }
}
