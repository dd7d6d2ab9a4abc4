//! Figures of a contiguous cache: what it has, what it could still take, how many sequences fit.

use vmm_sys::process::is_forked_child;

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
    /// thread's own. What was written off and is not taken away yet counts as idle. While the cache
    /// sleeps they say what it will have when it wakes. Looks at every chunk.
    pub fn stats(&self) -> KvStats {
        if is_forked_child() {
            return KvStats::default();
        }
        let core = self.core();
        let (geometry, counts) = (&core.geometry, &core.memory.counts);
        let _held = core.memory.hands.take();
        let books = core.books();
        let elastic = core.memory.buffer.stats();
        let standing_bytes = geometry.bytes(books.standing());
        // A buffer that sleeps without its contents has none.
        let (at_addresses_bytes, committed_bytes) = match elastic.asleep {
            Some(_) => (standing_bytes, geometry.bytes(books.standing() - books.links.extra())),
            None => (elastic.committed_bytes, elastic.physical_bytes),
        };
        let mut stats = KvStats {
            sequences: books.open_count(),
            committed_bytes,
            shared_bytes: at_addresses_bytes - committed_bytes,
            mappings: at_addresses_bytes / geometry.chunk_bytes,
            ..counts.stats()
        };
        let mut open_bytes = 0;
        for slot in (0..books.slots()).filter(|slot| books.used(*slot) == Use::Open) {
            let (line, bytes) = (core.slot(slot), geometry.bytes(books.stands(slot)));
            let tokens = line.tokens();
            let live_bytes = tokens * geometry.layout.shape().token_bytes();
            open_bytes += bytes;
            stats.tokens += tokens;
            stats.live_bytes += live_bytes;
            stats.slack_bytes += bytes.saturating_sub(live_bytes);
            if line.is_parked() {
                stats.parked_sequences += 1;
                stats.parked_bytes += bytes;
            }
        }
        stats.idle_bytes = at_addresses_bytes.saturating_sub(open_bytes);
        stats
    }

    /// What the cache could still take.
    pub fn room(&self) -> KvRoom {
        if is_forked_child() {
            return KvRoom::default();
        }
        let core = self.core();
        let (sequences, idle_bytes) = {
            let books = core.books();
            (books.free_count(), core.geometry.bytes(books.idle()))
        };
        let token_bytes = core.geometry.layout.shape().token_bytes();
        core.memory.room(token_bytes, idle_bytes, sequences)
    }

    /// How many sequences of `mean_tokens` a cache of this layout could have at once, by addresses and
    /// by mappings; memory is another matter ([`ContiguousCache::room`]). The builder's `max_sequences`
    /// is what this one has addresses for.
    pub fn capacity(&self, mean_tokens: u64) -> KvCapacity {
        let core = self.core();
        let geometry = &core.geometry;
        let devices = core.memory.pool.stats().devices;
        let reserved = devices.iter().map(|(_, device)| device.reserved_bytes);
        let reserved_bytes = reserved.fold(0, u64::saturating_add);
        let stats = core.memory.buffer.stats();
        let others_bytes = reserved_bytes.saturating_sub(stats.reserved_bytes);
        let own_mappings = stats.committed_bytes / stats.chunk_bytes;
        let others_mappings = core.memory.mappings().saturating_sub(own_mappings);
        let each = geometry.mappings(geometry.chunks_for(mean_tokens)).max(1);
        KvCapacity {
            by_addresses: ADDRESS_SPACE_BYTES.saturating_sub(others_bytes)
                / geometry.layout.span_bytes(),
            by_mappings: MAPPINGS_MAX.saturating_sub(others_mappings) / each,
        }
    }
}
