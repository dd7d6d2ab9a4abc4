//! Bringing memory to a window: claim under the lock, act at the driver without it, hand back on
//! failure.

use std::sync::Arc;

use vmm_heap::Miss;
use vmm_sys::object::{Chunk, Mapping};

use super::limbo::Retired;
use super::window::Window;
use super::{Lane, LaneState, retire};
use crate::depot::Shortage;
use crate::device::Device;
use crate::growth::{Piece, Source};
use crate::past::{self, User};
use crate::region::{Region, Segment};
use crate::turn::Turn;

/// Where a piece's chunk comes from, once it is claimed.
enum Supplied {
    Stock(Chunk),
    Create(u64),
    Alias(Arc<Chunk>),
}

/// One chunk to be mapped.
pub(super) struct Part {
    pub(super) first_slot: u32,
    slots: u32,
    segment: Segment,
    supplied: Option<Supplied>,
    pub(super) mapping: Option<Mapping>,
}

/// Memory on its way to a window.
pub(super) struct Claim {
    pub(super) window_offset: u64,
    pub(super) window_bytes: u64,
    pub(super) parts: Vec<Part>,
    /// The version of the policy by which the parts were granted.
    pub(super) policy: u64,
}

/// Takes hold of everything a window needs, under the lane's lock.
pub(super) fn claim(
    state: &mut LaneState,
    miss: &Miss,
    window: &Window,
    pieces: &[Piece],
    free_keys: &[u32],
    take_stock: &mut dyn FnMut(u32) -> Option<Chunk>,
) -> Claim {
    let slot_bytes = state.region.slot_bytes();
    let mut parts = Vec::with_capacity(pieces.len());
    for piece in pieces {
        let create = Supplied::Create(u64::from(piece.slots) * slot_bytes);
        let supplied = match piece.source {
            Source::Create => create,
            Source::Stock => take_stock(piece.slots).map_or(create, Supplied::Stock),
            Source::Free(index) => {
                let key = free_keys[index];
                let chunk = state.region.placed_at(key).map(|p| p.mapping.chunk().clone());
                let gates = state.own_gates();
                state.retire_chunk(key, gates);
                chunk.map_or(create, Supplied::Alias)
            }
        };
        let Some(segment) = state.region.segment_of(piece.first_slot).cloned() else { continue };
        state.region.claim(piece.first_slot, piece.slots);
        parts.push(Part {
            first_slot: piece.first_slot,
            slots: piece.slots,
            segment,
            supplied: Some(supplied),
            mapping: None,
        });
    }
    let (start, stop) = (window.offset, window.offset + miss.bytes);
    for part in &parts {
        let (inside, _) = split(part, slot_bytes, start, stop);
        state.heap.insert_free(inside.0, inside.1);
    }
    if let Err(error) = state.heap.alloc_at(start, miss.bytes) {
        debug_assert!(false, "the window is free now: {error:?}");
    }
    state.marks.withhold(start);
    if let Some(guards) = &mut state.guards {
        guards.claim(window.end_slot);
    }
    state.busy += 1;
    Claim { window_offset: start, window_bytes: miss.bytes, parts, policy: 0 }
}

/// A part's bytes inside of the window, and behind and before it: (offset, bytes).
pub(super) fn split(
    part: &Part,
    slot_bytes: u64,
    start: u64,
    stop: u64,
) -> ((u64, u64), [(u64, u64); 2]) {
    let first = u64::from(part.first_slot) * slot_bytes;
    let end = first + u64::from(part.slots) * slot_bytes;
    let (low, high) = (first.max(start), end.min(stop));
    ((low, high - low), [(first, low - first), (high, end - high)])
}

/// Brings the memory: the driver's part, without any lock.
pub(super) fn act(device: &Device, claim: &mut Claim) -> Result<(), Shortage> {
    let turn = Turn::Requester;
    let slot_bytes = device.plan.granularity_bytes;
    let grants = device.policy.grants();
    claim.policy = grants.version;
    for part in &mut claim.parts {
        let chunk = match part.supplied.take() {
            Some(Supplied::Stock(chunk)) => {
                past::note_user(&chunk, &User::Nameless);
                Arc::new(chunk)
            }
            Some(Supplied::Alias(chunk)) => chunk,
            Some(Supplied::Create(bytes)) => match device.create_chunk(bytes, turn) {
                Ok(chunk) => Arc::new(chunk),
                Err(shortage) => return Err(shortage),
            },
            None => continue,
        };
        let kept = chunk.clone();
        let mapped =
            turn.with(|| Region::map_in(&part.segment, slot_bytes, part.first_slot, chunk));
        match mapped {
            Ok(mapping) => {
                drop(kept);
                let mapping = part.mapping.insert(mapping);
                turn.with(|| mapping.set_access(&grants.list)).map_err(Shortage::Driver)?;
            }
            Err(error) => {
                device.depot.settle(kept, turn);
                return Err(Shortage::Driver(error));
            }
        }
    }
    Ok(())
}

/// Grants once more what was brought: the policy has changed since.
pub(super) fn grant_again(device: &Device, claim: &mut Claim) -> Result<(), Shortage> {
    let grants = device.policy.grants_again();
    claim.policy = grants.version;
    let mut mappings = claim.parts.iter().filter_map(|part| part.mapping.as_ref());
    mappings
        .try_for_each(|mapping| Turn::Requester.with(|| mapping.set_access(&grants.list)))
        .map_err(Shortage::Driver)
}

/// Undoes a claim: nobody has seen its addresses, so no gate is needed.
pub(super) fn hand_back(lane: &Lane, claim: Claim) {
    let device = &*lane.device;
    let turn = Turn::Requester;
    let mut stuck = Vec::new();
    let mut places = Vec::new();
    for mut part in claim.parts {
        places.push((part.first_slot, part.slots));
        match part.supplied.take() {
            Some(Supplied::Stock(chunk)) => device.depot.settle(Arc::new(chunk), turn),
            Some(Supplied::Alias(chunk)) => device.depot.settle(chunk, turn),
            Some(Supplied::Create(_)) | None => {}
        }
        let Some(mapping) = part.mapping.take() else { continue };
        match turn.with(|| mapping.unmap()) {
            Ok(chunk) => device.depot.settle(chunk, turn),
            Err((mapping, _)) => {
                let (first_slot, slots) = (part.first_slot, part.slots);
                stuck.push(Retired { mapping, first_slot, slots, gates: Vec::new() });
            }
        }
    }
    let mut guard = lane.cell.lock();
    let Some(state) = guard.as_mut() else { return };
    let slot_bytes = state.region.slot_bytes();
    state.busy -= 1;
    state.marks.clear(claim.window_offset);
    if let Err(error) = state.heap.free(claim.window_offset) {
        debug_assert!(false, "the window is a block: {error:?}");
    }
    let (start, stop) = (claim.window_offset, claim.window_offset + claim.window_bytes);
    if let Some(guards) = &mut state.guards {
        guards.give_up((start / slot_bytes) as u32, (stop / slot_bytes) as u32);
    }
    for (first_slot, slots) in places {
        let first = u64::from(first_slot) * slot_bytes;
        let end = first + u64::from(slots) * slot_bytes;
        let (low, high) = (first.max(start), end.min(stop));
        if let Err(error) = state.heap.remove_free(low, high - low) {
            debug_assert!(false, "what was claimed is free again: {error:?}");
        }
        if stuck.iter().any(|entry| entry.first_slot == first_slot) {
            state.region.hold(first_slot, slots);
        } else {
            state.region.vacate(first_slot, slots);
        }
    }
    device.limbo_grew(stuck.len());
    state.limbo.retired.extend(stuck);
    // The lane may have been closed meanwhile, and nobody else comes by any more.
    let should_retire = state.should_retire();
    drop(guard);
    if should_retire {
        retire(lane.cell);
    }
}
