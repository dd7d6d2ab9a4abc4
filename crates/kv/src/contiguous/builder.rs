//! [`ContiguousBuilder`]: the settings of a contiguous cache, validated once.

use std::sync::Arc;

use vmm_pool::Pool;
use vmm_sys::object::Stream;

use super::core::Core;
use super::geometry::Geometry;
use super::{ContiguousCache, Handle};
use crate::error::KvError;
use crate::grower::Grower;
use crate::layout::{KvShape, LayoutError, Order, SequenceLayout};
use crate::memory::{Lending, helper};
use crate::settings::{Settings, refuse};

/// How much memory without tokens is kept, unless said otherwise.
const KEEP_IDLE_BYTES: u64 = 256 << 20;

/// Settings of a [`ContiguousCache`]; see [`ContiguousCache::builder`].
#[derive(Clone, Debug)]
pub struct ContiguousBuilder {
    common: Settings,
    max_tokens: u64,
    max_sequences: u32,
    order: Order,
    ahead_tokens: Option<u64>,
}

impl ContiguousBuilder {
    pub(super) fn new(pool: Pool, stream: Stream, shape: KvShape) -> ContiguousBuilder {
        ContiguousBuilder {
            common: Settings::new(pool, stream, shape, KEEP_IDLE_BYTES),
            max_tokens: 4096,
            max_sequences: 256,
            order: Order::TokenMajor,
            ahead_tokens: None,
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
        self.common.chunk_bytes = Some(bytes);
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
        self.common.keep_idle_bytes = bytes;
        self
    }

    /// Who may lend what the device cannot give. Default: nobody.
    pub fn lenders(mut self, lending: Lending) -> Self {
        self.common.lending = lending;
        self
    }

    /// A label of the owner, by which [`Pool::sleep`] finds the cache.
    pub fn tag(mut self, tag: &str) -> Self {
        self.common.tag = Some(tag.to_owned());
        self
    }

    /// What the cache may commit at most, in bytes. A chunk that sequences share counts once for each.
    /// Default: no quota.
    pub fn quota_bytes(mut self, bytes: u64) -> Self {
        self.common.quota_bytes = Some(bytes);
        self
    }

    /// Whether the pool may move the cache by itself: see
    /// [`ElasticBuilder::movable`](vmm_pool::ElasticBuilder::movable). Default: false.
    pub fn movable(mut self, on: bool) -> Self {
        self.common.movable = on;
        self
    }

    /// Whether a thread of the cache's own grows sequences ahead and takes memory away, so that appending
    /// and dropping need not. Without it both do that work themselves. Default: true.
    pub fn background(mut self, on: bool) -> Self {
        self.common.background = on;
        self
    }

    /// Reserves the addresses. Nothing is committed.
    ///
    /// # Errors
    /// [`KvError::Layout`], [`KvError::BadSetting`]; the pool's, which names a chunk length that is
    /// none, and says so if addresses are short.
    pub fn build(self) -> Result<ContiguousCache, KvError> {
        let common = &self.common;
        if self.max_sequences == 0 {
            return Err(refuse("max_sequences", 0, "at least 1"));
        }
        let granularity_bytes = || common.granularity_bytes(common.home());
        let chunk_bytes = common.chunk_bytes_or(granularity_bytes)?;
        let layout =
            SequenceLayout::aligned(common.shape, self.max_tokens, self.order, chunk_bytes)?;
        let capacity_bytes = layout.span_bytes().checked_mul(u64::from(self.max_sequences));
        let capacity_bytes = capacity_bytes
            .filter(|bytes| *bytes <= 1 << 63)
            .ok_or(LayoutError::TooLarge { what: "the cache" })?;
        let geometry = Geometry::new(layout, chunk_bytes);
        let ahead_tokens = self.ahead_tokens.unwrap_or_else(|| geometry.tokens_in(1).max(1));
        let memory = common.memory(capacity_bytes, chunk_bytes)?;
        let core =
            Core::new(geometry, memory, self.max_sequences, ahead_tokens, common.keep_idle_bytes);
        let core = Arc::new(core);
        let bell = core.memory.bell.clone();
        let grower = common.background.then(|| Grower::start(core.clone(), bell));
        let hook = common.pool.on_shortage(helper(&core));
        Ok(ContiguousCache(Arc::new(Handle { _hook: hook, _grower: grower, core })))
    }
}
