//! Capabilities that do not hold: what is advertised, and then refused by a later call.

use super::answer::{Answer, Refused};
use super::builder::Config;
use crate::call::Call;
use crate::error::{ResultCode, explain};
use crate::types::{ChunkProps, HandleTypes, Location};

/// What a chunk has that a call may refuse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Property {
    /// Anything.
    Any,
    /// The RDMA flag.
    Rdma,
    /// Handle type POSIX descriptor.
    PosixFd,
    /// Handle type fabric.
    Fabric,
    /// Memory of the host.
    HostNuma,
}

impl Property {
    fn is_of(self, props: &ChunkProps) -> bool {
        match self {
            Property::Any => true,
            Property::Rdma => props.rdma,
            Property::PosixFd => props.handle_types.contains(HandleTypes::POSIX_FD),
            Property::Fabric => props.handle_types.contains(HandleTypes::FABRIC),
            Property::HostNuma => matches!(props.location, Location::HostNuma(_)),
        }
    }
}

/// One lie: `call` refuses memory with `property`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Refusal {
    pub(super) property: Property,
    pub(super) call: Call,
    pub(super) code: ResultCode,
}

impl Config {
    /// Whether `call` takes memory of these properties.
    pub(super) fn permit(&self, call: Call, props: &ChunkProps) -> Answer<()> {
        match self.refusals.iter().find(|rule| rule.call == call && rule.property.is_of(props)) {
            Some(rule) => Err(Refused::new(rule.code).because(explain::MISSING_SUPPORT)),
            None => Ok(()),
        }
    }
}
