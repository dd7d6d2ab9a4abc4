//! A row of the table: its name, what it needs, and the function that checks it.

use crate::types::{DeviceAttribute, DriverKind};

use super::bench::Bench;
use super::check::skip;
use super::outcome::{Outcome, Step};

/// One row of the table of answers in `docs/DRIVER.md`.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// The id in the table: `D-R1`.
    pub id: &'static str,
    /// The part of the contract it belongs to.
    pub group: &'static str,
    /// What the driver is expected to do, in one line.
    pub title: &'static str,
    /// Whether the answer is known.
    pub kind: RowKind,
    /// What the machine and the runner must offer.
    pub needs: Needs,
    /// The states it is run in, each in a place of its own if [`Needs::own_driver`] says so.
    pub cases: &'static [Case],
    /// The check itself, for the case that the bench names.
    pub run: fn(&Bench) -> Outcome,
}

impl Row {
    /// The name of its function: `d_r1`.
    pub fn name(&self) -> String {
        self.id.to_lowercase().replace('-', "_")
    }
}

/// Whether a row can fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowKind {
    /// The table has the answer.
    Check,
    /// The table has no answer yet: the row reports what came.
    Observe,
}

/// One state in which a row is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case {
    /// Its name; empty for the only case of a row.
    pub name: &'static str,
    /// Whether it needs kernels that take real time, which only a GPU has.
    pub gpu_only: bool,
    /// The signal that ends the process on a GPU, where that is the answer: the driver follows a
    /// handle that names nothing. The simulated device follows none, and refuses.
    pub ends_by: Option<i32>,
}

/// What a row needs; where something is missing the row is skipped, and the report says what.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// A second device that the first can reach, and the other way round.
    pub peer: bool,
    /// Host NUMA memory through the VMM calls.
    pub host_numa: bool,
    /// A second process: see [`Bench::with_second_process`].
    pub second_process: bool,
    /// A driver that nothing else uses, because the row leaves its context broken or might end the
    /// process: see [`Bench::with_fresh`] and [`Bench::with_isolation`].
    pub own_driver: bool,
}

impl Needs {
    /// One device and nothing else.
    pub const DEVICE: Needs =
        Needs { peer: false, host_numa: false, second_process: false, own_driver: false };
    /// Two devices that reach each other.
    pub const PEER: Needs = Needs { peer: true, ..Needs::DEVICE };
    /// Host NUMA memory.
    pub const HOST_NUMA: Needs = Needs { host_numa: true, ..Needs::DEVICE };
    /// A second process.
    pub const PROCESS: Needs = Needs { second_process: true, ..Needs::DEVICE };
    /// A second process and a second device.
    pub const PEER_PROCESS: Needs = Needs { peer: true, second_process: true, ..Needs::DEVICE };
    /// A driver of its own.
    pub const OWN_DRIVER: Needs = Needs { own_driver: true, ..Needs::DEVICE };
    /// A driver of its own and a second device.
    pub const PEER_OWN_DRIVER: Needs = Needs { peer: true, own_driver: true, ..Needs::DEVICE };

    /// Stops a row that `bench` lacks something for. A driver that cannot even be asked has failed.
    pub(crate) fn met_by(&self, bench: &Bench) -> Step<()> {
        if self.peer {
            let Some(peer) = bench.second_device() else {
                return skip("needs two devices, and there is one");
            };
            let device = bench.device();
            for (from, to) in [(device, peer), (peer, device)] {
                if !bench.driver().can_access_peer(from, to)? {
                    return skip(format!("{from} has no access to {to}"));
                }
            }
        }
        if self.host_numa {
            let attribute = DeviceAttribute::HostNumaVmmSupported;
            let value = bench.driver().device_attribute(bench.device(), attribute)?;
            if value != 1 {
                return skip(format!("{attribute:?} is {value}: no chunks of host memory"));
            }
        }
        if self.second_process && !bench.has_second_process() {
            return skip("needs a second process, and the runner starts none");
        }
        Ok(())
    }
}

/// The one case of most rows.
pub(crate) const ONLY: &[Case] = &[Case::any("")];

impl Case {
    /// A case for every driver.
    pub(crate) const fn any(name: &'static str) -> Case {
        Case { name, gpu_only: false, ends_by: None }
    }

    /// A case for drivers whose kernels take real time.
    pub(crate) const fn gpu(name: &'static str) -> Case {
        Case { name, gpu_only: true, ends_by: None }
    }

    /// A case that ends the process on a GPU.
    pub(crate) const fn ends_by(name: &'static str, signal: i32) -> Case {
        Case { name, gpu_only: false, ends_by: Some(signal) }
    }

    /// Why this case cannot run on a driver of `kind`.
    pub(crate) fn missing(&self, kind: DriverKind) -> Option<String> {
        (self.gpu_only && kind == DriverKind::Sim)
            .then(|| "needs kernels that take real time".to_owned())
    }
}
