//! The machinery of the program `vmm-pool`, as a library: the tests and benches of the workspace
//! replay traces with it too.
//!
//! - [`trace`] reads what an allocator was asked;
//! - [`replay`] drives an allocator through it and measures;
//! - [`target`] holds the allocators that can be driven: the pool, and the driver's own;
//! - [`report`] turns figures into a table or into JSON;
//! - [`doctor`] examines the machine;
//! - [`tour`](mod@tour) shows what the pool does across devices, with every byte checked;
//! - [`driver_choice`] decides between the GPU and the simulated device.
//!
//! No policy of the pool is here: this crate drives and measures.

#![deny(unsafe_code)]

pub mod doctor;
pub mod driver_choice;
pub mod replay;
pub mod report;
pub mod target;
pub mod tour;
pub mod trace;
