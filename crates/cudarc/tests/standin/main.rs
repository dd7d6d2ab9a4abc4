//! Programs of cudarc with the pool, on the stand-in `libcuda`: each test in a process of its own.

#![allow(clippy::unwrap_used, reason = "helpers of tests are not seen as tests")]

mod common;
mod drop_in;
mod elastic;
mod ends;
mod faults;
mod gpus;
mod graphs;
mod streams;
