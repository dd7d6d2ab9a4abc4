//! [`Slot`]: what a sequence and the thread that grows it tell each other, without a lock.

use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// One sequence's line. Two of them share no cache line: each is written at every token.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(super) struct Slot {
    /// The sequence's length, for the statistics.
    tokens: AtomicU64,
    /// Chunks of each part that the sequence may count on. Raised by whoever grows it, lowered by the
    /// sequence alone; both with the books locked.
    usable_chunks: AtomicU64,
    /// How many it asked for ahead; 0 if it does not.
    wanted_chunks: AtomicU64,
    is_parked: AtomicBool,
}

impl Slot {
    /// A sequence begins.
    pub(super) fn begin(&self, tokens: u64, usable_chunks: u64) {
        self.set_tokens(tokens);
        self.set_usable_chunks(usable_chunks);
        self.wanted_chunks.store(0, Ordering::Release);
        self.set_parked(false);
    }

    pub(super) fn tokens(&self) -> u64 {
        self.tokens.load(Ordering::Relaxed)
    }

    /// Tells the statistics, and nobody who acts on it.
    pub(super) fn set_tokens(&self, tokens: u64) {
        self.tokens.store(tokens, Ordering::Relaxed);
    }

    pub(super) fn usable_chunks(&self) -> u64 {
        self.usable_chunks.load(Ordering::Acquire)
    }

    pub(super) fn set_usable_chunks(&self, chunks: u64) {
        self.usable_chunks.store(chunks, Ordering::Release);
    }

    pub(super) fn wanted_chunks(&self) -> u64 {
        self.wanted_chunks.load(Ordering::Acquire)
    }

    /// Says what is wanted. Whether nothing was: then it is to be asked for.
    pub(super) fn want(&self, chunks: u64) -> bool {
        self.wanted_chunks.swap(chunks, Ordering::AcqRel) == 0
    }

    /// What was wanted has come, or cannot. False if it is more by now.
    pub(super) fn end_wait(&self, chunks: u64) -> bool {
        let ended =
            self.wanted_chunks.compare_exchange(chunks, 0, Ordering::AcqRel, Ordering::Acquire);
        // It is 0 if the sequence is gone.
        matches!(ended, Ok(_) | Err(0))
    }

    pub(super) fn is_parked(&self) -> bool {
        self.is_parked.load(Ordering::Relaxed)
    }

    pub(super) fn set_parked(&self, is_parked: bool) {
        self.is_parked.store(is_parked, Ordering::Relaxed);
    }
}
