//! [`Sequence`]: one context, which grows token by token.

use std::fmt;
use std::sync::Arc;

use vmm_sys::process::is_forked_child;

use super::Handle;
use super::core::Core;
use super::slot::Slot;
use crate::error::{KvError, check_process};
use crate::layout::Part;

/// A sequence of a [`ContiguousCache`](super::ContiguousCache). Dropping it frees its memory for
/// sequences that come later, in the order of the cache's stream, and makes no driver call if the cache
/// has a thread.
///
/// Who owns the physical memory: the sequence, but for chunks that it has in common with others by
/// [`fork`](Sequence::fork). Is the address stable: yes, for its whole life. Who may access: as the
/// cache's buffer says.
pub struct Sequence {
    pub(super) handle: Arc<Handle>,
    pub(super) number: u32,
    slot: Arc<Slot>,
    tokens: u64,
    /// Up to this length there is nothing to do but to count.
    ready_tokens: u64,
    /// In each part, bytes from here on are its own to write: before, chunks are shared.
    pub(super) own_from: u64,
    pub(super) is_parked: bool,
}

impl fmt::Debug for Sequence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (address, committed_tokens) = (self.address(), self.committed_tokens());
        f.debug_struct("Sequence")
            .field("address", &format_args!("{address:#x}"))
            .field("tokens", &self.tokens)
            .field("committed_tokens", &committed_tokens)
            .field("is_parked", &self.is_parked)
            .finish()
    }
}

impl Drop for Sequence {
    fn drop(&mut self) {
        if is_forked_child() {
            return;
        }
        self.core().leave(self.number);
    }
}

impl Sequence {
    /// An open slot's. Its first append finds out what there is.
    pub(super) fn new(handle: Arc<Handle>, number: u32, tokens: u64, own_from: u64) -> Sequence {
        let slot = handle.core.slot(number).clone();
        slot.set_tokens(tokens);
        Sequence { handle, number, slot, tokens, ready_tokens: 0, own_from, is_parked: false }
    }

    pub(super) fn core(&self) -> &Core {
        &self.handle.core
    }

    /// The device address of its first byte, for its whole life.
    pub fn address(&self) -> u64 {
        let core = self.core();
        core.memory.buffer.address() + core.geometry.span(self.number).start
    }

    /// Where a layer's keys, or values, begin: what a kernel takes, with the stride from token to
    /// token that the layout says. For its whole life.
    pub fn layer_address(&self, layer: u32, part: Part) -> u64 {
        self.address() + self.core().geometry.layout.layer_offset(layer, part)
    }

    /// Its length.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// How long it can become without more memory.
    pub fn committed_tokens(&self) -> u64 {
        self.core().geometry.tokens_in(self.slot.usable_chunks())
    }

    /// Whether `n` tokens more can be appended without waiting for memory.
    pub fn is_ready(&self, n: u64) -> bool {
        let core = self.core();
        let is_own = core.geometry.offset_of(self.tokens) >= self.own_from;
        let end = self.tokens.saturating_add(n);
        !self.is_parked && (n == 0 || is_own && end <= self.committed_tokens())
    }

    /// Makes room for `n` tokens more, and returns the position of the first: the caller's kernels
    /// write them, on the cache's stream or behind it. As long as memory lies ahead this compares two
    /// numbers; else it waits for memory, and evicts if need be.
    ///
    /// The first append after a [`fork`](Sequence::fork) may give the sequence a chunk of its own, for
    /// which a guard of the cache must not be alive in this thread.
    ///
    /// # Errors
    /// The sequence is as it was. [`KvError::TooLong`], [`KvError::NoMemory`], [`KvError::Parked`]; the
    /// pool's: [`ElasticError::Asleep`](vmm_pool::ElasticError::Asleep) if memory is needed while the
    /// cache sleeps, [`ElasticError::InUse`](vmm_pool::ElasticError::InUse) if a chunk of its own is
    /// needed under a guard.
    #[inline]
    pub fn append(&mut self, n: u64) -> Result<u64, KvError> {
        let first = self.tokens;
        if self.append_quietly(n)? {
            self.core().wake();
        }
        Ok(first)
    }

    /// The same as [`Sequence::append`], but for waking whoever grows ahead. Returns whether that is to
    /// be done.
    #[inline]
    pub(super) fn append_quietly(&mut self, n: u64) -> Result<bool, KvError> {
        match self.tokens.checked_add(n) {
            Some(end) if end <= self.ready_tokens => {
                self.set_tokens(end);
                Ok(false)
            }
            _ => self.append_slowly(n),
        }
    }

    #[inline]
    fn set_tokens(&mut self, tokens: u64) {
        self.tokens = tokens;
        self.slot.set_tokens(tokens);
    }

    #[cold]
    fn append_slowly(&mut self, n: u64) -> Result<bool, KvError> {
        check_process()?;
        let max_tokens = self.core().geometry.max_tokens();
        let tokens = self.tokens.saturating_add(n);
        if tokens > max_tokens {
            return Err(KvError::TooLong { tokens, max_tokens });
        }
        if self.is_parked {
            return Err(KvError::Parked);
        }
        if n == 0 {
            return Ok(false);
        }
        self.own_end()?;
        if self.committed_tokens() < tokens {
            self.core().need(self.number, tokens)?;
        }
        self.set_tokens(tokens);
        Ok(self.asks_ahead())
    }

    /// Finds out up to where there is nothing to do, all of it being the sequence's own to write. Returns
    /// whether it asked for more beyond.
    pub(super) fn asks_ahead(&mut self) -> bool {
        let core = &*self.handle.core;
        let usable_chunks = self.slot.usable_chunks();
        let wanted_chunks = core.chunks_ahead(self.tokens);
        let committed_tokens = core.geometry.tokens_in(usable_chunks);
        if wanted_chunks <= usable_chunks {
            // At the end of the longest context nothing more comes.
            let has_all = committed_tokens == core.geometry.max_tokens();
            let ahead_tokens = if has_all { 0 } else { core.ahead_tokens };
            self.ready_tokens = committed_tokens.saturating_sub(ahead_tokens).max(self.tokens);
            return false;
        }
        // Half of the way it looks again what came. Until that is answered it does not ask again.
        self.ready_tokens = self.tokens + committed_tokens.saturating_sub(self.tokens).div_ceil(2);
        let is_first = self.slot.want(wanted_chunks);
        if is_first {
            core.books().ask(self.number);
        }
        is_first
    }

    /// Forgets what was found out about memory: the next append looks again.
    pub(super) fn look_again(&mut self) {
        self.ready_tokens = 0;
    }

    /// Cuts it to its first `tokens`. Memory that is left over stays for what comes, a little; the rest
    /// goes. Does nothing if it is no longer than that.
    pub fn truncate(&mut self, tokens: u64) {
        if tokens >= self.tokens {
            return;
        }
        self.set_tokens(tokens);
        self.look_again();
        if is_forked_child() {
            return;
        }
        let core = &*self.handle.core;
        let holds = core.geometry.chunks_for(tokens);
        let own_from = self.own_from.min(holds * core.geometry.chunk_bytes);
        let keep = match own_from < self.own_from {
            // What is behind may be shared: it must not be written.
            true => holds,
            // A few tokens more or less are no reason to give memory back and to fetch it again.
            false => core.chunks_ahead(tokens) + (core.chunks_ahead(tokens) - holds) + 1,
        };
        let is_less = {
            let mut books = core.books();
            books.write_off(self.number, keep);
            core.publish(&books, self.number);
            books.has_rest(self.number)
        };
        if is_less {
            core.wake();
        }
        self.own_from = own_from;
    }
}
