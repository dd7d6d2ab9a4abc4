//! What a step of a paged cache costs the host: one token for each sequence of a batch, and the tables.
//!
//! On the simulated device, which is not called: `cargo run --release -p vmm-kv --example paged_step`.
//! Times in microseconds: median, and the slowest of a hundred.

use std::time::Instant;

use vmm_kv::{BlockTables, Dtype, KvShape, PagedCache, PagedSequence};
use vmm_pool::Pool;
use vmm_sys::object::Stream;
use vmm_sys::sim::Sim;
use vmm_sys::{DeviceId, Driver};

const SEQUENCES: u64 = 256;
const STEPS: usize = 4096;
const BLOCK_TOKENS: u64 = 16;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let driver: std::sync::Arc<dyn Driver> = Sim::builder().build();
    let pool = Pool::builder(driver.clone()).build()?;
    let stream = Stream::create(&driver, DeviceId(0))?;
    // Llama 3 8B on one of four devices.
    let shape = KvShape::new(32, 8, 128, Dtype::Bf16)?.shard(0, 4)?;
    let blocks = (SEQUENCES * (STEPS as u64 / BLOCK_TOKENS + 2)) as u32;
    let builder = PagedCache::builder(&pool, &stream, shape).max_blocks(blocks);
    let cache = builder.keep_idle_bytes(u64::MAX).build()?;
    // Memory is there: it is not what is measured.
    drop(cache.open(u64::from(blocks) * BLOCK_TOKENS)?);
    // Their blocks end in different steps.
    let opened: Result<Vec<PagedSequence>, _> =
        (0..SEQUENCES).map(|n| cache.open(1 + n % BLOCK_TOKENS)).collect();
    let mut sequences = opened?;
    let mut tables = BlockTables::new(SEQUENCES as usize, STEPS / BLOCK_TOKENS as usize + 2);
    let (mut append_ns, mut update_ns) = (Vec::new(), Vec::new());
    let calls = driver.ledger().snapshot();
    for _ in 0..STEPS {
        let began = Instant::now();
        for sequence in &mut sequences {
            sequence.append(1)?;
        }
        append_ns.push(began.elapsed().as_nanos());
        let shown: Vec<&PagedSequence> = sequences.iter().collect();
        let began = Instant::now();
        tables.update(&shown)?;
        update_ns.push(began.elapsed().as_nanos());
    }
    let calls = driver.ledger().snapshot().since(&calls).total();
    println!("{SEQUENCES} sequences, {STEPS} steps, {calls} driver calls");
    print("append", append_ns);
    print("tables", update_ns);
    Ok(())
}

fn print(name: &str, mut nanos: Vec<u128>) {
    nanos.sort_unstable();
    let us = |at: usize| nanos[at] as f64 / 1000.0;
    println!("{name}: {:.2} us, {:.2} us", us(nanos.len() / 2), us(nanos.len() * 99 / 100));
}
