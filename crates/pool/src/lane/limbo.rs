//! Freed and replaced memory whose GPU work is not known to be finished: park, gate, sweep.
//!
//! Entries are parked with gates, events recorded after their last users. A sweep takes the
//! entries out under the lock, asks their gates outside of it, and puts back what is still
//! pending; so a slow event never hides finished ones behind it, and no driver call is made under
//! the lock. A gate that could not be asked keeps its entry.

use vmm_sys::object::{Mapping, RelaxedCapture, Stream};

use super::gate::{Asker, Gate, Pending, record};
use super::wreck::AtDriver;
use super::{LaneCell, retire};
use crate::device::Device;
use crate::obstacle;
use crate::sync::thread;
use crate::turn::Turn;

/// A freed block that other streams used.
#[derive(Debug)]
pub(crate) struct Parked {
    offset: u64,
    block_bytes: u64,
    gates: Vec<Gate>,
}

/// A mapping that was replaced, still valid for work enqueued before.
#[derive(Debug)]
pub(crate) struct Retired {
    pub(crate) mapping: Mapping,
    pub(crate) first_slot: u32,
    pub(crate) slots: u32,
    pub(crate) gates: Vec<Gate>,
}

/// What a lane has in limbo.
#[derive(Debug, Default)]
pub(crate) struct Limbo {
    pub(crate) parked: Vec<Parked>,
    pub(crate) retired: Vec<Retired>,
    /// Bytes of the parked blocks, those in the hands of a sweep included.
    pub(crate) block_bytes: u64,
    /// How many of each are in the hands of sweeps.
    parked_in_hand: usize,
    retired_in_hand: usize,
}

impl Limbo {
    /// Frees that wait, those in the hands of a sweep included.
    pub(crate) fn parked_count(&self) -> usize {
        self.parked.len() + self.parked_in_hand
    }

    /// Mappings that retire, those in the hands of a sweep included.
    pub(crate) fn retired_count(&self) -> usize {
        self.retired.len() + self.retired_in_hand
    }

    /// Whether there is anything for a sweep to look at.
    pub(super) fn has_entries(&self) -> bool {
        !(self.parked.is_empty() && self.retired.is_empty())
    }

    /// Whether entries are in the hands of a sweep.
    pub(super) fn is_in_hand(&self) -> bool {
        self.parked_in_hand + self.retired_in_hand > 0
    }

    /// The gates of what is here.
    pub(super) fn gates_mut(&mut self) -> impl Iterator<Item = &mut Gate> {
        let parked = self.parked.iter_mut().flat_map(|entry| &mut entry.gates);
        parked.chain(self.retired.iter_mut().flat_map(|entry| &mut entry.gates))
    }

    fn gates(&self) -> impl Iterator<Item = &Gate> {
        let parked = self.parked.iter().flat_map(|entry| &entry.gates);
        parked.chain(self.retired.iter().flat_map(|entry| &entry.gates))
    }
}

/// Whether a sweep may wait for the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// Ask only.
    No,
    /// Wait until the gates have passed.
    Yes,
}

impl Parked {
    pub(crate) fn into_gates(self) -> Vec<Gate> {
        self.gates
    }
}

/// Frees a buffer that streams other than its lane's used: parked until their work is done, and the
/// gates `behind` have passed.
///
/// If the lane's stream is the default stream of another thread, work of the calling thread may
/// have used the memory under the same handle, and is not ordered with the lane's: then the block
/// also waits for the legacy stream, which stands for both (row D-S2).
#[cold]
pub(crate) fn free_special(
    cell: &'static LaneCell,
    mut offset: u64,
    mut bytes: u64,
    mut streams: Vec<Stream>,
    behind: &[Gate],
) {
    let (device, retire_now, is_guarded, gates) = {
        let mut guard = cell.lock();
        // The lane cannot retire while the buffer that is being freed counts as live.
        let Some(state) = guard.as_mut() else {
            cell.forget_buffer();
            return;
        };
        if state.stream.is_elsewhere() {
            streams.push(state.stream.clone());
        }
        let is_guarded = state.guards.is_some();
        (offset, bytes) = state.unguard(offset, bytes);
        let own = &state.stream;
        let gates: Vec<_> = behind.iter().filter(|gate| gate.concerns(own)).cloned().collect();
        if streams.is_empty() && gates.is_empty() {
            let block_bytes = state.heap.block_bytes(offset).unwrap_or(0);
            let retire_now = state.take_back(cell, offset, bytes);
            if is_guarded {
                state.retire_block(offset, block_bytes, &state.own_gates());
            }
            (None, retire_now, is_guarded, gates)
        } else {
            state.busy += 1;
            (Some(state.device.clone()), false, is_guarded, gates)
        }
    };
    match device {
        Some(device) => park(cell, &device, (offset, bytes), streams, gates),
        None if retire_now => retire(cell),
        None => {}
    }
    if is_guarded {
        // Unmapped at once, if its users are done.
        sweep(cell, Wait::No, Turn::Requester);
    }
}

/// Records gates on the streams and parks the block behind them all.
fn park(
    cell: &'static LaneCell,
    device: &Device,
    (offset, bytes): (u64, u64),
    streams: Vec<Stream>,
    mut gates: Vec<Gate>,
) {
    let _at_driver = AtDriver::for_lane(cell);
    gates.extend(streams.into_iter().map(|stream| record(&device.events, stream)));
    let should_retire = {
        let mut guard = cell.lock();
        let Some(state) = guard.as_mut() else {
            cell.forget_buffer();
            return;
        };
        state.busy -= 1;
        if state.guards.is_some() {
            // It is unmapped when they have passed, not handed out again in the lane's own order.
            gates.extend(state.own_gates());
        }
        state.uncount(cell, offset, bytes);
        let block_bytes = state.heap.block_bytes(offset).unwrap_or(0);
        state.live.block_bytes -= block_bytes;
        state.limbo.block_bytes += block_bytes;
        state.marks.withhold(offset);
        state.limbo.parked.push(Parked { offset, block_bytes, gates });
        device.limbo_grew(1);
        state.should_retire()
    };
    if should_retire {
        retire(cell);
    }
}

/// Brings back what has passed its gates; with [`Wait::Yes`], everything that is in limbo now.
/// Returns whether anything came back.
///
/// Waiting takes nothing out of limbo, so that what is finished is there for other threads.
pub(crate) fn sweep(cell: &'static LaneCell, wait: Wait, turn: Turn) -> bool {
    let came_back = sweep_once(cell, turn);
    wait == Wait::Yes && sweep_pending(cell, turn) || came_back
}

/// Brings back what is pending, once it has passed.
pub(super) fn sweep_pending(cell: &'static LaneCell, turn: Turn) -> bool {
    wait_for_pending(cell) && sweep_once(cell, turn)
}

/// Waits until what is in limbo now has passed. Returns whether there was anything.
fn wait_for_pending(cell: &'static LaneCell) -> bool {
    let (device, pending) = loop {
        {
            let guard = cell.lock();
            let Some(state) = guard.as_ref() else { return false };
            let limbo = &state.limbo;
            if !limbo.is_in_hand() {
                break (state.device.clone(), Pending::of(limbo.gates()));
            }
        }
        // Another thread is asking the gates, and puts back what is pending.
        thread::sleep(std::time::Duration::from_micros(20));
    };
    pending.wait(&device.events)
}

pub(super) fn sweep_once(cell: &'static LaneCell, turn: Turn) -> bool {
    let mut came_back = false;
    loop {
        let pass = sweep_pass(cell, turn);
        came_back |= pass.came_back;
        if !pass.has_more {
            return came_back;
        }
    }
}

/// What a sweep has in its hands. What is left when it is dropped goes where ended lanes leave theirs: the
/// lane broke meanwhile, and nothing may be unmapped before its gates have passed.
struct InHand<'a> {
    device: &'a Device,
    parked: Vec<Parked>,
    retired: Vec<Retired>,
}

impl Drop for InHand<'_> {
    fn drop(&mut self) {
        for Retired { mapping, gates, .. } in self.retired.drain(..) {
            self.device.depot.leaving.add(std::iter::once(mapping), gates);
        }
    }
}

/// What one pass of a sweep came to.
#[derive(Clone, Copy, Debug, Default)]
struct Pass {
    came_back: bool,
    /// Guarded blocks have passed their gates, and can be unmapped by a further pass.
    has_more: bool,
}

fn sweep_pass(cell: &'static LaneCell, turn: Turn) -> Pass {
    let (device, parked, retired) = {
        let mut guard = cell.lock();
        let Some(state) = guard.as_mut() else { return Pass::default() };
        let limbo = &mut state.limbo;
        if !limbo.has_entries() {
            return Pass::default();
        }
        let (parked, retired) =
            (std::mem::take(&mut limbo.parked), std::mem::take(&mut limbo.retired));
        limbo.parked_in_hand += parked.len();
        limbo.retired_in_hand += retired.len();
        state.busy += 1;
        (state.device.clone(), parked, retired)
    };
    let _carrying = device.depot.carries.begin();
    let counts = (parked.len(), retired.len());
    let _at_driver = AtDriver::for_lane(cell);
    let mut in_hand = InHand { device: &device, parked, retired };
    let (mut free, mut refused, mut vacant) = (Vec::new(), Vec::new(), Vec::new());
    // Without the relaxed mode a query could end somebody's capture: then nothing is asked.
    match RelaxedCapture::enter(&device.driver).inspect_err(obstacle::note) {
        Ok(_relaxed) => {
            let mut asker = Asker::new(&device.events);
            in_hand.parked.retain_mut(|entry| {
                entry.gates.retain_mut(|gate| !asker.ask(gate));
                if entry.gates.is_empty() {
                    free.push((entry.offset, entry.block_bytes));
                }
                !entry.gates.is_empty()
            });
            let passed = in_hand.retired.extract_if(.., |entry| {
                entry.gates.retain_mut(|gate| !asker.ask(gate));
                entry.gates.is_empty()
            });
            for entry in passed {
                match unmap(&device, entry, turn) {
                    Ok(slots) => vacant.push(slots),
                    Err(entry) => refused.push(entry),
                }
            }
            asker.finish();
        }
        Err(error) => vmm_sys::say!(debug, %error, "no gate is asked"),
    }
    in_hand.retired.append(&mut refused);
    let came_back = !free.is_empty() || !vacant.is_empty();
    let has_more = publish(cell, counts, in_hand, &free, &vacant);
    Pass { came_back, has_more }
}

fn unmap(device: &Device, entry: Retired, turn: Turn) -> Result<(u32, u32), Retired> {
    let Retired { mapping, first_slot, slots, gates } = entry;
    match turn.with(|| mapping.unmap()) {
        Ok(chunk) => {
            device.depot.settle(chunk, turn);
            Ok((first_slot, slots))
        }
        Err((mapping, error)) => {
            obstacle::tell(&error, "a retired mapping could not be unmapped");
            Err(Retired { mapping, first_slot, slots, gates })
        }
    }
}

/// Puts back what is pending, and gives the lane what has passed. Returns whether guarded blocks are
/// among that, which are to be unmapped.
fn publish(
    cell: &'static LaneCell,
    counts: (usize, usize),
    mut in_hand: InHand<'_>,
    free: &[(u64, u64)],
    vacant: &[(u32, u32)],
) -> bool {
    let (should_retire, has_more) = {
        let mut guard = cell.lock();
        // A busy lane does not retire; it may break.
        let Some(state) = guard.as_mut() else { return false };
        let is_guarded = state.guards.is_some();
        state.busy -= 1;
        state.limbo.parked_in_hand -= counts.0;
        state.limbo.retired_in_hand -= counts.1;
        let (parked, retired) =
            (std::mem::take(&mut in_hand.parked), std::mem::take(&mut in_hand.retired));
        // What others parked meanwhile is younger: it goes behind.
        let younger = std::mem::replace(&mut state.limbo.parked, parked);
        state.limbo.parked.extend(younger);
        let younger = std::mem::replace(&mut state.limbo.retired, retired);
        state.limbo.retired.extend(younger);
        for &(offset, block_bytes) in free {
            state.limbo.block_bytes -= block_bytes;
            state.marks.clear(offset);
            if let Err(error) = state.heap.free(offset) {
                debug_assert!(false, "a parked block is a block of the heap: {error:?}");
            }
            if is_guarded {
                state.retire_block(offset, block_bytes, &[]);
            }
        }
        for &(first_slot, slots) in vacant {
            state.region.vacate(first_slot, slots);
        }
        state.device.limbo_shrank(free.len() + vacant.len());
        (state.should_retire(), is_guarded && !free.is_empty())
    };
    if should_retire {
        retire(cell);
    }
    has_more && !should_retire
}
