//! How long it takes until another process has a buffer: from its first word to the exporter until it
//! has checked a word of each chunk. Both processes have their contexts before.
//!
//! ```text
//! handover [--driver auto|cuda|sim] [--bytes N] [--chunk-bytes N] [--rounds N]
//! ```
//!
//! Prints JSON, times in microseconds: once with the descriptors made ahead, once without. Each round
//! has another process, another exporter, and memory of which there was no descriptor before, as a second
//! one of the same memory is cheaper. Ends with an error if a byte is wrong.

mod common;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Parser;
use common::{DriverRequest, Outcome, Second, socket_path};
use serde_json::{Value, json};
use vmm_pool::Pool;
use vmm_share::{Access, Address, Exporter, Importer, ImporterOptions, Offered};
use vmm_sys::object::{Chunk, Mapping, Range, Stream};
use vmm_sys::{AccessGrant, ChunkProps, DeviceId, Driver, GranularityKind};

const HOME: DeviceId = DeviceId(0);
const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Debug, Parser)]
struct Options {
    /// Which driver.
    #[arg(long, value_enum, default_value = "auto")]
    driver: DriverRequest,
    /// The length of the buffer.
    #[arg(long, default_value_t = 1 << 30)]
    bytes: u64,
    /// The length of its chunks.
    #[arg(long, default_value_t = 32 << 20)]
    chunk_bytes: u64,
    /// Rounds of each kind.
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// Where the exporter listens: said to the second process.
    #[arg(long, hide = true)]
    socket: Option<String>,
}

/// The word at the start of a chunk.
fn word(offset: u64) -> [u8; 4] {
    (offset as u32 ^ (offset >> 21) as u32 ^ 0x5eed).to_le_bytes()
}

fn main() -> Outcome<()> {
    let options = Options::parse();
    match &options.socket {
        Some(socket) => second(&options, Path::new(socket)),
        None => first(&options),
    }
}

fn first(options: &Options) -> Outcome<()> {
    let driver = options.driver.open()?;
    let pool = Pool::builder(driver.clone()).device(HOME).build()?;
    let mut modes = serde_json::Map::new();
    for (name, ahead) in [("ahead", true), ("on_demand", false)] {
        let rounds = (0..options.rounds).map(|_| round(options, &pool, ahead));
        let rounds = rounds.collect::<Outcome<Vec<Value>>>()?;
        let mut totals: Vec<u64> =
            rounds.iter().filter_map(|round| round["total_us"].as_u64()).collect();
        totals.sort_unstable();
        let middle = totals.get(totals.len() / 2);
        let summary = json!({
            "median_us": middle, "least_us": totals.first(), "most_us": totals.last(),
            "rounds": rounds,
        });
        modes.insert(name.to_owned(), summary);
    }
    let report = json!({
        "driver": driver.kind().to_string(),
        "bytes": options.bytes,
        "chunk_bytes": options.chunk_bytes,
        "handover": modes,
    });
    println!("{}", serde_json::to_string_pretty(&report)?);
    Ok(())
}

/// One hand-over to a new process.
fn round(options: &Options, pool: &Pool, ahead: bool) -> Outcome<Value> {
    let driver = pool.driver();
    let builder = pool.elastic(HOME).capacity_bytes(options.bytes).exportable(true);
    let buffer = Arc::new(builder.chunk_bytes(options.chunk_bytes).build()?);
    buffer.grow_to(options.bytes)?;
    for offset in (0..options.bytes).step_by(options.chunk_bytes as usize) {
        buffer.write(offset, &word(offset))?;
    }
    let path = socket_path("handover");
    let kind = driver.kind().to_string();
    let socket = path.to_string_lossy().into_owned();
    let (bytes, chunk) = (options.bytes.to_string(), options.chunk_bytes.to_string());
    let arguments = ["--driver", &kind, "--bytes", &bytes, "--chunk-bytes", &chunk];
    let mut second = Second::start(&[&arguments[..], &["--socket", &socket]].concat())?;
    let exporter = Exporter::builder().ahead(ahead).bind(Address::Path(path))?;
    let offer = exporter.offer("buffer", &buffer, Offered::Read)?;
    offer.wait_ready(PATIENCE)?;
    offer.publish(&Stream::create(driver, HOME)?)?;
    let made = exporter.stats().descriptors;
    if second.answer()? != "ready" {
        return Err("the other process is not ready".into());
    }
    second.order("go")?;
    let mut times: Value = serde_json::from_str(&second.answer()?)?;
    second.end()?;
    times["descriptors_before"] = made.into();
    Ok(times)
}

/// The other process.
fn second(options: &Options, socket: &Path) -> Outcome<()> {
    let driver = options.driver.open()?;
    // The context, and what the driver makes at its first copy, before the clock runs.
    let stream = Stream::create(&driver, HOME)?;
    warm_up(&driver)?;
    println!("ready");
    std::io::stdin().read_line(&mut String::new())?;
    let start = Instant::now();
    let address = Address::Path(socket.to_owned());
    let settings = ImporterOptions::new(driver.clone()).timeout(PATIENCE);
    let importer = Importer::connect(&address, settings)?;
    let connected = start.elapsed();
    let import = importer.open("buffer", Access::Read)?;
    let opened = start.elapsed();
    import.wait_published(1, &stream, PATIENCE)?;
    let ordered = start.elapsed();
    for offset in (0..options.bytes).step_by(options.chunk_bytes as usize) {
        let mut found = [0; 4];
        import.read(offset, &mut found)?;
        if found != word(offset) {
            return Err(format!("at {offset}: {found:?}, not {:?}", word(offset)).into());
        }
    }
    let total = start.elapsed();
    let us = |time: Duration| time.as_micros() as u64;
    let times = json!({
        "connect_us": us(connected),
        "open_us": us(opened - connected),
        "order_us": us(ordered - opened),
        "check_us": us(total - ordered),
        "total_us": us(total),
    });
    println!("{times}");
    Ok(())
}

/// Maps a chunk of its own, and reads it.
fn warm_up(driver: &Arc<dyn Driver>) -> Outcome<()> {
    let props = ChunkProps::on_device(HOME);
    let bytes = driver.granularity(&props, GranularityKind::Minimum)?;
    let chunk = Arc::new(Chunk::create(driver, bytes, &props)?);
    let range = Range::reserve(driver, bytes, 0, 0)?;
    let mapping = Mapping::map(&range, 0, chunk)?;
    mapping.set_access(&[AccessGrant::read_write(HOME)])?;
    Ok(range.read(HOME, 0, &mut [0; 4])?)
}
