//! The pool's slices and cubecl in one program: that it compiles is the test.

use cubecl_cuda::{CudaDevice, CudaRuntime};
use vmm_pool_cudarc::{CudaPool, Error, PoolSlice};

/// A program that asks the pool for memory, and cubecl for a runtime on the same GPU.
pub fn side_by_side() -> Result<(PoolSlice<f32>, CudaDevice), Error> {
    let context = vmm_pool_cudarc::cudarc::driver::CudaContext::new(0)?;
    let stream = context.default_stream();
    let ours = CudaPool::new(&context)?.alloc_zeros::<f32>(&stream, 1024)?;
    Ok((ours, CudaDevice::default()))
}

/// cubecl's runtime, by name.
pub type Runtime = CudaRuntime;
