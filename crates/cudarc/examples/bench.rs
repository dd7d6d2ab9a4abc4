//! What an allocation and its free cost: a slice of the pool against cudarc's own. Needs a GPU.
//!
//! `cargo run --release -p vmm-pool-cudarc --example bench`

use std::error::Error;
use std::hint::black_box;
use std::time::Instant;

use cudarc::driver::{CudaContext, CudaStream};
use std::sync::Arc;
use vmm_pool_cudarc::CudaPool;

const PAIRS: u32 = 20_000;
const ROUNDS: usize = 7;

/// The middle of some rounds, in nanoseconds a pair.
fn ns_a_pair(mut pair: impl FnMut() -> Result<(), Box<dyn Error>>) -> Result<f64, Box<dyn Error>> {
    let mut rounds = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        let begun = Instant::now();
        for _ in 0..PAIRS {
            pair()?;
        }
        rounds.push(begun.elapsed().as_nanos() as f64 / f64::from(PAIRS));
    }
    rounds.sort_by(f64::total_cmp);
    Ok(rounds[ROUNDS / 2])
}

fn compare(
    pool: &CudaPool,
    stream: &Arc<CudaStream>,
    what: &str,
    bytes: usize,
) -> Result<(), Box<dyn Error>> {
    let ours = ns_a_pair(|| {
        // SAFETY: nobody reads it.
        drop(black_box(unsafe { pool.alloc::<u8>(stream, bytes)? }));
        Ok(())
    })?;
    let theirs = ns_a_pair(|| {
        // SAFETY: nobody reads it.
        drop(black_box(unsafe { stream.alloc::<u8>(bytes)? }));
        Ok(())
    })?;
    println!("{what:32} {bytes:>12} {ours:>12.0} {theirs:>12.0}");
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let ctx = CudaContext::new(0)?;
    let pool = CudaPool::new(&ctx)?;
    println!(
        "{:32} {:>12} {:>12} {:>12}",
        "ns for alloc and drop", "bytes", "PoolSlice", "CudaSlice"
    );
    for bytes in [1 << 10, 1 << 20, 64 << 20] {
        compare(&pool, &ctx.default_stream(), "default stream", bytes)?;
    }
    let stream = ctx.new_stream()?;
    for bytes in [1 << 10, 1 << 20, 64 << 20] {
        compare(&pool, &stream, "a stream, events managed", bytes)?;
    }
    // SAFETY: one stream uses each slice.
    unsafe { ctx.disable_event_tracking() };
    for bytes in [1 << 10, 1 << 20, 64 << 20] {
        compare(&pool, &stream, "the same without events", bytes)?;
    }
    Ok(())
}
