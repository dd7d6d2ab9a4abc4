//! What is done before memory is made beyond the soft limit.
//!
//! First the device's lanes are asked for chunks that lie wholly free in them. A chunk may cross to
//! another stream once its last users are done, and nobody waits for that, on the host or on the
//! GPU: a lane is asked how far its stream has come, and gives what has been free since before. The
//! answer is a [`Mark`], an event recorded behind all that was freed until then; if it has not
//! passed, it is kept, and a later request finds it passed.
//!
//! What still cannot be used is too long for the holes that lack memory. Then as much is given back
//! to the driver as is made anew in the right lengths: without that, each such hole would add to
//! what is held, pass by pass.

use vmm_sys::object::RelaxedCapture;

use super::gate::{Asker, Gate};
use super::{LaneState, Wait, sweep};
use crate::device::Device;
use crate::lanes::LaneRef;
use crate::turn::Turn;

/// How far one request has gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Thrift {
    /// Nothing was done yet, and of what other lanes have alive only what was noted is known.
    Untried,
    /// What is alive in other lanes was asked. Not at once: their threads pay for it.
    Counted,
    /// Free chunks were drawn from the lanes.
    Drawn,
    /// Those of a wrong length were given back: what is still missing is made.
    Done,
}

/// Memory that would be made beyond the soft limit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lack {
    pub(super) bytes: u64,
    /// The longest chunk of it.
    pub(super) chunk_slots: u32,
    /// The slots that it is for, [first, end): free chunks there are of use where they are.
    pub(super) window: (u32, u32),
}

impl Thrift {
    /// Does what comes next against a lack; counts what is alive in other lanes. No lock is held.
    pub(super) fn next(
        self,
        device: &Device,
        lane: LaneRef,
        lack: Lack,
        elsewhere_bytes: &mut u64,
    ) -> Thrift {
        match self {
            Thrift::Untried => {
                *elsewhere_bytes = live_elsewhere_bytes(device, lane.id);
                Thrift::Counted
            }
            Thrift::Counted => {
                draw(device, lane, lack);
                Thrift::Drawn
            }
            Thrift::Drawn | Thrift::Done => {
                device.depot.release_for(lack.bytes, Turn::Requester);
                Thrift::Done
            }
        }
    }
}

/// A moment of a lane: what is free since the tick has no users left once the gates have passed.
#[derive(Clone, Debug)]
pub(super) struct Mark {
    tick: u64,
    gates: Vec<Gate>,
}

/// Bytes alive in the device's lanes other than `own`.
fn live_elsewhere_bytes(device: &Device, own: u64) -> u64 {
    let live = |lane: LaneRef| lane.lock().map_or(0, |state| state.live.asked_bytes);
    others(device, own).into_iter().map(live).sum()
}

fn others(device: &Device, own: u64) -> Vec<LaneRef> {
    let mut lanes = device.lanes.lock().all();
    lanes.retain(|lane| lane.id != own);
    lanes
}

/// Brings free chunks to the stock, as much as is lacking and as far as there are any that no stream
/// uses any more. Those that fit come first, from whichever lane has most free.
fn draw(device: &Device, own: LaneRef, lack: Lack) {
    let mut lanes = others(device, own.id);
    // Numbers decide between equals, so that the order is always the same.
    lanes.sort_by_cached_key(|lane| {
        let free_bytes = lane.lock().map_or(0, |state| state.free_bytes());
        (std::cmp::Reverse(free_bytes), lane.id)
    });
    let mut missing_bytes = lack.bytes;
    let mut take = |lane: LaneRef, tick: u64, most_slots: u32, avoid: (u32, u32)| {
        let given_bytes =
            lane.lock().map_or(0, |mut state| state.give(tick, missing_bytes, most_slots, avoid));
        if given_bytes > 0 {
            sweep(lane.cell, Wait::No, Turn::Requester);
        }
        missing_bytes = missing_bytes.saturating_sub(given_bytes);
        missing_bytes == 0
    };
    let mut asked = Vec::new();
    for lane in lanes {
        sweep(lane.cell, Wait::No, Turn::Requester);
        let Some(tick) = reached(device, lane, (0, 0)) else { continue };
        asked.push((lane, tick, (0, 0)));
        if take(lane, tick, lack.chunk_slots, (0, 0)) {
            return;
        }
    }
    // Longer ones, of its own first, whose limbo the request has looked at.
    let own = reached(device, own, lack.window).map(|tick| (own, tick, lack.window));
    for (lane, tick, avoid) in own.into_iter().chain(asked) {
        if take(lane, tick, u32::MAX, avoid) {
            return;
        }
    }
}

/// The latest tick of a lane since whose frees its stream is known to have passed; `None` if there is
/// none, or the lane has no free chunk outside of the slots `avoid`.
fn reached(device: &Device, lane: LaneRef, avoid: (u32, u32)) -> Option<u64> {
    let (earlier, now) = {
        let mut state = lane.lock()?;
        if !state.may_move() {
            return None;
        }
        state.heap.drain();
        if state.aged_free_chunks(avoid.0, avoid.1).is_empty() {
            return None;
        }
        (state.mark.take(), Mark { tick: state.heap.tick(), gates: state.own_gates() })
    };
    // Without the relaxed mode a query could end somebody's capture.
    let _relaxed = RelaxedCapture::enter(&device.driver).ok()?;
    let mut asker = Asker::new(&device.events);
    let mut has_passed = |mark: &mut Mark| {
        mark.gates.retain_mut(|gate| !asker.ask(gate));
        mark.gates.is_empty()
    };
    let (mut reached, mut kept) = (None, Some(now));
    if kept.as_mut().is_some_and(&mut has_passed) {
        reached = kept.take().map(|mark| mark.tick);
    } else if let Some(mut mark) = earlier {
        if has_passed(&mut mark) {
            reached = Some(mark.tick);
        } else {
            // It passes before the younger one does.
            kept = Some(mark);
        }
    }
    asker.finish();
    if kept.is_some()
        && let Some(mut state) = lane.lock()
    {
        state.mark = kept;
    }
    reached
}

impl LaneState {
    /// The most that was ever asked for by the buffers alive: what growth goes by, whatever the
    /// statistics count from.
    pub(crate) fn peak_live_bytes(&self) -> u64 {
        self.live.peak_asked_bytes.max(self.earlier_peak_bytes)
    }

    /// Mapped bytes that nothing uses, whether or not they make up whole chunks.
    fn free_bytes(&self) -> u64 {
        let used_bytes = self.live.block_bytes + self.limbo.block_bytes;
        // While a thread brings memory, its window counts as used but is not mapped yet.
        self.region.mapped_bytes().saturating_sub(used_bytes)
    }

    /// Retires chunks of at most `most_slots` outside of the slots `avoid` that are free since
    /// `tick`, coldest first, until they sum to `bytes`. Returns what they sum to.
    fn give(&mut self, tick: u64, bytes: u64, most_slots: u32, avoid: (u32, u32)) -> u64 {
        if !self.may_move() {
            return 0;
        }
        let mut given_bytes = 0;
        for (freed_tick, key) in self.aged_free_chunks(avoid.0, avoid.1) {
            if given_bytes >= bytes || freed_tick > tick {
                break;
            }
            let Some(placed) = self.region.placed_at(key) else { continue };
            if placed.slots <= most_slots {
                given_bytes += placed.mapping.bytes();
                self.retire_chunk(key, Vec::new());
            }
        }
        given_bytes
    }
}
