//! What a lane tells the other lanes of its device without its lock.
//!
//! Who needs memory beyond the soft limit goes by what is alive in all lanes, and looks for one that
//! has some to give. Were that asked under their locks, each such request would stop the threads of
//! all other lanes, and take the bias of their locks. So a lane keeps these numbers outside of its
//! lock. They are written under it only, by plain stores: a warm operation pays one, to a cache line
//! of its own lane that nobody else writes, and that others read when they lack memory.

use crate::sync::atomic::{AtomicU64, Ordering};

/// The numbers. Each is true of its own; of the two together only the lane's lock says more.
#[derive(Debug, Default)]
pub(crate) struct Figures {
    live_bytes: AtomicU64,
    mapped_bytes: AtomicU64,
}

impl Figures {
    /// Says what the buffers alive asked for. Under the lane's lock.
    #[inline(always)]
    pub(super) fn tell_live(&self, bytes: u64) {
        self.live_bytes.store(bytes, Ordering::Relaxed);
    }

    /// Says what is mapped. Under the lane's lock.
    pub(crate) fn tell_mapped(&self, bytes: u64) {
        self.mapped_bytes.store(bytes, Ordering::Relaxed);
    }

    /// What the buffers alive asked for.
    pub(super) fn live_bytes(&self) -> u64 {
        self.live_bytes.load(Ordering::Relaxed)
    }

    /// What the lane might give at most: it is mapped, and nobody asked for it.
    pub(super) fn spare_bytes(&self) -> u64 {
        self.mapped_bytes.load(Ordering::Relaxed).saturating_sub(self.live_bytes())
    }

    /// The walker, under the lane's lock: whether they are true.
    pub(crate) fn are(&self, live_bytes: u64, mapped_bytes: u64) -> bool {
        self.live_bytes() == live_bytes && self.mapped_bytes.load(Ordering::Relaxed) == mapped_bytes
    }
}
