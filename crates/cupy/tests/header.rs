//! The header says what the sources do.

#![allow(clippy::unwrap_used, reason = "a failure ends the test")]

#[path = "../../capi/tests/support/mod.rs"]
mod support;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

#[test]
fn the_committed_header_is_made_from_the_sources() {
    support::is_the_committed_one(ROOT, "vmm_pool_cupy.h");
}

#[test]
fn the_header_compiles_as_c_and_as_cpp() {
    support::compiles(ROOT, "vmm_pool_cupy.h");
}
