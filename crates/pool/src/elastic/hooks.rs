//! Who is told that the memory behind an elastic buffer's addresses changes.
//!
//! A NIC, a collective library or an importer registers physical memory, not addresses: when the
//! memory behind an address changes, its registration is of memory that is somebody else's by then.
//! Hooks run in the thread that changes the memory, with no lock held: they may ask the buffer and
//! the pool anything and allocate, but not change the same buffer's memory.

use std::sync::Arc;

use vmm_sys::caught::thrown;
use vmm_sys::registry::{Registered, Registry};

/// What happens to the memory behind a buffer's addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Cause {
    /// Memory comes to addresses that had none.
    Commit,
    /// Memory is taken away; the addresses stay.
    Decommit,
    /// The contents move to other memory.
    Move,
    /// Chunks come to stand at a second address too: what is concerned are the new addresses.
    Share,
    /// Addresses of shared chunks get chunks of their own, contents kept.
    Unshare,
    /// Memory is given back until the buffer wakes; the contents may be kept elsewhere.
    Sleep,
    /// Memory comes back.
    Wake,
    /// The buffer ends.
    End,
}

/// When a hook is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Phase {
    /// Before anything is changed: what is registered with others has to be let go now.
    Before,
    /// After the change: the new memory can be registered.
    After,
    /// Nothing was changed after all: what was let go can be registered again.
    Failed,
}

/// One change of the memory behind an elastic buffer's addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BackingChange {
    /// When this call is made.
    pub phase: Phase,
    /// What happens.
    pub cause: Cause,
    /// The first byte that is concerned, from the start of the buffer.
    pub offset: u64,
    /// The length of what is concerned, in bytes; within it some chunks may stay as they are.
    pub bytes: u64,
    /// The buffer's generation: before and on failure the present one, after a change the new one.
    pub generation: u64,
}

type Hook = dyn Fn(&BackingChange) + Send + Sync;

/// The hooks of a buffer.
#[derive(Debug, Default)]
pub(crate) struct Hooks(Registry<Hook>);

/// Keeps a hook registered; dropping it ends that. A call that has begun in another thread is not
/// waited for.
#[must_use = "dropping it unregisters the hook"]
#[derive(Debug)]
pub struct BackingHook {
    _registered: Registered<Hook>,
}

impl Hooks {
    pub(crate) fn add(&self, hook: impl Fn(&BackingChange) + Send + Sync + 'static) -> BackingHook {
        BackingHook { _registered: self.0.register(Arc::new(hook)) }
    }

    /// Calls each hook, the oldest first. One that panics does no harm to the others.
    pub(crate) fn call(&self, change: &BackingChange) {
        for hook in self.0.all() {
            if thrown(|| hook(change)).is_err() {
                vmm_sys::say!(warn, ?change, "a hook for changed backing panicked");
            }
        }
    }
}
