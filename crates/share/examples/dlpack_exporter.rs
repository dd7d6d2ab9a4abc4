//! Offers a tensor to a program in another language: crates/library/python/examples/import_tensor.py
//! maps it as a tensor of PyTorch, without a copy.
//!
//! ```text
//! dlpack_exporter [--driver auto|cuda|sim] --socket PATH|@NAME [--words N]
//! ```
//!
//! The tensor is called `tensor` and holds 32-bit integers that count up from 1. Anybody who is let in
//! may write to it. A line on the input ends this; it prints the sum before and after as JSON, by which
//! the other program's writes are seen.

#[allow(dead_code, reason = "the other process is no program of this package")]
mod common;

use std::sync::Arc;

use clap::Parser;
use common::{DriverRequest, Outcome};
use serde_json::json;
use vmm_pool::{ElasticBuffer, Pool};
use vmm_share::{Address, Exporter, Offered};
use vmm_sys::{DeviceId, ProbeKernel, object::Stream};

const HOME: DeviceId = DeviceId(0);

#[derive(Debug, Parser)]
struct Options {
    /// Which driver.
    #[arg(long, value_enum, default_value = "auto")]
    driver: DriverRequest,
    /// Where to listen.
    #[arg(long)]
    socket: Address,
    /// How many integers.
    #[arg(long, default_value_t = 1 << 20)]
    words: u64,
}

fn main() -> Outcome<()> {
    let options = Options::parse();
    let driver = options.driver.open()?;
    let pool = Pool::builder(driver.clone()).device(HOME).build()?;
    let bytes = options.words * 4;
    let buffer = pool.elastic(HOME).capacity_bytes(bytes).exportable(true).build()?;
    let buffer = Arc::new(buffer);
    buffer.grow_to(bytes)?;
    let stream = Stream::create(&driver, HOME)?;
    let (dst, words) = (buffer.address(), options.words);
    let using = buffer.use_on(&stream)?;
    let kernel = ProbeKernel::FillWords { dst, words, value: 1 };
    // SAFETY: the stream is live, and the memory stays until the guard's work is done.
    unsafe { driver.launch(HOME, &kernel, stream.handle())? };
    drop(using);
    let exporter = Exporter::builder().bind(options.socket)?;
    let offer = exporter.offer("tensor", &buffer, Offered::ReadWrite)?;
    offer.publish(&stream)?;
    stream.synchronize()?;
    let before = sum(&buffer, bytes)?;
    println!("offered tensor at {}", exporter.address());
    std::io::stdin().read_line(&mut String::new())?;
    println!("{}", json!({ "words": words, "before": before, "after": sum(&buffer, bytes)? }));
    Ok(())
}

fn sum(buffer: &ElasticBuffer, bytes: u64) -> Outcome<i64> {
    let mut words = vec![0; bytes as usize];
    buffer.read(0, &mut words)?;
    let word = |part: &[u8]| part.try_into().map(i32::from_le_bytes);
    let words = words.chunks_exact(4).map(word).collect::<Result<Vec<_>, _>>()?;
    Ok(words.into_iter().map(i64::from).sum())
}
