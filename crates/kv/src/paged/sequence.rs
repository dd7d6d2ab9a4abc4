//! [`PagedSequence`]: one sequence of a paged cache.

use std::fmt;
use std::sync::Arc;

use vmm_sys::process::{is_forked_child, keep_in_forked_child};

use super::shared::Shared;
use crate::error::{KvError, check_process};
use crate::layout::Part;
use crate::sync::atomic::{AtomicU64, Ordering};

/// One sequence of a paged cache: its blocks, and how many tokens are in them. Dropping it frees
/// the blocks, for whatever the cache's stream does later; that makes no driver call.
///
/// It keeps the cache's memory, and can be dropped in any thread, before or after the cache.
pub struct PagedSequence {
    pub(super) shared: Arc<Shared>,
    pub(super) key: usize,
    /// Also in its table, for the figures.
    length: u64,
    counted: Arc<AtomicU64>,
    /// Up to here tokens can be appended without a look at the blocks: the last one is its own.
    writable: u64,
    is_parked: bool,
}

impl PagedSequence {
    pub(super) fn open(shared: &Arc<Shared>, tokens: u64) -> Result<PagedSequence, KvError> {
        let blocks = shared.blocks_for(tokens)?;
        let counted = Arc::new(AtomicU64::new(tokens));
        let held = shared.obtain(blocks, tokens)?;
        let key = shared.state().open(counted.clone(), held);
        let writable = shared.tokens_of(blocks);
        let (shared, length) = (shared.clone(), tokens);
        Ok(PagedSequence { shared, key, length, counted, writable, is_parked: false })
    }

    /// See [`PagedCache::open_ahead`](super::PagedCache::open_ahead).
    pub(super) fn open_ahead(shared: &Arc<Shared>, tokens: u64) -> Result<PagedSequence, KvError> {
        let blocks = shared.blocks_for(tokens)?;
        let counted = Arc::new(AtomicU64::new(0));
        let key = shared.open_ahead(counted.clone(), blocks);
        let shared = shared.clone();
        Ok(PagedSequence { shared, key, length: 0, counted, writable: 0, is_parked: false })
    }

    /// How many tokens it has.
    pub fn tokens(&self) -> u64 {
        self.length
    }

    /// Its block numbers, in the order of its tokens. [`PagedCache::pack`](super::PagedCache::pack)
    /// changes them, and so does parking.
    pub fn blocks(&self) -> Vec<u32> {
        if is_forked_child() {
            return Vec::new();
        }
        let state = self.shared.state();
        state.tables.get(self.key).map_or(Vec::new(), |table| table.blocks.clone())
    }

    /// Where one head of one token lies now, in bytes from the start of the cache. `None` for what
    /// the sequence or the model does not have.
    pub fn offset(&self, layer: u32, part: Part, token: u64, head: u32) -> Option<u64> {
        let layout = &self.shared.layout;
        let shape = layout.shape();
        if token >= self.length || layer >= shape.layers() || head >= shape.kv_heads() {
            return None;
        }
        let (at, token_in_block) = layout.locate(token);
        let state = self.shared.state();
        let block = *state.tables.get(self.key)?.blocks.get(usize::try_from(at).ok()?)?;
        let in_block = layout.offset_in_block(layer, part, token_in_block, head);
        Some(layout.bytes_of(block).start + in_block)
    }

    /// How long it can become in the blocks that it has and those that are kept for it.
    pub fn committed_tokens(&self) -> u64 {
        if is_forked_child() {
            return 0;
        }
        let state = self.shared.state();
        let blocks = |table: &super::state::Table| table.blocks.len() + table.ahead.len();
        self.shared.tokens_of(state.tables.get(self.key).map_or(0, blocks) as u64)
    }

    /// Whether `tokens` more can be appended without waiting for memory: in blocks of its own, and
    /// those that are kept for it.
    pub fn is_ready(&self, tokens: u64) -> bool {
        let end = self.length.saturating_add(tokens);
        let (at, filled) = self.shared.layout.locate(self.length);
        let is_own = || {
            let at = usize::try_from(at).unwrap_or(usize::MAX);
            filled == 0 || self.shared.sole_owner(self.key, at)
        };
        !self.is_parked && (tokens == 0 || end <= self.committed_tokens() && is_own())
    }

    /// Makes room for `tokens` more. Returns the position of the first: what they hold is undefined
    /// until a kernel has written them.
    ///
    /// Within a block that is the sequence's own, this compares two numbers. A new block takes a lock,
    /// and no driver call as long as one is free. A block that another sequence has too is copied
    /// first, on the cache's stream; that one keeps the old one. All or nothing.
    ///
    /// # Errors
    /// [`KvError::TooLong`]; [`KvError::Parked`]; [`KvError::NoMemory`] after everything that could
    /// help was tried; the driver's.
    pub fn append(&mut self, tokens: u64) -> Result<u64, KvError> {
        let first = self.length;
        match first.checked_add(tokens) {
            Some(end) if end <= self.writable => self.set_length(end),
            _ => self.append_blocks(tokens)?,
        }
        Ok(first)
    }

    fn append_blocks(&mut self, tokens: u64) -> Result<(), KvError> {
        check_process()?;
        if self.is_parked {
            return Err(KvError::Parked);
        }
        let end = self.length.saturating_add(tokens);
        let blocks = self.shared.blocks_for(end)?;
        self.own_tail()?;
        self.shared.extend(self.key, blocks, tokens)?;
        self.set_length(end);
        self.writable = self.shared.tokens_of(blocks);
        Ok(())
    }

    /// Sees to it that nobody else has the block that the next token goes to, if it has begun.
    fn own_tail(&mut self) -> Result<(), KvError> {
        let (at, filled) = self.shared.layout.locate(self.length);
        let Some(at) = usize::try_from(at).ok().filter(|_| filled > 0) else { return Ok(()) };
        let shared = &*self.shared;
        if shared.sole_owner(self.key, at) {
            return Ok(());
        }
        let held = shared.obtain(1, u64::from(filled))?;
        let copied = {
            let _motion = shared.motion();
            // Who else had it may have gone, or taken a copy himself, while this thread waited.
            match shared.sole_owner(self.key, at) {
                true => None,
                false => Some(shared.copy_out(self.key, at, held[0])),
            }
        };
        if !matches!(copied, Some(Ok(()))) {
            let mut state = shared.state();
            state.let_go(&held);
            shared.after_freeing(state);
        }
        copied.unwrap_or(Ok(()))
    }

    /// Takes all tokens from `tokens` on away, and frees the blocks that none is left in. Does nothing
    /// if there are no more than that.
    pub fn truncate(&mut self, tokens: u64) {
        if tokens >= self.length {
            return;
        }
        self.set_length(tokens);
        // The last block may be another's too: the next append looks.
        self.writable = tokens;
        if is_forked_child() {
            return;
        }
        let blocks = self.shared.layout.blocks_for(tokens);
        let mut state = self.shared.state();
        if state.truncate(self.key, usize::try_from(blocks).unwrap_or(usize::MAX)) {
            self.shared.after_freeing(state);
        }
    }

    /// A second sequence with the same tokens. They have their blocks in common until one of them
    /// appends into a block that both have; it makes no driver call.
    ///
    /// # Errors
    /// [`KvError::Parked`].
    pub fn fork(&mut self) -> Result<PagedSequence, KvError> {
        self.fork_at(self.length)
    }

    /// The same with the first `tokens` only.
    ///
    /// # Errors
    /// [`KvError::Parked`]; [`KvError::TooLong`] if there are not so many.
    pub fn fork_at(&mut self, tokens: u64) -> Result<PagedSequence, KvError> {
        check_process()?;
        if self.is_parked {
            return Err(KvError::Parked);
        }
        if tokens > self.length {
            return Err(KvError::TooLong { tokens, max_tokens: self.length });
        }
        let counted = Arc::new(AtomicU64::new(tokens));
        let blocks = usize::try_from(self.shared.layout.blocks_for(tokens)).unwrap_or(usize::MAX);
        let key = self.shared.state().fork(self.key, counted.clone(), blocks);
        // The next append looks whose the last block is.
        self.writable = self.length;
        let shared = self.shared.clone();
        let (length, writable) = (tokens, tokens);
        Ok(PagedSequence { shared, key, length, counted, writable, is_parked: false })
    }

    /// Whether it is parked.
    pub fn is_parked(&self) -> bool {
        self.is_parked
    }

    /// Moves its own blocks to the host's zone of the cache, by copies on the cache's stream; blocks
    /// that another sequence has too stay where they are. Returns the bytes that went; 0 if it was
    /// parked already. All or nothing.
    ///
    /// # Errors
    /// [`KvError::BadSetting`] if the cache was built without blocks on the host;
    /// [`KvError::NoMemory`] if there is no room there; the driver's.
    pub fn park(&mut self) -> Result<u64, KvError> {
        if self.is_parked {
            return Ok(0);
        }
        check_process()?;
        let moved = self.shared.park(self.key)?;
        self.is_parked = true;
        self.writable = self.length;
        Ok(moved)
    }

    /// Brings its blocks back to the device. Returns the bytes that came; 0 if it was not parked. All
    /// or nothing: after an error it is parked as before.
    ///
    /// # Errors
    /// [`KvError::NoMemory`] after everything that could help was tried; the driver's.
    pub fn resume(&mut self) -> Result<u64, KvError> {
        if !self.is_parked {
            return Ok(0);
        }
        check_process()?;
        let moved = self.shared.resume(self.key)?;
        self.is_parked = false;
        Ok(moved)
    }

    fn set_length(&mut self, tokens: u64) {
        self.length = tokens;
        self.counted.store(tokens, Ordering::Relaxed);
    }
}

impl Drop for PagedSequence {
    fn drop(&mut self) {
        if is_forked_child() {
            keep_in_forked_child(&self.shared);
            return;
        }
        let mut state = self.shared.state();
        state.close(self.key);
        self.shared.after_freeing(state);
    }
}

impl fmt::Debug for PagedSequence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parked = if self.is_parked { ", parked" } else { "" };
        write!(f, "PagedSequence({} tokens{parked})", self.length)
    }
}
