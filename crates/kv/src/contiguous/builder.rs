//! [`ContiguousBuilder`]: the settings of a contiguous cache, validated once.

use std::sync::Arc;

use vmm_pool::Pool;
use vmm_sys::caught::caught;
use vmm_sys::object::Stream;
use vmm_sys::{Call, ChunkProps, GranularityKind};

use super::core::Core;
use super::geometry::Geometry;
use super::{ContiguousCache, Handle};
use crate::error::KvError;
use crate::grower::{Bell, Grower};
use crate::hands::Hands;
use crate::layout::{KvShape, LayoutError, Order, SequenceLayout};
use crate::memory::{Counts, Lending, Memory, helper};
use crate::shortage::Hooks;

/// How much memory without tokens is kept, unless said otherwise.
const KEEP_IDLE_BYTES: u64 = 256 << 20;

/// Settings of a [`ContiguousCache`]; see [`ContiguousCache::builder`].
#[derive(Clone, Debug)]
pub struct ContiguousBuilder {
    pool: Pool,
    stream: Stream,
    shape: KvShape,
    max_tokens: u64,
    max_sequences: u32,
    order: Order,
    chunk_bytes: Option<u64>,
    ahead_tokens: Option<u64>,
    keep_idle_bytes: u64,
    lending: Lending,
    tag: Option<String>,
    quota_bytes: Option<u64>,
    movable: bool,
    background: bool,
}

impl ContiguousBuilder {
    pub(super) fn new(pool: Pool, stream: Stream, shape: KvShape) -> ContiguousBuilder {
        ContiguousBuilder {
            pool,
            stream,
            shape,
            max_tokens: 4096,
            max_sequences: 256,
            order: Order::TokenMajor,
            chunk_bytes: None,
            ahead_tokens: None,
            keep_idle_bytes: KEEP_IDLE_BYTES,
            lending: Lending::Nobody,
            tag: None,
            quota_bytes: None,
            movable: false,
            background: true,
        }
    }

    /// The longest context. As many addresses are reserved for each sequence, which costs no memory.
    /// Default: 4096.
    pub fn max_tokens(mut self, tokens: u64) -> Self {
        self.max_tokens = tokens;
        self
    }

    /// How many sequences can be open at once. Default: 256.
    pub fn max_sequences(mut self, sequences: u32) -> Self {
        self.max_sequences = sequences;
        self
    }

    /// What lies next to what. Default: [`Order::TokenMajor`], which wastes least.
    pub fn order(mut self, order: Order) -> Self {
        self.order = order;
        self
    }

    /// The length of a chunk, in bytes: a multiple of the granularity. Long ones are quick to map, short
    /// ones waste less. Default: the granularity of the device's memory, 2 MiB.
    pub fn chunk_bytes(mut self, bytes: u64) -> Self {
        self.chunk_bytes = Some(bytes);
        self
    }

    /// How many tokens ahead of each sequence's end memory is to be there. Default: what a chunk holds.
    pub fn ahead_tokens(mut self, tokens: u64) -> Self {
        self.ahead_tokens = Some(tokens);
        self
    }

    /// How much memory of sequences that ended is kept for those to come, in bytes. Whoever in the pool
    /// is short gets it. Default: 256 MiB.
    pub fn keep_idle_bytes(mut self, bytes: u64) -> Self {
        self.keep_idle_bytes = bytes;
        self
    }

    /// Who may lend what the device cannot give. Default: nobody.
    pub fn lenders(mut self, lending: Lending) -> Self {
        self.lending = lending;
        self
    }

    /// A label of the owner, by which [`Pool::sleep`] finds the cache.
    pub fn tag(mut self, tag: &str) -> Self {
        self.tag = Some(tag.to_owned());
        self
    }

    /// What the cache may commit at most, in bytes. A chunk that sequences share counts once for each.
    /// Default: no quota.
    pub fn quota_bytes(mut self, bytes: u64) -> Self {
        self.quota_bytes = Some(bytes);
        self
    }

    /// Whether the pool may move the cache by itself: see
    /// [`ElasticBuilder::movable`](vmm_pool::ElasticBuilder::movable). Default: false.
    pub fn movable(mut self, on: bool) -> Self {
        self.movable = on;
        self
    }

    /// Whether a thread of the cache's own grows sequences ahead and takes memory away, so that appending
    /// and dropping need not. Without it both do that work themselves. Default: true.
    pub fn background(mut self, on: bool) -> Self {
        self.background = on;
        self
    }

    /// Reserves the addresses. Nothing is committed.
    ///
    /// # Errors
    /// [`KvError::Layout`], [`KvError::BadSetting`]; the pool's, which names a chunk length that is
    /// none, and says so if addresses are short.
    pub fn build(self) -> Result<ContiguousCache, KvError> {
        let refuse = |setting, value: u64, expected: &str| KvError::BadSetting {
            setting,
            value: value.to_string(),
            expected: expected.to_owned(),
        };
        if self.max_sequences == 0 {
            return Err(refuse("max_sequences", 0, "at least 1"));
        }
        let chunk_bytes = match self.chunk_bytes {
            Some(0) => return Err(refuse("chunk_bytes", 0, "a multiple of the granularity")),
            Some(bytes) => bytes,
            None => {
                let props = ChunkProps::on_device(self.stream.device());
                caught(Call::MemGetAllocationGranularity, || {
                    self.stream.driver().granularity(&props, GranularityKind::Minimum)
                })?
            }
        };
        let layout = SequenceLayout::aligned(self.shape, self.max_tokens, self.order, chunk_bytes)?;
        let capacity_bytes = layout.span_bytes().checked_mul(u64::from(self.max_sequences));
        let capacity_bytes = capacity_bytes
            .filter(|bytes| *bytes <= 1 << 63)
            .ok_or(LayoutError::TooLarge { what: "the cache" })?;
        let mut elastic = self.pool.elastic(self.stream.device());
        elastic = elastic.capacity_bytes(capacity_bytes).chunk_bytes(chunk_bytes);
        elastic = elastic.movable(self.movable);
        if let Some(tag) = &self.tag {
            elastic = elastic.tag(tag);
        }
        if let Some(bytes) = self.quota_bytes {
            elastic = elastic.quota_bytes(bytes);
        }
        let geometry = Geometry::new(layout, chunk_bytes);
        let ahead_tokens = self.ahead_tokens.unwrap_or_else(|| geometry.tokens_in(1).max(1));
        let memory = Memory {
            pool: self.pool.clone(),
            buffer: elastic.build()?,
            stream: self.stream,
            lending: self.lending,
            hands: Hands::default(),
            hooks: Hooks::default(),
            bell: Arc::new(Bell::default()),
            counts: Counts::default(),
        };
        let core =
            Core::new(geometry, memory, self.max_sequences, ahead_tokens, self.keep_idle_bytes);
        let core = Arc::new(core);
        let bell = core.memory.bell.clone();
        let grower = self.background.then(|| Grower::start(core.clone(), bell));
        let hook = self.pool.on_shortage(helper(&core));
        Ok(ContiguousCache(Arc::new(Handle { _hook: hook, _grower: grower, core })))
    }
}
