//! [`PagedCache`]: the handle of a paged cache.

use std::fmt;
use std::sync::Arc;

use vmm_pool::{ElasticBuffer, Pool, ShortageHook, Use};
use vmm_sys::object::Stream;
use vmm_sys::process::{is_forked_child, keep_in_forked_child};

use super::builder::PagedBuilder;
use super::moves::Packed;
use super::sequence::PagedSequence;
use super::shared::Shared;
use crate::error::{KvError, check_process};
use crate::grower::Grower;
use crate::layout::{BlockLayout, KvShape};
use crate::shortage::{EvictionHook, KvShortage};

/// A KV cache of fixed blocks, in one elastic buffer: block `b` lies `b * block_bytes` behind
/// [`address`](PagedCache::address), for as long as the cache lives. Memory comes to the lowest blocks
/// that are needed, and goes from the highest chunks that hold nothing.
///
/// It belongs to one stream, as a lane does: blocks that a sequence leaves are given to others at once,
/// whose work comes later in that stream. Work of other streams is ordered by the caller.
///
/// Clones are the same cache. With the last of them its thread ends, and the pool asks it for idle memory
/// no more; sequences go on.
#[derive(Clone)]
pub struct PagedCache {
    pub(super) shared: Arc<Shared>,
    /// Held for its `Drop`.
    _ends: Arc<Ends>,
}

impl Drop for PagedCache {
    fn drop(&mut self) {
        keep_in_forked_child(&self.shared);
    }
}

/// What ends with the last handle.
struct Ends {
    _grower: Option<Grower>,
    /// The pool asks for idle memory.
    _hook: ShortageHook,
}

impl PagedCache {
    /// Starts the settings of a cache of `pool`, on the device of `stream`.
    pub fn builder(pool: &Pool, stream: &Stream, shape: KvShape) -> PagedBuilder {
        PagedBuilder::new(pool, stream, shape)
    }

    pub(super) fn new(
        shared: Arc<Shared>,
        grower: Option<Grower>,
        hook: ShortageHook,
    ) -> PagedCache {
        PagedCache { shared, _ends: Arc::new(Ends { _grower: grower, _hook: hook }) }
    }

    /// The device address of block 0, the same for the cache's whole life.
    pub fn address(&self) -> u64 {
        self.buffer().address()
    }

    /// The buffer: for grants, hooks, moves and figures. Its memory is the cache's to commit and to
    /// take away.
    pub fn buffer(&self) -> &ElasticBuffer {
        &self.shared.memory.buffer
    }

    /// The stream whose order the blocks are used in.
    pub fn stream(&self) -> &Stream {
        &self.shared.memory.stream
    }

    /// Where a token lies in its block, and blocks in the buffer.
    pub fn layout(&self) -> &BlockLayout {
        &self.shared.layout
    }

    /// The longest sequence, in tokens.
    pub fn max_tokens(&self) -> u64 {
        self.shared.max_tokens()
    }

    /// Says that work of the cache's stream is going to use it: held until the work of a step is
    /// enqueued. One a step, however many sequences.
    ///
    /// # Errors
    /// As [`ElasticBuffer::use_on`].
    pub fn use_now(&self) -> Result<Use, KvError> {
        Ok(self.buffer().use_on(self.stream())?)
    }

    /// A new sequence with room for so many tokens, whose contents are undefined. All or nothing.
    ///
    /// # Errors
    /// [`KvError::TooLong`]; [`KvError::NoMemory`] after everything that could help was tried; the
    /// driver's.
    pub fn open(&self, tokens: u64) -> Result<PagedSequence, KvError> {
        check_process()?;
        PagedSequence::open(&self.shared, tokens)
    }

    /// A new sequence without tokens, at once; blocks for `tokens` of them are kept for it as soon as
    /// there are so many. Once [`PagedSequence::is_ready`] says so, appending as many waits for nothing.
    /// Free blocks are used first, so that it often is ready from the start; else memory comes from
    /// the cache's thread, as growth ahead does: nobody is pressed for it. If memory is short none
    /// comes, and the append finds it as any other does.
    ///
    /// With a thread it makes no driver call. Without one the memory comes before it returns.
    ///
    /// # Errors
    /// [`KvError::TooLong`].
    pub fn open_ahead(&self, tokens: u64) -> Result<PagedSequence, KvError> {
        check_process()?;
        PagedSequence::open_ahead(&self.shared, tokens)
    }

    /// Moves at most `max_blocks` blocks out of the chunks that hold fewest into free blocks of those that
    /// hold most, so that chunks become empty, and gives back what is empty then beyond the idle memory that is to
    /// be kept. The copies are enqueued on the cache's stream, and the tables of all sequences that have a
    /// block say where it is now: a block that several have moves once.
    ///
    /// For between two steps: kernels that are launched later need tables that were
    /// [updated](super::BlockTables::update) afterwards. All or nothing.
    ///
    /// # Errors
    /// As [`ElasticBuffer::copies_on`].
    pub fn pack(&self, max_blocks: u64) -> Result<Packed, KvError> {
        check_process()?;
        self.shared.pack(max_blocks)
    }

    /// Gives memory without tokens back to the pool, until `keep_bytes` of it are left on the device. What
    /// is kept ahead goes too. Returns the bytes.
    ///
    /// # Errors
    /// [`vmm_pool::ElasticError::Busy`] from a callback for short memory.
    pub fn release_idle(&self, keep_bytes: u64) -> Result<u64, KvError> {
        check_process()?;
        self.shared.release_idle(keep_bytes)
    }

    /// Asks `hook` when memory is short and the cache has no idle memory: it drops, shortens or parks
    /// sequences, and says whether it did. It runs in the thread that is short, with no lock held,
    /// until the answer is dropped.
    pub fn on_shortage(
        &self,
        hook: impl Fn(&KvShortage) -> bool + Send + Sync + 'static,
    ) -> EvictionHook {
        self.shared.memory.hooks.add(hook)
    }
}

impl fmt::Debug for PagedCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if is_forked_child() {
            return write!(f, "PagedCache(at {:#x})", self.address());
        }
        let state = self.shared.state();
        let (sequences, blocks) = (state.tables.len(), state.device.owned_blocks());
        write!(f, "PagedCache({sequences} sequences, {blocks} blocks at {:#x})", self.address())
    }
}
