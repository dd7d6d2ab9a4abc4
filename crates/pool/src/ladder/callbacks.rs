//! [`Callbacks`]: callers who may free something when memory is short.

use std::fmt;
use std::sync::{Arc, Weak};

use vmm_sys::{DeviceId, process};

use super::help::heard;
use crate::sync::Mutex;

/// What a caller can do when memory is short: free some, and say whether it did.
///
/// Called with the device and the bytes asked for, with no lock of the pool held: it may allocate
/// and free. A callback that panics counts as one that did not help.
type Callback = Arc<dyn Fn(DeviceId, u64) -> bool + Send + Sync>;

/// Those of one pool, the oldest first.
#[derive(Default)]
pub(crate) struct Callbacks(Mutex<List>);

#[derive(Clone, Default)]
struct List {
    callbacks: Vec<(u64, Callback)>,
    last_number: u64,
}

impl Clone for Callbacks {
    /// A list of its own, of the same callers.
    fn clone(&self) -> Callbacks {
        Callbacks(Mutex::new(self.0.lock().clone()))
    }
}

impl fmt::Debug for Callbacks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Callbacks({})", self.0.lock().callbacks.len())
    }
}

/// Keeps a callback for short memory registered ([`Pool::on_shortage`](crate::Pool::on_shortage));
/// dropping it ends that. A call that has begun in another thread is not waited for. It does not keep
/// the pool.
#[must_use = "dropping it unregisters the callback"]
pub struct ShortageHook {
    callbacks: Weak<Callbacks>,
    number: u64,
}

impl fmt::Debug for ShortageHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ShortageHook({})", self.number)
    }
}

impl Drop for ShortageHook {
    fn drop(&mut self) {
        let alive = self.callbacks.upgrade().filter(|_| !process::is_forked_child());
        let Some(callbacks) = alive else { return };
        let mut list = callbacks.0.lock();
        let at = list.callbacks.iter().position(|(number, _)| *number == self.number);
        let callback = at.map(|at| list.callbacks.remove(at));
        drop(list);
        // What it holds may do anything when it is dropped.
        drop(callback);
    }
}

impl Callbacks {
    pub(crate) fn add(
        self: &Arc<Callbacks>,
        callback: impl Fn(DeviceId, u64) -> bool + Send + Sync + 'static,
    ) -> ShortageHook {
        if process::is_forked_child() {
            // Nothing is short any more.
            return ShortageHook { callbacks: Weak::new(), number: 0 };
        }
        ShortageHook { callbacks: Arc::downgrade(self), number: self.push(callback) }
    }

    /// The same for good. Returns its number.
    pub(crate) fn push(
        &self,
        callback: impl Fn(DeviceId, u64) -> bool + Send + Sync + 'static,
    ) -> u64 {
        let mut list = self.0.lock();
        list.last_number += 1;
        let number = list.last_number;
        list.callbacks.push((number, Arc::new(callback)));
        number
    }

    /// Asks one after the other, until one says that it made room.
    pub(super) fn ask(&self, device: DeviceId, bytes: u64) -> bool {
        let callbacks = self.0.lock().callbacks.clone();
        callbacks.iter().any(|(_, callback)| heard(|| callback(device, bytes)))
    }
}
