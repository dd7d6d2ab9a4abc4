//! What is at an address: mappings of chunks, legacy allocations, pinned host memory. And who may
//! touch it.

use std::collections::BTreeSet;

use super::answer::{Answer, Refused};
use super::builder::DEVICES_MAX;
use super::state::State;
use crate::types::{Access, ChunkHandle, DeviceId, Location};

/// What backs a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Backing {
    /// A mapped chunk, with the handle value it was mapped through.
    Chunk { handle: ChunkHandle, physical: usize },
    /// Memory of the driver's own allocators.
    Legacy { physical: usize, device: DeviceId, from_pool: bool },
    /// Page-locked host memory: the address is a real one of this process.
    Pinned,
}

/// What each location may do in a region. Starts as nothing (row D-A6).
#[derive(Clone, Copy, Debug)]
pub(super) struct AccessTable {
    devices: [Access; DEVICES_MAX],
    host: Access,
}

impl AccessTable {
    pub(super) const NONE: AccessTable =
        AccessTable { devices: [Access::None; DEVICES_MAX], host: Access::None };
    pub(super) const ALL: AccessTable =
        AccessTable { devices: [Access::ReadWrite; DEVICES_MAX], host: Access::ReadWrite };

    /// What a location may do.
    pub(super) fn get(&self, location: Location) -> Access {
        match location {
            Location::Device(device) => {
                self.devices.get(device.0 as usize).copied().unwrap_or(Access::None)
            }
            Location::Host | Location::HostNuma(_) => self.host,
        }
    }

    /// Changes what a location may do.
    pub(super) fn set(&mut self, location: Location, access: Access) {
        match location {
            Location::Device(device) => {
                if let Some(entry) = self.devices.get_mut(device.0 as usize) {
                    *entry = access;
                }
            }
            Location::Host | Location::HostNuma(_) => self.host = access,
        }
    }

    /// The devices that may do something.
    pub(super) fn granted(&self) -> impl Iterator<Item = DeviceId> + '_ {
        self.devices
            .iter()
            .enumerate()
            .filter(|(_, access)| **access != Access::None)
            .map(|(index, _)| DeviceId(index as u32))
    }
}

/// One region of addresses with one backing.
#[derive(Clone, Debug)]
pub(super) struct Region {
    pub(super) bytes: u64,
    pub(super) backing: Backing,
    pub(super) access: AccessTable,
    /// Never given out twice: tells a mapping from a later one at the same address.
    pub(super) id: u64,
}

/// A stretch of one region.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub(super) region: u64,
    pub(super) place: Place,
    pub(super) bytes: u64,
}

/// Where bytes are.
#[derive(Clone, Copy, Debug)]
pub(super) enum Place {
    Physical { index: usize, offset: u64 },
    Host { address: u64 },
}

/// Why an address cannot be touched.
#[derive(Clone, Copy, Debug)]
pub(super) enum TouchError {
    /// Nothing is there.
    Unmapped { address: u64 },
    /// Something is there, and `device` may not do this.
    NoAccess { address: u64, device: DeviceId },
}

impl std::fmt::Display for TouchError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            TouchError::Unmapped { address } => write!(f, "nothing is mapped at {address:#x}"),
            TouchError::NoAccess { address, device } => {
                write!(f, "{device} has no such access at {address:#x}: ")?;
                f.write_str(crate::error::explain::MISSING_GRANT)
            }
        }
    }
}

/// Who touches, and how.
#[derive(Clone, Copy, Debug)]
pub(super) struct Touch {
    pub(super) device: DeviceId,
    pub(super) write: bool,
    /// A copy engine: it reaches the legacy allocations of every device (unified addressing).
    pub(super) copy: bool,
}

impl Touch {
    /// Whether the region lets it.
    fn may(self, region: &Region, enabled_peers: &BTreeSet<(DeviceId, DeviceId)>) -> bool {
        if let Backing::Legacy { device: owner, from_pool, .. } = region.backing
            && (self.copy || (!from_pool && enabled_peers.contains(&(self.device, owner))))
        {
            return true;
        }
        match region.access.get(Location::Device(self.device)) {
            Access::None => false,
            Access::Read => !self.write,
            Access::ReadWrite => true,
        }
    }
}

impl State {
    pub(super) fn next_region_id(&mut self) -> u64 {
        self.last_region_id += 1;
        self.last_region_id
    }

    /// The region that holds an address, with its start.
    pub(super) fn region_at(&self, address: u64) -> Option<(u64, &Region)> {
        let (&start, region) = self.regions.range(..=address).next_back()?;
        (address - start < region.bytes).then_some((start, region))
    }

    /// Refuses addresses of which one is not reserved.
    pub(super) fn all_reserved(&self, address: u64, bytes: u64) -> Answer<()> {
        match self.space.covers(address, bytes) {
            true => Ok(()),
            false => Err(Refused::invalid_value(format_args!(
                "{address:#x} and {bytes} bytes are not all reserved"
            ))),
        }
    }

    /// Whether any region overlaps the addresses.
    pub(super) fn any_region_in(&self, address: u64, bytes: u64) -> bool {
        self.regions.range(address..address + bytes).next().is_some()
            || self.region_at(address).is_some()
    }

    /// The pieces of `address..address + bytes`, all of which `touch` must be allowed.
    pub(super) fn pieces(
        &self,
        address: u64,
        bytes: u64,
        touch: Touch,
    ) -> Result<Vec<Piece>, TouchError> {
        let mut pieces = Vec::new();
        let (mut at, mut left) = (address, bytes);
        while left > 0 {
            let Some((start, region)) = self.region_at(at) else {
                return Err(TouchError::Unmapped { address: at });
            };
            if !touch.may(region, &self.enabled_peers) {
                return Err(TouchError::NoAccess { address: at, device: touch.device });
            }
            let offset = at - start;
            let part = left.min(region.bytes - offset);
            let place = match region.backing {
                Backing::Chunk { physical: index, .. }
                | Backing::Legacy { physical: index, .. } => Place::Physical { index, offset },
                Backing::Pinned => Place::Host { address: at },
            };
            pieces.push(Piece { region: region.id, place, bytes: part });
            left -= part;
            // Addresses end at 2^64: a length beyond is a range that nothing maps.
            at = match at.checked_add(part) {
                Some(next) => next,
                None if left == 0 => break,
                None => return Err(TouchError::Unmapped { address: u64::MAX }),
            };
        }
        Ok(pieces)
    }
}
