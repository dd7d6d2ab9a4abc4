//! Which devices may use an elastic buffer: granted and revoked over all of its pieces, or over
//! none.

use std::sync::Arc;

use vmm_sys::caught::caught;
use vmm_sys::{Access, AccessGrant, Call, DeviceId, DriverError, Location};

use super::error::ElasticError;
use super::operation::Operation;
use crate::error::Error;
use crate::peers::Sample;
use crate::place::Place;
use crate::turn::Turn;

fn grant_of(device: DeviceId, access: Access) -> AccessGrant {
    AccessGrant { location: Location::Device(device), access }
}

/// Whose word a grant is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Word {
    /// The buffer's own, which goes before the pool's from then on.
    Buffer,
    /// The pool's policy.
    Policy,
}

impl Operation<'_> {
    /// Sets what `device` may do, on every piece and on those to come.
    pub(crate) fn grant(&self, device: DeviceId, access: Access, word: Word) -> Result<(), Error> {
        let body = self.0;
        if word == Word::Policy && body.state().own_words.contains(&device) {
            return Ok(());
        }
        if device == body.home() {
            return match access {
                Access::ReadWrite => Ok(()),
                Access::None | Access::Read => Err(ElasticError::HomeAccess { device }.into()),
            };
        }
        self.set(device, access)?;
        if word == Word::Buffer {
            body.state().own_words.insert(device);
        }
        Ok(())
    }

    /// The same, without a word on whose wish it is. Returns what `device` might do before.
    pub(super) fn set(&self, device: DeviceId, access: Access) -> Result<Access, Error> {
        self.check_mended()?;
        if access != Access::None {
            self.reach_for(device)?;
        }
        let before = self.0.state().access.get(&device).copied().unwrap_or(Access::None);
        if before != access {
            self.grant_all(device, access, before)?;
        }
        Ok(before)
    }

    fn grant_all(&self, device: DeviceId, access: Access, before: Access) -> Result<(), Error> {
        let body = self.0;
        let slots: Vec<u32> = body.state().pieces.keys().copied().collect();
        for (done, slot) in slots.iter().enumerate() {
            if let Err(error) = self.set_access(*slot, grant_of(device, access)) {
                for slot in &slots[..done] {
                    self.restore_access(*slot, grant_of(device, before));
                }
                return Err(error.into());
            }
        }
        let mut state = body.state();
        match access {
            Access::None => state.access.remove(&device),
            _ => state.access.insert(device, access),
        };
        Ok(())
    }

    /// Undoes [`Operation::set`]: what `device` may do is what it might before, and what the driver
    /// refuses of that is tried again before the next operation.
    pub(crate) fn unset(&self, device: DeviceId, before: Access) {
        let body = self.0;
        let slots: Vec<u32> = {
            let mut state = body.state();
            let now = match before {
                Access::None => state.access.remove(&device),
                _ => state.access.insert(device, before),
            };
            if now.unwrap_or(Access::None) == before {
                return;
            }
            state.pieces.keys().copied().collect()
        };
        slots.into_iter().for_each(|slot| self.restore_access(slot, grant_of(device, before)));
    }

    /// Undoes [`Operation::grant`] of the pool's policy.
    pub(crate) fn ungrant(&self, device: DeviceId, before: Access) {
        if device != self.0.home() && !self.0.state().own_words.contains(&device) {
            self.unset(device, before);
        }
    }

    /// Makes sure that everybody who has access can use memory of `place`.
    pub(super) fn reach(&self, place: Place) -> Result<(), Error> {
        let places = &self.0.places;
        let Some(owner) = place.device() else { return Ok(()) };
        let accessors: Vec<DeviceId> = self.0.state().access.keys().copied().collect();
        let sample = || self.sample(owner);
        accessors
            .into_iter()
            .try_for_each(|accessor| places.peers.ensure_by(places, owner, accessor, sample))
    }

    /// Some chunk of the buffer that lies on `owner`.
    fn sample(&self, owner: DeviceId) -> Option<Sample> {
        let state = self.0.state();
        let mut there = state.pieces.values().filter(|it| it.place == Place::Device(owner));
        there.find_map(|standing| {
            let chunk = standing.mapping()?.chunk().clone();
            Some(Sample { chunk, footing: Arc::downgrade(&standing.footing) })
        })
    }

    /// Makes sure that `accessor` can use the memory that the buffer has now, and that of its home.
    fn reach_for(&self, accessor: DeviceId) -> Result<(), Error> {
        let body = self.0;
        let mut owners = vec![body.home()];
        owners.extend(body.state().pieces.values().filter_map(|it| it.place.device()));
        owners.sort_unstable();
        owners.dedup();
        let peers = &body.places.peers;
        owners.into_iter().try_for_each(|owner| {
            peers.ensure_by(&body.places, owner, accessor, || self.sample(owner))
        })
    }

    /// Only the thread that holds the operation takes pieces away, so the slot is what it was.
    fn set_access(&self, slot: u32, grant: AccessGrant) -> Result<(), DriverError> {
        let address = self.0.address() + u64::from(slot) * self.0.shape.chunk_bytes;
        let bytes = self.0.shape.chunk_bytes;
        let driver = self.0.range.driver();
        let set = || driver.set_access(address, bytes, &[grant]);
        Turn::Requester.with(|| caught(Call::MemSetAccess, set))
    }

    /// Takes a grant back. What the driver refuses is tried again before the next operation.
    fn restore_access(&self, slot: u32, grant: AccessGrant) {
        let Err(error) = self.set_access(slot, grant) else { return };
        crate::obstacle::tell(&error, "an access could not be taken back");
        self.0.state().change(slot, |standing| {
            standing.owed.retain(|owed| owed.location != grant.location);
            standing.owed.push(grant);
        });
    }

    /// Tries again what [`Operation::restore_access`] could not do.
    pub(super) fn settle_debts(&self) {
        let owed: Vec<(u32, Vec<AccessGrant>)> = {
            let mut state = self.0.state();
            let slots: Vec<u32> = state.indebted.iter().copied().collect();
            let mut take = |slot| {
                let mut owed = Vec::new();
                state.change(slot, |standing| owed = std::mem::take(&mut standing.owed));
                (slot, owed)
            };
            slots.into_iter().map(&mut take).collect()
        };
        for (slot, grants) in owed {
            grants.into_iter().for_each(|grant| self.restore_access(slot, grant));
        }
    }
}
