//! Fidelity: the same work on the simulated device and on a GPU makes the same driver calls, and takes the
//! time that is modelled.

pub mod compare;
pub mod work;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use vmm_sys::{CallCounts, Driver};

/// What one piece of work cost: a line of a record.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// What was done.
    pub work: String,
    /// On which driver.
    pub driver: String,
    /// How many devices the work could use: the tour does more with two.
    pub devices: u32,
    /// Driver calls, by the driver's name.
    pub calls: BTreeMap<String, u64>,
    /// Microseconds in them: measured on a GPU, modelled on the simulated device.
    pub us: BTreeMap<String, f64>,
    /// The most memory held, in bytes.
    pub peak_held_bytes: u64,
}

impl Row {
    fn new(work: String, driver: &dyn Driver, calls: &CallCounts, peak_held_bytes: u64) -> Row {
        let named = |call: vmm_sys::Call| call.name().to_owned();
        Row {
            work,
            driver: driver.kind().to_string(),
            devices: 0, // said by who knows: [`work::all`]
            calls: calls.nonzero().map(|(call, count)| (named(call), count)).collect(),
            us: calls
                .nonzero()
                .map(|(call, _)| (named(call), calls.nanos_of(call) as f64 / 1000.0))
                .collect(),
            peak_held_bytes,
        }
    }
}
