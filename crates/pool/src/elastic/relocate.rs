//! Another place for the memory behind a buffer's addresses, contents kept: all of it, or none.
//!
//! The new chunks are made and mapped ahead, at addresses of the move's own. Then nobody may use the
//! buffer for a while ([`door`](super::door)): each chunk is copied behind the work of its users,
//! and while the next is copied, the one before changes place: the old mapping goes, the new chunk
//! is mapped at the buffer's address (rows D-V1, D-V5). The old chunks are kept until all have
//! changed place, so that a failure at any step brings them back: nobody has written meanwhile.

use std::sync::Arc;

use vmm_sys::AccessGrant;
use vmm_sys::object::{Chunk, Latch, Mapping, RelaxedCapture};

use super::body::Operation;
use super::commit::{Origin, give_back};
use super::copier::Copier;
use super::door::{Closed, Closing};
use super::error::ElasticError;
use super::hooks::Phase;
use super::prepare::unmap_alias;
use super::state::{Standing, State};
use super::terms::{Left, Moved, Target, Terms};
use crate::error::Error;
use crate::lane::{Asker, Waited};
use crate::lending::Loan;
use crate::place::Place;
use crate::turn::Turn;

/// One chunk on its way to another place.
pub(super) struct Leg {
    pub(super) slot: u32,
    pub(super) to: Place,
    pub(super) origin: Origin,
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
                state.pieces.get(&it.slot).is_some_and(|standing| standing.place != it.to)
            };
            targets.filter(is_away).collect()
        };
        if targets.is_empty() {
            // Both sides' accounts may change.
            let sites = body.places.sites();
            let _carrying: Vec<_> = sites.map(|site| site.depot.carries.begin()).collect();
            let mut state = body.state();
            publish(&mut state);
            return Ok(Moved { generation: state.generation, ..Moved::default() });
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
    fn close(&self, terms: &Terms) -> Result<Closed<'_>, Error> {
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
    ) -> (Moved, Vec<(Mapping, Arc<Chunk>)>) {
        let body = self.0;
        let bytes = self.bytes_of(legs.len());
        let mut left = Vec::with_capacity(legs.len());
        let rests_until_ms = body.rest_after_borrowing_ms();
        let mut state = body.state();
        state.generation += 1;
        let (generation, home) = (state.generation, state.home);
        for Leg { slot, to, loan, shadow, stage, .. } in legs {
            let Stage::New { mapping, old } = stage else { continue };
            state.arrived(to, body.shape.chunk_bytes, loan.is_some());
            if loan.is_some() {
                state.rests_until_ms = rests_until_ms;
            }
            let standing = body.standing(home, mapping, generation, loan);
            state.pieces.insert(slot, standing);
            left.push((shadow, old));
        }
        state.counts.moved_bytes += bytes;
        publish(&mut state);
        drop(state);
        let held_us = closed.since.elapsed().as_micros() as u64;
        (Moved { bytes, generation, held_us }, left)
    }

    /// Gives back what the move left: its own addresses, and the old chunks.
    fn leave_behind(&self, left: Vec<(Mapping, Arc<Chunk>)>, terms: &Terms) {
        let bytes = self.0.shape.chunk_bytes;
        for (shadow, old) in left {
            unmap_alias(shadow, terms.turn);
            let Ok(site) = self.0.places.site(Place::of(old.props())) else { continue };
            site.depot.elastic_shrank(bytes);
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
