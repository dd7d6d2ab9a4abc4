//! The owning objects: each holds what it needs, and dropping it gives it back in the right order.
//!
//! Order of release is a fact of types: a [`Mapping`] owns its [`Chunk`] (shared, for aliases) and
//! its [`Range`], so unmapping always comes before release and before the range is freed.
//!
//! `Drop` neither panics nor forgets. When the driver refuses to give something back, the object
//! goes to a list ([`failed_drops`]) from which [`retry_failed_drops`] tries again. Once the process
//! is exiting, or in a forked child, nothing is called at all.

mod capture;
mod chunk;
mod drops;
mod event;
mod latch;
mod mapping;
mod range;
mod stream;
mod thread;

pub use capture::RelaxedCapture;
pub use chunk::Chunk;
use drops::same_driver;
pub use drops::{failed_drops, retry_failed_drops};
pub use event::Event;
pub use latch::Latch;
pub use mapping::Mapping;
pub use range::Range;
pub use stream::{Stream, identity_of};
