//! The paged cache on a simulated device.

mod harness;

mod blocks;
mod faults;
mod forks;
mod model;
mod packing;
mod places;
mod shortage;
mod streams;
mod threads;
