//! The pool as the allocator of cudarc programs.
//!
//! ```no_run
//! use cudarc::driver::CudaContext;
//! use vmm_pool_cudarc::CudaPool;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let ctx = CudaContext::new(0)?;
//! let stream = ctx.default_stream();
//! let pool = CudaPool::new(&ctx)?;
//!
//! let mut x = pool.alloc_zeros::<f32>(&stream, 1024)?; // in place of stream.alloc_zeros(1024)
//! stream.memcpy_htod(&[1.0f32; 1024], &mut x)?; // and all else as with a CudaSlice
//! assert_eq!(stream.clone_dtoh(&x)?, [1.0; 1024]);
//! # Ok(())
//! # }
//! ```
//!
//! A [`PoolSlice`] goes wherever cudarc takes a slice by its traits: kernel arguments, copies, cuBLAS,
//! cuBLASLt, cuRAND. What wants a `CudaSlice` by value or by `&mut` cannot have one, for it could free
//! the memory as if it were the driver's:
//!
//! ```compile_fail,E0596
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let ctx = cudarc::driver::CudaContext::new(0)?;
//! # let stream = ctx.default_stream();
//! # let pool = vmm_pool_cudarc::CudaPool::new(&ctx)?;
//! let mut ours = pool.alloc_zeros::<f32>(&stream, 8)?;
//! let mut theirs = stream.alloc_zeros::<f32>(8)?;
//! std::mem::swap(&mut *ours, &mut theirs); // cannot borrow as mutable
//! # Ok(())
//! # }
//! ```
//!
//! ```compile_fail,E0507
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let ctx = cudarc::driver::CudaContext::new(0)?;
//! # let stream = ctx.default_stream();
//! # let pool = vmm_pool_cudarc::CudaPool::new(&ctx)?;
//! let ours = pool.alloc_zeros::<f32>(&stream, 8)?;
//! ours.leak(); // cannot move out of it
//! # Ok(())
//! # }
//! ```
//!
//! # Who orders what
//!
//! cudarc orders the uses of a slice on several streams by two events, one for reads and one for
//! writes. This crate keeps that, and closes what it leaves open: a second stream that reads has an
//! event of its own (`tracked`), so that a write or the drop waits for both; a stream of another GPU is
//! let in by [`PoolSlice::on`] (`guest`). One stream costs nothing more than with cudarc.
//!
//! Policy is the pool's (package `vmm-pool`); here is only translation. docs/integrations/cudarc.md has
//! the how-to, and what cannot be done.

mod elastic;
mod error;
mod guest;
mod homes;
mod joins;
mod key;
mod launch;
mod pool;
mod shell;
mod slice;
mod tracked;
mod view;

/// The cudarc whose slices these are.
pub use cudarc;

pub use elastic::{ElasticSlice, ElasticView, ElasticViewMut};
pub use error::Error;
pub use pool::{CudaPool, CudaPoolBuilder};
pub use slice::PoolSlice;
pub use view::{PoolView, PoolViewMut};

/// The examples of the page that has the how-to.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/integrations/cudarc.md")]
mod page {}
