//! The pool behind a C ABI: the state that a process shares, and the general functions.
//!
//! `include/vmm_pool.h` is made from this crate, and docs/integrations/c.md says how to use it. The
//! packages `vmm-pool-torch` and `vmm-pool-cupy` add what PyTorch and CuPy ask for, over the same
//! state; `vmm-pool-library` makes the shared library of all three.
//!
//! The functions translate and decide nothing. Handles are numbers in the shape of pointers, looked up
//! and never followed. A thread finds the lanes it used last without a hash and without a lock of its
//! own, so that a warm pair costs little more than in Rust.
//!
//! Nothing panics across the border. In a forked child nothing is given and nothing is taken back, and
//! no lock is touched. When the process exits, nothing is torn down and nothing is said.

pub mod border;
mod create;
mod driver;
mod elastic;
pub mod failure;
pub mod figures;
mod handle;
#[cfg(feature = "share")]
mod import;
#[doc(hidden)]
pub mod inside;
pub mod lanes;
mod memory;
mod pointers;
mod pools;
pub mod recent;
mod status;
mod structs;

use std::time::Duration;

pub use create::*;
pub use driver::{DriverChosen, device_count, driver, driver_of, use_driver};
pub use elastic::*;
pub use failure::Failure;
pub use handle::{VmmElastic, VmmPool, VmmUse};
#[cfg(feature = "share")]
pub use import::*;
pub use memory::*;
pub use pools::{empty, pool, set_fraction};
pub use status::vmm_pool_status;
pub use structs::*;

/// A duration as C names it.
fn patience(us: u64) -> Duration {
    Duration::from_micros(us)
}
