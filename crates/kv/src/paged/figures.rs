//! Figures of a paged cache: what it has, what it could still take; the walker.

use std::collections::BTreeSet;

use vmm_sys::process::is_forked_child;

use super::cache::PagedCache;
use crate::error::check_process;
use crate::room::{KvRoom, MAPPINGS_MAX};
use crate::stats::KvStats;
use crate::sync::atomic::Ordering;

impl PagedCache {
    /// The figures, all of one moment. While the cache sleeps they say what it will have when it wakes.
    pub fn stats(&self) -> KvStats {
        if is_forked_child() {
            return KvStats::default();
        }
        let block_bytes = self.layout().block_bytes();
        let state = self.shared.state();
        let mut stats = self.shared.memory.counts.stats();
        for (_, table) in &state.tables {
            stats.sequences += 1;
            stats.tokens += table.tokens.load(Ordering::Relaxed);
            stats.parked_sequences += u64::from(table.is_parked);
        }
        let host = state.host.as_ref();
        let on_host = host.map_or(0, |host| host.owned_blocks());
        let ahead_bytes = state.ahead_blocks() * block_bytes;
        let owned_bytes = (state.device.owned_blocks() + on_host) * block_bytes;
        stats.committed_bytes =
            state.device.standing_bytes() + host.map_or(0, |host| host.standing_bytes());
        stats.live_bytes = stats.tokens * self.layout().shape().token_bytes();
        stats.slack_bytes =
            (state.entries * block_bytes + ahead_bytes).saturating_sub(stats.live_bytes);
        stats.shared_bytes = state.entries * block_bytes - owned_bytes;
        stats.idle_bytes = stats.committed_bytes - owned_bytes - ahead_bytes;
        stats.parked_bytes = on_host * block_bytes;
        stats.mappings = stats.committed_bytes / self.buffer().chunk_bytes();
        stats
    }

    /// What the cache could still take. A figure of the moment and an estimate, as
    /// [`vmm_pool::ElasticBuffer::room`] is. On the host: what could be parked, if the cache has blocks there; else what the
    /// host lends. The cache has as many sequences more as blocks.
    pub fn room(&self) -> KvRoom {
        if is_forked_child() {
            return KvRoom::default();
        }
        let shared = &self.shared;
        let block_bytes = self.layout().block_bytes();
        let room = self.buffer().room();
        let mut quota_blocks = self.buffer().quota_room_bytes() / block_bytes;
        let state = shared.state();
        let (free, mut lacking) = (state.device.free_blocks(), state.device.lacking_blocks());
        // Of so many bytes, as long as blocks and quota last.
        let mut more = |bytes: u64, lacking: &mut u64| {
            let blocks = (bytes / block_bytes).min(*lacking).min(quota_blocks);
            *lacking -= blocks;
            quota_blocks -= blocks;
            blocks
        };
        let here = free + more(room.own_bytes, &mut lacking);
        let lends = |is_host: bool| {
            let lenders = room.lenders.iter().filter(|lender| lender.is_host == is_host);
            let lenders = lenders.filter(|lender| shared.memory.lending.includes(lender));
            lenders.map(|lender| lender.bytes).fold(0, u64::saturating_add)
        };
        let borrowed = more(lends(false), &mut lacking);
        let host = match (&state.host, shared.host) {
            (Some(zone), Some(place)) => {
                let at = room.lenders.iter().find(|lender| lender.place == place);
                let bytes = at.map_or(0, |lender| lender.bytes);
                zone.free_blocks() + more(bytes, &mut zone.lacking_blocks())
            }
            _ => more(lends(true), &mut lacking),
        };
        let sequences = free + state.device.lacking_blocks();
        drop(state);
        KvRoom {
            here_tokens: shared.tokens_of(here),
            borrowed_tokens: shared.tokens_of(borrowed),
            host_tokens: shared.tokens_of(host),
            sequences,
            mappings: MAPPINGS_MAX.saturating_sub(shared.memory.mappings()),
        }
    }

    /// Walks the whole cache and checks that every block has the owners that it counts, that memory stands
    /// behind all of them, and that the buffer has the memory that the cache thinks. For tests:
    /// it waits for whoever changes the memory, and nobody may change the buffer behind the cache's back.
    ///
    /// # Errors
    /// The first that does not hold, in words.
    pub fn verify(&self) -> Result<(), String> {
        check_process().map_err(|error| error.to_string())?;
        let _hands = self.shared.memory.hands.take().map_err(|error| error.to_string())?;
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
