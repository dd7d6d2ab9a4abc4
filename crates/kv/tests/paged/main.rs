//! The paged cache on a simulated device.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod harness;
#[path = "../common/rng.rs"]
mod rng;
#[path = "../common/waiting.rs"]
mod waiting;

mod ahead;
mod blocks;
mod forks;
mod model;
mod packing;
mod places;
mod shortage;
mod streams;
mod threads;
