//! `vmm-pool replay`: traces in, figures out.

use std::io::{self, Write};
use std::num::NonZeroU16;
use std::path::PathBuf;

use clap::ValueEnum;
use indicatif::{ProgressBar, ProgressStyle};
use vmm_pool::{ChunkSize, DebugMode, Placement, text};
use vmm_pool_cli::driver_choice::{DriverChoice, DriverRequest, choose};
use vmm_pool_cli::replay::{Cause, HostClock, PassFigures, Plan, ReplayError, Spread, replay};
use vmm_pool_cli::report::{Row, Setting, Table, write_json};
use vmm_pool_cli::target::{
    CudaMalloc, CudaMallocAsync, IdleLanes, Late, LateDriver, PoolOptions, PoolTarget,
};
use vmm_pool_cli::trace::Trace;
use vmm_sys::DeviceId;

use super::{Failure, say};

/// Replay allocator traces and report time, held memory and driver calls.
#[derive(Debug, clap::Args)]
#[command(after_long_help = HOW)]
pub(crate) struct Args {
    /// Traces, plain or gzip-compressed.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Which driver: the GPU's, the simulated device's, or the GPU's if there is one.
    #[arg(long, value_enum, default_value = "auto")]
    driver: DriverRequest,
    /// Ordinal of the device.
    #[arg(long, value_name = "N", default_value_t = 0)]
    device: u32,
    /// Passes over each trace; the first one finds an empty pool.
    #[arg(long, value_name = "K", default_value_t = 3)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1000))]
    passes: u32,
    /// Size of the physical chunks that the pool grows by: `auto`, or bytes (2MiB, 32M, ...).
    #[arg(long, value_name = "auto|SIZE", default_value = "auto", value_parser = text::chunk)]
    chunk: ChunkSize,
    /// Placement of large blocks.
    #[arg(long, value_name = "first-fit|buddy", value_parser = text::placement)]
    #[arg(default_value = text::placement_name(Placement::default()))]
    placement: Placement,
    /// New memory is made while the pool holds less than its peak live bytes and this fraction
    /// more; beyond, free chunks are moved first. `off`: never move.
    #[arg(long, value_name = "FRACTION|off", default_value = "0.01")]
    #[arg(value_parser = parse_soft_limit, allow_negative_numbers = true)]
    soft_limit: SoftLimit,
    /// A lane that was not used for so many milliseconds gives its free chunks to the others. `auto`:
    /// as a pool does by default on a GPU, never on the simulated device, whose figures would depend on
    /// the speed of this machine.
    #[arg(long, value_name = "auto|MS|off", default_value = "auto")]
    idle_lane_ms: IdleLanes,
    /// `guard`: each block has mappings of its own with unmapped addresses behind, so that stray
    /// writes fault; every operation then costs driver calls.
    #[arg(long, value_name = "off|guard", default_value = "off", value_parser = text::debug_mode)]
    debug: DebugMode,
    /// Spread the blocks over N streams, one block in eight used on a second stream too
    /// (record_stream). Left out: the streams of the trace.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    streams: Option<u16>,
    /// What decides the spread of --streams.
    #[arg(long, value_name = "SEED", default_value_t = 1)]
    seed: u64,
    /// Put GPU work behind every free that ends US microseconds later: what is freed is in use for
    /// so long. Only the pool (and `--compare sim`).
    #[arg(long, value_name = "US", value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    late_us: Option<u64>,
    /// Replay on others too, in the same run: a list of cudaMalloc, cudaMallocAsync (the driver's
    /// own allocators on the same device) and sim (the pool on the simulated device: driver calls
    /// and modelled time beside the real ones).
    #[arg(long, value_enum, value_name = "LIST", value_delimiter = ',')]
    compare: Vec<PeerArg>,
    /// One JSON object a line instead of a table.
    #[arg(long)]
    json: bool,
}

/// The part of the help that says how figures come about.
const HOW: &str = "\
Traces are lines `a ID BYTES STREAM T_US`, `f ID T_US` or `# comment`. All files are read and
checked before anything runs.

How it is measured: two runs of K passes for each trace and allocator, each on a fresh allocator,
so that pass k of either has the same past. The counted run reads the clock only before and after a
pass: mean time, held memory and driver calls come from it. The timed run puts a time stamp around
each operation: median, p99 and max come from it (the cost of a stamp is taken off), and the
addresses, which are then checked: no two live blocks may overlap. Mean times are the allocator's
own host time, the time inside driver calls taken out; median, p99 and max include it. On the
simulated device driver time is modelled: calls are counted exactly, and charged what they cost on
an H200. Blocks that a trace leaves live are freed between passes, outside of all figures.

For cudaMalloc and cudaMallocAsync (release threshold at its maximum) the driver call is the
operation: their mean includes it, and held memory is what the driver says is taken, asked every
1024 operations of the timed run and when live bytes are at their peak.

Exit code: 0 done; 1 the replay failed (out of memory, blocks that overlap); 2 bad usage, malformed
trace, or no such driver.";

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum PeerArg {
    #[value(name = "cudaMalloc")]
    CudaMalloc,
    #[value(name = "cudaMallocAsync")]
    CudaMallocAsync,
    #[value(name = "sim")]
    Sim,
}

/// `None` is off. A type of its own: clap takes an `Option` for an argument that may be left out.
#[derive(Clone, Copy, Debug, PartialEq)]
struct SoftLimit(Option<f64>);

fn parse_soft_limit(text: &str) -> Result<SoftLimit, String> {
    text::soft_limit(text).map(SoftLimit)
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let traces = args
        .files
        .iter()
        .map(|file| Trace::open(file))
        .collect::<Result<Vec<_>, _>>()
        .map_err(Failure::refused)?;
    let device = DeviceId(args.device);
    let choice = choose(args.driver, device).map_err(Failure::refused)?;
    say(&choice.why);
    let job = Job::new(args, choice, device)?;
    let mut rows = Vec::new();
    let result = job.run(&traces, &mut rows);
    // What was finished before a failure is still true.
    if !args.json && !rows.is_empty() {
        let mut out = io::stdout().lock();
        write!(out, "{}", Table(&rows))?;
        out.flush()?;
    }
    result
}

/// What is the same for all traces.
struct Job<'a> {
    args: &'a Args,
    choice: DriverChoice,
    device: DeviceId,
    options: PoolOptions,
    spread: Option<Spread>,
    peers: Vec<PeerArg>,
}

impl<'a> Job<'a> {
    fn new(args: &'a Args, choice: DriverChoice, device: DeviceId) -> Result<Job<'a>, Failure> {
        let options = PoolOptions {
            chunk: args.chunk,
            placement: args.placement,
            soft_limit: args.soft_limit.0,
            idle_lanes: args.idle_lane_ms,
            debug_mode: args.debug,
            background: None,
        };
        // The pool knows best which settings fit this device. Asked once, before anything runs.
        options.build(&choice.driver, device).map_err(Failure::refused)?;
        let spread = args
            .streams
            .and_then(NonZeroU16::new)
            .map(|streams| Spread { streams, seed: args.seed });
        if let Some(Spread { streams, seed }) = spread {
            say(format_args!("streams: {streams}, blocks spread by seed {seed}"));
        }
        let mut peers = Vec::new();
        for peer in &args.compare {
            if !peers.contains(peer) {
                peers.push(*peer);
            }
        }
        let own = [PeerArg::CudaMalloc, PeerArg::CudaMallocAsync];
        if args.late_us.is_some() && peers.iter().any(|peer| own.contains(peer)) {
            let why = "--late-us: work is put behind the frees of the pool only; expected no \
                       --compare, or --compare sim";
            return Err(Failure::refused(why));
        }
        Ok(Job { args, choice, device, options, spread, peers })
    }

    /// Replays all traces on all allocators. Rows are kept as soon as they are known.
    fn run(&self, traces: &[Trace], rows: &mut Vec<Row>) -> Result<(), Failure> {
        let allocators = 1 + self.peers.len() as u64;
        let bar = progress_bar(traces.len() as u64 * allocators * 2 * u64::from(self.args.passes));
        let result = traces.iter().try_for_each(|trace| {
            let plan = Plan::new(trace, self.spread);
            self.allocator(&plan, None, &bar, rows)?;
            self.peers.iter().try_for_each(|peer| self.allocator(&plan, Some(*peer), &bar, rows))
        });
        bar.finish_and_clear();
        result
    }

    /// One trace on one allocator.
    fn allocator(
        &self,
        plan: &Plan<'_>,
        peer: Option<PeerArg>,
        bar: &ProgressBar,
        rows: &mut Vec<Row>,
    ) -> Result<(), Failure> {
        let setting = self.setting(plan, peer);
        bar.set_message(format!("{}, {}", plan.trace.name, setting.allocator));
        let (choice, device) = match peer {
            Some(PeerArg::Sim) => (&choose_sim()?, DeviceId(0)),
            _ => (&self.choice, self.device),
        };
        let driver = &choice.driver;
        let (options, streams) = (&self.options, plan.streams);
        let figures = match peer {
            None | Some(PeerArg::Sim) => match self.args.late_us {
                None => {
                    self.passes(plan, bar, || PoolTarget::new(driver, device, options, streams))
                }
                Some(late_us) => {
                    let on = match &choice.sim {
                        Some(sim) => LateDriver::Sim(sim.clone()),
                        None => LateDriver::Gpu(driver.clone()),
                    };
                    self.passes(plan, bar, || Late::new(&on, device, options, streams, late_us))
                }
            },
            Some(PeerArg::CudaMalloc) => self.passes(plan, bar, || CudaMalloc::new(driver, device)),
            Some(PeerArg::CudaMallocAsync) => {
                self.passes(plan, bar, || CudaMallocAsync::new(driver, device, plan.streams))
            }
        };
        let figures = figures.map_err(|error| {
            Failure::failed(format_args!("{} on {}: {error}", plan.trace.name, setting.allocator))
        })?;
        let fresh = rows.len();
        rows.extend(figures.iter().map(|pass| Row::new(plan, driver.kind(), &setting, pass)));
        if self.args.json {
            // Line by line as they come: a long job can be followed, and cut short.
            bar.suspend(|| write_json(&mut io::stdout().lock(), &rows[fresh..]))?;
        }
        Ok(())
    }

    fn passes<T: vmm_pool_cli::replay::Target>(
        &self,
        plan: &Plan<'_>,
        bar: &ProgressBar,
        make: impl Fn() -> Result<T, Cause>,
    ) -> Result<Vec<PassFigures>, ReplayError> {
        replay(plan, self.args.passes, &HostClock::new(), make, || bar.inc(1))
    }

    fn setting(&self, plan: &Plan<'_>, peer: Option<PeerArg>) -> Setting {
        let driver_own = |allocator| Setting {
            allocator,
            placement: None,
            chunk: None,
            soft_limit: None,
            idle_lane_ms: None,
            debug_mode: None,
            streams: plan.streams,
            seed: self.spread.map(|spread| spread.seed),
            late_us: self.args.late_us,
        };
        match peer {
            Some(PeerArg::CudaMalloc) => driver_own("cudaMalloc"),
            Some(PeerArg::CudaMallocAsync) => driver_own("cudaMallocAsync"),
            None | Some(PeerArg::Sim) => Setting {
                placement: Some(text::placement_name(self.options.placement)),
                chunk: Some(match self.options.chunk {
                    ChunkSize::Auto => "auto".to_owned(),
                    ChunkSize::Fixed(bytes) => bytes.to_string(),
                }),
                soft_limit: self.options.soft_limit,
                idle_lane_ms: Some(self.options.idle_lanes.to_string()),
                debug_mode: Some(text::debug_mode_name(self.options.debug_mode)),
                ..driver_own(if peer.is_none() { "vmm-pool" } else { "vmm-pool on sim" })
            },
        }
    }
}

/// The simulated device to compare with.
fn choose_sim() -> Result<DriverChoice, Failure> {
    choose(DriverRequest::Sim, DeviceId(0)).map_err(Failure::failed)
}

/// Moves between passes only: nothing draws while something is measured. Hidden unless stderr is a
/// terminal.
fn progress_bar(passes: u64) -> ProgressBar {
    let bar = ProgressBar::new(passes);
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} passes  {msg}") {
        bar.set_style(style);
    }
    bar
}
