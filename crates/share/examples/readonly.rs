//! What happens if a process writes to memory that it may only read: its own context is lost, and the
//! owner goes on.
//!
//! ```text
//! readonly [--driver auto|cuda|sim]
//! ```
//!
//! Prints JSON. Ends with an error if anything else happened.

mod common;

use std::path::Path;
use std::sync::Arc;

use clap::Parser;
use common::{DriverRequest, Outcome, Second, socket_path};
use serde_json::{Value, json};
use vmm_pool::Pool;
use vmm_share::{Access, Address, Exporter, Importer, ImporterOptions, Offered, ShareError};
use vmm_sys::object::Stream;
use vmm_sys::{DeviceId, ProbeKernel, Transfer};

const HOME: DeviceId = DeviceId(0);
const BYTES: u64 = 64 << 20;
const WORDS: u64 = 1024;

#[derive(Debug, Parser)]
struct Options {
    /// Which driver.
    #[arg(long, value_enum, default_value = "auto")]
    driver: DriverRequest,
    /// Where the exporter listens: said to the second process.
    #[arg(long, hide = true)]
    socket: Option<String>,
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
    let builder = pool.elastic(HOME).capacity_bytes(2 * BYTES).exportable(true);
    let buffer = Arc::new(builder.build()?);
    buffer.grow_to(BYTES)?;
    let pattern: Vec<u8> = (0..WORDS * 4).map(|at| at as u8 ^ 0xa5).collect();
    buffer.write(0, &pattern)?;
    let path = socket_path("readonly");
    let exporter = Exporter::builder().bind(Address::Path(path.clone()))?;
    let offer = exporter.offer("buffer", &buffer, Offered::Read)?;
    let kind = driver.kind().to_string();
    let socket = path.to_string_lossy();
    let mut second = Second::start(&["--driver", &kind, "--socket", &socket])?;
    second.order("write")?;
    let writer: Value = serde_json::from_str(&second.answer()?)?;
    second.end()?;
    // The owner goes on: its bytes are its own, its GPU works, and its buffer grows.
    let mut found = vec![0; pattern.len()];
    buffer.read(0, &mut found)?;
    if found != pattern {
        return Err("the owner's bytes have changed".into());
    }
    let stream = Stream::create(&driver, HOME)?;
    stream.synchronize()?;
    buffer.grow_to(2 * BYTES)?;
    buffer.write(BYTES, &pattern)?;
    drop(offer);
    let report = json!({
        "driver": kind,
        "writer": writer,
        "owner": { "bytes_intact": true, "goes_on": true },
    });
    println!("{}", serde_json::to_string_pretty(&report)?);
    Ok(())
}

/// The process that writes.
fn second(options: &Options, socket: &Path) -> Outcome<()> {
    let driver = options.driver.open()?;
    let settings = ImporterOptions::new(driver.clone());
    let importer = Importer::connect(&Address::Path(socket.to_owned()), settings)?;
    let asked = importer.open("buffer", Access::ReadWrite);
    let Err(ShareError::Refused { reason, .. }) = asked else {
        return Err(format!("asked for writing: {asked:?}").into());
    };
    let import = importer.open("buffer", Access::Read)?;
    let mut found = [0; 4];
    import.read(0, &mut found)?;
    let stream = Stream::create(&driver, HOME)?;
    std::io::stdin().read_line(&mut String::new())?;
    let word = [7u8; 4];
    let copy = Transfer::HostToDevice { dst: import.address(), src: word.as_ptr(), bytes: 4 };
    // SAFETY: the word is readable, and the address is the driver's.
    let Err(copy_refused) = (unsafe { driver.copy(HOME, &copy) }) else {
        return Err("a copy engine wrote to a read-only mapping".into());
    };
    let kernel = ProbeKernel::FillWords { dst: import.address(), words: WORDS, value: 7 };
    // SAFETY: the stream is live, and the address is the driver's. That the kernel faults the context
    // is what is asked for.
    let written = unsafe { driver.launch(HOME, &kernel, stream.handle()) };
    let Err(fault) = written.and_then(|()| stream.synchronize()) else {
        return Err("a kernel wrote to a read-only mapping".into());
    };
    if !fault.is_sticky() {
        return Err(format!("the kernel's write: {fault}").into());
    }
    let after = stream.synchronize();
    let report = json!({
        "writing_refused": reason.to_string(),
        "copy_refused": copy_refused.code().to_string(),
        "kernel_fault": fault.code().to_string(),
        "context_lost": after.is_err(),
    });
    println!("{report}");
    Ok(())
}
