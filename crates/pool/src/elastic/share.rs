//! One chunk at several addresses of a buffer: the same bytes, whichever of them is used.
//!
//! The slots of a chunk share its [`Footing`] and what is lent, so that it counts once; it goes when the
//! last of them has lost it. Whatever moves a slot gives it a chunk of its own, and the others keep
//! theirs.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::Duration;

use vmm_sys::object::{Chunk, Mapping};

use super::ElasticBuffer;
use super::body::Body;
use super::error::ElasticError;
use super::hooks::{Cause, Phase};
use super::operation::Operation;
use super::state::{Backing, Standing};
use super::terms::{Effort, Left, Moved, Target, Terms};
use crate::depot::{Depot, Footing};
use crate::error::Error;
use crate::lane::Wait;
use crate::turn::Turn;

/// A chunk that is to stand in another slot too.
struct Twin {
    from: u32,
    to: u32,
    chunk: Arc<Chunk>,
    footing: Weak<Footing>,
}

impl ElasticBuffer {
    /// Has the chunks of `from` stand at offset `to` too: the same bytes at both addresses, for reads
    /// and writes alike. Returns the bytes shared. All or nothing. A chunk may stand at any number of
    /// addresses, and its memory is free when it was taken from the last of them and its users are
    /// done; each address counts as committed, and against quotas.
    ///
    /// A move, a sleep and a recall give each address memory of its own, as
    /// [`ElasticBuffer::unshare`] does.
    ///
    /// The caller waits if memory that was taken from the addresses is still used there.
    ///
    /// # Errors
    /// [`ElasticError::NotWhole`] unless both are whole chunks; [`ElasticError::NotCommitted`];
    /// [`ElasticError::Occupied`] if something is committed at `to`;
    /// [`ElasticError::BeyondCapacity`], [`ElasticError::OverQuota`], [`ElasticError::Asleep`],
    /// [`ElasticError::StillUsed`]; the driver's.
    pub fn share(&self, from: Range<u64>, to: u64) -> Result<u64, Error> {
        let (slots, first) = self.body.whole_chunks(&from, to)?;
        let operation = self.body.operate()?;
        self.body.check_awake()?;
        operation.share(slots, first)
    }

    /// Gives every address of the chunks that these bytes touch memory of its own, at the same place,
    /// with the same bytes: by a move, with users held and guards waited for, for `patience` at most.
    /// Chunks that stand nowhere else are left alone; of one that stands in the range alone, the last
    /// of its addresses keeps it. All or nothing.
    ///
    /// # Errors
    /// As [`ElasticBuffer::migrate`].
    pub fn unshare(&self, range: Range<u64>, patience: Duration) -> Result<Moved, Error> {
        self.unshare_all([range], patience)
    }

    /// As [`ElasticBuffer::unshare`], the chunks of several ranges in one move.
    ///
    /// # Errors
    /// As [`ElasticBuffer::migrate`].
    pub fn unshare_all(
        &self,
        ranges: impl IntoIterator<Item = Range<u64>>,
        patience: Duration,
    ) -> Result<Moved, Error> {
        let mut slots = BTreeSet::new();
        for range in ranges {
            let bytes = range.end.saturating_sub(range.start);
            slots.extend(self.body.slots_over(range.start, bytes)?);
        }
        let operation = self.body.operate()?;
        self.body.check_awake()?;
        operation.unshare(&slots, patience)
    }
}

impl Body {
    /// The slots of `from`, and the first at `to`.
    fn whole_chunks(&self, from: &Range<u64>, to: u64) -> Result<(Range<u32>, u32), Error> {
        let chunk_bytes = self.shape.chunk_bytes;
        let bytes = from.end.saturating_sub(from.start);
        if [from.start, bytes, to].iter().any(|it| it % chunk_bytes != 0) {
            let from = from.start;
            return Err(ElasticError::NotWhole { from, to, bytes, chunk_bytes }.into());
        }
        // The last chunk may reach beyond the capacity, which need not be whole chunks.
        let capacity_bytes = self.range.bytes();
        for start in [from.start, to] {
            let end_bytes = start.saturating_add(bytes);
            if end_bytes > capacity_bytes {
                return Err(ElasticError::BeyondCapacity { end_bytes, capacity_bytes }.into());
            }
        }
        // The builder saw to it that every slot has a number.
        let slot = |offset: u64| (offset / chunk_bytes) as u32;
        Ok((slot(from.start)..slot(from.start + bytes), slot(to)))
    }
}

impl Operation<'_> {
    fn share(&self, from: Range<u32>, to: u32) -> Result<u64, Error> {
        let body = self.0;
        self.check_mended()?;
        let twins = self.twins(from, to)?;
        if twins.is_empty() {
            return Ok(0);
        }
        let bytes = self.bytes_of(twins.len());
        self.book_quota(bytes)?;
        let slots: Vec<u32> = twins.iter().map(|it| it.to).collect();
        let mut change = self.change(Cause::Share, &slots);
        body.hooks.call(&change);
        let shared = self.map_twins(twins);
        match shared {
            Ok(twins) => {
                change.generation = self.publish_twins(twins);
                change.phase = Phase::After;
            }
            Err(error) => {
                self.unbook_quota(bytes);
                change.phase = Phase::Failed;
                body.hooks.call(&change);
                return Err(error);
            }
        }
        body.hooks.call(&change);
        Ok(bytes)
    }

    /// The chunks that are to stand elsewhere too, if they are there and nothing is where they go.
    fn twins(&self, from: Range<u32>, to: u32) -> Result<Vec<Twin>, Error> {
        let state = self.0.state();
        let offset = |slot: u32| u64::from(slot) * self.0.shape.chunk_bytes;
        from.zip(to..)
            .map(|(from, to)| {
                let standing = state.pieces.get(&from);
                let Some((standing, mapping)) = standing.and_then(|it| Some((it, it.mapping()?)))
                else {
                    return Err(ElasticError::NotCommitted { offset: offset(from) }.into());
                };
                if state.pieces.contains_key(&to) {
                    return Err(ElasticError::Occupied { offset: offset(to) }.into());
                }
                let (chunk, footing) = (mapping.chunk().clone(), Arc::downgrade(&standing.footing));
                Ok(Twin { from, to, chunk, footing })
            })
            .collect()
    }

    /// Maps all of them where they are to stand too, or none.
    fn map_twins(&self, twins: Vec<Twin>) -> Result<Vec<(Twin, Mapping)>, Error> {
        let grants = self.0.grants();
        let mut mapped = Vec::with_capacity(twins.len());
        for twin in twins {
            let turn = Turn::Requester;
            let mapping =
                self.clear(twin.to).and_then(|()| Ok(self.map(twin.to, twin.chunk.clone())?));
            let granted = mapping.and_then(|mapping| {
                let granted = turn.with(|| mapping.set_access(&grants));
                mapped.push((twin, mapping));
                Ok(granted?)
            });
            if let Err(error) = granted {
                for (twin, mapping) in mapped.into_iter().rev() {
                    self.unmap_twin(&twin, mapping);
                }
                return Err(error);
            }
        }
        Ok(mapped)
    }

    /// The chunk goes on to stand where it stood. What the driver refuses is tried again later.
    fn unmap_twin(&self, twin: &Twin, mapping: Mapping) {
        let Err((mapping, error)) = Turn::Requester.with(|| mapping.unmap()) else { return };
        crate::obstacle::tell(&error, "an address of a shared chunk could not be unmapped");
        if let Some(Depot { leaving, .. }) = self.depot_of(twin.from) {
            leaving.add_shared(std::iter::once(mapping), Vec::new(), &twin.footing);
        }
    }

    fn depot_of(&self, slot: u32) -> Option<&Depot> {
        let place = self.0.state().pieces.get(&slot)?.place;
        self.0.places.site(place).ok().map(|site| site.depot)
    }

    /// Waits until nothing that was taken from the slot stands there any more.
    fn clear(&self, slot: u32) -> Result<(), Error> {
        let offset = u64::from(slot) * self.0.shape.chunk_bytes;
        let occupant = || self.0.places.occupant(self.0.address() + offset);
        if let Some(site) = occupant() {
            site.sweep(Wait::Yes, Turn::Requester);
            if occupant().is_some() {
                return Err(ElasticError::StillUsed { offset }.into());
            }
        }
        Ok(())
    }

    /// Makes the addresses the buffer's. Returns its new generation.
    fn publish_twins(&self, twins: Vec<(Twin, Mapping)>) -> u64 {
        let mut state = self.0.state();
        state.generation += 1;
        let generation = state.generation;
        for (Twin { from, to, .. }, mapping) in twins {
            // Only the thread that holds the operation takes pieces away.
            let Some(source) = state.pieces.get(&from) else { continue };
            let standing = Standing {
                backing: Backing::Mapped(mapping),
                place: source.place,
                generation,
                owed: Vec::new(),
                footing: source.footing.clone(),
                lent: source.lent.clone(),
                spare: None,
                aliases: Vec::new(),
            };
            state.insert(to, standing);
        }
        generation
    }

    fn unshare(&self, slots: &BTreeSet<u32>, patience: Duration) -> Result<Moved, Error> {
        let targets = {
            let state = self.0.state();
            let mut seen: HashMap<*const Footing, usize> = HashMap::new();
            let standing = slots.iter().filter_map(|slot| state.pieces.get_key_value(slot));
            let shared = standing.filter(|(_, it)| it.is_shared());
            let others = shared.filter(|(_, it)| {
                let seen = seen.entry(Arc::as_ptr(&it.footing)).or_default();
                *seen += 1;
                // The last one keeps it.
                *seen < Arc::strong_count(&it.footing)
            });
            let anew =
                |(slot, it): (&u32, &Standing)| Target::anew(*slot, it.place, it.is_borrowed());
            others.map(anew).collect::<Vec<Target>>()
        };
        let terms = Terms {
            cause: Cause::Unshare,
            turn: Turn::Requester,
            wait: Wait::Yes,
            patience,
            left: Left::Shelf,
            effort: Effort::Ladder,
            shut: false,
        };
        self.relocate(targets.into_iter(), &terms, |_| {})
    }
}
