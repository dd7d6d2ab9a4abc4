//! Bringing memory to a buffer's addresses: all of it, or none.
//!
//! Chunks come from the stock of their place, else from the driver; from which place,
//! [`borrow`](super::borrow) says. Nobody knows of them before all stand where they should, with
//! everybody's access; a failure at any step takes them away again, in the reverse order, and what was
//! in the stock goes back there.

use std::sync::Arc;

use vmm_sys::object::{Chunk, Mapping};
use vmm_sys::{AccessGrant, DriverError};

use super::body::Body;
use super::borrow::{Sources, Supplied, add};
use super::error::ElasticError;
use super::growth::{Grown, Lenders};
use super::hooks::{Cause, Phase};
use super::operation::Operation;
use super::state::{Counts, Standing};
use crate::depot::Shortage;
use crate::error::Error;
use crate::ladder::Climb;
use crate::lane::{Gate, Wait};
use crate::leaving::Returned;
use crate::lending::Loan;
use crate::past;
use crate::place::Place;
use crate::places::{Found, Site};
use crate::request::Request;
use crate::turn::Turn;

/// How a buffer is to grow.
#[derive(Clone, Copy, Debug)]
pub(crate) struct How {
    /// Where the memory comes from, unless it is borrowed.
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
struct Part<'a> {
    slot: u32,
    site: Site<'a>,
    mapping: Mapping,
    /// Where else its chunk is mapped.
    aliases: Vec<Mapping>,
    origin: Origin,
    loan: Option<Loan>,
}

/// What is going to stand in a slot.
enum Supply<'a> {
    /// It stands there already: it had left, and was not gone yet.
    Standing(Part<'a>),
    New(Supplied<'a>),
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

    /// What the whole growth takes.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// Where a chunk came from, and so where it goes if it is not needed after all.
pub(super) enum Origin {
    Made,
    Stock,
    /// It had left these addresses and was not gone yet; its users.
    Returned(Vec<Gate>),
    /// It stands ready where it is: see [`Landing`](crate::landing::Landing).
    Landing,
}

impl<'a> Operation<'a> {
    /// Commits those of `slots` that have no memory. What their place cannot give, `lenders` may.
    pub(crate) fn commit(
        &self,
        slots: impl Iterator<Item = u32>,
        how: How,
        lenders: &'a Lenders,
    ) -> Result<Grown, Error> {
        self.commit_for(slots, how, lenders, Cause::Commit)
    }

    pub(super) fn commit_for(
        &self,
        slots: impl Iterator<Item = u32>,
        how: How,
        lenders: &'a Lenders,
        cause: Cause,
    ) -> Result<Grown, Error> {
        let body = self.0;
        let missing: Vec<u32> = {
            let state = body.state();
            slots.filter(|slot| !state.pieces.contains_key(slot)).collect()
        };
        if missing.is_empty() {
            return Ok(Grown::default());
        }
        let bytes = self.bytes_of(missing.len());
        let mut sources = Sources::new(self, how, lenders, bytes)?;
        self.book_quota(bytes)?;
        let mut change = self.change(cause, &missing);
        body.hooks.call(&change);
        // Until the new chunks are the buffer's, they are in this thread's hands.
        let carrying = sources.own().depot.carries.begin();
        match self.bring(&mut sources, &missing, how) {
            Ok(parts) => {
                let (generation, borrowed) = self.publish(parts);
                drop((carrying, sources));
                change.generation = generation;
                change.phase = Phase::After;
                body.hooks.call(&change);
                Ok(Grown { bytes, borrowed })
            }
            Err(error) => {
                drop((carrying, sources));
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

    pub(super) fn book_quota(&self, bytes: u64) -> Result<(), Error> {
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
    fn bring(
        &self,
        sources: &mut Sources<'a>,
        slots: &[u32],
        how: How,
    ) -> Result<Vec<Part<'a>>, Error> {
        let grants = self.0.grants();
        let mut found = Vec::with_capacity(slots.len());
        for &slot in slots {
            let one = match self.vacate(slot, how, sources) {
                Ok(Some(part)) => Ok(Supply::Standing(part)),
                Ok(None) => sources.next(self).map(Supply::New),
                Err(error) => Err(error),
            };
            match one {
                Ok(one) => found.push((slot, one)),
                Err(error) => {
                    self.hand_back(found, how.turn);
                    return Err(error);
                }
            }
        }
        // Made first, all of them: the driver clears new memory meanwhile, for which a grant right
        // behind would wait.
        let mut parts = Vec::with_capacity(slots.len());
        let mut found = found.into_iter();
        while let Some((slot, one)) = found.next() {
            if let Err(error) = self.bring_one(slot, one, how, &grants, &mut parts) {
                self.hand_back(found.collect(), how.turn);
                self.undo(parts, how.turn);
                return Err(error);
            }
        }
        let from_stock = parts.iter().filter(|it| matches!(it.origin, Origin::Stock));
        if let Err(error) = self.scrub(from_stock.map(|it| &it.mapping)) {
            self.undo(parts, how.turn);
            return Err(error);
        }
        Ok(parts)
    }

    /// Gives back what was found for slots and does not stand there.
    fn hand_back(&self, found: Vec<(u32, Supply<'a>)>, turn: Turn) {
        for (_, one) in found.into_iter().rev() {
            match one {
                Supply::Standing(part) => self.undo(vec![part], turn),
                Supply::New(Supplied { site, chunk, origin, loan }) => {
                    give_back(&site, chunk, &origin, turn);
                    drop(loan);
                }
            }
        }
    }

    fn bring_one(
        &self,
        slot: u32,
        one: Supply<'a>,
        how: How,
        grants: &[AccessGrant],
        parts: &mut Vec<Part<'a>>,
    ) -> Result<(), Error> {
        let body = self.0;
        let part = match one {
            Supply::Standing(part) => part,
            Supply::New(Supplied { site, chunk, origin, loan }) => {
                let offset = u64::from(slot) * body.shape.chunk_bytes;
                let kept = chunk.clone();
                match how.turn.with(|| Mapping::map(&body.range, offset, chunk)) {
                    Ok(mapping) => Part { slot, site, mapping, aliases: Vec::new(), origin, loan },
                    Err(error) => {
                        give_back(&site, kept, &origin, how.turn);
                        return Err(error.into());
                    }
                }
            }
        };
        // From here on, a failure is undone with the others.
        parts.push(part);
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
        let mut cause: Option<DriverError> = None;
        loop {
            match self.take(site, how.turn) {
                Ok(taken) => return Ok(taken),
                Err(Shortage::Limit) => {}
                Err(Shortage::Driver(error)) if error.is_out_of_memory() => cause = Some(error),
                Err(Shortage::Driver(error)) => return Err(error.into()),
            }
            if !site.make_room(&mut short.climb, self.0.shape.chunk_bytes, how) {
                return Err(site.shortage(short.bytes, how, cause));
            }
        }
    }

    /// Looks for a mapping that left the slot and still stands there for its last users. One of a
    /// place that may give memory comes back as it is; another, or one of a chunk that is used at
    /// other addresses, is waited for.
    fn vacate(
        &self,
        slot: u32,
        how: How,
        sources: &mut Sources<'a>,
    ) -> Result<Option<Part<'a>>, Error> {
        let body = self.0;
        let offset = u64::from(slot) * body.shape.chunk_bytes;
        let address = body.address() + offset;
        let reclaim = |place| body.places.reclaim(address, &body.props(place));
        let part = |site, Returned { mapping, gates, aliases }, loan| {
            let aliases = unmap_all(aliases, how.turn);
            Some(Part { slot, site, mapping, aliases, origin: Origin::Returned(gates), loan })
        };
        for may_sweep in [true, false] {
            let other = match reclaim(how.place) {
                Found::Nothing => return Ok(None),
                Found::Reclaimed(returned) => return Ok(part(sources.own(), returned, None)),
                Found::Other(site) => site,
            };
            if let Some(loan) = sources.book(&other, body.shape.chunk_bytes) {
                match reclaim(other.place) {
                    Found::Nothing => return Ok(None),
                    Found::Reclaimed(returned) => return Ok(part(other, returned, Some(loan))),
                    Found::Other(_) => {}
                }
            }
            if may_sweep {
                other.sweep(how.wait, how.turn);
            }
        }
        Err(ElasticError::StillUsed { offset }.into())
    }

    /// Takes away what was brought, the youngest first.
    fn undo(&self, parts: Vec<Part<'_>>, turn: Turn) {
        for Part { site, mapping, aliases, origin, .. } in parts.into_iter().rev() {
            site.depot.leaving.add(aliases.into_iter(), Vec::new());
            if let Origin::Returned(gates) = origin {
                site.depot.leaving.add(std::iter::once(mapping), gates);
                continue;
            }
            if let Some(chunk) = site.depot.unmap(mapping, turn) {
                give_back(&site, chunk, &origin, turn);
            }
        }
    }

    /// Makes the parts the buffer's. Returns its new generation, and what is borrowed.
    fn publish(&self, parts: Vec<Part<'_>>) -> (u64, Vec<(Place, u64)>) {
        let body = self.0;
        let chunk_bytes = body.shape.chunk_bytes;
        let rests_until_ms = body.rest_after_borrowing_ms();
        let mut borrowed = Vec::new();
        let mut state = body.state();
        state.generation += 1;
        let (generation, home) = (state.generation, state.home);
        for Part { slot, site, mapping, aliases, origin, loan } in parts {
            let Counts { created_bytes, stock_bytes, returned_bytes, .. } = &mut state.counts;
            match origin {
                Origin::Made => *created_bytes += chunk_bytes,
                Origin::Stock | Origin::Landing => *stock_bytes += chunk_bytes,
                Origin::Returned(gates) => {
                    *returned_bytes += chunk_bytes;
                    body.uses.come_after(gates);
                }
            }
            if loan.is_some() {
                add(&mut borrowed, site.place, chunk_bytes);
                state.rests_until_ms = rests_until_ms;
            }
            past::note_user(mapping.chunk(), &body.shape.user);
            let footing = site.depot.footing(chunk_bytes);
            let standing = body.standing(home, mapping, generation, footing, loan);
            state.insert(slot, Standing { aliases, ..standing });
        }
        (generation, borrowed)
    }
}

/// Unmaps where else a chunk that came back is mapped: it may be a slot of the same growth. Returns what
/// the driver refuses, which stays with the chunk.
fn unmap_all(aliases: Vec<Mapping>, turn: Turn) -> Vec<Mapping> {
    let unmap = |alias: Mapping| turn.with(|| alias.unmap()).err().map(|(alias, _)| alias);
    aliases.into_iter().filter_map(unmap).collect()
}

/// What was made for the buffer goes back to the driver, what was in the stock to the stock.
pub(super) fn give_back(site: &Site<'_>, chunk: Arc<Chunk>, origin: &Origin, turn: Turn) {
    match origin {
        Origin::Made => {
            if let Some(chunk) = Arc::into_inner(chunk) {
                site.depot.release(chunk, turn);
            }
        }
        Origin::Stock | Origin::Returned(_) | Origin::Landing => site.depot.settle(chunk, turn),
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
