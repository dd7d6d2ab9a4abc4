//! Another place for the memory behind a buffer's addresses, contents kept: all of it, or none.
//!
//! The new chunks are made and mapped ahead, at addresses of the move's own. Then nobody may use the
//! buffer for a while ([`door`](super::door)): each chunk is copied behind the work of its users,
//! and while the next is copied, the one before changes place: the old mapping goes, the new chunk
//! is mapped at the buffer's address (rows D-V1, D-V5). The old chunks are kept until all have
//! changed place, so that a failure at any step brings them back: nobody has written meanwhile.

use std::sync::{Arc, Weak};
use std::time::Duration;

use vmm_sys::AccessGrant;
use vmm_sys::object::{Chunk, Latch, Mapping, RelaxedCapture};

use super::commit::{Origin, give_back};
use super::copier::{Copier, copy};
use super::door::{Closed, Held};
use super::error::ElasticError;
use super::hooks::Phase;
use super::operation::Operation;
use super::state::{Standing, State};
use super::terms::{Left, Moved, Target, Terms};
use crate::depot::Footing;
use crate::error::Error;
use crate::landing::Spare;
use crate::lane::{Asker, Waited};
use crate::lending::Loan;
use crate::past;
use crate::place::Place;
use crate::turn::Turn;

/// The most chunks that are swapped together: others wait for their turn at the driver meanwhile.
const BATCH_MAX: usize = 16;

/// One chunk on its way to another place.
pub(super) struct Leg {
    pub(super) slot: u32,
    pub(super) to: Place,
    pub(super) origin: Origin,
    pub(super) footing: Footing,
    /// The booking of a lender's memory.
    pub(super) loan: Option<Loan>,
    /// The new chunk, at an address of the move's own.
    pub(super) shadow: Mapping,
    pub(super) stage: Stage,
}

/// What is at the buffer's address.
pub(super) enum Stage {
    /// As before: the buffer has the mapping.
    Untouched,
    Old(Mapping),
    Nothing(Arc<Chunk>),
    New {
        mapping: Mapping,
        old: Arc<Chunk>,
    },
    /// The new chunk, which the driver does not let go of although the move failed.
    Stays,
}

impl Leg {
    fn take_old(&mut self) -> Option<Mapping> {
        match std::mem::replace(&mut self.stage, Stage::Untouched) {
            Stage::Old(mapping) => Some(mapping),
            other => {
                self.stage = other;
                None
            }
        }
    }
}

/// What a move has left of one slot.
struct Remains {
    slot: u32,
    to: Place,
    /// The new chunk's address of the move's own, unless the slot keeps it.
    shadow: Option<Mapping>,
    old: Arc<Chunk>,
    /// Where else the old chunk is mapped: ready for the next, and where it should not be.
    spare: Option<Spare>,
    aliases: Vec<Mapping>,
    /// Alive while the old chunk stands in other slots.
    footing: Weak<Footing>,
}

/// What an exchange needs, made before anybody is concerned.
struct Tools {
    copier: Copier,
    /// Not where users wait instead.
    held: Option<Held>,
    _relaxed: RelaxedCapture,
}

impl Operation<'_> {
    /// Brings each of the slots that has memory to the place that is named for it. `publish` is
    /// called with the new state, under its lock.
    pub(super) fn relocate(
        &self,
        targets: impl Iterator<Item = Target>,
        terms: &Terms,
        publish: impl FnOnce(&mut State),
    ) -> Result<Moved, Error> {
        let body = self.0;
        let targets: Vec<Target> = {
            let state = body.state();
            let is_away = |it: &Target| {
                let standing = state.pieces.get(&it.slot);
                standing.is_some_and(|standing| standing.place != it.to || it.is_anew)
            };
            targets.filter(is_away).collect()
        };
        if targets.is_empty() {
            // Who falls asleep where its memory lies has users to wait for all the same.
            let closed = match terms.shut {
                true => Some(self.close_when_done(terms.patience)?),
                false => None,
            };
            // Both sides' accounts may change.
            let sites = body.places.sites();
            let _carrying: Vec<_> = sites.map(|site| site.depot.carries.begin()).collect();
            let mut state = body.state();
            publish(&mut state);
            let generation = state.generation;
            drop(state);
            drop(closed);
            return Ok(Moved { generation, ..Moved::default() });
        }
        self.check_mended()?;
        self.check_places(&targets)?;
        let slots: Vec<u32> = targets.iter().map(|it| it.slot).collect();
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
    fn check_places(&self, targets: &[Target]) -> Result<(), Error> {
        let chunk_bytes = self.0.shape.chunk_bytes;
        let mut places: Vec<Place> = targets.iter().map(|it| it.to).collect();
        places.sort_unstable();
        places.dedup();
        places.into_iter().try_for_each(|place| {
            self.0.places.site(place)?.check_chunk(chunk_bytes)?;
            self.reach(place)
        })
    }

    /// Everything after the new chunks stand ready.
    fn carry_out(
        &self,
        mut legs: Vec<Leg>,
        terms: &Terms,
        publish: impl FnOnce(&mut State),
    ) -> Result<Moved, Error> {
        let places = &self.0.places;
        let exchanged = self.ready(legs.len(), terms).and_then(|mut tools| {
            let closed = self.exchange(&mut legs, &mut tools, terms.patience);
            places.copiers.put(tools.copier);
            if let Some(held) = tools.held {
                places.latches.put(held);
            }
            closed
        });
        let closed = match exchanged {
            Ok(closed) => closed,
            Err(error) => {
                self.give_up(legs, terms.turn);
                return Err(error);
            }
        };
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

    /// Makes what the exchange needs. Nothing that is made, recorded or asked from here on harms
    /// anybody's capture.
    fn ready(&self, copies: usize, terms: &Terms) -> Result<Tools, Error> {
        let body = self.0;
        let (places, driver, home) = (&body.places, body.range.driver(), body.home());
        let _relaxed = RelaxedCapture::enter(driver)?;
        let held = match terms.shut {
            true => None,
            false => Some(places.latches.take(|| Ok(Latch::create(driver, home)?))?),
        };
        match places.copiers.take(driver, home, copies) {
            Ok(copier) => Ok(Tools { _relaxed, copier, held }),
            Err(error) => {
                if let Some(held) = held {
                    places.latches.put(held);
                }
                Err(error.into())
            }
        }
    }

    /// Copies and swaps, once nobody uses the buffer. After an error everything is as it was, and no
    /// copy is under way.
    fn exchange(
        &self,
        legs: &mut [Leg],
        tools: &mut Tools,
        patience: Duration,
    ) -> Result<Closed<'_>, Error> {
        let body = self.0;
        let mut closed = body.uses.close(patience)?;
        let copier = &tools.copier;
        self.follow_users(copier, &mut closed)?;
        {
            let mut state = body.state();
            for leg in &mut *legs {
                if let Some(mapping) = state.pieces.get_mut(&leg.slot).and_then(Standing::take) {
                    leg.stage = Stage::Old(mapping);
                }
            }
        }
        let copied = copy(legs, copier);
        if copied.is_err()
            && let Err(error) = copier.stream.synchronize()
        {
            // Nobody is held yet. A copy may be under way behind which no event was recorded.
            vmm_sys::say!(warn, %error, "the end of a move's copies is not known");
        }
        let done = copied.and_then(|()| {
            if let Some(held) = tools.held.take() {
                closed.hold(held, &body.places.latches);
            }
            self.swap_all(legs, copier)
        });
        match done {
            Ok(()) => Ok(closed),
            Err(error) => {
                vmm_sys::say!(debug, %error, "a move is taken back");
                // No copy may be under way when its target goes.
                copier.settle(legs.len());
                self.take_back(legs);
                if closed.holds() {
                    self.mend_while_held();
                }
                Err(error)
            }
        }
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

    /// Swaps the chunks as their copies end, as many together as have ended.
    fn swap_all(&self, legs: &mut [Leg], copier: &Copier) -> Result<(), Error> {
        let grants = self.0.grants();
        let mut swapped = 0;
        while swapped < legs.len() {
            let copied = copier.wait_beyond(swapped, legs.len())?;
            while swapped < copied {
                let slots = legs[swapped..copied].iter().map(|leg| leg.slot);
                let run = slots.zip(legs[swapped].slot..).take_while(|(slot, next)| slot == next);
                let end = swapped + run.take(BATCH_MAX).count();
                self.swap(&mut legs[swapped..end], &grants)?;
                swapped = end;
            }
        }
        Ok(())
    }

    /// Puts the new chunks of neighbouring legs where the old ones stand. After an error the stages
    /// say how far they came.
    fn swap(&self, legs: &mut [Leg], grants: &[AccessGrant]) -> Result<(), Error> {
        let turn = Turn::Requester;
        let old: Vec<Mapping> = legs.iter_mut().filter_map(Leg::take_old).collect();
        match turn.with(|| Mapping::unmap_all(old)) {
            Ok(chunks) => {
                for (leg, chunk) in legs.iter_mut().zip(chunks) {
                    leg.stage = Stage::Nothing(chunk);
                }
            }
            Err((old, error)) => {
                for (leg, mapping) in legs.iter_mut().zip(old) {
                    leg.stage = Stage::Old(mapping);
                }
                return Err(error.into());
            }
        }
        for leg in &mut *legs {
            let mapping = self.map(leg.slot, leg.shadow.chunk().clone())?;
            if let Stage::Nothing(old) = std::mem::replace(&mut leg.stage, Stage::Untouched) {
                leg.stage = Stage::New { mapping, old };
            }
        }
        let new = legs.iter().filter_map(|leg| match &leg.stage {
            Stage::New { mapping, .. } => Some(mapping),
            _ => None,
        });
        Ok(turn.with(|| Mapping::set_access_all(new, grants))?)
    }

    pub(super) fn map(&self, slot: u32, chunk: Arc<Chunk>) -> vmm_sys::DriverResult<Mapping> {
        let offset = u64::from(slot) * self.0.shape.chunk_bytes;
        Turn::Requester.with(|| Mapping::map(&self.0.range, offset, chunk))
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
        let rests_until_ms = body.rest_after_borrowing_ms();
        let grants = body.grants();
        let mut state = body.state();
        state.generation += 1;
        let (generation, home) = (state.generation, state.home);
        for Leg { slot, to, footing, loan, shadow, stage, .. } in legs {
            let Stage::New { mapping, old } = stage else { continue };
            past::note_only_user(mapping.chunk(), &body.shape.user);
            state.arrived(to, body.shape.chunk_bytes, loan.is_some());
            if loan.is_some() {
                state.rests_until_ms = rests_until_ms;
            }
            let mut standing = body.standing(home, mapping, generation, footing, loan);
            let shadow = match to {
                Place::Device(_) => Some(shadow),
                Place::HostNuma(_) => {
                    standing.spare = Some(Spare { mapping: shadow, grants: grants.clone() });
                    None
                }
            };
            let Some(before) = state.insert(slot, standing) else { continue };
            let Standing { spare, aliases, footing, .. } = before;
            let footing = Arc::downgrade(&footing);
            left.push(Remains { slot, to, shadow, old, spare, aliases, footing });
        }
        state.counts.moved_bytes += bytes;
        publish(&mut state);
        drop(state);
        let held_us = closed.since.elapsed().as_micros() as u64;
        (Moved { bytes, generation, held_us }, left)
    }

    /// Gives back what the move left: its own addresses, and the old chunks.
    fn leave_behind(&self, left: Vec<Remains>, terms: &Terms) {
        for Remains { slot, to, shadow, old, spare, aliases, footing } in left {
            if let Some(shadow) = shadow
                && let Ok(site) = self.0.places.site(to)
            {
                // The chunk is the buffer's by now: only the address goes.
                self.part_with(slot, &site, shadow, &Origin::Stock, terms.turn);
            }
            let Ok(site) = self.0.places.site(Place::of(old.props())) else { continue };
            let leaving = &site.depot.leaving;
            leaving.add_shared(aliases.into_iter(), Vec::new(), &footing);
            match spare {
                // Nobody else has the chunk.
                Some(spare) if Arc::strong_count(&old) == 2 => {
                    if !past::is_outside(&old) {
                        site.depot.landing.put(spare);
                        continue;
                    }
                    drop(site.depot.unmap(spare.mapping, terms.turn));
                }
                spare => {
                    let spare = spare.into_iter().map(|spare| spare.mapping);
                    leaving.add_shared(spare, Vec::new(), &footing);
                }
            }
            match terms.left {
                Left::Shelf => site.depot.settle(old, terms.turn),
                Left::Driver => give_back(&site, old, &Origin::Made, terms.turn),
            }
        }
    }
}
