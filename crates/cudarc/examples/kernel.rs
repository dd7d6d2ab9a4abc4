//! A kernel from a source string and a matrix product by cuBLAS, over memory of the pool. Needs a GPU,
//! NVRTC and cuBLAS.
//!
//! `cargo run --release -p vmm-pool-cudarc --example kernel --features nvrtc,cublas`

mod common;

use std::error::Error;

use common::square_of;
use cudarc::cublas::{CudaBlas, Gemm};
use cudarc::driver::{CudaContext, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::compile_ptx;
use vmm_pool_cudarc::CudaPool;

const SOURCE: &str = r#"
extern "C" __global__ void add(float *out, const float *a, const float *b, size_t n) {
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i < n) out[i] = a[i] + b[i];
}
"#;

fn main() -> Result<(), Box<dyn Error>> {
    let ctx = CudaContext::new(0)?;
    let stream = ctx.new_stream()?;
    let pool = CudaPool::new(&ctx)?;

    let add = ctx.load_module(compile_ptx(SOURCE)?)?.load_function("add")?;
    let n = 1_000_000_usize;
    let a = pool.clone_htod(&stream, &vec![1.5_f32; n])?;
    let b = pool.clone_htod(&stream, &(0..n).map(|i| i as f32).collect::<Vec<_>>())?;
    let mut out = pool.alloc_zeros::<f32>(&stream, n)?;
    let mut launch = stream.launch_builder(&add);
    launch.arg(&mut out).arg(&a).arg(&b).arg(&n);
    // SAFETY: the kernel takes these arguments, and writes within `n` elements.
    unsafe { launch.launch(LaunchConfig::for_num_elems(n as u32))? };
    let sums = stream.clone_dtoh(&out)?;
    let wrong = sums.iter().enumerate().filter(|(i, sum)| **sum != *i as f32 + 1.5).count();
    println!("add: {n} elements, {wrong} wrong");

    let side = 512_usize;
    let product = multiply(&pool, &stream, side)?;
    let off = product.iter().filter(|x| (**x - 2.0 * side as f32).abs() > 1e-3).count();
    println!("gemm: {side} x {side}, {off} wrong");

    drop((a, b, out));
    stream.synchronize()?;
    println!("{} bytes held by the pool", pool.pool().stats().devices[0].1.held_bytes);
    if wrong + off > 0 { Err("wrong results".into()) } else { Ok(()) }
}

/// The product of a matrix of ones and one of twos.
fn multiply(
    pool: &CudaPool,
    stream: &std::sync::Arc<cudarc::driver::CudaStream>,
    side: usize,
) -> Result<Vec<f32>, Box<dyn Error>> {
    let blas = CudaBlas::new(stream.clone())?;
    let ones = pool.clone_htod(stream, &vec![1.0_f32; side * side])?;
    let twos = pool.clone_htod(stream, &vec![2.0_f32; side * side])?;
    let mut product = pool.alloc_zeros::<f32>(stream, side * side)?;
    // SAFETY: the matrices are as large as the numbers say.
    unsafe { blas.gemm(square_of(side as i32), &ones, &twos, &mut product)? };
    Ok(stream.clone_dtoh(&product)?)
}
