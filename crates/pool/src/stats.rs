//! The figures of a device's pool, and the law that ties them.

use vmm_sys::DeviceId;

use crate::balance::BalanceStats;
use crate::broken::Broken;
use crate::ladder::LadderStats;

/// What one device's pool holds, in bytes, at one moment (all its lanes locked).
///
/// `held = live + rounding + idle + limbo + private + elastic + anchor + stock`, always.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceStats {
    /// Asked for by the buffers that are alive.
    pub live_bytes: u64,
    /// What live buffers occupy beyond what was asked.
    pub rounding_bytes: u64,
    /// Mapped and free.
    pub idle_bytes: u64,
    /// Freed or given up, but GPU work may still use it.
    pub limbo_bytes: u64,
    /// Kept for captured graphs.
    pub private_bytes: u64,
    /// At the addresses of elastic buffers, wherever their home is.
    pub elastic_bytes: u64,
    /// Of these, in buffers whose home is elsewhere: borrowed, or placed here by name.
    pub lent_bytes: u64,
    /// Memory elsewhere, the host included, of the elastic buffers whose home this is. Other places
    /// hold it: it is no part of the sum.
    pub borrowed_bytes: u64,
    /// What it lends at most to those that borrow ([`PoolBuilder::lend`](crate::PoolBuilder::lend)).
    pub lending_bytes: u64,
    /// What of that they have.
    pub lending_booked_bytes: u64,
    /// Behind small mappings that keep the links to peers up.
    pub anchor_bytes: u64,
    /// Owned and mapped for nobody: on the shelf, or on its way to or from it.
    pub stock_bytes: u64,
    /// All physical memory owned.
    pub held_bytes: u64,
    /// Highest live bytes since the start or the last reset; with several lanes the sum of the
    /// lanes' own peaks, which is an upper bound.
    pub peak_live_bytes: u64,
    /// Highest held bytes since the start or the last reset.
    pub peak_held_bytes: u64,
    /// Addresses reserved. Costs no memory.
    pub reserved_bytes: u64,
    /// The hard limit; `u64::MAX` if none.
    pub limit_bytes: u64,
    /// Live buffers of lanes.
    pub buffers: u64,
    /// Elastic buffers whose home this is.
    pub elastic_buffers: u64,
    /// Open lanes.
    pub lanes: u64,
    /// Chunks that stand at a second address whose GPU work may not be finished (count).
    pub retired_mappings: u64,
    /// Frees that wait for other streams (count).
    pub limbo_buffers: u64,
    /// How often a lane that was idle for the set time gave its free chunks to the stock (count).
    pub idle_lanes_emptied: u64,
    /// How often a request looked into another lane for memory that it may not make within the soft
    /// limit (count).
    pub lanes_asked: u64,
    /// Memory that came from the stock and was zeroed for an elastic buffer that must not see what
    /// others wrote, since the start.
    pub scrubbed_bytes: u64,
    /// What was tried when memory was short.
    pub ladder: LadderStats,
}

impl DeviceStats {
    /// Whether the columns add up.
    pub fn adds_up(&self) -> bool {
        self.live_bytes
            + self.rounding_bytes
            + self.idle_bytes
            + self.limbo_bytes
            + self.private_bytes
            + self.elastic_bytes
            + self.anchor_bytes
            + self.stock_bytes
            == self.held_bytes
    }
}

/// What a pool holds of the memory of one host NUMA node, in bytes.
///
/// `held = elastic + limbo + stock`, always.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct HostStats {
    /// The node.
    pub node: u32,
    /// At the addresses of elastic buffers.
    pub elastic_bytes: u64,
    /// Given up, but GPU work may still use it.
    pub limbo_bytes: u64,
    /// Owned and mapped for nobody.
    pub stock_bytes: u64,
    /// All memory owned.
    pub held_bytes: u64,
    /// Highest held bytes since the start or the last reset.
    pub peak_held_bytes: u64,
    /// The hard limit.
    pub limit_bytes: u64,
    /// What it lends at most to those that borrow.
    pub lending_bytes: u64,
    /// What of that they have; the rest of the elastic bytes was placed here by name.
    pub lending_booked_bytes: u64,
    /// Memory that came from the stock and was zeroed for an elastic buffer that must not see what
    /// others wrote, since the start.
    pub scrubbed_bytes: u64,
}

impl HostStats {
    /// Whether the columns add up.
    pub fn adds_up(&self) -> bool {
        self.elastic_bytes + self.limbo_bytes + self.stock_bytes == self.held_bytes
    }
}

/// The figures of all devices of a pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolStats {
    /// One entry a device, in the order the builder was given.
    pub devices: Vec<(DeviceId, DeviceStats)>,
    /// One entry a host node that may give memory.
    pub hosts: Vec<HostStats>,
    /// What balance does, if it is on.
    pub balance: Option<BalanceStats>,
    /// What a panic of some thread has broken; what it holds counts as limbo, or as elastic.
    pub broken: Vec<Broken>,
    /// How often a thread of the pool panicked in its work (count). It goes on with what comes next.
    pub thread_panics: u64,
}
