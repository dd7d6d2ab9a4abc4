//! What the machine can do: asked once, decided by trying, then plain data.
//!
//! An attribute is an advertisement (row D-C7): each ability is tried on a throw-away chunk, and
//! the [`Finding`] keeps both what was said and what happened. A shortage is not a verdict: out of
//! memory leaves an ability *undecided*, never *refused*.
//!
//! Probing needs no context and makes none. It takes one granule of memory at a time and gives all
//! of it back, whichever call fails.

mod probe;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;

use crate::call::Call;
use crate::driver::Driver;
use crate::error::{DriverError, DriverResult, ResultCode, explain};
use crate::types::{DeviceId, Uuid};

/// The devices that were asked about, and what lies between them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    /// `cuDriverGetVersion`: 1000 x major + 10 x minor.
    pub driver_version: u32,
    /// One entry for each device, in the order asked.
    pub devices: Vec<DeviceFacts>,
    /// One entry for each ordered pair of different devices.
    pub links: Vec<LinkFacts>,
}

/// What is known of one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Its ordinal in this process.
    pub device: DeviceId,
    /// Its identity in every process.
    pub uuid: Uuid,
    /// What it is called.
    pub name: String,
    /// Its memory in bytes. The driver keeps a part of it.
    pub total_bytes: u64,
    /// The host NUMA node next to it, where the driver knows one.
    pub numa_node: Option<u32>,
    /// Whether it shares physical memory with the host.
    pub integrated: bool,
    /// Granularity of plain chunks.
    pub plain: DriverResult<Granularity>,
    /// Granularity of chunks that can be exported as a POSIX descriptor.
    pub exportable: DriverResult<Granularity>,
    /// Granularity of chunks with the RDMA flag.
    pub rdma: DriverResult<Granularity>,
    /// What it can do, and how that was found out.
    pub abilities: Abilities,
}

/// Granularity of one kind of chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Granularity {
    /// Sizes and addresses must be multiples of it, in bytes.
    pub minimum_bytes: u64,
    /// Sizes and addresses should be multiples of it, in bytes.
    pub recommended_bytes: u64,
}

/// What a device can do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Abilities {
    /// Reserve, create, map, set access, unmap.
    pub vmm: Finding,
    /// Export a chunk as a POSIX descriptor and import it again.
    pub export_fd: Finding,
    /// Make chunks with a fabric handle.
    pub fabric: Finding,
    /// Make chunks that a NIC may read.
    pub rdma: Finding,
    /// Use chunks of the host's memory, on the NUMA node next to the device (else node 0).
    pub host_numa: Finding,
}

impl Abilities {
    /// Each with its name, in the order in which they are explained to people.
    pub fn named(&self) -> [(&'static str, &Finding); 5] {
        let Abilities { vmm, export_fd, fabric, rdma, host_numa } = self;
        [
            ("virtual memory management", vmm),
            ("export as descriptor", export_fd),
            ("fabric handles", fabric),
            ("RDMA-capable chunks", rdma),
            ("host memory", host_numa),
        ]
    }
}

/// What one device may do with the memory of another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkFacts {
    /// Who reads and writes.
    pub accessor: DeviceId,
    /// Whose memory it is.
    pub owner: DeviceId,
    /// `cuDeviceCanAccessPeer`, against a grant that was tried on a chunk of `owner`.
    pub access: Finding,
    /// Relative speed of the link, 0 the fastest; `None` if the driver does not say.
    pub rank: Option<i32>,
    /// Whether atomics work over the link; `None` if the driver does not say.
    pub native_atomics: Option<bool>,
}

/// What was said of an ability, and what happened when it was tried.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What the attribute says; `None` if the driver does not know it.
    pub advertised: Option<bool>,
    /// What the try says.
    pub tried: Tried,
}

/// How a try ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tried {
    /// It works.
    Works,
    /// The driver says that it cannot be done here.
    Refused(DriverError),
    /// The try failed for a reason that says nothing about the ability: memory, descriptors or
    /// peer slots were short, or the context is lost. Another try may succeed.
    Undecided(DriverError),
}

impl Finding {
    /// Whether it was seen to work.
    pub fn works(&self) -> bool {
        self.tried == Tried::Works
    }

    /// Whether the ability can be relied on: seen to work, and not denied by the device. Neither
    /// word alone is enough.
    ///
    /// # Errors
    /// The refusal; where the device denies what worked, one of the attribute's call.
    pub fn usable(&self) -> DriverResult<()> {
        if self.advertised == Some(false) {
            let denied = DriverError::new(Call::DeviceGetAttribute, ResultCode::NOT_SUPPORTED);
            return Err(denied
                .because("the device says that it cannot")
                .because(explain::MISSING_SUPPORT));
        }
        self.error().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// The error of a try that did not succeed.
    pub fn error(&self) -> Option<&DriverError> {
        match &self.tried {
            Tried::Works => None,
            Tried::Refused(error) | Tried::Undecided(error) => Some(error),
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let said = match self.advertised {
            Some(true) => "advertised",
            Some(false) => "not advertised",
            None => "unknown to the driver's attributes",
        };
        match (&self.tried, self.advertised) {
            (Tried::Works, Some(true)) => write!(f, "works"),
            (Tried::Works, _) => write!(f, "works, though {said}"),
            (Tried::Refused(error), _) => write!(f, "refused ({said}): {error}"),
            (Tried::Undecided(error), _) => write!(f, "undecided ({said}): {error}"),
        }
    }
}

/// Asks and tries virtual memory management alone: the ability that nothing works without.
pub fn try_vmm(driver: &Arc<dyn Driver>, device: DeviceId) -> Finding {
    probe::vmm(driver, device)
}

impl Topology {
    /// Asks about `devices` and tries what they can do. Other devices are not touched.
    ///
    /// # Errors
    /// The driver's, if a device does not exist, or cannot even be asked for its name. Abilities
    /// that are missing are findings, not errors.
    pub fn probe(driver: &Arc<dyn Driver>, devices: &[DeviceId]) -> DriverResult<Topology> {
        probe::topology(driver, devices)
    }

    /// The facts of one device, if it was asked about.
    pub fn device(&self, device: DeviceId) -> Option<&DeviceFacts> {
        self.devices.iter().find(|facts| facts.device == device)
    }

    /// What `accessor` may do with the memory of `owner`, for two different devices that were asked
    /// about.
    pub fn link(&self, accessor: DeviceId, owner: DeviceId) -> Option<&LinkFacts> {
        self.links.iter().find(|link| (link.accessor, link.owner) == (accessor, owner))
    }

    /// Whether `accessor` was seen to be granted memory of `owner`. A device may use its own.
    pub fn reaches(&self, accessor: DeviceId, owner: DeviceId) -> bool {
        if accessor == owner {
            return self.device(owner).is_some_and(|facts| facts.abilities.vmm.works());
        }
        self.link(accessor, owner).is_some_and(|link| link.access.works())
    }
}
