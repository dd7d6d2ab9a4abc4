//! A weight server and its workers: the first worker loads the weights, crashes, and comes back to
//! find them; the second maps the same memory read-only and sums it up.
//!
//! ```text
//! weight_server [--driver auto|cuda|sim] [--bytes N]
//! ```
//!
//! Prints JSON. The server and both workers are processes of their own. Ends with an error if a word is
//! wrong, or anything is left.

mod common;

use std::path::Path;
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use common::{DriverRequest, Outcome, Second, socket_path};
use serde_json::{Value, json};
use vmm_share::{
    Access, Address, Import, ImporterOptions, NamedBuffer, Owner, OwnerClient, OwnerStatus,
    ShareError,
};
use vmm_sys::DeviceId;
use vmm_sys::ProbeKernel;
use vmm_sys::object::Stream;

const HOME: DeviceId = DeviceId(0);
const NAME: &str = "weights";
const PATIENCE: Duration = Duration::from_secs(30);
/// The first of the words, which count up.
const FIRST_WORD: u32 = 0x5eed;

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Role {
    Server,
    Loader,
    Reader,
}

#[derive(Debug, Parser)]
struct Options {
    /// Which driver.
    #[arg(long, value_enum, default_value = "auto")]
    driver: DriverRequest,
    /// The length of the weights.
    #[arg(long, default_value_t = 64 << 20)]
    bytes: u64,
    /// What this process is; left out, the one that starts the others.
    #[arg(long, hide = true)]
    role: Option<Role>,
    /// Where the server listens.
    #[arg(long, hide = true)]
    socket: Option<String>,
}

fn main() -> Outcome<()> {
    let options = Options::parse();
    let socket = options.socket.as_deref().map(Path::new).unwrap_or(Path::new(""));
    let address = Address::Path(socket.to_owned());
    match options.role {
        None => conduct(&options),
        Some(Role::Server) => serve(&options, address),
        Some(Role::Loader) => load(&options, &address),
        Some(Role::Reader) => read(&options, &address),
    }
}

/// Starts the others.
fn conduct(options: &Options) -> Outcome<()> {
    let path = socket_path("weights");
    let address = Address::Path(path.clone());
    let start = |role: &str| {
        let (bytes, socket) = (options.bytes.to_string(), path.to_string_lossy());
        let driver = options.driver.to_possible_value().ok_or("a driver without a name")?;
        let driver = driver.get_name();
        let arguments =
            ["--driver", driver, "--bytes", &bytes, "--role", role, "--socket", &socket];
        Second::start(&arguments)
    };
    let mut server = start("server")?;
    server.answer()?;
    let mut loader = start("loader")?;
    let loaded: Value = serde_json::from_str(&loader.answer()?)?;
    // Dropped, it is killed.
    drop(loader);
    let mut loader = start("loader")?;
    let found: Value = serde_json::from_str(&loader.answer()?)?;
    let mut reader = start("reader")?;
    let read: Value = serde_json::from_str(&reader.answer()?)?;
    for (process, created) in [(&loaded, true), (&found, false)] {
        if process["created"] != created {
            return Err(
                format!("created {} where {created} was expected", process["created"]).into()
            );
        }
    }
    if read["sum"] != loaded["sum"] || read["sum"] != found["sum"] {
        return Err(format!("sums differ: {loaded} {found} {read}").into());
    }
    let held = OwnerStatus::ask(&address, PATIENCE)?;
    let holders = held.buffers.first().map_or(0, |buffer| buffer.holders.len());
    reader.end()?;
    loader.end()?;
    server.order("end")?;
    server.end()?;
    let report = json!({
        "bytes": options.bytes, "holders": holders, "loader": loaded, "loader_again": found,
        "reader": read,
    });
    println!("{}", serde_json::to_string_pretty(&report)?);
    match (holders, path.exists()) {
        (2, false) => Ok(()),
        other => Err(format!("expected two holders and no socket left, found {other:?}").into()),
    }
}

/// Holds the weights until its input ends.
fn serve(options: &Options, address: Address) -> Outcome<()> {
    let owner = Owner::builder(options.driver.open()?).bind(address)?;
    println!("ready");
    std::io::stdin().read_line(&mut String::new())?;
    drop(owner);
    Ok(())
}

/// Makes the weights, or finds them.
fn load(options: &Options, address: &Address) -> Outcome<()> {
    let driver = options.driver.open()?;
    let stream = Stream::create(&driver, HOME)?;
    let client = OwnerClient::connect(address, ImporterOptions::new(driver).timeout(PATIENCE))?;
    let start = Instant::now();
    let wanted = NamedBuffer::new(NAME, options.bytes).succeed(true);
    let (weights, created) = client.create_or_find(&wanted)?;
    let mapped_us = start.elapsed().as_micros() as u64;
    if created {
        fill(&weights, &stream)?;
    }
    tell(json!({ "created": created, "mapped_us": mapped_us, "sum": sum(&weights)? }))
}

/// Maps what is there, and cannot write to it.
fn read(options: &Options, address: &Address) -> Outcome<()> {
    let driver = options.driver.open()?;
    let client = OwnerClient::connect(address, ImporterOptions::new(driver).timeout(PATIENCE))?;
    let refused = client.open(NAME, Access::ReadWrite);
    let Err(ShareError::Refused { reason, .. }) = refused else {
        return Err(format!("asked for writing: {refused:?}").into());
    };
    let start = Instant::now();
    let weights = client.open(NAME, Access::Read)?;
    let mapped_us = start.elapsed().as_micros() as u64;
    let refused = reason.to_string();
    tell(json!({ "writing_refused": refused, "mapped_us": mapped_us, "sum": sum(&weights)? }))
}

/// Says it, and holds on until the input ends.
fn tell(report: Value) -> Outcome<()> {
    println!("{report}");
    std::io::stdin().read_line(&mut String::new())?;
    Ok(())
}

/// Words that count up, written by a kernel.
fn fill(weights: &Import, stream: &Stream) -> Outcome<()> {
    let _using = weights.use_on(stream)?;
    let words = weights.bytes() / 4;
    let kernel = ProbeKernel::FillWords { dst: weights.address(), words, value: FIRST_WORD };
    // SAFETY: the stream is live, and the memory is mapped for writing until the guard's work is done.
    unsafe { stream.driver().launch(HOME, &kernel, stream.handle())? };
    Ok(stream.synchronize()?)
}

/// The sum of all words, each of which is as it was written.
fn sum(weights: &Import) -> Outcome<u64> {
    let (mut sum, mut expected) = (0u64, FIRST_WORD);
    let mut part = vec![0; 4 << 20];
    let mut offset = 0;
    while offset < weights.bytes() {
        let length = (weights.bytes() - offset).min(part.len() as u64) as usize;
        weights.read(offset, &mut part[..length])?;
        for word in part[..length].chunks_exact(4) {
            if word != expected.to_le_bytes() {
                return Err(format!("a wrong word before {}", offset + length as u64).into());
            }
            sum = sum.wrapping_add(u64::from(expected));
            expected = expected.wrapping_add(1);
        }
        offset += length as u64;
    }
    Ok(sum)
}
