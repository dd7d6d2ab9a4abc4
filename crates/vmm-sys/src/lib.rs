//! The CUDA virtual memory management calls, typed.
//!
//! Four nouns: a **chunk** is physical memory, a **range** is reserved addresses, a **mapping** is
//! a chunk at a place in a range, an **event** is the only clock of stream order. The
//! [`Driver`] contract states what the driver does with them; [`cuda`] is the real one, [`sim`] a
//! truthful simulated device for machines without a GPU; [`object`] owns the nouns, so that the
//! order of release is a fact of types.
//!
//! This crate knows nothing of pools.

pub mod call;
pub mod caught;
#[cfg(feature = "conformance")]
pub mod conformance;
pub mod cuda;
pub mod driver;
pub mod error;
pub mod object;
pub mod process;
pub mod registry;
pub mod sim;
#[doc(hidden)] // for the crates of this workspace
pub mod sync;
pub mod topology;
pub mod types;

pub use call::{Call, CallCounts, CallLedger, ThreadTime};
pub use driver::Driver;
pub use error::{DriverError, DriverResult, ResultCode};
pub use types::*;
