//! Two processes and real descriptors, on the simulated device. The second process is this program
//! once more, told what to be by its environment.

#![allow(clippy::unwrap_used, reason = "a failure ends the test")]

mod changes;
mod common;
mod handover;
mod kills;
mod limits;
mod owner;
mod processes;
mod rounds;
mod walls;

/// What the second process runs; does nothing in the first.
#[test]
fn second_process() {
    common::second::run();
}
