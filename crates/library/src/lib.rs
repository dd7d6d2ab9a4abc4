//! `libvmm_pool.so`: everything that the packages below declare in their headers.

extern crate vmm_pool_capi as _;
#[cfg(feature = "cupy")]
extern crate vmm_pool_cupy as _;
#[cfg(feature = "torch")]
extern crate vmm_pool_torch as _;
