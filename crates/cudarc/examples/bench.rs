//! What slices of the pool cost beside cudarc's own: an allocation with its free, a kernel argument, a
//! launch. Needs a GPU, but no compiler.
//!
//! `cargo run --release -p vmm-pool-cudarc --example bench --features nvrtc`

use std::error::Error;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use cudarc::driver::{CudaContext, CudaFunction, CudaStream, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;
use vmm_pool_cudarc::CudaPool;

const OPERATIONS: u32 = 20_000;
const ROUNDS: usize = 7;

const PTX: &str = ".version 7.0
.target sm_70
.address_size 64
.visible .entry nothing(.param .u64 a, .param .u64 b) { ret; }
";

/// The middle of some rounds, in nanoseconds an operation.
fn ns_each(
    stream: &CudaStream,
    mut operation: impl FnMut() -> Result<(), Box<dyn Error>>,
) -> Result<f64, Box<dyn Error>> {
    let mut rounds = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        let begun = Instant::now();
        for _ in 0..OPERATIONS {
            operation()?;
        }
        rounds.push(begun.elapsed().as_nanos() as f64 / f64::from(OPERATIONS));
        stream.synchronize()?;
    }
    rounds.sort_by(f64::total_cmp);
    Ok(rounds[ROUNDS / 2])
}

fn row(what: &str, how: &str, ours: f64, theirs: f64) {
    println!("{what:28} {how:26} {ours:>10.0} {theirs:>10.0}");
}

fn pairs(pool: &CudaPool, stream: &Arc<CudaStream>, how: &str) -> Result<(), Box<dyn Error>> {
    for bytes in [1 << 10, 1 << 20, 64 << 20] {
        let ours = ns_each(stream, || {
            // SAFETY: nobody reads it.
            drop(black_box(unsafe { pool.alloc::<u8>(stream, bytes)? }));
            Ok(())
        })?;
        let theirs = ns_each(stream, || {
            // SAFETY: nobody reads it.
            drop(black_box(unsafe { stream.alloc::<u8>(bytes)? }));
            Ok(())
        })?;
        row(&format!("alloc and drop, {} KiB", bytes >> 10), how, ours, theirs);
    }
    Ok(())
}

fn arguments(
    pool: &CudaPool,
    stream: &Arc<CudaStream>,
    nothing: &CudaFunction,
    how: &str,
) -> Result<(), Box<dyn Error>> {
    let (our_a, mut our_b) =
        (pool.alloc_zeros::<u8>(stream, 1)?, pool.alloc_zeros::<u8>(stream, 1)?);
    let (a, mut b) = (stream.alloc_zeros::<u8>(1)?, stream.alloc_zeros::<u8>(1)?);
    let ours = ns_each(stream, || {
        black_box(stream.launch_builder(nothing).arg(&our_a).arg(&mut our_b));
        Ok(())
    })?;
    let theirs = ns_each(stream, || {
        black_box(stream.launch_builder(nothing).arg(&a).arg(&mut b));
        Ok(())
    })?;
    row("arguments & and &mut", how, ours, theirs);
    let config = LaunchConfig::for_num_elems(1);
    let ours = ns_each(stream, || {
        // SAFETY: the kernel does nothing.
        unsafe { stream.launch_builder(nothing).arg(&our_a).arg(&mut our_b).launch(config)? };
        Ok(())
    })?;
    let theirs = ns_each(stream, || {
        // SAFETY: the kernel does nothing.
        unsafe { stream.launch_builder(nothing).arg(&a).arg(&mut b).launch(config)? };
        Ok(())
    })?;
    row("launch with them", how, ours, theirs);
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let ctx = CudaContext::new(0)?;
    let nothing = ctx.load_module(Ptx::from_src(PTX))?.load_function("nothing")?;
    let pool = CudaPool::new(&ctx)?;
    println!("{:28} {:26} {:>10} {:>10}", "ns", "", "PoolSlice", "CudaSlice");
    let how = "default stream";
    pairs(&pool, &ctx.default_stream(), how)?;
    arguments(&pool, &ctx.default_stream(), &nothing, how)?;
    let stream = ctx.new_stream()?;
    let how = "a stream, events managed";
    pairs(&pool, &stream, how)?;
    arguments(&pool, &stream, &nothing, how)?;
    // SAFETY: one stream uses each slice.
    unsafe { ctx.disable_event_tracking() };
    let how = "the same without events";
    pairs(&pool, &stream, how)?;
    arguments(&pool, &stream, &nothing, how)
}
