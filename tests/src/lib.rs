//! Tests that cross rooms: the pool against a model, on the simulated device or on a GPU.

pub mod action;
pub mod contents;
pub mod elastic;
pub mod generate;
pub mod hold;
mod honesty;
pub mod machine;
pub mod many;
pub mod memory;
pub mod model;
pub mod orders;
#[cfg(doctest)]
mod pages;
pub mod rng;
pub mod run;
pub mod script;
pub mod setup;
pub mod shadow;
pub mod shrink;
pub mod soak;
pub mod stories;

pub use machine::{DriverChoice, Machine, MachineSpec, Skip, any_driver, run_or_skip};
