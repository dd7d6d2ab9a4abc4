//! [`KvStats`]: the figures of a cache, and the law that ties them.

/// What a cache has, at one moment. In bytes unless a field says otherwise.
///
/// `committed + shared = live + slack + idle`, always.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct KvStats {
    /// Open sequences, parked ones included (count).
    pub sequences: u64,
    /// Of these, parked (count).
    pub parked_sequences: u64,
    /// Tokens of open sequences; one that several have in common counts once for each (count).
    pub tokens: u64,
    /// Physical memory of the cache, wherever it lies.
    pub committed_bytes: u64,
    /// What sequences have in common, once for each but the first.
    pub shared_bytes: u64,
    /// What tokens take.
    pub live_bytes: u64,
    /// Memory of open sequences that holds no token: unfinished chunks or blocks, growth ahead.
    pub slack_bytes: u64,
    /// Memory that belongs to no open sequence.
    pub idle_bytes: u64,
    /// Committed for sequences that are parked: a part of live and slack.
    pub parked_bytes: u64,
    /// Chunks that stand at addresses of the cache (count): the driver has a limit for them.
    pub mappings: u64,
    /// Growths ahead of need, since the cache was built (count).
    pub background_growths: u64,
    /// Growths that somebody waited for (count).
    pub foreground_growths: u64,
    /// How often a hook for short memory freed something (count).
    pub evictions: u64,
}

impl KvStats {
    /// Whether the columns add up.
    pub fn adds_up(&self) -> bool {
        self.committed_bytes + self.shared_bytes
            == self.live_bytes + self.slack_bytes + self.idle_bytes
    }
}
