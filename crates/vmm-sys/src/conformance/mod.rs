//! The conformance suite: what the driver does, row by row, as `docs/DRIVER.md` states it.
//!
//! Each row is one function, named by its id in that table (`d_r1` checks D-R1), and written once
//! against [`Driver`](crate::Driver). `cargo test` runs them on the simulated device; on a GPU they
//! run by `cargo run -p vmm-sys --features conformance --example conformance -- --driver cuda`.
//! That the same rows pass on both is what makes the simulated device worth testing against.
//!
//! A row that cannot be run is *skipped*, with its reason, and counted. A row whose answer nobody
//! knows yet *observes*: it prints what came, and is counted apart.
//!
//! Rows give back what they made, however they end. A row that breaks its context, or may end its
//! process, is given a driver of its own: a child process ([`run_in_child`]), or a fresh simulated
//! machine ([`Bench::with_fresh`]).

mod bench;
mod check;
mod child;
mod gate;
mod orders;
mod outcome;
mod report;
mod row;
mod rows;
mod scratch;
mod second;

pub use bench::Bench;
pub use child::run_in_child;
pub use outcome::Outcome;
pub use report::{Progress, Report, RowReport, run_all, select};
pub use row::{Case, Needs, Row, RowKind};
pub use rows::ROWS;
pub use second::serve_second_process;
