//! A move that failed is taken back: the old chunks come to the buffer's addresses again, as far as
//! the driver lets. What it does not is kept, and tried again before each operation and each use.

use std::sync::Arc;
use std::time::Duration;

use vmm_sys::AccessGrant;
use vmm_sys::object::Chunk;

use super::operation::Operation;
use super::relocate::{Leg, Stage};
use super::state::{Backing, Loose, Stuck};
use crate::place::Place;
use crate::sync::thread;
use crate::turn::Turn;

/// How often memory is tried to be brought back while users are held, and the first pause before;
/// each is twice as long as the one before: a quarter of a second in all.
const TRIES_MAX: u32 = 8;
const PAUSE: Duration = Duration::from_millis(1);

impl Operation<'_> {
    /// Brings the old chunks back to the buffer's addresses, the last first. Where the driver
    /// refuses even that, the contents are kept, and brought back later ([`Stuck`]).
    pub(super) fn take_back(&self, legs: &mut [Leg]) {
        let grants = self.0.grants();
        for leg in legs.iter_mut().rev() {
            let stage = std::mem::replace(&mut leg.stage, Stage::Untouched);
            let backing = match stage {
                Stage::Untouched | Stage::Stays => continue,
                Stage::Old(mapping) => Backing::Mapped(mapping),
                Stage::Nothing(old) => self.stand(leg.slot, Loose::Unmapped(old), &grants),
                Stage::New { mapping, old } => match Turn::Requester.with(|| mapping.unmap()) {
                    Ok(_) => self.stand(leg.slot, Loose::Unmapped(old), &grants),
                    Err((mapping, error)) => {
                        vmm_sys::say!(warn, %error, "a chunk stays where a failed move brought it");
                        let backing = self.stand(leg.slot, Loose::Ungranted(mapping), &grants);
                        self.stay(leg, backing, old);
                        leg.stage = Stage::Stays;
                        continue;
                    }
                },
            };
            self.0.state().set_backing(leg.slot, backing);
        }
    }

    /// Work that is held goes on when the latch opens, and faults where nothing is mapped: so what the
    /// driver refused to bring back is tried again first. Not for ever: who is held keeps others waiting.
    pub(super) fn mend_while_held(&self) {
        let mut pause = PAUSE;
        for _ in 0..TRIES_MAX {
            if self.0.state().stuck.is_empty() {
                return;
            }
            thread::sleep(pause);
            pause *= 2;
            self.mend();
        }
        if let Some(slot) = self.0.state().stuck.first() {
            vmm_sys::say!(error, slot, "users go on without memory that could not be brought back");
        }
    }

    /// Has a chunk stand in a slot, granted to all who have access, as far as the driver lets.
    pub(super) fn stand(&self, slot: u32, loose: Loose, grants: &[AccessGrant]) -> Backing {
        let mapping = match loose {
            Loose::Ungranted(mapping) => mapping,
            Loose::Unmapped(chunk) => match self.map(slot, chunk.clone()) {
                Ok(mapping) => mapping,
                Err(error) => {
                    vmm_sys::say!(warn, %error, slot, "a chunk could not be mapped back; tried again later");
                    let loose = Loose::Unmapped(chunk);
                    return Backing::Stuck(Stuck { loose, refused: error });
                }
            },
        };
        match Turn::Requester.with(|| mapping.set_access(grants)) {
            Ok(()) => Backing::Mapped(mapping),
            Err(error) => {
                vmm_sys::say!(warn, %error, slot, "a chunk could not be granted; tried again later");
                Backing::Stuck(Stuck { loose: Loose::Ungranted(mapping), refused: error })
            }
        }
    }

    /// A move failed, but the driver refuses to take this leg back: the same bytes, elsewhere. Its
    /// old chunk goes.
    fn stay(&self, leg: &mut Leg, backing: Backing, old: Arc<Chunk>) {
        let bytes = self.0.shape.chunk_bytes;
        let from = Place::of(old.props());
        let places = &self.0.places;
        let (Ok(site), Ok(to)) = (places.site(from), places.site(leg.to)) else { return };
        let sites = places.sites();
        let _carrying: Vec<_> = sites.map(|site| site.depot.carries.begin()).collect();
        let loan = leg.loan.take();
        // Where else the old chunk is mapped, which may stand in other slots.
        let (others, footing) = {
            let mut state = self.0.state();
            state.generation += 1;
            let generation = state.generation;
            if loan.is_some() {
                // What `give_up` is going to count off is no loan any more.
                state.arrived(leg.to, bytes, true);
                state.expect(leg.to, bytes, false);
            }
            let lent = self.0.lent(state.home, leg.to, loan);
            // Beside that of the leg, which `give_up` is going to count off.
            let mut footing = Arc::new(to.depot.footing(bytes));
            state.set_backing(leg.slot, backing);
            let mut others = Vec::new();
            state.change(leg.slot, |standing| {
                standing.place = leg.to;
                standing.generation = generation;
                standing.lent = lent;
                std::mem::swap(&mut standing.footing, &mut footing);
                others = standing.take_others();
            });
            (others, Arc::downgrade(&footing))
        };
        site.depot.leaving.add_shared(others.into_iter(), Vec::new(), &footing);
        site.depot.settle(old, Turn::Requester);
    }
}
