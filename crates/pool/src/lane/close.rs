//! Giving memory back: trim a lane's free chunks, retire a lane for good.

use vmm_sys::object::{RelaxedCapture, Stream};

use super::{Gate, LaneCell, LaneState, Wait, sweep};
use crate::device::Device;
use crate::lane::limbo::Retired;
use crate::lanes::LaneRef;
use crate::turn::Turn;

/// Takes the lane's wholly free chunks out of its addresses; their memory goes to the stock once
/// the stream has passed its present work, which is waited for only if `wait` says so.
pub(crate) fn trim(lane: LaneRef, wait: Wait, turn: Turn) {
    // What is only held up by unfinished work may become a free chunk.
    if lane.lock().is_none() {
        return;
    }
    sweep(lane.cell, wait, turn);
    {
        let Some(mut state) = lane.lock() else { return };
        state.heap.drain();
        for key in state.free_chunks(0, 0) {
            state.retire_chunk(key);
        }
    }
    sweep(lane.cell, wait, turn);
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
    let mut guard = cell.lock();
    // Somebody else may have been faster.
    let Some(mut state) = guard.take_if(|state| state.should_retire()) else { return };
    let device = state.device.clone();
    // Before the lock goes: nobody may find the lane gone and its memory nowhere.
    let _carrying = device.carry();
    state.unlist(cell);
    drop(guard);
    device.lanes.lock().remove(state.stream.id(), state.id);
    tear_down(state, &device);
    cell.give_back_shell();
}

fn tear_down(mut state: LaneState, device: &Device) {
    if device.driver.is_gone() {
        // Every object stays silent when it is dropped.
        return;
    }
    let span = tracing::debug_span!("vmm_pool.lane_close", stream = ?state.stream);
    let _entered = span.enter();
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
    // A wait would end the capture of another thread.
    let relaxed = RelaxedCapture::enter(&device.driver);
    if let Err(error) = &relaxed {
        tracing::debug!(%error, "captures are not kept from harm");
    }
    let mut waited = vec![(state.stream.device(), state.stream.id())];
    wait_for_stream(&state.stream, device);
    for gate in state.limbo.parked.iter().flat_map(|parked| parked.gates()) {
        match gate {
            Gate::Event(recorded) => {
                if let Err(error) = recorded.wait() {
                    tracing::warn!(%error, "the end of another stream's work is not known");
                }
            }
            Gate::Unrecorded(stream) => {
                let key = (stream.device(), stream.id());
                if !waited.contains(&key) {
                    waited.push(key);
                    wait_for_stream(stream, device);
                }
            }
            Gate::Passed => {}
        }
    }
}

/// Waits for the work that is enqueued on a stream now. Without an event, the stream itself is
/// waited for.
fn wait_for_stream(stream: &Stream, device: &Device) {
    let waited = match device.gate(stream) {
        // Being captured: what is recorded does not run.
        Ok(None) => return,
        Ok(Some(event)) => {
            let waited = event.wait();
            device.spare(event);
            waited
        }
        Err(_) => stream.synchronize(),
    };
    if let Err(error) = waited.or_else(|_| stream.synchronize()) {
        tracing::warn!(%error, ?stream, "the end of the stream's work is not known");
    }
}
