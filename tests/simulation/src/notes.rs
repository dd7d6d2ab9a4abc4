//! What a run writes down: who did what, what was seen, and bytes that were not what they had to be.
//!
//! Behind plain locks: they are held for a moment and at no step of the scheduler.

use std::sync::{Arc, Mutex};

use vmm_sys::sim::Sim;

use crate::coverage::Coverage;

/// Lines of the log that are kept; a run that loops must not fill the memory.
const LINES_MAX: usize = 100_000;

#[derive(Default)]
pub(crate) struct Notes {
    lines: Mutex<Vec<String>>,
    wrong: Mutex<Vec<String>>,
    coverage: Mutex<Coverage>,
    machines: Mutex<Vec<Arc<Sim>>>,
}

fn open<T>(lock: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

impl Notes {
    /// The machines of a run that goes on.
    pub(crate) fn set_machines(&self, machines: Vec<Arc<Sim>>) {
        *open(&self.machines) = machines;
    }

    /// The run has failed: nothing need be given back any more. What is left is dropped where the
    /// scheduler is gone, and must not call a machine.
    pub(crate) fn shut_down(&self) {
        open(&self.machines).iter().for_each(|machine| machine.shut_down());
    }

    /// Who did what.
    pub(crate) fn line(&self, line: String) {
        let mut lines = open(&self.lines);
        if lines.len() < LINES_MAX {
            lines.push(line);
        }
    }

    pub(crate) fn lines(&self) -> Vec<String> {
        open(&self.lines).clone()
    }

    /// Bytes that somebody else wrote. Called by work on streams, under the lock of the machine.
    pub(crate) fn wrong(&self, what: String) {
        open(&self.wrong).push(what);
    }

    /// The first of those.
    pub(crate) fn first_wrong(&self) -> Option<String> {
        open(&self.wrong).first().cloned()
    }

    pub(crate) fn cover(&self, note: impl FnOnce(&mut Coverage)) {
        note(&mut open(&self.coverage));
    }

    pub(crate) fn coverage(&self) -> Coverage {
        open(&self.coverage).clone()
    }

    /// A number that two runs have in common only if they were the same.
    pub(crate) fn fingerprint(&self) -> u64 {
        let lines = open(&self.lines);
        let bytes = lines.iter().flat_map(|line| line.bytes().chain([b'\n']));
        // FNV-1a.
        bytes.fold(0xCBF2_9CE4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3)
        })
    }
}
