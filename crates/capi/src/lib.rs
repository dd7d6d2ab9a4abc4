//! The pool behind a C ABI: the state that a process shares.

pub mod border;
mod driver;
pub mod failure;
mod handle;
pub mod lanes;
mod pools;
pub mod recent;
mod status;

pub use driver::{DriverChosen, driver_of, use_driver};
pub use failure::Failure;
pub use handle::{VmmElastic, VmmPool, VmmUse};
pub use pools::{empty, pool};
pub use status::vmm_pool_status;
