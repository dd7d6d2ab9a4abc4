//! A small inference server on the pool: KV caches that grow by mapping, in a server that batches
//! continuously.
//!
//! Decode steps are simulated (there are no weights that mean anything); memory is real, and every
//! byte of it is checked ([`pattern`]).

#![deny(unsafe_code)] // a backend launches kernels

pub mod backend;
pub mod cache;
pub mod clock;
pub mod compare;
pub mod engine;
pub mod fleet;
pub mod http;
pub mod lengths;
pub mod load;
pub mod meters;
pub mod model;
pub mod pattern;
pub mod serve;
