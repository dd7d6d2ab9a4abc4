//! What is done before memory is made beyond the soft limit.
//!
//! What the other lanes have alive, and which of them may have a chunk to give, is read without their
//! locks ([`Figures`]): a lane that is left alone does not notice that somebody is short.
//!
//! First such lanes are asked for chunks that lie wholly free in them. A chunk may cross to
//! another stream once its last users are done, and nobody waits for that, on the host or on the
//! GPU: a lane is asked how far its stream has come, and gives what has been free since before. The
//! answer is a [`Mark`], an event recorded behind all that was freed until then; if it has not
//! passed, it is kept, and a later request finds it passed.
//!
//! What still cannot be used is too long for the holes that lack memory. Then as much is given back
//! to the driver as is made anew in the right lengths: without that, each such hole would add to
//! what is held, pass by pass. Not below the low mark of the stock, which was made for others.
//!
//! [`Figures`]: super::Figures

use vmm_sys::object::RelaxedCapture;

use super::gate::{Asker, Gate};
use super::survey::Terms;
use super::window::Window;
use super::{LaneState, Wait, sweep};
use crate::device::Device;
use crate::growth::{self, Piece, Source};
use crate::lanes::LaneRef;
use crate::turn::Turn;

/// How far one request has gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Thrift {
    /// Nothing was done yet, and of what other lanes have alive only what was noted is known.
    Untried,
    /// What is alive in other lanes was read. Not at once: it takes the list of lanes.
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

impl Lack {
    /// What of these pieces would be made although only `soft_slots` may.
    pub(super) fn of(pieces: &[Piece], soft_slots: u64, slot_bytes: u64, window: &Window) -> Lack {
        let created = pieces.iter().filter(|piece| piece.source == Source::Create);
        let chunk_slots = created.clone().map(|piece| piece.slots).max().unwrap_or(0);
        let created: u64 = created.map(|piece| u64::from(piece.slots)).sum();
        Lack {
            bytes: created.saturating_sub(soft_slots) * slot_bytes,
            chunk_slots,
            window: (window.first_slot, window.end_slot),
        }
    }
}

/// Slots that may be created within the soft limit, which goes by all lanes together.
pub(super) fn soft_slots(device: &Device, live_bytes: u64, terms: Terms) -> u64 {
    let peak_bytes = device.peak_live_bytes().max(live_bytes);
    let held_bytes = device.held_for_lanes_bytes(terms.shelf_bytes);
    let bytes = growth::soft_allowance_bytes(device.plan.soft_limit, peak_bytes, held_bytes);
    bytes / device.plan.granularity_bytes
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
                // What was made ahead of need is for others. What this block itself takes from there
                // may go: it comes back in shorter chunks, which fit more holes later.
                let keep_bytes = device.plan.stock_low_bytes;
                device.depot.release_for(lack.bytes, keep_bytes, Turn::Requester);
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
    let lanes = device.lanes.lock();
    lanes.iter().filter(|lane| lane.id != own).map(|lane| lane.cell.figures.live_bytes()).sum()
}

/// The device's lanes other than `own` that may have a chunk to give, from whichever has most.
fn givers(device: &Device, own: u64) -> Vec<LaneRef> {
    let shortest_bytes = device.plan.granularity_bytes;
    let spare = |lane: LaneRef| (lane.cell.figures.spare_bytes(), lane);
    let mut found: Vec<(u64, LaneRef)> = {
        let lanes = device.lanes.lock();
        let others = lanes.iter().filter(|lane| lane.id != own);
        others.map(spare).filter(|(bytes, _)| *bytes >= shortest_bytes).collect()
    };
    // Numbers decide between equals, so that the order is always the same.
    found.sort_by_key(|(bytes, lane)| (std::cmp::Reverse(*bytes), lane.id));
    found.into_iter().map(|(_, lane)| lane).collect()
}

/// Brings free chunks to the stock, as much as is lacking and as far as there are any that no stream
/// uses any more. Those that fit come first, from whichever lane has most to spare; lanes that are
/// not needed for it are left alone.
fn draw(device: &Device, own: LaneRef, lack: Lack) {
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
    for lane in givers(device, own.id) {
        device.asks_a_lane();
        let Some(tick) = reached(device, lane, (0, 0), true) else { continue };
        asked.push((lane, tick, (0, 0)));
        if take(lane, tick, lack.chunk_slots, (0, 0)) {
            return;
        }
    }
    // Longer ones, of its own first, whose limbo the request has looked at.
    let own = reached(device, own, lack.window, false).map(|tick| (own, tick, lack.window));
    for (lane, tick, avoid) in own.into_iter().chain(asked) {
        if take(lane, tick, u32::MAX, avoid) {
            return;
        }
    }
}

/// The latest tick of a lane since whose frees its stream is known to have passed; `None` if there is
/// none, or the lane has no free chunk outside of the slots `avoid`. With `sweeps`, limbo comes first.
fn reached(device: &Device, lane: LaneRef, avoid: (u32, u32), sweeps: bool) -> Option<u64> {
    let mut state = lane.lock()?;
    if sweeps && state.limbo.has_entries() {
        drop(state);
        sweep(lane.cell, Wait::No, Turn::Requester);
        state = lane.lock()?;
    }
    let (earlier, now) = state.moment(avoid)?;
    drop(state);
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

    /// Tells the device what is alive, with `elsewhere_bytes` in its other lanes.
    pub(super) fn note_live(&self, elsewhere_bytes: u64) {
        let live_bytes = self.live.asked_bytes + elsewhere_bytes;
        self.device.note_live(live_bytes.max(self.peak_live_bytes()));
    }

    /// This moment of the lane, if it has a free chunk outside of the slots `avoid` that may leave; and
    /// an earlier one that had not passed when it was last asked.
    fn moment(&mut self, avoid: (u32, u32)) -> Option<(Option<Mark>, Mark)> {
        if !self.may_move() {
            return None;
        }
        self.heap.drain();
        if self.aged_free_chunks(avoid.0, avoid.1).is_empty() {
            return None;
        }
        let now = Mark { tick: self.heap.tick(), gates: self.own_gates() };
        Some((self.mark.take(), now))
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
