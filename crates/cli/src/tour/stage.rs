//! [`Stage`]: what the steps share.

use std::path::PathBuf;
use std::sync::Arc;

use vmm_pool::{Buffer, ElasticBuffer, Place, Pool};
use vmm_sys::object::Stream;
use vmm_sys::sim::Sim;
use vmm_sys::{DeviceId, Driver};

use super::graph::Graph;
use super::telling::{Told, Trouble};

pub(super) type StepResult = Result<Told, Trouble>;

/// The label of the buffer.
pub(super) const TAG: &str = "tour";

/// A device that has a part.
pub(super) struct Actor {
    pub(super) device: DeviceId,
    pub(super) stream: Stream,
    /// A word on the device that kernels count wrong words in.
    pub(super) counter: Buffer,
    /// Free memory before anything was made, in bytes.
    pub(super) free_bytes: u64,
}

/// The pool, the buffer and what is known of it. Fields are dropped in this order.
pub(super) struct Stage {
    pub(super) graph: Option<Graph>,
    pub(super) buffer: ElasticBuffer,
    pub(super) first: Actor,
    /// Or why there is none.
    pub(super) second: Result<Actor, String>,
    /// Whether there is memory of the host, or why not.
    pub(super) host: Result<Place, String>,
    /// What the buffer is to hold, in bytes: a multiple of four chunks.
    pub(super) bytes: u64,
    /// Where it began; it must stay there.
    pub(super) address: u64,
    /// The first of the words that it holds now.
    pub(super) value: u32,
    pub(super) pool: Pool,
    pub(super) driver: Arc<dyn Driver>,
    pub(super) sim: Option<Arc<Sim>>,
    /// What the second process runs.
    pub(super) program: Option<PathBuf>,
}

impl Stage {
    /// The devices that have parts.
    pub(super) fn actors(&self) -> impl Iterator<Item = &Actor> {
        [&self.first].into_iter().chain(&self.second)
    }

    /// The chunks' places, all the same, or what was found.
    pub(super) fn check_place(&self, place: Place) -> Result<(), Trouble> {
        let by_place = self.buffer.stats().by_place;
        match by_place.as_slice() {
            [(found, bytes)] if *found == place && *bytes == self.bytes => Ok(()),
            _ => Err(Trouble::Wrong(format!(
                "expected {} bytes on {place}, found {by_place:?}",
                self.bytes
            ))),
        }
    }

    /// The address and the figures of the pool.
    pub(super) fn check_sound(&self) -> Result<(), Trouble> {
        if self.buffer.address() != self.address {
            let (expected, found) = (self.address, self.buffer.address());
            return Err(Trouble::Wrong(format!(
                "expected address {expected:#x}, found {found:#x}"
            )));
        }
        self.pool.verify().map_err(Trouble::Wrong)?;
        let stats = self.pool.stats();
        let devices = stats.devices.iter().find(|(_, stats)| !stats.adds_up());
        let hosts = stats.hosts.iter().find(|stats| !stats.adds_up());
        match (devices, hosts) {
            (None, None) => Ok(()),
            (device, host) => Err(Trouble::Wrong(format!(
                "expected figures that add up, found {device:?} {host:?}"
            ))),
        }
    }
}
