//! Hand-overs between threads, tried in many interleavings: `tests/proofs.sh` runs them.
//!
//! Each proof says which change to the code it was seen to catch, and which it is meant to catch. Threads, locks and the simulated
//! device all run under the scheduler of `vmm_sys::sync`; an execution repeats by its seed.
#![cfg(shuttle)]
#![allow(clippy::unwrap_used, reason = "a failure ends the proof")]

mod ahead;
mod captures;
mod ends;
mod hooks;
mod lanes;
mod limits;
mod loans;
mod locks;
mod mover;
mod moves;
mod rig;
mod whole;

// The pool's own files, since the turn has no door to the outside.
#[allow(unused_imports, unused_macros, dead_code, reason = "the turn uses its part")]
#[path = "../../src/sync.rs"]
mod sync;
#[path = "../../src/turn.rs"]
mod turn;
