//! What the soft limit goes by: what a device's lanes had alive, and what is held for them.

use crate::sync::atomic::Ordering;

use super::Device;

impl Device {
    /// Notes what the lanes together have alive.
    pub(crate) fn note_live(&self, live_bytes: u64) {
        self.peak_live_bytes.fetch_max(live_bytes, Ordering::Relaxed);
    }

    /// Counts a lane that a request of another one looks into.
    pub(crate) fn asks_a_lane(&self) {
        self.lanes_asked.fetch_add(1, Ordering::Relaxed);
    }

    /// The most that the lanes together had alive, as far as it was noted.
    pub(crate) fn peak_live_bytes(&self) -> u64 {
        self.peak_live_bytes.load(Ordering::Relaxed)
    }

    /// What is held for lanes: all but elastic buffers, anchors, and up to `shelf_bytes` of stock.
    pub(crate) fn held_for_lanes_bytes(&self, shelf_bytes: u64) -> u64 {
        let depot = &self.depot;
        let stock_bytes = depot.stock.lock().bytes().min(shelf_bytes);
        let others_bytes = depot.elastic_bytes() + depot.anchor_bytes() + stock_bytes;
        depot.held_bytes().saturating_sub(others_bytes)
    }
}
