//! What is left of a lane in which a thread panicked.
//!
//! Nobody knows what its tables are worth, so nobody looks at them again. The state is taken out of the
//! shell: a warm operation finds the shell empty, as after the end of a lane, and learns the rest on the cold
//! path. The shell is not used again, for buffers of the lane may be alive and name it. What was mapped
//! stays where it is until the device ends, for buffers and work may still use it.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use vmm_sys::caught::thrown;
use vmm_sys::object::{Chunk, Mapping};

use super::{Gate, LaneCell, LaneState};
use crate::broken::{Broken, BrokenPart, Since, keep_for_good};
use crate::device::Device;
use crate::directory;
use crate::error::Error;
use crate::region::Region;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Held as Taken, Mutex};

/// What the shell of a broken lane knows.
#[derive(Debug)]
pub(crate) struct Wreck {
    /// The lane's number.
    id: u64,
    pub(super) broken: Broken,
    /// Buffers that may be alive. One too many, if the thread was making or freeing one.
    buffers: AtomicU64,
}

/// The broken lanes of a device, and what they held.
#[derive(Debug, Default)]
pub(crate) struct Wrecks(Mutex<Vec<(Arc<Wreck>, Held)>>);

#[derive(Debug)]
struct Held {
    /// Which the directory may name.
    cell: &'static LaneCell,
    /// What is placed in it, and its addresses.
    region: Region,
    retired: Vec<Mapping>,
    /// Of everybody who may use any of it.
    gates: Vec<Gate>,
}

impl Held {
    fn mappings(&self) -> impl Iterator<Item = &Mapping> {
        self.region.placed().map(|(_, placed)| &placed.mapping).chain(&self.retired)
    }
}

impl Wrecks {
    /// What broke.
    pub(crate) fn broken(&self) -> Vec<Broken> {
        self.0.lock().iter().map(|(wreck, _)| wreck.broken.clone()).collect()
    }

    /// Calls `visit` with each chunk that stands in a broken lane, once for each of its addresses.
    pub(crate) fn chunks(&self, mut visit: impl FnMut(&Arc<Chunk>)) {
        let wrecks = self.0.lock();
        let held = wrecks.iter().flat_map(|(_, held)| held.mappings());
        held.for_each(|mapping| visit(mapping.chunk()));
    }

    /// The end of the device: gives what nobody holds to `leave`, with its gates. What somebody may still
    /// hold stays where it is.
    pub(crate) fn end(&self, mut leave: impl FnMut(Vec<Mapping>, Vec<Gate>)) {
        // Under no lock: what leaves takes others.
        let all = std::mem::take(&mut *self.0.lock());
        for (wreck, mut held) in all {
            let buffers = wreck.buffers.load(Ordering::Acquire);
            if buffers > 0 {
                let broken = &wreck.broken;
                vmm_sys::say!(error, buffers, %broken, "its memory is kept for good");
                keep_for_good(held);
                continue;
            }
            for (address, bytes) in held.region.ranges() {
                directory::leave(address, bytes, held.cell);
            }
            let placed = held.region.take_all().into_iter().map(|placed| placed.mapping);
            leave(placed.chain(held.retired).collect(), held.gates);
        }
    }
}

/// A lane's state under its lock. A thread that panics while it has it, and has changed it, leaves a wreck.
///
/// For the cold paths. The warm ones go by [`LaneCell::with`], which costs nothing unless it unwinds.
pub(crate) struct LaneGuard {
    cell: &'static LaneCell,
    state: vmm_lock::Guard<'static, Option<LaneState>>,
    since: Since,
    is_changed: bool,
    _taken: Taken,
}

impl LaneGuard {
    pub(super) fn new(
        cell: &'static LaneCell,
        state: vmm_lock::Guard<'static, Option<LaneState>>,
        taken: Taken,
    ) -> LaneGuard {
        LaneGuard { cell, state, since: Since::now(), is_changed: false, _taken: taken }
    }
}

impl Deref for LaneGuard {
    type Target = Option<LaneState>;

    fn deref(&self) -> &Option<LaneState> {
        &self.state
    }
}

impl DerefMut for LaneGuard {
    fn deref_mut(&mut self) -> &mut Option<LaneState> {
        self.is_changed = true;
        &mut self.state
    }
}

impl Drop for LaneGuard {
    fn drop(&mut self) {
        if self.is_changed && self.since.has_panicked() {
            self.cell.wreck(&mut self.state);
        }
    }
}

/// A thread is at the driver for a lane (`busy`): if it panics there, the lane is as broken as by a panic
/// under its lock, for nobody would ever count it out again.
#[derive(Debug)]
pub(super) struct AtDriver {
    cell: &'static LaneCell,
    since: Since,
}

impl AtDriver {
    pub(super) fn for_lane(cell: &'static LaneCell) -> AtDriver {
        AtDriver { cell, since: Since::now() }
    }
}

impl Drop for AtDriver {
    fn drop(&mut self) {
        if self.since.has_panicked() {
            // A busy lane does not retire: the shell still holds it, or it is a wreck already.
            let mut guard = self.cell.lock();
            self.cell.wreck(&mut guard);
        }
    }
}

/// Leaves a wreck when it is dropped: forgotten where nothing went wrong.
pub(super) struct OnUnwind<'a> {
    pub(super) cell: &'static LaneCell,
    pub(super) state: &'a mut Option<LaneState>,
}

impl Drop for OnUnwind<'_> {
    #[cold]
    fn drop(&mut self) {
        self.cell.wreck(self.state);
    }
}

impl LaneCell {
    /// Takes the lane out of use.
    #[cold]
    fn wreck(&'static self, slot: &mut Option<LaneState>) {
        let Some(state) = slot.take() else { return };
        // What this throws in turn would end the process.
        let _unheard = thrown(|| self.break_down(state));
    }

    fn break_down(&'static self, state: LaneState) {
        let mut gates = state.own_gates();
        let LaneState { id, live, region, limbo, device, stream, .. } = state;
        let part = BrokenPart::Lane { device: device.plan.device, stream: stream.id() };
        let buffers = AtomicU64::new(live.buffers);
        let wreck = Arc::new(Wreck { id, broken: Broken::here(part), buffers });
        // A shell is not used again after this, so there was none before.
        let wreck = self.wreck.get_or_init(|| wreck).clone();
        self.figures.tell_live(0);
        self.figures.tell_mapped(0);
        device.limbo_shrank(limbo.parked_count() + limbo.retired_count());
        gates.extend(limbo.parked.into_iter().flat_map(|parked| parked.into_gates()));
        let mut retired = Vec::with_capacity(limbo.retired.len());
        for entry in limbo.retired {
            gates.extend(entry.gates);
            retired.push(entry.mapping);
        }
        device.wrecks.0.lock().push((wreck, Held { cell: self, region, retired, gates }));
        // Its end would make driver calls, here under the lane's lock.
        if Arc::strong_count(&device) == 1 {
            keep_for_good(device);
        }
    }

    /// What became of the lane with this number, which is not in its shell any more.
    pub(super) fn why_gone(&self, id: u64) -> Error {
        match self.wreck.get() {
            Some(wreck) if wreck.id == id => Error::Broken(Box::new(wreck.broken.clone())),
            _ => Error::LaneClosed,
        }
    }

    /// What keeps from looking at a plain address whose shell is empty.
    pub(crate) fn why_unknown(&self, address: u64) -> Error {
        match self.wreck.get() {
            Some(wreck) => Error::Broken(Box::new(wreck.broken.clone())),
            None => Error::UnknownAddress { address },
        }
    }

    /// A buffer of a broken lane was dropped.
    #[cold]
    pub(crate) fn forget_buffer(&self) {
        if let Some(wreck) = self.wreck.get() {
            let less = |buffers: u64| buffers.checked_sub(1);
            let _none_left = wreck.buffers.fetch_update(Ordering::AcqRel, Ordering::Relaxed, less);
        }
    }
}

impl Device {
    /// Bytes of the chunks that stand in broken lanes, each counted once.
    pub(crate) fn wrecked_bytes(&self) -> u64 {
        let mut known = std::collections::HashSet::new();
        let mut bytes = 0;
        self.wrecks.chunks(|chunk| {
            if known.insert(Arc::as_ptr(chunk)) {
                bytes += chunk.bytes();
            }
        });
        bytes
    }
}

#[cfg(test)]
mod tests;
