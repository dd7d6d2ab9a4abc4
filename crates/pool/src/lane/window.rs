//! Where a missing block shall lie: the window of free and unmapped addresses that needs the
//! least new memory; and more addresses, if none is large enough.

use vmm_heap::{Heap, Miss};

use super::Lane;
use crate::error::Error;
use crate::growth::Run;
use crate::region::{Region, Slot};

/// A window of addresses and what it lacks.
pub(super) struct Window {
    pub(super) offset: u64,
    pub(super) first_slot: u32,
    pub(super) end_slot: u32,
    pub(super) missing_slots: u32,
}

/// The window that needs the least new memory, lowest address first.
pub(super) fn choose_window(region: &Region, heap: &Heap, miss: &Miss) -> Option<Window> {
    let slot_bytes = region.slot_bytes();
    let end_slot = region.end_slot();
    // Sums over the slots below each: how many lack memory, how many cannot be used.
    let mut vacant = Vec::with_capacity(end_slot as usize + 1);
    let mut blocked = Vec::with_capacity(end_slot as usize + 1);
    let (mut vacant_sum, mut blocked_sum) = (0u32, 0u32);
    for slot in 0..end_slot {
        vacant.push(vacant_sum);
        blocked.push(blocked_sum);
        match region.slot(slot) {
            Slot::Vacant => vacant_sum += 1,
            Slot::Mapped(_) => {}
            Slot::Claimed | Slot::Retiring | Slot::Barrier => blocked_sum += 1,
        }
    }
    vacant.push(vacant_sum);
    blocked.push(blocked_sum);
    let mut best: Option<Window> = None;
    let mut consider = |offset: u64| {
        let Some(stop) = offset.checked_add(miss.bytes) else { return };
        let first_slot = (offset / slot_bytes) as u32;
        let stop_slot = stop.div_ceil(slot_bytes) as u32;
        if stop_slot > region.capacity_slots() {
            return;
        }
        let (low, high) = (first_slot.min(end_slot) as usize, stop_slot.min(end_slot) as usize);
        if blocked[high] != blocked[low] {
            return;
        }
        let beyond = stop_slot - stop_slot.min(end_slot).max(first_slot);
        let missing_slots = vacant[high] - vacant[low] + beyond;
        let better = |b: &Window| (missing_slots, offset) < (b.missing_slots, b.offset);
        if best.as_ref().is_none_or(better) {
            best = Some(Window { offset, first_slot, end_slot: stop_slot, missing_slots });
        }
    };
    heap.windows(miss, region.end_bytes(), &mut consider);
    consider(region.end_bytes().next_multiple_of(miss.align.max(slot_bytes)));
    best
}

/// The stretches of a window without memory.
pub(super) fn runs(region: &Region, window: &Window) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for slot in window.first_slot..window.end_slot {
        if region.slot(slot) != Slot::Vacant {
            continue;
        }
        // A chunk does not reach over the border of two reservations.
        let segment_end = region.segment_of(slot).map_or(0, |s| s.first_slot + s.slots);
        match runs.last_mut() {
            Some(run)
                if run.first_slot + run.slots == slot
                    && region.segment_of(run.first_slot).map_or(0, |s| s.first_slot + s.slots)
                        == segment_end =>
            {
                run.slots += 1;
            }
            _ => runs.push(Run { first_slot: slot, slots: 1, spare_slots: 0 }),
        }
    }
    if let Some(run) = runs.last_mut()
        && run.first_slot + run.slots >= region.end_slot()
    {
        // Behind the end of the addresses in use the last chunk may reach further.
        let segment_end = region.segment_of(run.first_slot).map_or(0, |s| s.first_slot + s.slots);
        run.spare_slots = segment_end.saturating_sub(run.first_slot + run.slots);
    }
    runs
}

/// Reserves more addresses: twice what the lane has, down to what the missing block needs.
pub(super) fn reserve(lane: &Lane, miss: &Miss) -> Result<(), Error> {
    let plan = &lane.device.plan;
    let (hint, reserved, first, need_bytes) = {
        let mut guard = lane.cell.lock();
        let state = lane.state(&mut guard)?;
        // There may be many graphs, and each holds little.
        let first = if state.is_private { plan.align_max_bytes * 32 } else { plan.reserve_bytes };
        let region = &state.region;
        let gaps_bytes = if state.guards.is_some() { 2 * region.slot_bytes() } else { 0 };
        (region.next_address(), region.reserved_bytes(), first, miss.bytes + gaps_bytes)
    };
    let min_bytes = need_bytes.next_multiple_of(plan.granularity_bytes);
    let wish = reserved.max(first);
    let align_bytes = plan.align_max_bytes;
    let range = Region::reserve(&lane.device.driver, min_bytes, wish, align_bytes, hint);
    let mut guard = lane.cell.lock();
    let state = lane.state(&mut guard)?;
    let range = match range {
        Ok(range) => range,
        Err(cause) if !cause.is_out_of_addresses() => return Err(Error::Driver(cause)),
        // Those that there are come round sooner.
        Err(_) if state.guards.as_mut().is_some_and(|guards| guards.pack()) => return Ok(()),
        Err(cause) => return Err(Error::OutOfAddresses { bytes: min_bytes, cause }),
    };
    state.list_range(lane.cell, range.address(), range.bytes())?;
    // Real addresses are aligned to `align_bytes`; a placement may want more of logical ones.
    state.region.add_segment(range, need_bytes, miss.align.max(align_bytes));
    Ok(())
}
