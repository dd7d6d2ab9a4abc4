//! Figures of a contiguous cache: what it has, what it could still take, how many sequences fit.

use super::ContiguousCache;
use super::books::Use;
use crate::room::{ADDRESS_SPACE_BYTES, KvRoom, MAPPINGS_MAX};
use crate::stats::KvStats;

/// How many sequences of a length a cache of this layout could have, whatever the memory: see
/// [`ContiguousCache::capacity`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KvCapacity {
    /// By the process's addresses: [`ADDRESS_SPACE_BYTES`], less what others in the pool have reserved.
    pub by_addresses: u64,
    /// By what a context can have mapped: [`MAPPINGS_MAX`], less what other elastic buffers of the
    /// pool have.
    pub by_mappings: u64,
}

impl KvCapacity {
    /// The smaller of the two.
    pub fn sequences(&self) -> u64 {
        self.by_addresses.min(self.by_mappings)
    }
}

impl ContiguousCache {
    /// The figures, all of one moment: a growth that is under way is waited for, unless it is the calling
    /// thread's own. While the cache sleeps they say what it will have when it wakes.
    pub fn stats(&self) -> KvStats {
        let core = self.core();
        let (geometry, counts) = (&core.geometry, &core.memory.counts);
        let _held = core.memory.hands.take();
        let books = core.books();
        let mut stats = KvStats {
            sequences: books.open_count(),
            committed_bytes: geometry.bytes(books.standing() - books.extra()),
            shared_bytes: geometry.bytes(books.extra()),
            idle_bytes: geometry.bytes(books.idle()),
            mappings: geometry.mappings(books.standing()),
            ..counts.stats()
        };
        for slot in (0..books.slots()).filter(|slot| books.used(*slot) == Use::Open) {
            let (line, bytes) = (core.slot(slot), geometry.bytes(books.stands(slot)));
            let tokens = line.tokens();
            let live_bytes = tokens * geometry.layout.shape().token_bytes();
            stats.tokens += tokens;
            stats.live_bytes += live_bytes;
            stats.slack_bytes += bytes.saturating_sub(live_bytes);
            if line.is_parked() {
                stats.parked_sequences += 1;
                stats.parked_bytes += bytes;
            }
        }
        stats
    }

    /// What the cache could still take.
    pub fn room(&self) -> KvRoom {
        let core = self.core();
        let (sequences, idle_bytes, mappings) = {
            let books = core.books();
            let idle_bytes = core.geometry.bytes(books.idle());
            (books.free_count(), idle_bytes, core.geometry.mappings(books.standing()))
        };
        let shape = core.geometry.layout.shape();
        {
            let _ = (shape, idle_bytes, mappings);
            KvRoom { sequences, ..KvRoom::default() }
        }
    }

    /// How many sequences of `mean_tokens` a cache of this layout could have at once, by addresses and
    /// by mappings; memory is another matter ([`ContiguousCache::room`]). The builder's `max_sequences`
    /// is what this one has addresses for.
    pub fn capacity(&self, mean_tokens: u64) -> KvCapacity {
        let core = self.core();
        let geometry = &core.geometry;
        let (mut reserved_bytes, mut mappings) = (0u64, 0u64);
        for (_, device) in core.memory.pool.stats().devices {
            reserved_bytes = reserved_bytes.saturating_add(device.reserved_bytes);
        }
        for buffer in core.memory.pool.elastic_stats() {
            mappings += buffer.committed_bytes / buffer.chunk_bytes;
        }
        let stats = core.memory.buffer.stats();
        let others_bytes = reserved_bytes.saturating_sub(stats.reserved_bytes);
        let others_mappings = mappings.saturating_sub(stats.committed_bytes / stats.chunk_bytes);
        let each = geometry.mappings(geometry.chunks_for(mean_tokens)).max(1);
        KvCapacity {
            by_addresses: ADDRESS_SPACE_BYTES.saturating_sub(others_bytes)
                / geometry.layout.span_bytes(),
            by_mappings: MAPPINGS_MAX.saturating_sub(others_mappings) / each,
        }
    }
}
