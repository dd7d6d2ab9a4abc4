//! Another place for the memory behind a buffer's addresses, contents kept: all of it, or none.
//!
//! The new chunks are made and mapped ahead, at addresses of the move's own. Then nobody may use the
//! buffer for a while ([`door`](super::door)): each chunk is copied behind the work of its users,
//! and while the next is copied, the one before changes place: the old mapping goes, the new chunk
//! is mapped at the buffer's address (rows D-V1, D-V5). The old chunks are kept until all have
//! changed place, so that a failure at any step brings them back: nobody has written meanwhile.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use vmm_sys::AccessGrant;
use vmm_sys::object::{Chunk, Latch, Mapping, Range, RelaxedCapture};

use super::body::{Backing, Operation, Standing, State, Stuck};
use super::commit::{How, Origin, Short, give_back};
use super::copier::Copier;
use super::door::{Closed, Closing};
use super::error::ElasticError;
use super::hooks::{Cause, Phase};
use crate::error::Error;
use crate::lane::{Asker, Wait, Waited};
use crate::place::Place;
use crate::places::Site;
use crate::turn::Turn;

/// How the memory is to change place.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    pub(super) cause: Cause,
    pub(super) turn: Turn,
    /// Whether the GPU may be waited for in order to have memory.
    pub(super) wait: Wait,
    /// How long guards that are alive are waited for.
    pub(super) patience: Duration,
    pub(super) left: Left,
    /// Whether uses that begin meanwhile wait, instead of being held.
    pub(super) shut: bool,
}

/// What becomes of the chunks that are left behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Left {
    /// They go to the stock of their place.
    Shelf,
    /// They go back to the driver.
    Driver,
}

/// What a move did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Moved {
    /// Memory that changed place, in bytes.
    pub bytes: u64,
    /// The buffer's generation afterwards.
    pub generation: u64,
    /// How long users were held, in microseconds: from the moment when no guard was alive until all
    /// memory stood at its new place. Work that was enqueued before is in it.
    pub held_us: u64,
}

/// One chunk on its way to another place.
struct Leg {
    slot: u32,
    to: Place,
    origin: Origin,
    /// The new chunk, at an address of the move's own.
    shadow: Mapping,
    stage: Stage,
}

/// What is at the buffer's address.
enum Stage {
    /// As before: the buffer has the mapping.
    Untouched,
    Old(Mapping),
    Nothing(Arc<Chunk>),
    New {
        mapping: Mapping,
        old: Arc<Chunk>,
    },
}

/// What a move has left in a slot.
struct Remains {
    slot: u32,
    to: Place,
    /// The new chunk, at an address of the move's own.
    shadow: Mapping,
    /// The chunk that stood there before, and where else it is mapped.
    old: Arc<Chunk>,
    aliases: Vec<Mapping>,
}

impl Operation<'_> {
    /// Brings each of the slots that has memory to the place that is named for it. `publish` is
    /// called with the new state, under its lock.
    pub(super) fn relocate(
        &self,
        targets: impl Iterator<Item = (u32, Place)>,
        terms: &Terms,
        publish: impl FnOnce(&mut State),
    ) -> Result<Moved, Error> {
        let body = self.0;
        let targets: Vec<(u32, Place)> = {
            let state = body.state();
            let away = |slot: &u32, to: &Place| {
                state.pieces.get(slot).is_some_and(|standing| standing.place != *to)
            };
            targets.filter(|(slot, to)| away(slot, to)).collect()
        };
        if targets.is_empty() {
            // Who falls asleep where its memory lies has users to wait for all the same.
            let closed = if terms.shut { Some(self.close_when_done(terms)?) } else { None };
            let mut state = body.state();
            publish(&mut state);
            let generation = state.generation;
            drop(state);
            drop(closed);
            return Ok(Moved { generation, ..Moved::default() });
        }
        self.check_mended()?;
        self.check_places(&targets)?;
        let slots: Vec<u32> = targets.iter().map(|(slot, _)| *slot).collect();
        let mut change = self.change(terms.cause, &slots);
        body.hooks.call(&change);
        let moved =
            self.prepare(&targets, terms).and_then(|legs| self.carry_out(legs, terms, publish));
        change.phase = if moved.is_ok() { Phase::After } else { Phase::Failed };
        change.generation = body.state().generation;
        body.hooks.call(&change);
        moved
    }

    /// Refuses what cannot be, before anything is touched.
    fn check_places(&self, targets: &[(u32, Place)]) -> Result<(), Error> {
        let chunk_bytes = self.0.shape.chunk_bytes;
        let mut places: Vec<Place> = targets.iter().map(|(_, to)| *to).collect();
        places.sort_unstable();
        places.dedup();
        places.into_iter().try_for_each(|place| {
            self.0.places.site(place)?.check_chunk(chunk_bytes)?;
            self.reach(place)
        })
    }

    /// Makes and maps the new chunks ahead; nobody is concerned yet.
    fn prepare(&self, targets: &[(u32, Place)], terms: &Terms) -> Result<Vec<Leg>, Error> {
        let body = self.0;
        let chunk_bytes = body.shape.chunk_bytes;
        let bytes = self.bytes_of(targets.len());
        let reserve = || Range::reserve(body.range.driver(), bytes, 0, 0);
        let shadows = terms.turn.with(reserve)?;
        let mut shorts: BTreeMap<Place, Short> = BTreeMap::new();
        let mut legs = Vec::with_capacity(targets.len());
        let grants = body.grants();
        for (index, &(slot, to)) in targets.iter().enumerate() {
            let short = shorts.entry(to).or_insert_with(|| {
                let count = targets.iter().filter(|(_, place)| *place == to).count();
                Short::new(self.bytes_of(count))
            });
            let how = How { place: to, turn: terms.turn, wait: terms.wait };
            let offset = index as u64 * chunk_bytes;
            match self.prepare_one(slot, (&shadows, offset), how, short, &grants) {
                Ok((shadow, origin)) => {
                    legs.push(Leg { slot, to, origin, shadow, stage: Stage::Untouched });
                }
                Err(error) => {
                    self.give_up(legs, terms.turn);
                    return Err(error);
                }
            }
        }
        Ok(legs)
    }

    fn prepare_one(
        &self,
        slot: u32,
        (shadows, offset): (&Range, u64),
        how: How,
        short: &mut Short,
        grants: &[AccessGrant],
    ) -> Result<(Mapping, Origin), Error> {
        let site = self.0.places.site(how.place)?;
        let _carrying = site.depot.carries.begin();
        let (chunk, origin) = self.supply(&site, how, short)?;
        let kept = chunk.clone();
        let mapped = how.turn.with(|| Mapping::map(shadows, offset, chunk));
        let shadow = match mapped {
            Ok(shadow) => shadow,
            Err(error) => {
                give_back(&site, kept, &origin, how.turn);
                return Err(error.into());
            }
        };
        drop(kept);
        // All who have access, though only the copy needs it: granted once, the chunk costs a third
        // of it when it comes to the buffer's address.
        if let Err(error) = how.turn.with(|| shadow.set_access(grants)) {
            self.part_with(slot, &site, shadow, &origin, how.turn);
            return Err(error.into());
        }
        self.expect(how.place, &site);
        Ok((shadow, origin))
    }

    /// Takes the new chunks away again.
    fn give_up(&self, legs: Vec<Leg>, turn: Turn) {
        for Leg { slot, to, origin, shadow, .. } in legs.into_iter().rev() {
            let Ok(site) = self.0.places.site(to) else { continue };
            let _carrying = site.depot.carries.begin();
            self.forget(to, &site);
            self.part_with(slot, &site, shadow, &origin, turn);
        }
    }

    /// A chunk for the buffer stands at an address of a move's own.
    fn expect(&self, to: Place, site: &Site<'_>) {
        let bytes = self.0.shape.chunk_bytes;
        *self.0.state().incoming.entry(to).or_default() += bytes;
        site.depot.elastic_grew(bytes);
    }

    /// It does not any more, or not as one that is still to come.
    fn forget(&self, to: Place, site: &Site<'_>) {
        let bytes = self.0.shape.chunk_bytes;
        self.0.state().arrived(to, bytes);
        site.depot.elastic_shrank(bytes);
    }

    /// Everything after the new chunks stand ready.
    fn carry_out(
        &self,
        mut legs: Vec<Leg>,
        terms: &Terms,
        publish: impl FnOnce(&mut State),
    ) -> Result<Moved, Error> {
        let body = self.0;
        let places = &body.places;
        let driver = body.range.driver();
        // Nothing that is made, recorded or asked from here on harms anybody's capture.
        let ready = RelaxedCapture::enter(driver).and_then(|relaxed| {
            Ok((relaxed, places.copiers.take(driver, body.home(), legs.len())?))
        });
        let (_relaxed, copier) = match ready {
            Ok(ready) => ready,
            Err(error) => {
                self.give_up(legs, terms.turn);
                return Err(error.into());
            }
        };
        let exchanged = self.close(terms).and_then(|mut closed| {
            self.exchange(&mut legs, &copier, &mut closed)?;
            Ok(closed)
        });
        let closed = match exchanged {
            Ok(closed) => closed,
            Err(error) => {
                self.give_up(legs, terms.turn);
                places.copiers.put(copier);
                return Err(error);
            }
        };
        places.copiers.put(copier);
        // Old chunks are in this thread's hands from the moment when they are not the buffer's.
        let sites: Vec<_> = places.sites().collect();
        let carrying: Vec<_> = sites.iter().map(|site| site.depot.carries.begin()).collect();
        let (moved, left) = self.publish_moved(legs, &closed, publish);
        // From here on, users go on; the rest is tidying up.
        drop(closed);
        self.leave_behind(left, terms);
        drop(carrying);
        Ok(moved)
    }

    /// Waits until nobody uses the buffer, and lets nobody in.
    pub(super) fn close(&self, terms: &Terms) -> Result<Closed<'_>, Error> {
        let body = self.0;
        let latches = &body.places.latches;
        let closing = match terms.shut {
            true => Closing::Shut,
            false => Closing::Hold(
                latches.take(|| Ok(Latch::create(body.range.driver(), body.home())?))?,
            ),
        };
        body.uses.close(latches, closing, terms.patience)
    }

    /// Copies and swaps. After an error everything is as it was, and no copy is under way.
    fn exchange(
        &self,
        legs: &mut [Leg],
        copier: &Copier,
        closed: &mut Closed<'_>,
    ) -> Result<(), Error> {
        let body = self.0;
        self.follow_users(copier, closed)?;
        {
            let mut state = body.state();
            for leg in &mut *legs {
                if let Some(mapping) = state.pieces.get_mut(&leg.slot).and_then(Standing::take) {
                    leg.stage = Stage::Old(mapping);
                }
            }
        }
        let done = copy(legs, copier).and_then(|()| {
            let grants = body.grants();
            legs.iter_mut().zip(&copier.events).try_for_each(|(leg, copied)| {
                copied.wait()?;
                self.swap(leg, &grants)
            })
        });
        if let Err(error) = &done {
            tracing::debug!(%error, "a move is taken back");
            // No copy may be under way when its target goes.
            if let Err(error) = copier.stream.synchronize() {
                tracing::warn!(%error, "the end of a move's copies is not known");
            }
            self.take_back(legs);
        }
        done
    }

    /// The copies come after everything that the buffer's users have enqueued.
    fn follow_users(&self, copier: &Copier, closed: &mut Closed<'_>) -> Result<(), Error> {
        let mut asker = Asker::new(&self.0.keeper().events);
        closed.gates.retain_mut(|gate| !asker.ask(gate));
        asker.finish();
        for gate in &closed.gates {
            if gate.order(&copier.stream)? == Waited::Captured {
                return Err(ElasticError::StillUsed { offset: 0 }.into());
            }
        }
        Ok(())
    }

    /// Puts the new chunk of a leg where the old one stands. After an error the stage says how far
    /// it came.
    fn swap(&self, leg: &mut Leg, grants: &[AccessGrant]) -> Result<(), Error> {
        let turn = Turn::Requester;
        let old = match std::mem::replace(&mut leg.stage, Stage::Untouched) {
            Stage::Old(mapping) => match turn.with(|| mapping.unmap()) {
                Ok(chunk) => chunk,
                Err((mapping, error)) => {
                    leg.stage = Stage::Old(mapping);
                    return Err(error.into());
                }
            },
            other => {
                leg.stage = other;
                return Ok(());
            }
        };
        match self.map(leg.slot, leg.shadow.chunk().clone()) {
            Err(error) => {
                leg.stage = Stage::Nothing(old);
                Err(error.into())
            }
            Ok(mapping) => {
                let granted = turn.with(|| mapping.set_access(grants));
                leg.stage = Stage::New { mapping, old };
                Ok(granted?)
            }
        }
    }

    fn map(&self, slot: u32, chunk: Arc<Chunk>) -> vmm_sys::DriverResult<Mapping> {
        let offset = u64::from(slot) * self.0.shape.chunk_bytes;
        Turn::Requester.with(|| Mapping::map(&self.0.range, offset, chunk))
    }

    /// Brings the old chunks back to the buffer's addresses, the last first. Where the driver
    /// refuses even that, the contents are kept, and brought back later ([`Stuck`]).
    fn take_back(&self, legs: &mut [Leg]) {
        let grants = self.0.grants();
        for leg in legs.iter_mut().rev() {
            let stage = std::mem::replace(&mut leg.stage, Stage::Untouched);
            let backing = match stage {
                Stage::Untouched => continue,
                Stage::Old(mapping) => Backing::Mapped(mapping),
                Stage::Nothing(old) => self.stand(leg.slot, Stuck::Unmapped(old), &grants),
                Stage::New { mapping, old } => match Turn::Requester.with(|| mapping.unmap()) {
                    Ok(_) => self.stand(leg.slot, Stuck::Unmapped(old), &grants),
                    Err((mapping, error)) => {
                        tracing::warn!(%error, "a chunk stays where a failed move brought it");
                        let backing = self.stand(leg.slot, Stuck::Ungranted(mapping), &grants);
                        self.stay(leg, backing, old);
                        continue;
                    }
                },
            };
            self.0.state().set_backing(leg.slot, backing);
        }
    }

    /// Has a chunk stand in a slot, granted to all who have access, as far as the driver lets.
    pub(super) fn stand(&self, slot: u32, stuck: Stuck, grants: &[AccessGrant]) -> Backing {
        let mapping = match stuck {
            Stuck::Ungranted(mapping) => mapping,
            Stuck::Unmapped(chunk) => match self.map(slot, chunk.clone()) {
                Ok(mapping) => mapping,
                Err(error) => {
                    tracing::warn!(%error, slot, "a chunk could not be mapped back; tried again later");
                    return Backing::Stuck(Stuck::Unmapped(chunk));
                }
            },
        };
        match Turn::Requester.with(|| mapping.set_access(grants)) {
            Ok(()) => Backing::Mapped(mapping),
            Err(error) => {
                tracing::warn!(%error, slot, "a chunk could not be granted; tried again later");
                Backing::Stuck(Stuck::Ungranted(mapping))
            }
        }
    }

    /// A move failed, but the driver refuses to take this leg back: the same bytes, elsewhere. Its
    /// old chunk goes.
    fn stay(&self, leg: &Leg, backing: Backing, old: Arc<Chunk>) {
        let bytes = self.0.shape.chunk_bytes;
        let from = Place::of(old.props());
        let Ok(site) = self.0.places.site(from) else { return };
        let _carrying = site.depot.carries.begin();
        {
            let mut state = self.0.state();
            state.generation += 1;
            let generation = state.generation;
            state.set_backing(leg.slot, backing);
            if let Some(standing) = state.pieces.get_mut(&leg.slot) {
                standing.place = leg.to;
                standing.generation = generation;
            }
        }
        // Beside what is still to come: `give_up` counts that off.
        if let Ok(to) = self.0.places.site(leg.to) {
            to.depot.elastic_grew(bytes);
        }
        site.depot.elastic_shrank(bytes);
        site.depot.settle(old, Turn::Requester);
    }

    /// Makes the new chunks the buffer's.
    fn publish_moved(
        &self,
        legs: Vec<Leg>,
        closed: &Closed<'_>,
        publish: impl FnOnce(&mut State),
    ) -> (Moved, Vec<Remains>) {
        let body = self.0;
        let bytes = self.bytes_of(legs.len());
        let mut left = Vec::with_capacity(legs.len());
        let mut state = body.state();
        state.generation += 1;
        let generation = state.generation;
        for Leg { slot, to, shadow, stage, .. } in legs {
            let Stage::New { mapping, old } = stage else { continue };
            state.arrived(to, body.shape.chunk_bytes);
            let before = state.pieces.insert(slot, Standing::new(mapping, generation));
            let aliases = before.map_or_else(Vec::new, |standing| standing.aliases);
            left.push(Remains { slot, to, shadow, old, aliases });
        }
        state.counts.moved_bytes += bytes;
        publish(&mut state);
        drop(state);
        let held_us = closed.since.elapsed().as_micros() as u64;
        (Moved { bytes, generation, held_us }, left)
    }

    /// Gives back what the move left: its own addresses, and the old chunks.
    fn leave_behind(&self, left: Vec<Remains>, terms: &Terms) {
        let bytes = self.0.shape.chunk_bytes;
        for Remains { slot, to, shadow, old, aliases } in left {
            if let Ok(site) = self.0.places.site(to) {
                // The chunk is the buffer's by now: only the address goes.
                self.part_with(slot, &site, shadow, &Origin::Stock, terms.turn);
            }
            let Ok(site) = self.0.places.site(Place::of(old.props())) else { continue };
            site.depot.elastic_shrank(bytes);
            site.depot.leaving.add(aliases.into_iter(), Vec::new());
            match terms.left {
                Left::Shelf => site.depot.settle(old, terms.turn),
                Left::Driver => give_back(&site, old, &Origin::Made, terms.turn),
            }
        }
    }
}

/// Enqueues the copy of each leg, and the event after it.
fn copy(legs: &[Leg], copier: &Copier) -> Result<(), Error> {
    for (leg, copied) in legs.iter().zip(&copier.events) {
        if let Stage::Old(old) = &leg.stage {
            leg.shadow.copy_from(old, &copier.stream)?;
        }
        copied.record(&copier.stream)?;
    }
    Ok(())
}
