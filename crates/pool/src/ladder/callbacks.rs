//! [`Callbacks`]: callers who may free something when memory is short.

use std::sync::Arc;

use vmm_sys::DeviceId;
use vmm_sys::registry::{Registered, Registry};

use super::help::heard;

/// What a caller can do when memory is short: free some, and say whether it did.
///
/// Called with the device and the bytes asked for, with no lock of the pool held: it may allocate
/// and free. A callback that panics counts as one that did not help.
type Callback = dyn Fn(DeviceId, u64) -> bool + Send + Sync;

/// Those of one pool, the oldest first.
#[derive(Clone, Debug, Default)]
pub(crate) struct Callbacks(Registry<Callback>);

/// Keeps a callback for short memory registered ([`Pool::on_shortage`](crate::Pool::on_shortage));
/// dropping it ends that. A call that has begun in another thread is not waited for. It does not keep
/// the pool.
#[must_use = "dropping it unregisters the callback"]
#[derive(Debug)]
pub struct ShortageHook {
    _registered: Registered<Callback>,
}

impl Callbacks {
    pub(crate) fn add(
        &self,
        callback: impl Fn(DeviceId, u64) -> bool + Send + Sync + 'static,
    ) -> ShortageHook {
        ShortageHook { _registered: self.0.register(Arc::new(callback)) }
    }

    /// The same for good.
    pub(crate) fn push(&self, callback: impl Fn(DeviceId, u64) -> bool + Send + Sync + 'static) {
        self.0.push(Arc::new(callback));
    }

    /// Asks one after the other, until one says that it made room.
    pub(super) fn ask(&self, device: DeviceId, bytes: u64) -> bool {
        self.0.all().iter().any(|callback| heard(|| callback(device, bytes)))
    }
}
