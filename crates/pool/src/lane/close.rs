//! Giving memory back: trim a lane's free chunks, retire a lane for good.

use super::{Gate, LaneCell, LaneState, Wait, sweep};
use crate::device::Device;
use crate::lane::limbo::Retired;
use crate::turn::Turn;

/// Takes the lane's wholly free chunks out of its addresses; their memory goes to the stock once
/// the stream has passed its present work, which is waited for only if `wait` says so.
pub(crate) fn trim(cell: &'static LaneCell, wait: Wait, turn: Turn) {
    {
        let mut guard = cell.lock();
        let Some(state) = guard.as_mut() else { return };
        state.heap.drain();
        for key in state.free_chunks(0, 0) {
            state.retire_chunk(key);
        }
    }
    sweep(cell, wait, turn);
}

impl LaneState {
    /// Keys of the chunks that lie wholly in free space and outside of the slots
    /// [avoid_first, avoid_end), coldest first.
    pub(super) fn free_chunks(&self, avoid_first: u32, avoid_end: u32) -> Vec<u32> {
        let slot_bytes = self.region.slot_bytes();
        let mut found: Vec<(u64, u32)> = Vec::new();
        self.heap.free_runs(&mut |run| {
            let first = run.offset.div_ceil(slot_bytes) as u32;
            let end = ((run.offset + run.bytes) / slot_bytes) as u32;
            let mut slot = first;
            while slot < end {
                let crate::region::Slot::Mapped(key) = self.region.slot(slot) else {
                    slot += 1;
                    continue;
                };
                let Some(placed) = self.region.placed_at(key) else { break };
                let stop = placed.first_slot + placed.slots;
                let whole = placed.first_slot >= first && stop <= end;
                let apart = stop <= avoid_first || placed.first_slot >= avoid_end;
                if whole && apart {
                    found.push((run.last_freed_tick, key));
                }
                slot = stop;
            }
        });
        found.sort_by_key(|(tick, _)| *tick);
        found.into_iter().map(|(_, key)| key).collect()
    }

    /// Takes a wholly free chunk out of the heap; its mapping retires behind the lane's stream.
    pub(super) fn retire_chunk(&mut self, key: u32) {
        let Some(placed) = self.region.placed_at(key) else { return };
        let offset = u64::from(placed.first_slot) * self.region.slot_bytes();
        let bytes = placed.mapping.bytes();
        if self.heap.remove_free(offset, bytes).is_err() {
            debug_assert!(false, "only wholly free chunks are retired");
            return;
        }
        let Some(placed) = self.region.retire(key) else { return };
        self.limbo.retired.push(Retired {
            mapping: placed.mapping,
            first_slot: placed.first_slot,
            slots: placed.slots,
            gate: Gate::Unrecorded(self.stream.clone()),
        });
        self.device.limbo_grew(1);
    }
}

/// Ends a lane that is closing and has nothing alive any more: everything is unmapped behind the
/// stream's work, and its memory goes to the stock.
#[cold]
pub(crate) fn retire(cell: &'static LaneCell) {
    let state = {
        let mut guard = cell.lock();
        // Somebody else may have been faster.
        if !guard.as_ref().is_some_and(LaneState::should_retire) {
            return;
        }
        guard.take()
    };
    let Some(mut state) = state else { return };
    state.unlist(cell);
    let device = state.device.clone();
    {
        let mut lanes = device.lanes.lock();
        let id = state.stream.id();
        if lanes.get(&id).is_some_and(|known| std::ptr::eq(*known, cell)) {
            lanes.remove(&id);
        }
    }
    tear_down(state, &device);
    cell.give_back_shell();
}

fn tear_down(mut state: LaneState, device: &Device) {
    if device.driver.is_gone() {
        // Every object stays silent when it is dropped.
        return;
    }
    wait_for_users(&state, device);
    device.limbo_shrank(state.limbo.parked.len() + state.limbo.retired.len());
    let turn = Turn::Requester;
    let placed = state.region.take_all();
    let retired = std::mem::take(&mut state.limbo.retired);
    let mappings =
        placed.into_iter().map(|p| p.mapping).chain(retired.into_iter().map(|r| r.mapping));
    for mapping in mappings {
        match turn.with(|| mapping.unmap()) {
            Ok(chunk) => device.settle(chunk, turn),
            Err((mapping, error)) => {
                tracing::warn!(%error, "a mapping could not be unmapped; tried again later");
                device.keep_stuck(mapping);
            }
        }
    }
}

/// Unmap does not wait by itself, so the lane's last users are waited for first. A stream that is
/// being captured has no work of its own to wait for; a lost context has none any more.
fn wait_for_users(state: &LaneState, device: &Device) {
    match device.gate(&state.stream) {
        Ok(Some(event)) => {
            if let Err(error) = event.wait() {
                tracing::debug!(%error, "the end of the stream's work is not known");
            }
            device.spare(event);
        }
        Ok(None) => {}
        Err(error) => tracing::debug!(%error, "the end of the stream's work is not known"),
    }
    for gate in state.limbo.parked.iter().flat_map(|parked| parked.gates()) {
        let waited = match gate {
            Gate::Event(event) => event.wait(),
            Gate::Unrecorded(_) | Gate::Passed => Ok(()),
        };
        if let Err(error) = waited {
            tracing::debug!(%error, "the end of another stream's work is not known");
        }
    }
}
