//! What memory costs across GPUs and on the host, in four parts: moves to the neighbour, grants,
//! kernels on the neighbour's memory, sleep and wake. See docs/BENCHMARKS.md.

#![forbid(unsafe_code)]

use std::time::Instant;

use clap::Parser;
use serde::Serialize;
use vmm_pool::text;
use vmm_pool_benches::cross::{Ground, Row, Rows, Table, bandwidth, grants, moves, sleep};
use vmm_pool_benches::setup::{Setup, fail, repetitions};
use vmm_pool_cli::driver_choice::DriverRequest;
use vmm_pool_cli::replay::Cause;
use vmm_sys::DeviceId;

const REPETITIONS: u32 = 7;
/// The chunks that are granted.
const GRANT_CHUNKS: [u64; 2] = [2 << 20, 32 << 20];

/// Measures what memory costs across GPUs and on the host, beside the bare driver calls.
///
/// Sizes take a unit (K, M, G). Repetitions, device and record are set by the variables of all
/// benchmarks: docs/BENCHMARKS.md.
#[derive(Debug, Parser)]
#[command(name = "cross")]
struct Options {
    /// The driver; before the variable VMM_BENCH_DRIVER
    #[arg(long)]
    driver: Option<DriverRequest>,
    /// The neighbour's ordinal; `none` leaves out what needs one
    #[arg(long, default_value = "1", value_parser = peer)]
    peer: Peer,
    /// The NUMA node that memory sleeps on
    #[arg(long, default_value_t = 0)]
    node: u32,
    /// Only these parts
    #[arg(long, value_delimiter = ',', value_enum)]
    parts: Vec<Part>,
    /// Bytes that are moved [1G; 32M on the simulated device]
    #[arg(long, value_parser = text::bytes)]
    r#move: Option<u64>,
    /// Chunks of the moves [32M,256M; 2M,8M]
    #[arg(long, value_delimiter = ',', value_parser = text::bytes)]
    chunks: Vec<u64>,
    /// Bytes that a kernel runs over [1G; 4M]
    #[arg(long, value_parser = text::bytes)]
    kernel: Option<u64>,
    /// Bytes that fall asleep [16G; 64M]
    #[arg(long, value_parser = text::bytes)]
    sleep: Option<u64>,
    /// Chunks of kernels and of sleep [32M; 2M]
    #[arg(long, value_parser = text::bytes)]
    chunk: Option<u64>,
}

#[derive(Clone, Copy, Debug)]
struct Peer(Option<DeviceId>);

fn peer(text: &str) -> Result<Peer, String> {
    match text {
        "none" => Ok(Peer(None)),
        _ => match text.parse() {
            Ok(ordinal) => Ok(Peer(Some(DeviceId(ordinal)))),
            Err(_) => Err("expected a device ordinal, or none".into()),
        },
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
enum Part {
    Move,
    Grant,
    Bandwidth,
    Sleep,
}

impl Part {
    const ALL: [Part; 4] = [Part::Move, Part::Grant, Part::Bandwidth, Part::Sleep];
}

/// How much of everything.
struct Sizes {
    move_bytes: u64,
    move_chunks: Vec<u64>,
    kernel_bytes: u64,
    sleep_bytes: u64,
    chunk_bytes: u64,
}

impl Sizes {
    fn new(options: &Options, is_gpu: bool) -> Result<Sizes, Cause> {
        let default =
            |gpu_mib: u64, sim_mib: u64| if is_gpu { gpu_mib << 20 } else { sim_mib << 20 };
        let move_chunks = match options.chunks.as_slice() {
            [] => vec![default(32, 2), default(256, 8)],
            chunks => chunks.to_vec(),
        };
        let sizes = Sizes {
            move_bytes: options.r#move.unwrap_or(default(1024, 32)),
            move_chunks,
            kernel_bytes: options.kernel.unwrap_or(default(1024, 4)),
            sleep_bytes: options.sleep.unwrap_or(default(16 << 10, 64)),
            chunk_bytes: options.chunk.unwrap_or(default(32, 2)),
        };
        let whole = |bytes: u64, chunk: u64| bytes > 0 && chunk > 0 && bytes.is_multiple_of(chunk);
        let moves = sizes.move_chunks.iter().all(|chunk| whole(sizes.move_bytes, *chunk));
        let others = [sizes.kernel_bytes, sizes.sleep_bytes];
        if moves && others.iter().all(|bytes| whole(*bytes, sizes.chunk_bytes)) {
            Ok(sizes)
        } else {
            Err("each size must be a whole number of its chunks, and not 0".into())
        }
    }
}

/// Something that this machine cannot show.
#[derive(Serialize)]
struct LeftOut {
    part: Part,
    left_out: String,
}

/// One part's rows, or why there are none.
fn measure(
    ground: &Ground,
    part: Part,
    sizes: &Sizes,
    repetitions: u32,
) -> Result<Result<Rows, &'static str>, Cause> {
    let Sizes { move_bytes, kernel_bytes, sleep_bytes, chunk_bytes, .. } = *sizes;
    let rows = match (part, ground.peer()) {
        (Part::Move | Part::Grant, None) => {
            return Ok(Err("needs two devices that reach each other"));
        }
        (Part::Move, Some(peer)) => {
            moves::measure(ground, peer, move_bytes, &sizes.move_chunks, repetitions)
        }
        (Part::Grant, Some(peer)) => grants::measure(ground, peer, &GRANT_CHUNKS, repetitions),
        (Part::Bandwidth, peer) => {
            bandwidth::measure(ground, peer, kernel_bytes, chunk_bytes, repetitions)
        }
        // A repetition copies everything out and in again.
        (Part::Sleep, _) => sleep::measure(ground, sleep_bytes, chunk_bytes, repetitions.min(5)),
    };
    rows.map(Ok)
}

/// What a part shows less of on this machine.
fn missing(ground: &Ground, part: Part) -> Result<Option<&'static str>, Cause> {
    Ok(match part {
        Part::Bandwidth if ground.peer().is_none() => {
            Some("the neighbour's memory: needs two devices that reach each other")
        }
        Part::Sleep if ground.host_props()?.is_none() => {
            Some("sleep on the host: the driver has no chunks of host memory")
        }
        _ => None,
    })
}

fn run(options: &Options) -> Result<(), Cause> {
    let begin = Instant::now();
    let (mut setup, peer) = Setup::start_pair("cross", options.driver, options.peer.0)?;
    let sizes = Sizes::new(options, setup.is_gpu())?;
    setup.driver.ledger().set_timing(!setup.is_gpu());
    let repetitions = repetitions(REPETITIONS)?;
    let ground = Ground::new(&setup.driver, setup.device, peer, options.node)?;
    let parts = if options.parts.is_empty() { &Part::ALL[..] } else { &options.parts };
    for &part in parts {
        let leave_out = |setup: &mut Setup, what: &str| {
            println!("\nleft out of {part:?}: {what}");
            setup.record(&LeftOut { part, left_out: what.to_owned() })
        };
        let rows = match measure(&ground, part, &sizes, repetitions)? {
            Ok(rows) => rows.into_rows(),
            Err(reason) => {
                leave_out(&mut setup, reason)?;
                continue;
            }
        };
        if let Some(reason) = missing(&ground, part)? {
            leave_out(&mut setup, reason)?;
        }
        show(&rows);
        rows.iter().try_for_each(|row| setup.record(row))?;
    }
    drop(ground);
    setup.check_clean()?;
    println!("\n{:.1} s in all", begin.elapsed().as_secs_f64());
    setup.say_where();
    Ok(())
}

fn show(rows: &[Row]) {
    let (Some(first), table) = (rows.first(), Table(rows)) else { return };
    println!("\n{} ({}, {} repetitions)\n{table}", first.part, first.time, first.repetitions);
}

fn main() {
    if let Err(error) = run(&Options::parse()) {
        fail("cross", error);
    }
}
