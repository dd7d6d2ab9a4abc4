//! Guard mode of a lane: each block in mappings of its own, with unmapped addresses behind it.
//!
//! To the heap a guarded block is whole slots, taken at a place that is chosen here; so the heap of
//! a guarded lane has no free space, every request is a miss, and all of growth, limbo and the
//! ladder is as in any other lane. The caller's bytes lie at the end of the block, as near to the
//! gap as their alignment allows. A block that is freed leaves the heap at once, and its mappings
//! retire behind everything that may still use it.
//!
//! Addresses come round: the next block is looked for behind the last one, and from the start again
//! only at the end of the lane's reserved addresses, if at least half of them are free.

use std::collections::BTreeMap;

use vmm_heap::{Block, GRANULE_BYTES, Miss};

use super::limbo::Retired;
use super::window::Window;
use super::{Gate, LaneCell, LaneState};
use crate::buffer::Buffer;
use crate::region::{Region, Slot};
use crate::request::Request;

/// A block that somebody holds.
#[derive(Clone, Copy, Debug)]
struct Guarded {
    /// Where it starts for the heap.
    start: u64,
    /// What was asked for.
    bytes: u64,
}

/// The blocks of a guarded lane, and where the next one is looked for.
#[derive(Debug, Default)]
pub(crate) struct Guards {
    /// By the offset that the caller has.
    blocks: BTreeMap<u64, Guarded>,
    cursor_slot: u32,
    /// The driver has no more addresses: those that there are come round at once.
    is_packed: bool,
}

impl Guards {
    /// What a request lacks: whole slots.
    pub(super) fn miss(region: &Region, request: &Request) -> Miss {
        let slot_bytes = region.slot_bytes();
        let bytes = request.bytes().next_multiple_of(slot_bytes);
        Miss { bytes, align: request.align_bytes().max(slot_bytes) }
    }

    /// Where the next block goes; `None` if more addresses shall be reserved.
    pub(super) fn choose_window(&self, region: &Region, miss: &Miss) -> Option<Window> {
        let slot_bytes = region.slot_bytes();
        let place = Place {
            slots: (miss.bytes / slot_bytes) as u32,
            align_slots: (miss.align / slot_bytes) as u32,
        };
        let end = region.capacity_slots();
        let taken = region.mapped_bytes() / slot_bytes + self.blocks.len() as u64;
        let may_come_round = self.is_packed || 2 * taken <= u64::from(end);
        let behind = place.find(region, self.cursor_slot, end);
        let first_slot = match behind {
            None if may_come_round => place.find(region, 0, self.cursor_slot.min(end)),
            found => found,
        }?;
        Some(Window {
            offset: u64::from(first_slot) * slot_bytes,
            first_slot,
            end_slot: first_slot + place.slots,
            missing_slots: place.slots,
        })
    }

    /// A block is claimed up to here: the next one is looked for behind its gap.
    pub(super) fn claim(&mut self, end_slot: u32) {
        self.cursor_slot = end_slot + 1;
    }

    /// The claim is given up; nobody has seen its addresses.
    pub(super) fn give_up(&mut self, first_slot: u32, end_slot: u32) {
        if self.cursor_slot == end_slot + 1 {
            self.cursor_slot = first_slot;
        }
    }

    /// No more addresses can be had. Returns whether that is news.
    pub(super) fn pack(&mut self) -> bool {
        !std::mem::replace(&mut self.is_packed, true)
    }

    /// Takes a block off the list: (its start for the heap, what was asked for).
    fn take(&mut self, offset: u64) -> Option<(u64, u64)> {
        self.blocks.remove(&offset).map(|block| (block.start, block.bytes))
    }

    /// The walker: each block ends in its last slot and has unmapped addresses behind it.
    pub(crate) fn verify(&self, region: &Region) -> Result<(), String> {
        for (offset, block) in &self.blocks {
            let end = offset + block.bytes;
            let last = ((end - 1) / region.slot_bytes()) as u32;
            let behind = region.slot(last + 1);
            let is_gap = matches!(behind, Slot::Vacant) && last + 1 < region.capacity_slots();
            if !matches!(region.slot(last), Slot::Mapped(_)) || !is_gap {
                return Err(format!("the block at {offset} has {behind:?} behind it"));
            }
        }
        Ok(())
    }
}

/// What a block needs.
struct Place {
    slots: u32,
    align_slots: u32,
}

impl Place {
    /// The first place that starts in [from, to): a vacant stretch with a vacant slot behind it, and
    /// nothing mapped before it.
    fn find(&self, region: &Region, from: u32, to: u32) -> Option<u32> {
        let mut first = from.next_multiple_of(self.align_slots);
        while first < to && first + self.slots < region.capacity_slots() {
            let is_free = |slot: u32| match region.slot(slot) {
                Slot::Vacant => true,
                // No addresses are before it, so nothing runs over from there.
                Slot::Barrier => slot < first,
                Slot::Claimed | Slot::Mapped(_) | Slot::Retiring => false,
            };
            let stretch = first.saturating_sub(1)..=first + self.slots;
            match stretch.rev().find(|slot| !is_free(*slot)) {
                None => return Some(first),
                Some(taken) => first = (taken + 2).next_multiple_of(self.align_slots),
            }
        }
        None
    }
}

impl LaneState {
    /// Makes a lane that has handed out nothing yet an ordinary one.
    pub(super) fn leave_guard_mode(&mut self) {
        self.guards = None;
        self.home.special = self.stream.is_per_thread();
    }

    /// Hands out a block of a guarded lane, which the heap has taken already.
    pub(super) fn hand_out_guarded(
        &mut self,
        cell: &'static LaneCell,
        block: Block,
        request: &Request,
    ) -> Buffer {
        let bytes = request.bytes();
        let align_bytes = request.align_bytes().max(256);
        // A block starts at a multiple of the alignment, or of the slot, which is longer.
        let skipped = (block.bytes - bytes) & !(align_bytes - 1);
        let offset = block.offset + skipped;
        if let Some(guards) = &mut self.guards {
            guards.blocks.insert(offset, Guarded { start: block.offset, bytes });
        }
        self.marks.watch(offset);
        self.hand_out(cell, block, bytes).skip(skipped)
    }

    /// The length of the block that somebody holds at `offset`, in whole granules.
    pub(super) fn held_block_bytes(&self, offset: u64) -> Option<u64> {
        match &self.guards {
            None => self.heap.block_bytes(offset),
            Some(guards) => {
                guards.blocks.get(&offset).map(|it| it.bytes.next_multiple_of(GRANULE_BYTES))
            }
        }
    }

    /// Where the heap has the block that is freed at `offset`, and what counts as asked for it.
    pub(super) fn unguard(&mut self, offset: u64, bytes: u64) -> (u64, u64) {
        let Some(guards) = &mut self.guards else { return (offset, bytes) };
        self.marks.clear(offset);
        guards.take(offset).unwrap_or((offset, bytes))
    }

    /// Takes a freed block of a guarded lane out of the lane's addresses: its mappings retire behind
    /// `gates`.
    pub(super) fn retire_block(&mut self, offset: u64, bytes: u64, gates: &[Gate]) {
        if self.heap.remove_free(offset, bytes).is_err() {
            debug_assert!(false, "a guarded block is free now");
            return;
        }
        let slot_bytes = self.region.slot_bytes();
        let mut slot = (offset / slot_bytes) as u32;
        let end = ((offset + bytes) / slot_bytes) as u32;
        while slot < end {
            let Slot::Mapped(key) = self.region.slot(slot) else { break };
            let Some(placed) = self.region.retire(key) else { break };
            slot += placed.slots;
            self.limbo.retired.push(Retired {
                mapping: placed.mapping,
                first_slot: placed.first_slot,
                slots: placed.slots,
                gates: gates.to_vec(),
            });
            self.device.limbo_grew(1);
        }
    }
}
