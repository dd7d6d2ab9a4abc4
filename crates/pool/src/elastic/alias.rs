//! Addresses of a move's own that the driver refused to unmap, while their chunk stands in a buffer.
//!
//! They stay with the chunk: tried again before every operation, and on their way with it when it is
//! taken away. So the chunk is counted in one place, and goes once nothing of it is mapped.

use vmm_sys::object::Mapping;

use super::commit::{Origin, give_back};
use super::operation::Operation;
use crate::places::Site;
use crate::turn::Turn;

impl Operation<'_> {
    /// Unmaps an address of a move's own, which is not needed any more. A chunk that nobody has
    /// then goes back to where it came from.
    pub(super) fn part_with(
        &self,
        slot: u32,
        site: &Site<'_>,
        shadow: Mapping,
        origin: &Origin,
        turn: Turn,
    ) {
        match turn.with(|| shadow.unmap()) {
            Ok(chunk) => give_back(site, chunk, origin, turn),
            Err((shadow, error)) => {
                crate::obstacle::tell(&error, "an address of a move could not be unmapped");
                if let Some(shadow) = self.keep_alias(slot, shadow) {
                    site.depot.leaving.add(std::iter::once(shadow), Vec::new());
                }
            }
        }
    }

    /// Has the slot keep the mapping, if it is of the chunk that stands there.
    fn keep_alias(&self, slot: u32, alias: Mapping) -> Option<Mapping> {
        let mut alias = Some(alias);
        self.0.state().change(slot, |standing| {
            let own = alias.take_if(|alias| standing.holds(alias.chunk()));
            standing.aliases.extend(own);
        });
        alias
    }

    /// Tries again to unmap what slots keep.
    pub(super) fn settle_aliases(&self) {
        let kept: Vec<(u32, Vec<Mapping>)> = {
            let mut state = self.0.state();
            let slots: Vec<u32> = state.aliased.iter().copied().collect();
            let mut take = |slot| {
                let mut aliases = Vec::new();
                state.change(slot, |standing| aliases = std::mem::take(&mut standing.aliases));
                (slot, aliases)
            };
            slots.into_iter().map(&mut take).collect()
        };
        for (slot, aliases) in kept {
            for alias in aliases {
                // Only the thread that holds the operation changes the slot: the chunk is still there.
                if let Err((alias, error)) = Turn::Requester.with(|| alias.unmap()) {
                    vmm_sys::say!(debug, %error, "an address of a move is still mapped");
                    drop(self.keep_alias(slot, alias));
                }
            }
        }
    }
}
