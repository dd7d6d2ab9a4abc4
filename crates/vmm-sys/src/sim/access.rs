//! Who may touch a mapping: set access, get access, and the books of peer pairs.
//!
//! Access belongs to the mapping, not to the chunk: an alias or a remap starts with none (row
//! D-A6), and no peer has to be enabled first (row D-A7). What it costs depends on the past: memory
//! that was never granted needs its page tables built, and the first grant of a pair of devices
//! brings their link up. The link stays up as long as one mapping of that owner's memory is granted
//! to that peer; a pool keeps a small one for that. Whether one direction also serves the other was
//! not measured; here it does not, which is the dearer answer.

use std::collections::BTreeSet;

use super::answer::{Answer, Refused};
use super::builder::Link;
use super::regions::{Backing, Region};
use super::state::State;
use super::vmm::no_chunk_at;
use super::{Sim, costs};
use crate::call::Call;
use crate::error::{DriverResult, ResultCode};
use crate::types::{Access, AccessGrant, DeviceId, Location};

impl Sim {
    /// Rows D-A1 to D-A3 and D-A7. All is checked before anything is granted; the price is per
    /// mapping, not per call.
    pub(super) fn do_set_access(
        &self,
        address: u64,
        bytes: u64,
        grants: &[AccessGrant],
    ) -> DriverResult<()> {
        self.call(Call::MemSetAccess, |state| {
            state.check_grants(grants)?;
            state.all_reserved(address, bytes)?;
            let starts = state.whole_regions(address, bytes)?;
            // A hole at an end is refused. With one between two mappings the answer is OK, and what
            // lies behind the first hole got nothing (rows D-A9 and D-N10).
            let end = |start: &u64| start + state.regions[start].bytes;
            let reaches =
                starts.first() == Some(&address) && starts.last().map(end) == Some(address + bytes);
            if !reaches {
                return Err(Refused::invalid_value(format_args!(
                    "{address:#x} and {bytes} bytes do not begin and end with a mapping"
                )));
            }
            let mut reached = address;
            let before_hole = |start: &&u64| {
                let touches = **start == reached;
                reached = end(start);
                touches
            };
            let granted: Vec<u64> = starts.iter().take_while(before_hole).copied().collect();
            state.check_grantees(&starts, grants)?;
            let cost = granted.iter().map(|start| state.grant(*start, grants)).sum();
            state.bill(cost);
            Ok(())
        })
    }

    /// What one location may do there; nothing, for locations that were never granted.
    pub(super) fn do_get_access(&self, address: u64, location: Location) -> DriverResult<Access> {
        self.call(Call::MemGetAccess, |state| match state.region_at(address) {
            Some((_, region)) if matches!(region.backing, Backing::Chunk { .. }) => {
                if let Location::Device(device) = location {
                    state.device(device)?;
                }
                Ok(region.access.get(state.answers_for(region, location)))
            }
            _ => Err(no_chunk_at(address)),
        })
    }
}

impl State {
    /// Whose access get access tells: asked for the host, it tells that of the memory's own device
    /// (row D-N6). Nobody can grant device memory to the host (row D-A3).
    fn answers_for(&self, region: &Region, asked: Location) -> Location {
        match (asked, region.backing) {
            (Location::Host, Backing::Chunk { physical, .. }) => {
                match self.physical[physical].props.location {
                    home @ Location::Device(_) => home,
                    Location::Host | Location::HostNuma(_) => asked,
                }
            }
            _ => asked,
        }
    }

    /// Books a mapping of `home`'s memory that `device` may use, or takes it off the books.
    pub(super) fn count_peer(&mut self, home: Location, device: DeviceId, alive: bool) {
        let Some(owner) = home.device().filter(|owner| *owner != device) else { return };
        let count = self.peer_mappings.entry((owner, device)).or_insert(0);
        *count = if alive { *count + 1 } else { count.saturating_sub(1) };
        if *count == 0 {
            self.peer_mappings.remove(&(owner, device));
        }
    }

    /// What is wrong with a list of grants whatever it is applied to.
    fn check_grants(&self, grants: &[AccessGrant]) -> Answer<()> {
        if grants.is_empty() {
            return Err(Refused::invalid_value("no grant in the list"));
        }
        for grant in grants {
            if let Location::Device(device) = grant.location
                && self.device(device).is_err()
            {
                return Err(Refused::invalid_value(format_args!("there is no {device}")));
            }
        }
        Ok(())
    }

    /// What is wrong with granting these mappings to these locations.
    fn check_grantees(&self, starts: &[u64], grants: &[AccessGrant]) -> Answer<()> {
        let mut peers_after: Vec<(DeviceId, BTreeSet<DeviceId>)> = Vec::new();
        for start in starts {
            let Backing::Chunk { physical, .. } = self.regions[start].backing else {
                return Err(no_chunk_at(*start));
            };
            let props = &self.physical[physical].props;
            self.config.permit(Call::MemSetAccess, props)?;
            let Some(owner) = props.location.device() else { continue };
            if !peers_after.iter().any(|(device, _)| *device == owner) {
                peers_after.push((owner, self.peers_of(owner)));
            }
            for grant in grants {
                let Location::Device(device) = grant.location else {
                    // Row D-A3.
                    return Err(Refused::new(ResultCode::NOT_SUPPORTED).because(format_args!(
                        "memory of {owner} cannot be granted to {}",
                        grant.location
                    )));
                };
                if device == owner || grant.access == Access::None {
                    continue;
                }
                if self.config.link(owner, device) == Link::None {
                    return Err(Refused::invalid_value(format_args!(
                        "no link between {owner} and {device}"
                    )));
                }
                for (_, peers) in peers_after.iter_mut().filter(|(of, _)| *of == owner) {
                    peers.insert(device);
                }
            }
        }
        for (owner, peers) in peers_after {
            if peers.len() > self.config.max_peers {
                return Err(Refused::new(ResultCode::TOO_MANY_PEERS).because(format_args!(
                    "{} peers of {owner}, at most {}",
                    peers.len(),
                    self.config.max_peers
                )));
            }
        }
        Ok(())
    }

    /// Applies checked grants to one mapping. Returns the cost.
    fn grant(&mut self, start: u64, grants: &[AccessGrant]) -> u64 {
        let Some(region) = self.regions.get_mut(&start) else { return 0 };
        let Backing::Chunk { physical, .. } = region.backing else { return 0 };
        let before = region.access;
        for grant in grants {
            region.access.set(grant.location, grant.access);
        }
        let (after, bytes) = (region.access, region.bytes);
        let chunk = &self.physical[physical];
        let home = chunk.props.location;
        let again = chunk.granted_before;
        let exportable = chunk.exportable();

        let names = |location: Location| grants.iter().any(|grant| grant.location == location);
        // Page tables are built once, whoever asks first; a peer alone skips the owner's part.
        let local = names(home) || home.device().is_none() || !again;
        let mut cost = if local { costs::access_ns(bytes, again, exportable) } else { 0 };
        let owner_stays = before.get(home) != Access::None;
        for device in (0..self.devices.len() as u32).map(DeviceId) {
            let location = Location::Device(device);
            let had = before.get(location) != Access::None;
            let has = after.get(location) != Access::None;
            if let Some(owner) = home.device().filter(|owner| *owner != device)
                && names(location)
            {
                let alone = cost == 0 && !owner_stays;
                cost += if alone { costs::ACCESS_PEER_ALONE_NS } else { costs::ACCESS_PEER_NS };
                let link_is_up = self.peer_mappings.contains_key(&(owner, device));
                cost += if has && !link_is_up { costs::LINK_UP_NS } else { 0 };
            }
            if had != has {
                self.count_peer(home, device, has);
            }
        }
        if after.granted().next().is_some() {
            self.physical[physical].granted_before = true;
        }
        cost.max(costs::base_ns(Call::MemSetAccess))
    }
}
