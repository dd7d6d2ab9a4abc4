//! The library once more, for the tests: cargo builds examples for them, but not a library that no Rust
//! program can link. Not for use.

extern crate vmm_pool_capi as _;
#[cfg(feature = "cupy")]
extern crate vmm_pool_cupy as _;
#[cfg(feature = "torch")]
extern crate vmm_pool_torch as _;
