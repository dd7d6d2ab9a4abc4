//! Hand-overs between a cache's thread and those who use it, tried in many interleavings:
//! `tests/proofs.sh` runs them, after the pool's own (`crates/pool/tests/proofs`).
//!
//! Each proof says which change to the code it was seen to catch.
#![cfg(shuttle)]
#![allow(clippy::unwrap_used, reason = "a failure ends the proof")]

mod bell;
mod contiguous;
mod paged;

#[allow(dead_code, reason = "caches use their part")]
#[path = "../../../pool/tests/proofs/rig.rs"]
mod rig;

// The cache's own files, since its bell has no door to the outside.
#[path = "../../src/grower.rs"]
mod grower;
#[allow(unused_imports, dead_code, reason = "the bell uses its part")]
#[path = "../../src/sync.rs"]
mod sync;

use vmm_kv::{Dtype, KvShape};

/// 2 layers, one head of 64 elements, 16 bits: 512 bytes a token.
fn shape() -> KvShape {
    KvShape::new(2, 1, 64, Dtype::F16).unwrap()
}

/// Tokens of a chunk.
const T: u64 = rig::CHUNK / 512;
