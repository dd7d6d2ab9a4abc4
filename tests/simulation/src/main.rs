//! Seeded runs of everything at once: `tests/simulate.sh` builds and runs it.
//!
//! A run is one execution of several threads, the actors, on a pool of simulated devices, under the
//! scheduler of `vmm_sys::sync`. Its seed says what the machine and the pool are like, what each actor
//! does, which driver calls fail, and who goes on at every step: so the same seed is the same run.
//!
//! Every buffer has contents of its own, written and compared by work on streams, so that memory which
//! was given out too early shows as foreign bytes, and memory that went too early as a fault.
//!
//! Caught within 500 runs, made by hand and one at a time: gates that have always passed (`Asker::ask`); a lane
//! that ends while a thread of it is at the driver (`should_retire` without `busy`); a quota that stays
//! booked after a failed growth (`unbook_quota` in `commit_for`); a move that does not wait for guards
//! (`Uses::close`), nor for the work of earlier users (its gates); a use that is let in without being
//! held (`Uses::begin`); memory of graphs that is trimmed (`may_move` without `is_private`).
#![cfg_attr(shuttle, allow(clippy::unwrap_used, reason = "a failure ends the run"))]

#[cfg(shuttle)]
mod actor;
#[cfg(shuttle)]
mod blocks;
#[cfg(shuttle)]
mod caches;
#[cfg(shuttle)]
mod coverage;
#[cfg(shuttle)]
mod elastic;
#[cfg(shuttle)]
mod execute;
#[cfg(shuttle)]
mod faults;
#[cfg(shuttle)]
mod graphs;
#[cfg(shuttle)]
mod judge;
#[cfg(shuttle)]
mod kernels;
#[cfg(shuttle)]
mod moves;
#[cfg(shuttle)]
mod notes;
#[cfg(shuttle)]
mod part;
#[cfg(shuttle)]
mod program;
#[cfg(shuttle)]
#[allow(
    dead_code,
    unreachable_pub,
    reason = "the scripts of tests/ are a library, and use the rest"
)]
#[path = "../../src/rng.rs"]
mod rng;
#[cfg(shuttle)]
mod scheduler;
#[cfg(shuttle)]
mod setup;
#[cfg(shuttle)]
mod time;
#[cfg(shuttle)]
mod world;

#[cfg(shuttle)]
fn main() -> std::process::ExitCode {
    program::main()
}

#[cfg(not(shuttle))]
fn main() -> std::process::ExitCode {
    eprintln!("simulate: built without the scheduler; tests/simulate.sh builds it with");
    std::process::ExitCode::from(2)
}
