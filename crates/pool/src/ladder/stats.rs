//! How often each rung of the ladder was climbed.

use super::RUNGS;
use crate::sync::atomic::{AtomicU64, Ordering};

/// How often each rung was climbed on one device, and how often all of them did not suffice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LadderStats {
    /// Requests that the driver's refusal or the limit made be content with shorter chunks.
    pub exact: u64,
    /// Those that it sent to what the lane and the stock hold.
    pub own_only: u64,
    /// Waits for a lane's limbo, and for what ended lanes left.
    pub waited: u64,
    /// Other lanes emptied.
    pub other_lanes: u64,
    /// Stock given back, as much as was lacking.
    pub stock_released: u64,
    /// The rest of the stock given back, and other pools emptied.
    pub other_pools: u64,
    /// Callbacks asked.
    pub callbacks: u64,
    /// Times that a neighbour was asked to make room.
    pub neighbour: u64,
    /// Times that the host was.
    pub host: u64,
    /// Requests that failed after all.
    pub failed: u64,
}

impl LadderStats {
    /// The rungs by name, in the order in which they are climbed, with their counts; then `failed`.
    pub fn by_name(&self) -> [(&'static str, u64); RUNGS.len() + 1] {
        [
            ("exact", self.exact),
            ("own_only", self.own_only),
            ("waited", self.waited),
            ("other_lanes", self.other_lanes),
            ("stock_released", self.stock_released),
            ("other_pools", self.other_pools),
            ("callbacks", self.callbacks),
            ("neighbour", self.neighbour),
            ("host", self.host),
            ("failed", self.failed),
        ]
    }
}

/// The counters behind [`LadderStats`]. Cold: shared atomics are fine here.
#[derive(Debug, Default)]
pub(crate) struct LadderCounts {
    climbed: [AtomicU64; RUNGS.len()],
    failed: AtomicU64,
}

impl LadderCounts {
    /// Counts a rung, by its place in the order.
    pub(super) fn climbed(&self, rung: usize) {
        self.climbed[rung].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a request for which all of them did not suffice.
    pub(super) fn failed(&self) {
        self.failed.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn stats(&self) -> LadderStats {
        let climbed = self.climbed.each_ref().map(|count| count.load(Ordering::Relaxed));
        let [exact, own_only, waited, other_lanes, stock_released, other_pools, ..] = climbed;
        let [.., callbacks, neighbour, host] = climbed;
        LadderStats {
            exact,
            own_only,
            waited,
            other_lanes,
            stock_released,
            other_pools,
            callbacks,
            neighbour,
            host,
            failed: self.failed.load(Ordering::Relaxed),
        }
    }
}
