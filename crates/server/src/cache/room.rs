//! Figures of a cache: what it has, and what it could still take.

use serde::{Deserialize, Serialize};
use vmm_kv::KvStats;

/// How much more a cache could take now: an estimate of the moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Room {
    /// Tokens that memory of its own device has room for.
    pub here_tokens: u64,
    /// More, in memory of devices that lend.
    pub borrowed_tokens: u64,
    /// More, in memory of the host.
    pub host_tokens: u64,
    /// Sequences that can be opened.
    pub sequences: u64,
}

impl Room {
    /// Tokens that device memory has room for, borrowed memory included.
    pub fn tokens(&self) -> u64 {
        self.here_tokens.saturating_add(self.borrowed_tokens)
    }

    /// A sequence takes so many.
    pub fn take(&mut self, tokens: u64) {
        let here = tokens.min(self.here_tokens);
        self.here_tokens -= here;
        self.borrowed_tokens = self.borrowed_tokens.saturating_sub(tokens - here);
        self.sequences = self.sequences.saturating_sub(1);
    }
}

/// What a cache has, in bytes unless a field says otherwise.
///
/// `committed + shared = live + slack + idle`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheFigures {
    /// Physical memory, wherever it lies.
    pub committed_bytes: u64,
    /// What sequences have in common, once for each but the first.
    pub shared_bytes: u64,
    /// What tokens take.
    pub live_bytes: u64,
    /// Memory of open sequences that holds no token.
    pub slack_bytes: u64,
    /// Memory of no open sequence.
    pub idle_bytes: u64,
    /// Memory of parked sequences.
    pub parked_bytes: u64,
    /// Memory that others lend.
    pub borrowed_bytes: u64,
    /// Open sequences (count).
    pub sequences: u64,
    /// Growths ahead of need, so far (count).
    pub background_growths: u64,
    /// Growths that somebody waited for, so far (count).
    pub foreground_growths: u64,
}

impl CacheFigures {
    pub(super) fn of(stats: KvStats, borrowed_bytes: u64) -> CacheFigures {
        CacheFigures {
            committed_bytes: stats.committed_bytes,
            shared_bytes: stats.shared_bytes,
            live_bytes: stats.live_bytes,
            slack_bytes: stats.slack_bytes,
            idle_bytes: stats.idle_bytes,
            parked_bytes: stats.parked_bytes,
            borrowed_bytes,
            sequences: stats.sequences,
            background_growths: stats.background_growths,
            foreground_growths: stats.foreground_growths,
        }
    }
}
