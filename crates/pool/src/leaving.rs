//! [`Leaving`]: mappings of no lane any more, on their way to the shelf.
//!
//! A lane that ends hands its mappings over with the gates of their last users; what the driver
//! refused to unmap comes here too, and is tried again. So ending a lane never waits for the GPU.

use std::collections::HashSet;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use vmm_sys::object::{Chunk, Mapping, RelaxedCapture};

use crate::device::Device;
use crate::lane::{Asker, Gate, Pending, Wait};
use crate::turn::Turn;

/// One mapping on its way.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) mapping: Mapping,
    /// All must have passed.
    gates: Vec<Gate>,
}

/// The mappings of a device that belong to no lane.
#[derive(Debug, Default)]
pub(crate) struct Leaving {
    entries: Mutex<Vec<Entry>>,
    /// Held while entries are in a sweep's hands: whoever waits for memory must not miss them.
    sweep: Mutex<()>,
}

impl Leaving {
    /// Takes mappings over, until all the gates have passed.
    pub(crate) fn add(
        &self,
        device: &Device,
        mappings: impl Iterator<Item = Mapping>,
        gates: Vec<Gate>,
    ) {
        let mut entries = self.entries.lock();
        let before = entries.len();
        entries.extend(mappings.map(|mapping| Entry { mapping, gates: gates.clone() }));
        device.limbo_grew(entries.len() - before);
    }

    /// What is on its way.
    pub(crate) fn entries(&self) -> MutexGuard<'_, Vec<Entry>> {
        self.entries.lock()
    }

    /// Bytes of the chunks that stand here, each counted once.
    pub(crate) fn bytes(&self) -> u64 {
        let entries = self.entries.lock();
        let mut known: HashSet<*const Chunk> = HashSet::new();
        let mappings = entries.iter().map(|entry| &entry.mapping);
        mappings.filter(|it| known.insert(Arc::as_ptr(it.chunk()))).map(Mapping::bytes).sum()
    }

    /// Unmaps what has passed its gates and settles the chunks; with [`Wait::Yes`], everything that
    /// is here now. Waiting takes nothing out, so that what is finished is there for other threads.
    pub(crate) fn sweep(&self, device: &Device, wait: Wait, turn: Turn) {
        if self.entries.lock().is_empty() && wait == Wait::No {
            return;
        }
        match wait {
            Wait::No => {
                if let Some(_alone) = self.sweep.try_lock() {
                    self.sweep_once(device, turn);
                }
            }
            Wait::Yes => {
                let alone = self.sweep.lock();
                self.sweep_once(device, turn);
                drop(alone);
                let pending = Pending::of(self.entries.lock().iter().flat_map(|it| &it.gates));
                if pending.wait(device) {
                    let _alone = self.sweep.lock();
                    self.sweep_once(device, turn);
                }
            }
        }
    }

    fn sweep_once(&self, device: &Device, turn: Turn) {
        let _carrying = device.carry();
        let entries = std::mem::take(&mut *self.entries.lock());
        if entries.is_empty() {
            return;
        }
        let count = entries.len();
        let kept = match RelaxedCapture::enter(&device.driver) {
            Ok(_relaxed) => {
                let mut asker = Asker::new(device);
                let mut kept = Vec::new();
                for entry in entries {
                    kept.extend(leave(device, &mut asker, entry, turn));
                }
                asker.finish();
                kept
            }
            // Without the relaxed mode a query could end somebody's capture: nothing is asked.
            Err(_) => entries,
        };
        device.limbo_shrank(count - kept.len());
        self.entries.lock().extend(kept);
    }

    /// The end of the device: waits for the users of what is left in whatever way there is, and
    /// lets it go. What cannot be waited for belongs to a context that is lost.
    pub(crate) fn end(&self, device: &Device) {
        self.sweep(device, Wait::Yes, Turn::Requester);
        let entries = std::mem::take(&mut *self.entries.lock());
        if entries.is_empty() {
            return;
        }
        let relaxed = RelaxedCapture::enter(&device.driver);
        if let Err(error) = &relaxed {
            tracing::debug!(%error, "captures are not kept from harm");
        }
        for gate in entries.iter().flat_map(|entry| &entry.gates) {
            if let Err(error) = gate.wait() {
                tracing::warn!(%error, ?gate, "the end of the work is not known");
            }
        }
        drop(entries); // each mapping unmaps itself
    }
}

/// Unmaps an entry, or gives it back because its time has not come.
fn leave(device: &Device, asker: &mut Asker<'_>, mut entry: Entry, turn: Turn) -> Option<Entry> {
    entry.gates.retain_mut(|gate| !asker.ask(gate));
    if !entry.gates.is_empty() {
        return Some(entry);
    }
    let Entry { mapping, gates } = entry;
    match turn.with(|| mapping.unmap()) {
        Ok(chunk) => {
            device.settle(chunk, turn);
            None
        }
        Err((mapping, error)) => {
            tracing::warn!(%error, "a mapping could not be unmapped; tried again later");
            Some(Entry { mapping, gates })
        }
    }
}
