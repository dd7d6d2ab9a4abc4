//! Giving memory back: trim a lane's free chunks, retire a lane for good.

use super::gate::{Gate, is_captured, record};
use super::limbo::{Retired, sweep_once, sweep_pending};
use super::wreck::AtDriver;
use super::{LaneCell, LaneState, Wait, sweep};
use crate::device::Device;
use crate::lanes::LaneRef;
use crate::sync::thread;
use crate::turn::Turn;

/// Takes the lane's wholly free chunks out of its addresses; their memory goes to the stock once
/// the stream has passed its present work, which is waited for only if `wait` says so.
///
/// Chunks stay where they are while a capture may bake their addresses into a graph: those of
/// private lanes, of lanes in a capture scope, and of lanes whose stream is found to be captured.
pub(crate) fn trim(lane: LaneRef, wait: Wait, turn: Turn) {
    empty(lane, None, wait, turn);
}

/// What [`trim`] would take out of a lane, in bytes, as it lies: nothing is drained for the answer, and no
/// stream is asked whether it is captured.
pub(crate) fn idle_bytes(state: &LaneState) -> u64 {
    if !state.may_move() {
        return 0;
    }
    let placed = |key| state.region.placed_at(key);
    let free = state.free_chunks(0, 0).into_iter().filter_map(placed);
    free.map(|placed| placed.mapping.bytes()).sum()
}

/// The same without waiting, as long as nobody uses the lane: its heap stands at `tick`. Returns
/// whether there was anything to take.
pub(crate) fn trim_if_idle(lane: LaneRef, tick: u64, turn: Turn) -> bool {
    empty(lane, Some(tick), Wait::No, turn)
}

fn empty(lane: LaneRef, only_at: Option<u64>, wait: Wait, turn: Turn) -> bool {
    if lane.lock().is_none() {
        return false;
    }
    // What is only held up by unfinished work may become a free chunk.
    sweep(lane.cell, wait, turn);
    let may_empty =
        |state: &LaneState| state.may_move() && only_at.is_none_or(|it| it == state.heap.tick());
    let stream = {
        let Some(mut state) = lane.lock() else { return false };
        if !may_empty(&state) {
            return false;
        }
        state.heap.drain();
        if state.free_chunks(0, 0).is_empty() {
            return false;
        }
        // The handle of a stream that is gone must not be asked about.
        (!state.is_gone()).then(|| state.stream.clone())
    };
    if stream.is_some_and(|stream| is_captured(&stream)) {
        return false;
    }
    {
        let Some(mut state) = lane.lock() else { return false };
        if !may_empty(&state) {
            return false;
        }
        let device = state.device.clone();
        let _carrying = device.depot.carries.begin();
        for key in state.free_chunks(0, 0) {
            let gates = state.own_gates();
            state.retire_chunk(key, gates);
        }
        drop(state);
        sweep_once(lane.cell, turn);
    }
    if wait == Wait::Yes {
        sweep_pending(lane.cell, turn);
    }
    true
}

impl LaneState {
    /// Whether chunks may leave their addresses, as far as the pool was told.
    pub(super) fn may_move(&self) -> bool {
        !self.is_private && self.diverted.is_none()
    }

    /// Keys of the chunks that lie wholly in free space and outside of the slots
    /// [avoid_first, avoid_end), coldest first.
    pub(super) fn free_chunks(&self, avoid_first: u32, avoid_end: u32) -> Vec<u32> {
        let found = self.aged_free_chunks(avoid_first, avoid_end);
        found.into_iter().map(|(_, key)| key).collect()
    }

    /// The same, each with the heap's tick since which it is free.
    pub(super) fn aged_free_chunks(&self, avoid_first: u32, avoid_end: u32) -> Vec<(u64, u32)> {
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
        found
    }

    /// Takes a wholly free chunk out of the heap; its mapping retires behind `gates`.
    pub(super) fn retire_chunk(&mut self, key: u32, gates: Vec<Gate>) {
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
            gates,
        });
        self.device.limbo_grew(1);
    }
}

/// Closes a lane: it takes no further requests, and retires with its last buffer.
///
/// A stream that its owner may destroy (`gone`) is gated for the last time now, if it is not being
/// captured, and its handle is not used afterwards. Others are kept alive by the lane, and gated
/// when it retires.
pub(crate) fn close(lane: LaneRef, gone: bool) {
    {
        let Some(mut state) = lane.lock() else { return };
        state.closing = true;
        state.open_id = 0;
    }
    if gone {
        gate_for_good(lane);
    }
    if lane.lock().is_some_and(|state| state.should_retire()) {
        retire(lane.cell);
    }
}

/// Gates what a borrowed stream has done with the lane's memory, in place of every gate of it that
/// is still to be recorded: its owner may destroy it then. While it is being captured that cannot
/// be, and nothing changes.
pub(crate) fn gate_for_good(lane: LaneRef) {
    let (device, stream) = {
        let Some(mut state) = lane.lock() else { return };
        if !state.needs_handle() {
            return;
        }
        // Until the gate is in place the lane must not retire.
        state.busy += 1;
        (state.device.clone(), state.stream.clone())
    };
    let _at_driver = AtDriver::for_lane(lane.cell);
    let last = record(&device.events, stream);
    let should_retire = loop {
        {
            let Some(mut state) = lane.lock() else { return };
            // A sweep that has gates in its hands may be recording them, by the handle.
            if !state.limbo.is_in_hand() {
                let own = state.stream.id();
                for gate in state.limbo.gates_mut().filter(|gate| gate.is_due_on(own)) {
                    *gate = last.clone();
                }
                state.last = Some(last);
                state.busy -= 1;
                break state.should_retire();
            }
        }
        thread::sleep(std::time::Duration::from_micros(20));
    };
    if should_retire {
        retire(lane.cell);
    }
}

/// Ends a lane that is closing and has nothing alive any more: what it holds leaves behind the
/// work that may still use it.
#[cold]
pub(crate) fn retire(cell: &'static LaneCell) {
    let mut guard = cell.lock();
    // Somebody else may have been faster.
    let Some(mut state) = guard.take_if(|state| state.should_retire()) else { return };
    let device = state.device.clone();
    // Before the lock goes: nobody may find the lane gone and its memory nowhere.
    let _carrying = device.depot.carries.begin();
    state.unlist(cell);
    drop(guard);
    device.lanes.lock().remove(state.stream.id(), state.id);
    tear_down(state, &device);
    cell.give_back_shell();
}

/// Nobody waits here: a stream may be held up by work that the caller has still to enqueue.
fn tear_down(mut state: LaneState, device: &Device) {
    if device.driver.is_gone() {
        // Every object stays silent when it is dropped.
        return;
    }
    let _within = vmm_sys::within!("vmm_pool.lane_close", stream = ?state.stream);
    let (parked, retired) =
        (std::mem::take(&mut state.limbo.parked), std::mem::take(&mut state.limbo.retired));
    device.limbo_shrank(parked.len() + retired.len());
    let placed = state.region.take_all().into_iter().map(|placed| placed.mapping);
    let mappings: Vec<_> = placed.chain(retired.into_iter().map(|it| it.mapping)).collect();
    if mappings.is_empty() {
        return;
    }
    let mut gates = state.own_gates();
    gates.extend(parked.into_iter().flat_map(|parked| parked.into_gates()));
    device.depot.leaving.add(mappings.into_iter(), gates);
    device.sweep_leaving(Wait::No, Turn::Requester);
}
