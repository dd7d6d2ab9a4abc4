//! Taking memory away from a buffer's addresses: at once for the buffer, behind its users for the
//! driver. Nobody waits, and it cannot fail.

use std::sync::Arc;

use super::hooks::{Cause, Phase};
use super::operation::Operation;
use super::state::{Backing, Loose, Standing, Stuck};
use crate::carries::Carrying;
use crate::places::Site;
use crate::turn::Turn;

impl Operation<'_> {
    /// Takes the memory of those of `slots` that have some. Returns the bytes taken.
    pub(crate) fn decommit(&self, slots: impl Iterator<Item = u32>, cause: Cause) -> u64 {
        let body = self.0;
        let taken: Vec<u32> = {
            let state = body.state();
            slots.filter(|slot| state.pieces.contains_key(slot)).collect()
        };
        if taken.is_empty() {
            return 0;
        }
        let mut change = self.change(cause, &taken);
        body.hooks.call(&change);
        let bytes = self.bytes_of(taken.len());
        change.generation = self.take_away(&taken);
        self.unbook_quota(bytes);
        change.phase = Phase::After;
        body.hooks.call(&change);
        bytes
    }

    /// Takes the memory of all slots.
    pub(crate) fn decommit_all(&self, cause: Cause) -> u64 {
        let slots: Vec<u32> = self.0.state().pieces.keys().copied().collect();
        self.decommit(slots.into_iter(), cause)
    }

    /// Lets the chunks leave behind the buffer's users. Returns the new generation.
    fn take_away(&self, slots: &[u32]) -> u64 {
        let body = self.0;
        // Found nowhere in between: in this thread's hands.
        let sites: Vec<_> = body.places.sites().collect();
        let carrying: Vec<Carrying<'_>> =
            sites.iter().map(|site| site.depot.carries.begin()).collect();
        let gates = body.uses.gates();
        let (generation, gone) = {
            let mut state = body.state();
            state.generation += 1;
            let gone: Vec<_> = slots.iter().filter_map(|slot| state.remove(*slot)).collect();
            (state.generation, gone)
        };
        for mut standing in gone {
            let site = sites.iter().find(|site| site.place == standing.place);
            let Some(Site { depot, .. }) = site else { continue };
            let others = standing.take_others().into_iter();
            let Standing { backing, footing, .. } = standing;
            // It counts where it stands, if it stands in other slots.
            let footing = Arc::downgrade(&footing);
            depot.leaving.add_shared(others, Vec::new(), &footing);
            match backing {
                Backing::Mapped(mapping)
                | Backing::Stuck(Stuck { loose: Loose::Ungranted(mapping), .. }) => {
                    let mapping = std::iter::once(mapping);
                    depot.leaving.add_shared(mapping, gates.clone(), &footing);
                }
                Backing::Stuck(Stuck { loose: Loose::Unmapped(chunk), .. }) => {
                    depot.settle(chunk, Turn::Requester);
                }
                // Only the thread that holds the operation has one, and it is here.
                Backing::InHand => {}
            }
        }
        drop(carrying);
        for site in &sites {
            site.tidy(Turn::Requester);
        }
        generation
    }
}
