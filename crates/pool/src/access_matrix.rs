//! [`AccessMatrix`]: who may use whose memory, and over what.

use std::fmt;

use vmm_sys::caught::caught;
use vmm_sys::{Access, Call, DeviceId, PeerAttribute};

use crate::peers::PeerVerdict;
use crate::places::Places;

/// What is known of every pair of a pool's devices, and of the other devices that were named.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct AccessMatrix {
    /// One entry for each ordered pair of different devices, by owner.
    pub pairs: Vec<AccessPair>,
}

/// What one device may do with the memory of another.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AccessPair {
    /// Whose memory it is.
    pub owner: DeviceId,
    /// Who reads and writes.
    pub accessor: DeviceId,
    /// What the pool's policy lets it do.
    pub policy: Access,
    /// Elastic buffers with home at the owner that let it do something (count).
    pub buffers: u64,
    /// Whether it works, found out by reading bytes.
    pub verdict: PeerVerdict,
    /// Relative speed of the link, 0 the fastest; `None` if the driver does not say.
    pub link_rank: Option<i32>,
    /// Whether atomics work over the link; `None` if the driver does not say.
    pub native_atomics: Option<bool>,
}

impl AccessMatrix {
    /// The entry of a pair.
    pub fn pair(&self, owner: DeviceId, accessor: DeviceId) -> Option<&AccessPair> {
        self.pairs.iter().find(|pair| (pair.owner, pair.accessor) == (owner, accessor))
    }
}

/// Asks the driver about links; makes no context, and touches no memory.
pub(crate) fn read(places: &Places) -> AccessMatrix {
    let bodies = places.bodies();
    let allowed: Vec<Vec<DeviceId>> =
        bodies.iter().map(|body| body.state().access.keys().copied().collect()).collect();
    let policies: Vec<Vec<(DeviceId, Access)>> =
        places.devices.iter().map(|device| device.policy.others()).collect();
    let mut accessors: Vec<DeviceId> =
        places.devices.iter().map(|device| device.plan.device).collect();
    accessors.extend(allowed.iter().flatten());
    accessors.extend(policies.iter().flatten().map(|(device, _)| *device));
    accessors.sort_unstable();
    accessors.dedup();
    let mut pairs = Vec::new();
    for (device, policy) in places.devices.iter().zip(&policies) {
        let owner = device.plan.device;
        for &accessor in accessors.iter().filter(|accessor| **accessor != owner) {
            let granted = policy.iter().find(|(device, _)| *device == accessor);
            let of_owner = bodies.iter().zip(&allowed).filter(|(body, _)| body.home() == owner);
            let ask = |attribute| {
                let ask = || places.driver.peer_attribute(attribute, accessor, owner);
                caught(Call::DeviceGetP2pAttribute, ask).ok()
            };
            pairs.push(AccessPair {
                owner,
                accessor,
                policy: granted.map_or(Access::None, |(_, access)| *access),
                buffers: of_owner.filter(|(_, allowed)| allowed.contains(&accessor)).count() as u64,
                verdict: places.peers.verdict(owner, accessor),
                link_rank: ask(PeerAttribute::PerformanceRank),
                native_atomics: ask(PeerAttribute::NativeAtomicSupported).map(|it| it != 0),
            });
        }
    }
    AccessMatrix { pairs }
}

impl fmt::Display for AccessPair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let AccessPair { owner, accessor, buffers, .. } = self;
        let policy = match self.policy {
            Access::None => "nothing",
            Access::Read => "reads",
            Access::ReadWrite => "reads and writes",
        };
        write!(f, "{accessor} at memory of {owner}: policy {policy}, {buffers} elastic buffers, ")?;
        match &self.verdict {
            PeerVerdict::Untried => f.write_str("not tried")?,
            PeerVerdict::Works => f.write_str("works")?,
            PeerVerdict::Fails(fault) => write!(f, "does not work ({fault})")?,
        }
        match self.link_rank {
            Some(rank) => write!(f, ", link rank {rank} (0 is the fastest)"),
            None => f.write_str(", link unknown"),
        }
    }
}

impl fmt::Display for AccessMatrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.pairs.iter().try_for_each(|pair| writeln!(f, "{pair}"))
    }
}
