//! [`Device`]: what one GPU's lanes share: the device's memory ([`Depot`]), events, the lanes.

mod thrift;

use std::sync::{Arc, OnceLock, Weak};

use vmm_sys::object::Chunk;
use vmm_sys::{Access, DeviceId, Driver, StreamId};

use crate::budget::Budget;
use crate::config::Plan;
use crate::depot::{Depot, Shortage};
use crate::events::Events;
use crate::idle::{Clock, Watch};
use crate::ladder::{Callbacks, LadderCounts, Reliefs};
use crate::lane::{LaneState, Wait, Wrecks};
use crate::lanes::{LaneRef, Lanes};
use crate::past::{self, User};
use crate::places::Places;
use crate::policy::Policy;
use crate::stats::DeviceStats;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::turn::Turn;

/// One device's side of a pool.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) driver: Arc<dyn Driver>,
    pub(crate) plan: Plan,
    /// Its physical memory.
    pub(crate) depot: Depot,
    pub(crate) lanes: Mutex<Lanes>,
    /// What is left of lanes that broke.
    pub(crate) wrecks: Wrecks,
    /// Elastic buffers whose home it is.
    pub(crate) elastic: ElasticCounts,
    /// Which other devices may use its memory, in mappings to come.
    pub(crate) policy: Policy,
    pub(crate) events: Arc<Events>,
    /// The most that all lanes together had alive, as requests found it that needed memory: what
    /// growth goes by.
    peak_live_bytes: AtomicU64,
    /// How often a request looked into another lane, under its lock.
    lanes_asked: AtomicU64,
    /// Entries in limbo over all lanes: tells the background thread whether to look at lanes.
    limbo_entries: AtomicU64,
    pub(crate) callbacks: Arc<Callbacks>,
    pub(crate) reliefs: Reliefs,
    pub(crate) ladder: LadderCounts,
    /// The time, and when lanes are looked at.
    pub(crate) watch: Watch,
    /// What its pool has elsewhere.
    places: OnceLock<Weak<Places>>,
}

/// The elastic buffers of a device in numbers.
#[derive(Debug, Default)]
pub(crate) struct ElasticCounts {
    buffers: AtomicU64,
    reserved_bytes: AtomicU64,
}

impl ElasticCounts {
    pub(crate) fn opened(&self, reserved_bytes: u64) {
        self.buffers.fetch_add(1, Ordering::Relaxed);
        self.reserved_bytes.fetch_add(reserved_bytes, Ordering::Relaxed);
    }

    pub(crate) fn closed(&self, reserved_bytes: u64) {
        self.buffers.fetch_sub(1, Ordering::Relaxed);
        self.reserved_bytes.fetch_sub(reserved_bytes, Ordering::Relaxed);
    }
}

impl Device {
    pub(crate) fn new(
        driver: Arc<dyn Driver>,
        plan: Plan,
        budget: Option<Budget>,
        callbacks: Arc<Callbacks>,
        reliefs: Reliefs,
        clock: Clock,
        policy: Vec<(DeviceId, Access)>,
    ) -> Device {
        let device = plan.device;
        Device {
            depot: Depot::new(driver.clone(), plan.terms(), budget, clock.clone()),
            events: Events::new(driver.clone(), device),
            callbacks,
            reliefs,
            ladder: LadderCounts::default(),
            driver,
            plan,
            watch: Watch::new(clock),
            places: OnceLock::new(),
            lanes: Mutex::new(Lanes::default()),
            wrecks: Wrecks::default(),
            elastic: ElasticCounts::default(),
            policy: Policy::new(device, policy),
            peak_live_bytes: AtomicU64::new(0),
            lanes_asked: AtomicU64::new(0),
            limbo_entries: AtomicU64::new(0),
        }
    }

    /// Says what its pool has elsewhere. Once.
    pub(crate) fn belongs_to(&self, places: &Arc<Places>) {
        let first = self.places.set(Arc::downgrade(places));
        debug_assert!(first.is_ok(), "a device belongs to one pool");
    }

    /// What its pool has elsewhere, unless that is at its end.
    pub(crate) fn places(&self) -> Option<Arc<Places>> {
        self.places.get().and_then(Weak::upgrade)
    }

    /// The figures now, all lanes locked together.
    pub(crate) fn stats(&self) -> DeviceStats {
        // Held on, so that two threads never lock the same lanes in two orders.
        let lanes = self.lanes.lock();
        let guards: Vec<_> = lanes.all().into_iter().filter_map(LaneRef::lock).collect();
        let states: Vec<&LaneState> = guards.iter().map(|guard| &**guard).collect();
        self.stats_of(&states)
    }

    /// The figures, given every lane's state under its lock.
    pub(crate) fn stats_of(&self, states: &[&LaneState]) -> DeviceStats {
        let mut stats = DeviceStats {
            peak_held_bytes: self.depot.peak_held_bytes(),
            limit_bytes: self.plan.limit_bytes,
            lanes: states.iter().filter(|state| !state.is_private).count() as u64,
            idle_lanes_emptied: self.watch.emptied(),
            lanes_asked: self.lanes_asked.load(Ordering::Relaxed),
            ladder: self.ladder.stats(),
            elastic_bytes: self.depot.elastic_bytes(),
            lent_bytes: self.depot.lending.lent_bytes(),
            borrowed_bytes: self.depot.lending.borrowed_bytes(),
            lending_bytes: self.depot.lending.budget_bytes(),
            lending_booked_bytes: self.depot.lending.booked_bytes(),
            anchor_bytes: self.depot.anchor_bytes(),
            scrubbed_bytes: self.depot.scrubbed_bytes(),
            elastic_buffers: self.elastic.buffers.load(Ordering::Relaxed),
            reserved_bytes: self.elastic.reserved_bytes.load(Ordering::Relaxed),
            ..DeviceStats::default()
        };
        let mut mapped_bytes = 0;
        for state in states {
            let live = &state.live;
            mapped_bytes += state.region.mapped_bytes();
            stats.live_bytes += live.asked_bytes;
            stats.rounding_bytes += live.block_bytes - live.asked_bytes;
            stats.limbo_bytes += state.limbo.block_bytes;
            stats.peak_live_bytes += live.peak_asked_bytes;
            stats.reserved_bytes += state.region.reserved_bytes();
            stats.buffers += live.buffers;
            stats.limbo_buffers += state.limbo.parked_count() as u64;
            stats.retired_mappings += state.limbo.retired_count() as u64;
            if state.is_private {
                let used_bytes = live.block_bytes + state.limbo.block_bytes;
                stats.private_bytes += state.region.mapped_bytes() - used_bytes;
            }
        }
        let used =
            stats.live_bytes + stats.rounding_bytes + stats.limbo_bytes + stats.private_bytes;
        stats.idle_bytes = mapped_bytes - used;
        let placed_bytes = mapped_bytes + stats.elastic_bytes + stats.anchor_bytes;
        // Read after the lanes were locked: memory that one of them maps was booked before.
        stats.held_bytes = self.depot.held_bytes().max(placed_bytes);
        stats.stock_bytes = stats.held_bytes - placed_bytes;
        // What leaves may come to the shelf, and go from there, between the two answers.
        let leaving_bytes = self.depot.leaving.bytes() + self.wrecked_bytes();
        let leaving_bytes = leaving_bytes.min(stats.stock_bytes);
        stats.limbo_bytes += leaving_bytes;
        stats.stock_bytes -= leaving_bytes;
        // A thread that is making memory has booked it, and notes the peak once it is made.
        stats.peak_held_bytes = stats.peak_held_bytes.max(stats.held_bytes);
        stats
    }

    /// Starts new peaks from the present figures.
    pub(crate) fn reset_peaks(&self) {
        let lanes = self.lanes.lock().all();
        for mut state in lanes.into_iter().filter_map(LaneRef::lock) {
            state.earlier_peak_bytes = state.peak_live_bytes();
            state.live.peak_asked_bytes = state.live.asked_bytes;
        }
        self.depot.reset_peak();
    }

    /// Creates a plain chunk, as lanes use them.
    pub(crate) fn create_chunk(&self, bytes: u64, turn: Turn) -> Result<Chunk, Shortage> {
        let chunk = self.depot.create(bytes, &self.plan.props, turn)?;
        past::note_user(&chunk, &User::Nameless);
        Ok(chunk)
    }

    /// Records what is still to be recorded on a stream: see [`Leaving::is_done_with`].
    ///
    /// [`Leaving::is_done_with`]: crate::leaving::Leaving::is_done_with
    pub(crate) fn is_done_with(&self, stream: StreamId) -> bool {
        self.depot.leaving.is_done_with(self, &self.depot, stream)
    }

    /// Unmaps what belongs to nobody any more and has passed its gates: see [`Leaving::sweep`].
    ///
    /// [`Leaving::sweep`]: crate::leaving::Leaving::sweep
    pub(crate) fn sweep_leaving(&self, wait: Wait, turn: Turn) {
        self.depot.leaving.sweep(self, &self.depot, wait, turn);
    }

    /// Releases the shelf, with what can come to it now, until it holds at most `keep_bytes`.
    /// Returns the bytes given back.
    pub(crate) fn release_stock(&self, keep_bytes: u64, turn: Turn) -> u64 {
        self.sweep_leaving(Wait::No, turn);
        self.depot.release_stock(keep_bytes, turn)
    }

    /// The same, but only chunks that came to the shelf at `since_ms` or before.
    pub(crate) fn release_old_stock(&self, since_ms: u64, keep_bytes: u64, turn: Turn) -> u64 {
        self.sweep_leaving(Wait::No, turn);
        self.depot.release_old_stock(since_ms, keep_bytes, turn)
    }

    /// Counts entries that came to a lane's limbo.
    pub(crate) fn limbo_grew(&self, entries: usize) {
        self.limbo_entries.fetch_add(entries as u64, Ordering::Relaxed);
    }

    /// Counts entries that left a lane's limbo.
    pub(crate) fn limbo_shrank(&self, entries: usize) {
        self.limbo_entries.fetch_sub(entries as u64, Ordering::Relaxed);
    }

    /// Whether anything is in limbo: in a lane, or on its way to the shelf.
    pub(crate) fn has_limbo(&self) -> bool {
        self.limbo_entries.load(Ordering::Relaxed) != 0 || !self.depot.leaving.is_empty()
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if !self.driver.is_gone() {
            self.wrecks.end(|mappings, gates| self.depot.leaving.add(mappings.into_iter(), gates));
            self.depot.leaving.end(self, &self.depot);
            self.release_stock(0, Turn::Requester);
        }
    }
}
