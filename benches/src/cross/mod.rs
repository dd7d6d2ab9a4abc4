//! What memory costs across GPUs and on the host: moves, grants, kernels on the neighbour's memory,
//! sleep and wake. Each beside the bare driver calls that it consists of, in the same run.
//!
//! Each part is a function from a [`Ground`] to [`Rows`]. See docs/BENCHMARKS.md.

pub mod bandwidth;
pub mod grants;
mod ground;
pub mod held;
pub mod moves;
mod pooled;
mod row;
pub mod sleep;

pub use ground::{Anchor, Ground};
pub use row::{Case, Row, Rows, Table};
