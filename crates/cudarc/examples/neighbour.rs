//! A slice that lives on GPU 1, read by a kernel and by cuBLAS on both GPUs, and written from GPU 0.
//! Needs two GPUs, NVRTC and cuBLAS; with one GPU it says what it leaves out.
//!
//! `cargo run --release -p vmm-pool-cudarc --example neighbour --features nvrtc,cublas`

mod common;

use std::error::Error;
use std::sync::Arc;

use common::square_of;
use cudarc::cublas::{CudaBlas, Gemm};
use cudarc::driver::{CudaContext, CudaFunction, CudaStream, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::compile_ptx;
use vmm_pool_cudarc::{CudaPool, PoolSlice};

const SOURCE: &str = r#"
extern "C" __global__ void scale(float *out, const float *x, float by, size_t n) {
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i < n) out[i] = by * x[i];
}
"#;
const SIDE: usize = 256;
const N: usize = SIDE * SIDE;

struct Gpu {
    stream: Arc<CudaStream>,
    scale: CudaFunction,
    blas: CudaBlas,
}

impl Gpu {
    fn new(ctx: &Arc<CudaContext>) -> Result<Gpu, Box<dyn Error>> {
        let stream = ctx.new_stream()?;
        let scale = ctx.load_module(compile_ptx(SOURCE)?)?.load_function("scale")?;
        let blas = CudaBlas::new(stream.clone())?;
        Ok(Gpu { stream, scale, blas })
    }

    /// Twice `x` by a kernel, and its square as a matrix by cuBLAS; both on this GPU.
    fn read(&self, pool: &CudaPool, x: &PoolSlice<f32>) -> Result<[Vec<f32>; 2], Box<dyn Error>> {
        let mut twice = pool.alloc_zeros::<f32>(&self.stream, N)?;
        let mut square = pool.alloc_zeros::<f32>(&self.stream, N)?;
        {
            let view = x.on(&self.stream)?;
            let mut launch = self.stream.launch_builder(&self.scale);
            launch.arg(&mut twice).arg(&view).arg(&2.0_f32).arg(&N);
            // SAFETY: the kernel takes these arguments, and writes within `N` elements.
            unsafe { launch.launch(LaunchConfig::for_num_elems(N as u32))? };
            // SAFETY: the matrices are as large as the numbers say.
            unsafe { self.blas.gemm(square_of(SIDE as i32), &view, &view, &mut square)? };
        }
        Ok([self.stream.clone_dtoh(&twice)?, self.stream.clone_dtoh(&square)?])
    }
}

/// How many elements are not what they should be if all elements of `x` are `value`.
fn wrong([twice, square]: &[Vec<f32>; 2], value: f32) -> usize {
    let is_wrong = |x: f32, expected: f32| (x - expected).abs() > 1e-3 * expected.abs();
    let of = |all: &[f32], expected| all.iter().filter(|x| is_wrong(**x, expected)).count();
    of(twice, 2.0 * value) + of(square, SIDE as f32 * value * value)
}

fn main() -> Result<(), Box<dyn Error>> {
    let count = CudaContext::device_count()?;
    let home_ordinal = usize::from(count > 1);
    let ctx0 = CudaContext::new(0)?;
    let home_ctx = CudaContext::new(home_ordinal)?;
    let pool = CudaPool::builder().context(&ctx0).context(&home_ctx).share().build()?;
    let home = Gpu::new(&home_ctx)?;

    let mut x = pool.clone_htod(&home.stream, &vec![3.0_f32; N])?;
    let mut sum_wrong = wrong(&home.read(&pool, &x)?, 3.0);
    println!("{x:?}: read by its own GPU, {sum_wrong} wrong");
    if count < 2 {
        println!("left out: reads and writes by a second GPU, for this machine has one");
        return if sum_wrong > 0 { Err("wrong results".into()) } else { Ok(()) };
    }

    let guest = Gpu::new(&ctx0)?;
    let by_guest = wrong(&guest.read(&pool, &x)?, 3.0);
    println!("read by GPU 0 where it lies: {by_guest} wrong");
    // Written from GPU 0; what comes next on GPU 1 waits for it, nobody else.
    let fives = vec![5.0_f32; N];
    guest.stream.memcpy_htod(&fives, &mut x.on_mut(&guest.stream)?)?;
    let after = wrong(&home.read(&pool, &x)?, 5.0);
    println!("written by GPU 0, read by GPU 1: {after} wrong");
    sum_wrong += by_guest + after;
    if sum_wrong > 0 { Err("wrong results".into()) } else { Ok(()) }
}
