//! Bringing memory to a buffer's addresses: all of it, or none.
//!
//! Chunks come from the stock of their place, else from the driver. Nobody knows of them before
//! all stand where they should, with everybody's access; a failure at any step takes them away
//! again, in the reverse order, and what was in the stock goes back there.

use std::sync::Arc;

use vmm_sys::object::{Chunk, Mapping};
use vmm_sys::{AccessGrant, DriverError};

use super::body::{Body, Counts, Operation, Standing};
use super::error::ElasticError;
use super::hooks::{Cause, Phase};
use crate::depot::Shortage;
use crate::error::Error;
use crate::ladder::Climb;
use crate::lane::{Gate, Wait};
use crate::leaving::Returned;
use crate::place::Place;
use crate::places::{Found, Site};
use crate::request::Request;
use crate::turn::Turn;

/// How a buffer is to grow.
#[derive(Clone, Copy, Debug)]
pub(crate) struct How {
    /// Where the memory comes from.
    pub(crate) place: Place,
    pub(crate) turn: Turn,
    /// Whether the GPU may be waited for.
    pub(crate) wait: Wait,
}

impl How {
    /// One chunk, as the ladder understands it.
    pub(crate) fn request(&self, bytes: u64) -> Request {
        let request = Request::new(bytes);
        if self.wait == Wait::Yes { request } else { request.no_wait() }
    }
}

/// One chunk on its way.
struct Part {
    slot: u32,
    mapping: Mapping,
    /// Where else its chunk is mapped.
    aliases: Vec<Mapping>,
    origin: Origin,
}

/// How a shortage is met, over all chunks of one growth.
pub(super) struct Short {
    climb: Climb,
    /// What the whole growth takes.
    bytes: u64,
}

impl Short {
    pub(super) fn new(bytes: u64) -> Short {
        Short { climb: Climb::for_chunks(), bytes }
    }
}

/// Where a chunk came from, and so where it goes if it is not needed after all.
pub(super) enum Origin {
    Made,
    Stock,
    /// It had left these addresses and was not gone yet; its users.
    Returned(Vec<Gate>),
}

impl Operation<'_> {
    /// Commits those of `slots` that have no memory. Returns the bytes committed.
    pub(crate) fn commit(&self, slots: impl Iterator<Item = u32>, how: How) -> Result<u64, Error> {
        self.commit_for(slots, how, Cause::Commit)
    }

    pub(super) fn commit_for(
        &self,
        slots: impl Iterator<Item = u32>,
        how: How,
        cause: Cause,
    ) -> Result<u64, Error> {
        let body = self.0;
        let missing: Vec<u32> = {
            let state = body.state();
            slots.filter(|slot| !state.pieces.contains_key(slot)).collect()
        };
        if missing.is_empty() {
            return Ok(0);
        }
        let site = body.places.site(how.place)?;
        site.check_chunk(body.shape.chunk_bytes)?;
        self.reach(how.place)?;
        let bytes = self.bytes_of(missing.len());
        self.book_quota(bytes)?;
        let mut change = self.change(cause, &missing);
        body.hooks.call(&change);
        // Until the new chunks are the buffer's, they are in this thread's hands.
        let carrying = site.depot.carries.begin();
        match self.bring(&site, &missing, how) {
            Ok(parts) => {
                change.generation = self.publish(&site, parts);
                drop(carrying);
                change.phase = Phase::After;
                body.hooks.call(&change);
                Ok(bytes)
            }
            Err(error) => {
                drop(carrying);
                self.unbook_quota(bytes);
                change.phase = Phase::Failed;
                body.hooks.call(&change);
                Err(error)
            }
        }
    }

    pub(super) fn bytes_of(&self, slots: usize) -> u64 {
        slots as u64 * self.0.shape.chunk_bytes
    }

    fn book_quota(&self, bytes: u64) -> Result<(), Error> {
        match &self.0.shape.quota {
            Some(quota) if !quota.book(bytes) => Err(ElasticError::OverQuota {
                bytes,
                booked_bytes: quota.booked_bytes(),
                quota_bytes: quota.limit_bytes(),
            }
            .into()),
            _ => Ok(()),
        }
    }

    pub(super) fn unbook_quota(&self, bytes: u64) {
        if let Some(quota) = &self.0.shape.quota {
            quota.unbook(bytes);
        }
    }

    /// Brings a chunk to each of the slots, or none to any.
    fn bring(&self, site: &Site<'_>, slots: &[u32], how: How) -> Result<Vec<Part>, Error> {
        let grants = self.0.grants();
        let mut short = Short::new(self.bytes_of(slots.len()));
        let mut parts = Vec::with_capacity(slots.len());
        for &slot in slots {
            if let Err(error) = self.bring_one(site, slot, how, &grants, &mut short, &mut parts) {
                self.undo(site, parts, how.turn);
                return Err(error);
            }
        }
        Ok(parts)
    }

    fn bring_one(
        &self,
        site: &Site<'_>,
        slot: u32,
        how: How,
        grants: &[AccessGrant],
        short: &mut Short,
        parts: &mut Vec<Part>,
    ) -> Result<(), Error> {
        let body = self.0;
        let (mapping, aliases, origin) = match self.vacate(slot, how)? {
            Some(Returned { mapping, gates, aliases }) => {
                (mapping, aliases, Origin::Returned(gates))
            }
            None => {
                let (chunk, origin) = self.supply(site, how, short)?;
                let offset = u64::from(slot) * body.shape.chunk_bytes;
                let kept = chunk.clone();
                match how.turn.with(|| Mapping::map(&body.range, offset, chunk)) {
                    Ok(mapping) => (mapping, Vec::new(), origin),
                    Err(error) => {
                        give_back(site, kept, &origin, how.turn);
                        return Err(error.into());
                    }
                }
            }
        };
        // From here on, a failure is undone with the others.
        parts.push(Part { slot, mapping, aliases, origin });
        let granted =
            parts.last().map_or(Ok(()), |part| how.turn.with(|| part.mapping.set_access(grants)));
        Ok(granted?)
    }

    /// A chunk for this buffer: from the stock, else new; the ladder is climbed where neither is to
    /// be had.
    pub(super) fn supply(
        &self,
        site: &Site<'_>,
        how: How,
        short: &mut Short,
    ) -> Result<(Arc<Chunk>, Origin), Error> {
        let body = self.0;
        let (props, bytes) = (body.props(how.place), body.shape.chunk_bytes);
        let mut cause: Option<DriverError> = None;
        loop {
            if let Some(chunk) = site.depot.stock.lock().take(&props, bytes) {
                return Ok((Arc::new(chunk), Origin::Stock));
            }
            match site.depot.create(bytes, &props, how.turn) {
                Ok(chunk) => return Ok((Arc::new(chunk), Origin::Made)),
                Err(Shortage::Limit) => {}
                Err(Shortage::Driver(error)) if error.is_out_of_memory() => cause = Some(error),
                Err(Shortage::Driver(error)) => return Err(error.into()),
            }
            if !site.make_room(&mut short.climb, bytes, how) {
                return Err(site.shortage(short.bytes, how, cause));
            }
        }
    }

    /// Looks for a mapping that left the slot and still stands there for its last users. One of
    /// the right kind comes back as it is; another is waited for.
    fn vacate(&self, slot: u32, how: How) -> Result<Option<Returned>, Error> {
        let body = self.0;
        let offset = u64::from(slot) * body.shape.chunk_bytes;
        let address = body.address() + offset;
        for wait in [how.wait, Wait::No] {
            match body.places.reclaim(address, &body.props(how.place)) {
                Found::Nothing => return Ok(None),
                Found::Reclaimed(returned) => return Ok(Some(returned)),
                Found::Other(site) if wait == Wait::Yes => site.sweep(Wait::Yes, how.turn),
                Found::Other(_) => break,
            }
        }
        Err(ElasticError::StillUsed { offset }.into())
    }

    /// Takes away what was brought, the youngest first.
    fn undo(&self, site: &Site<'_>, parts: Vec<Part>, turn: Turn) {
        for Part { mapping, aliases, origin, .. } in parts.into_iter().rev() {
            site.depot.leaving.add(aliases.into_iter(), Vec::new());
            if let Origin::Returned(gates) = origin {
                site.depot.leaving.add(std::iter::once(mapping), gates);
                continue;
            }
            match turn.with(|| mapping.unmap()) {
                Ok(chunk) => give_back(site, chunk, &origin, turn),
                Err((mapping, error)) => {
                    tracing::warn!(%error, "a mapping could not be unmapped; tried again later");
                    site.depot.leaving.add(std::iter::once(mapping), Vec::new());
                }
            }
        }
    }

    /// Makes the parts the buffer's. Returns its new generation.
    fn publish(&self, site: &Site<'_>, parts: Vec<Part>) -> u64 {
        let body = self.0;
        let chunk_bytes = body.shape.chunk_bytes;
        let mut state = body.state();
        state.generation += 1;
        let generation = state.generation;
        for Part { slot, mapping, aliases, origin } in parts {
            let Counts { created_bytes, stock_bytes, returned_bytes, .. } = &mut state.counts;
            match origin {
                Origin::Made => *created_bytes += chunk_bytes,
                Origin::Stock => *stock_bytes += chunk_bytes,
                Origin::Returned(gates) => {
                    *returned_bytes += chunk_bytes;
                    body.uses.come_after(gates);
                }
            }
            site.depot.elastic_grew(chunk_bytes);
            let standing = Standing { aliases, ..Standing::new(mapping, generation) };
            state.pieces.insert(slot, standing);
        }
        generation
    }
}

/// What was made for the buffer goes back to the driver, what was in the stock to the stock.
pub(super) fn give_back(site: &Site<'_>, chunk: Arc<Chunk>, origin: &Origin, turn: Turn) {
    match origin {
        Origin::Made => {
            if let Some(chunk) = Arc::into_inner(chunk) {
                site.depot.release(chunk, turn);
            }
        }
        Origin::Stock | Origin::Returned(_) => site.depot.settle(chunk, turn),
    }
}

impl Body {
    /// The slots that these bytes touch.
    pub(crate) fn slots_over(
        &self,
        offset: u64,
        bytes: u64,
    ) -> Result<std::ops::Range<u32>, Error> {
        let chunk_bytes = self.shape.chunk_bytes;
        let end_bytes = offset.saturating_add(bytes);
        if end_bytes > self.shape.capacity_bytes {
            let capacity_bytes = self.shape.capacity_bytes;
            return Err(ElasticError::BeyondCapacity { end_bytes, capacity_bytes }.into());
        }
        if bytes == 0 {
            return Ok(0..0);
        }
        // The builder saw to it that every slot has a number.
        Ok((offset / chunk_bytes) as u32..end_bytes.div_ceil(chunk_bytes) as u32)
    }
}
