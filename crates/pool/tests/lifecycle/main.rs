//! What goes wrong around a pool, other than a call that fails: one program, a file a subject.

#![allow(clippy::unwrap_used, reason = "a failure ends the story")]

#[path = "../common/mod.rs"]
mod common;

mod drops;
mod held_calls;
mod lost;
#[allow(unreachable_pub, reason = "public where the file is at home")]
#[path = "../../../../tests/src/orders.rs"]
mod orders;
mod panics;
mod scene;
mod stuck;
