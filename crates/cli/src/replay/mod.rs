//! The replay: drives an allocator through a trace and measures it.
//!
//! A replay of K passes is two *runs* of K passes, each on an allocator made afresh:
//!
//! 1. the **counted** run reads the clock twice a pass and nothing else: mean time, driver calls
//!    and held memory come from it;
//! 2. the **timed** run puts a time stamp around each operation: median, p99 and maximum come from
//!    it, and the addresses that are then checked for overlap, outside of every measured time.
//!
//! Pass k of either run has the same past (k - 1 passes over the trace), so its figures belong
//! together, and the work of measuring one never shows in the other. Blocks that a trace leaves
//! live are freed between passes, in no figure.
//!
//! The engine knows allocators only as [`Target`]s, and time only through [`Clock`].

mod clock;
mod engine;
mod error;
mod figures;
mod overlap;
mod plan;
mod target;

pub use clock::{Clock, HostClock};
pub use engine::{count, replay};
pub use error::{BlockAt, Cause, ReplayError};
pub use figures::{Latency, PassFigures};
pub use plan::{Plan, Spread, Step};
pub use target::{DriverTime, Extent, Target};

/// Every address must be a multiple of this: what `cudaMalloc` promises, and the pool too.
pub const ALIGN_BYTES: u64 = 256;

#[cfg(test)]
mod tests;
