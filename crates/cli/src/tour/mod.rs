//! The tour: what the pool does across devices, told as one story, on a buffer whose every byte is
//! checked after each step.
//!
//! A step is a function in a file of its own: it gets the `Stage`, which the steps before have
//! left ready, and tells what it did, or why it was left out. The first that fails ends the story.

mod access;
mod borrow;
mod build;
mod bytes;
mod end;
mod graph;
mod grow;
mod host;
mod kv;
mod migrate;
mod neighbour;
mod others;
mod peer;
mod process;
mod sleep;
mod stage;
mod telling;

use std::path::PathBuf;
use std::sync::Arc;

use vmm_sys::sim::Sim;
use vmm_sys::{DeviceId, Driver};

pub use peer::peer;
use stage::{Stage, StepResult};
use telling::Teller;
pub use telling::{Outcome, Telling};

/// What the tour is made on.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The driver.
    pub driver: Arc<dyn Driver>,
    /// The same, if it is the simulated device: then times are modelled.
    pub sim: Option<Arc<Sim>>,
    /// The devices that the pool is to manage; the first two of them have parts.
    pub devices: Vec<DeviceId>,
    /// The length of the buffer, in bytes; rounded up to whole chunks.
    pub bytes: u64,
    /// The program `vmm-pool`, which is the second process; without it there is none.
    pub program: Option<PathBuf>,
}

/// The most that a buffer of the tour may hold, in bytes: half of its capacity.
pub const BYTES_MAX: u64 = 1 << 39;

/// Smaller on the simulated device, where bytes are the host's.
pub const SIM_BYTES: u64 = 16 << 20;
/// On a GPU.
pub const GPU_BYTES: u64 = 256 << 20;

type Step = fn(&mut Stage) -> StepResult;

/// Between the first step, which makes the stage, and the last, which takes it down.
const STEPS: &[(&str, Step)] = &[
    ("grow", grow::in_place),
    ("grow ahead", grow::ahead),
    ("graph", graph::capture),
    ("access", access::grant),
    ("neighbour", neighbour::commit),
    ("borrow", borrow::and_give_back),
    ("move", migrate::there_and_back),
    ("move ahead", others::while_others_work),
    ("host", host::there_and_back),
    ("sleep, dropped", sleep::dropped),
    ("sleep, kept", sleep::kept),
    ("kv, contiguous", kv::contiguous),
    ("kv, paged", kv::paged),
    ("another process", process::share),
];

/// Tells the story; each step is told as soon as it is over. Whether all went well.
pub fn tour(plan: &Plan, tell: &mut dyn FnMut(&Telling)) -> bool {
    let mut teller = Teller::new(plan, tell);
    let Some(mut stage) = teller.build("build", || build::stage(plan)) else {
        return teller.sum_up(false);
    };
    for (name, step) in STEPS {
        if !teller.step(name, || step(&mut stage)) {
            return teller.sum_up(false);
        }
    }
    let ended = teller.step("end", || end::give_back(stage));
    teller.sum_up(ended)
}
