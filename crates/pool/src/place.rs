//! [`Place`]: where physical memory can lie.

use std::fmt;

use vmm_sys::{ChunkProps, DeviceId, HandleTypes, Location};

/// Where a chunk of an elastic buffer lies. One buffer's chunks may lie in different places.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    /// The memory of a GPU that the pool manages.
    Device(DeviceId),
    /// A NUMA node of the host.
    HostNuma(u32),
}

impl Place {
    /// The device, if this is one.
    pub fn device(self) -> Option<DeviceId> {
        match self {
            Place::Device(device) => Some(device),
            Place::HostNuma(_) => None,
        }
    }

    /// Where chunks with these properties lie.
    pub(crate) fn of(props: &ChunkProps) -> Place {
        match props.location {
            Location::Device(device) => Place::Device(device),
            Location::HostNuma(node) => Place::HostNuma(node),
            // No chunk is made there: the host as a whole is a grantee only.
            Location::Host => Place::HostNuma(0),
        }
    }

    /// The properties of chunks made here.
    pub(crate) fn props(self, exportable: bool) -> ChunkProps {
        let location = match self {
            Place::Device(device) => Location::Device(device),
            Place::HostNuma(node) => Location::HostNuma(node),
        };
        let handle_types = if exportable { HandleTypes::POSIX_FD } else { HandleTypes::NONE };
        ChunkProps { location, handle_types, rdma: false }
    }
}

impl From<DeviceId> for Place {
    fn from(device: DeviceId) -> Place {
        Place::Device(device)
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Device(device) => write!(f, "{device}"),
            Place::HostNuma(node) => write!(f, "host NUMA node {node}"),
        }
    }
}
