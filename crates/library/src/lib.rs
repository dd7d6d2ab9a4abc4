//! `libvmm_pool.so`: everything that the packages below declare in their headers.

pub use vmm_pool_capi as _;
#[cfg(feature = "cupy")]
pub use vmm_pool_cupy as _;
#[cfg(feature = "torch")]
pub use vmm_pool_torch as _;
