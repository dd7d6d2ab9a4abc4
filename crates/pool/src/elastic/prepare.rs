//! The first half of a move: the new chunks are made and mapped ahead, at addresses of the move's own.
//! Nobody is concerned yet.

use std::collections::BTreeMap;
use std::sync::Arc;

use vmm_sys::AccessGrant;
use vmm_sys::object::{Chunk, Mapping, Range};

use super::commit::{How, Origin, Short, give_back};
use super::error::ElasticError;
use super::operation::Operation;
use super::relocate::{Leg, Stage};
use super::terms::{Effort, Target, Terms};
use crate::depot::Shortage;
use crate::error::Error;
use crate::landing::Spare;
use crate::lending::Loan;
use crate::past;
use crate::place::Place;
use crate::places::Site;
use crate::turn::Turn;

impl Operation<'_> {
    /// Makes and maps the new chunks ahead; nobody is concerned yet.
    pub(super) fn prepare(&self, targets: &[Target], terms: &Terms) -> Result<Vec<Leg>, Error> {
        let body = self.0;
        let chunk_bytes = body.shape.chunk_bytes;
        let bytes = self.bytes_of(targets.len());
        let reserve = || Range::reserve(body.range.driver(), bytes, 0, 0);
        let shadows = terms.turn.with(reserve)?;
        let mut shorts: BTreeMap<Place, Short> = BTreeMap::new();
        let mut legs = Vec::with_capacity(targets.len());
        let grants = body.grants();
        for (index, target) in targets.iter().enumerate() {
            let short = shorts.entry(target.to).or_insert_with(|| {
                let count = targets.iter().filter(|it| it.to == target.to).count();
                Short::new(self.bytes_of(count))
            });
            let offset = index as u64 * chunk_bytes;
            match self.prepare_one((&shadows, offset), *target, terms, short, &grants) {
                Ok(leg) => legs.push(leg),
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
        (shadows, offset): (&Range, u64),
        target: Target,
        terms: &Terms,
        short: &mut Short,
        grants: &[AccessGrant],
    ) -> Result<Leg, Error> {
        let Target { slot, to, is_loan, .. } = target;
        let turn = terms.turn;
        let site = self.0.places.site(to)?;
        let _carrying = site.depot.carries.begin();
        let bytes = self.0.shape.chunk_bytes;
        if !is_loan && let Some(spare) = site.depot.landing.take(&self.0.props(to), bytes, grants) {
            past::note_user(spare.mapping.chunk(), &self.0.shape.user);
            self.0.state().expect(to, bytes, false);
            let footing = site.depot.footing(bytes);
            let (origin, shadow, stage) = (Origin::Landing, spare.mapping, Stage::Untouched);
            return Ok(Leg { slot, to, origin, footing, loan: None, shadow, stage });
        }
        let (chunk, origin, loan) = self.supply_for(&site, is_loan, terms, short)?;
        let kept = chunk.clone();
        let shadow = match turn.with(|| Mapping::map(shadows, offset, chunk)) {
            Ok(shadow) => shadow,
            Err(error) => {
                give_back(&site, kept, &origin, turn);
                drop(loan);
                return Err(error.into());
            }
        };
        drop(kept);
        // All who have access, though only the copy needs it: granted once, the chunk costs a third
        // of it when it comes to the buffer's address.
        if let Err(error) = turn.with(|| shadow.set_access(grants)) {
            self.part_with(slot, &site, shadow, &origin, turn);
            drop(loan);
            return Err(error.into());
        }
        past::note_user(shadow.chunk(), &self.0.shape.user);
        self.0.state().expect(to, bytes, is_loan);
        let (footing, stage) = (site.depot.footing(bytes), Stage::Untouched);
        Ok(Leg { slot, to, origin, footing, loan, shadow, stage })
    }

    /// A chunk for a move, by the effort that its place is worth.
    fn supply_for(
        &self,
        site: &Site<'_>,
        is_loan: bool,
        terms: &Terms,
        short: &mut Short,
    ) -> Result<(Arc<Chunk>, Origin, Option<Loan>), Error> {
        if is_loan {
            let place = site.place;
            return match self.borrow(site, terms.turn)? {
                Ok((chunk, origin, loan)) => Ok((chunk, origin, Some(loan))),
                Err(refusal) => Err(ElasticError::NotLent { place, refusal }.into()),
            };
        }
        let how = How { place: site.place, turn: terms.turn, wait: terms.wait };
        let (chunk, origin) = match terms.effort {
            Effort::Ladder => self.supply(site, how, short)?,
            Effort::Ready => {
                self.take_any(site, terms.turn).map_err(|shortage| match shortage {
                    Shortage::Driver(error) if !error.is_out_of_memory() => error.into(),
                    Shortage::Driver(error) => site.shortage(short.bytes(), how, Some(error)),
                    Shortage::Limit => site.shortage(short.bytes(), how, None),
                })?
            }
        };
        Ok((chunk, origin, None))
    }

    /// Takes the new chunks away again.
    pub(super) fn give_up(&self, legs: Vec<Leg>, turn: Turn) {
        let bytes = self.0.shape.chunk_bytes;
        for Leg { slot, to, origin, footing, loan, shadow, stage } in legs.into_iter().rev() {
            let Ok(site) = self.0.places.site(to) else { continue };
            let _carrying = site.depot.carries.begin();
            self.0.state().arrived(to, bytes, loan.is_some());
            drop(footing);
            match (stage, &origin) {
                (Stage::Untouched, Origin::Landing) => {
                    site.depot.landing.put(Spare { mapping: shadow, grants: self.0.grants() });
                }
                _ => self.part_with(slot, &site, shadow, &origin, turn),
            }
            // While the memory is in this thread's hands.
            drop(loan);
        }
    }
}
