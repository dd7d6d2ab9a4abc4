//! Taking memory away from a buffer's addresses: at once for the buffer, behind its users for the
//! driver. Nobody waits, and it cannot fail.

use super::body::Operation;
use super::hooks::{Cause, Phase};
use crate::carries::Carrying;
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
            let gone: Vec<_> = slots.iter().filter_map(|slot| state.pieces.remove(slot)).collect();
            (state.generation, gone)
        };
        for standing in gone {
            let place = standing.place();
            let Some(site) = sites.iter().find(|site| site.place == place) else { continue };
            site.depot.elastic_shrank(standing.mapping.bytes());
            site.depot.leaving.add(std::iter::once(standing.mapping), gates.clone());
        }
        drop(carrying);
        for site in &sites {
            site.tidy(Turn::Requester);
        }
        generation
    }
}
