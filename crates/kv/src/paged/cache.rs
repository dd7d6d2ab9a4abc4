//! [`PagedCache`]: the handle of a paged cache.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vmm_pool::{ElasticBuffer, Error, Pool, Use};
use vmm_sys::object::Stream;

use super::builder::PagedBuilder;
use super::moves::Packed;
use super::sequence::PagedSequence;
use super::shared::Shared;
use crate::error::KvError;
use crate::grower::Grower;
use crate::layout::{BlockLayout, KvShape};
use crate::shortage::{EvictionHook, KvShortage};
use crate::stats::KvStats;

/// A KV cache of fixed blocks, in one elastic buffer: block `b` lies `b * block_bytes` behind
/// [`address`](PagedCache::address), for as long as the cache lives. Memory comes to the lowest blocks
/// that are needed, and goes from the highest chunks that hold nothing.
///
/// It belongs to one stream, as a lane does: blocks that a sequence leaves are given to others at once,
/// whose work comes later in that stream. Work of other streams is ordered by the caller.
///
/// Clones are the same cache. Its thread ends with the last of them; sequences go on.
#[derive(Clone)]
pub struct PagedCache {
    shared: Arc<Shared>,
    /// Held for its `Drop`.
    _grower: Option<Arc<Grower>>,
}

impl PagedCache {
    /// Starts the settings of a cache of `pool`, on the device of `stream`.
    pub fn builder(pool: &Pool, stream: &Stream, shape: KvShape) -> PagedBuilder {
        PagedBuilder::new(pool, stream, shape)
    }

    pub(super) fn new(shared: Arc<Shared>, grower: Option<Grower>) -> PagedCache {
        PagedCache { shared, _grower: grower.map(Arc::new) }
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
        PagedSequence::open(&self.shared, tokens)
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
        self.shared.pack(max_blocks)
    }

    /// Gives memory without tokens back to the pool, until `keep_bytes` of it are left on the device. What
    /// is kept ahead goes too. Returns the bytes.
    ///
    /// # Errors
    /// [`vmm_pool::ElasticError::Busy`] from a callback for short memory.
    pub fn release_idle(&self, keep_bytes: u64) -> Result<u64, KvError> {
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

    /// The figures.
    pub fn stats(&self) -> KvStats {
        let counts = &self.shared.memory.counts;
        let block_bytes = self.layout().block_bytes();
        let state = self.shared.state();
        let mut stats = KvStats::default();
        for (_, table) in &state.tables {
            stats.sequences += 1;
            stats.tokens += table.tokens.load(Ordering::Relaxed);
            stats.parked_sequences += u64::from(table.is_parked);
        }
        let host = state.host.as_ref();
        let on_host = host.map_or(0, |host| host.owned_blocks());
        let owned_bytes = (state.device.owned_blocks() + on_host) * block_bytes;
        stats.committed_bytes =
            state.device.standing_bytes() + host.map_or(0, |host| host.standing_bytes());
        stats.live_bytes = stats.tokens * self.layout().shape().token_bytes();
        stats.slack_bytes = (state.entries * block_bytes).saturating_sub(stats.live_bytes);
        stats.shared_bytes = state.entries * block_bytes - owned_bytes;
        stats.idle_bytes = stats.committed_bytes - owned_bytes;
        stats.parked_bytes = on_host * block_bytes;
        stats.mappings = stats.committed_bytes / self.buffer().chunk_bytes();
        drop(state);
        stats.background_growths = counts.background_growths.load(Ordering::Relaxed);
        stats.foreground_growths = counts.foreground_growths.load(Ordering::Relaxed);
        stats.evictions = counts.evictions.load(Ordering::Relaxed);
        stats
    }

    /// Walks the whole cache and checks that every block has the owners that it counts, that memory stands
    /// behind all of them, and that the buffer has the memory that the cache thinks. For tests:
    /// it waits for whoever changes the memory, and nobody may change the buffer behind the cache's back.
    ///
    /// # Errors
    /// The first that does not hold, in words.
    pub fn verify(&self) -> Result<(), String> {
        let _hands = self.shared.memory.hands.take().map_err(|error: Error| error.to_string())?;
        let expected: BTreeSet<u64> = {
            let state = self.shared.state();
            state.verify(self.layout().block_tokens())?;
            let host = state.host.iter().flat_map(|host| host.standing_offsets());
            state.device.standing_offsets().chain(host).collect()
        };
        let stats = self.stats();
        if !stats.adds_up() {
            return Err(format!("figures do not add up: {stats:?}"));
        }
        if self.buffer().stats().asleep.is_some() {
            return Ok(());
        }
        let found: BTreeSet<u64> = self.buffer().pieces().iter().map(|it| it.offset).collect();
        match found == expected {
            true => Ok(()),
            false => Err(format!("memory stands at {found:?}, the cache thinks at {expected:?}")),
        }
    }
}

impl fmt::Debug for PagedCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.shared.state();
        let (sequences, blocks) = (state.tables.len(), state.device.owned_blocks());
        write!(f, "PagedCache({sequences} sequences, {blocks} blocks at {:#x})", self.address())
    }
}
