//! [`Device`]: what one GPU's lanes share: the stock of chunks, the budget, events, the lanes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use vmm_sys::object::{Chunk, Event, Mapping, Range, RelaxedCapture, Stream};
use vmm_sys::{Driver, DriverError};

use crate::budget::Budget;
use crate::capture;
use crate::config::Plan;
use crate::error::Error;
use crate::idle::{Clock, Watch};
use crate::ladder::{Callback, LadderCounts, Reliefs};
use crate::lane::{LaneState, Wait};
use crate::lanes::{LaneRef, Lanes};
use crate::leaving::Leaving;
use crate::stats::DeviceStats;
use crate::stock::Stock;
use crate::turn::Turn;

/// Events kept for reuse: making one costs more than recording it.
const SPARE_EVENTS_MAX: usize = 64;

/// One device's side of a pool.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) driver: Arc<dyn Driver>,
    pub(crate) plan: Plan,
    pub(crate) stock: Mutex<Stock>,
    pub(crate) lanes: Mutex<Lanes>,
    /// Physical bytes owned, booked before they are made.
    booked_bytes: AtomicU64,
    peak_booked_bytes: AtomicU64,
    /// Entries in limbo over all lanes: tells the background thread whether to look at lanes.
    limbo_entries: AtomicU64,
    spare_events: Mutex<Vec<Event>>,
    /// Mappings of no lane.
    pub(crate) leaving: Leaving,
    /// A limit shared with other pools.
    budget: Option<Budget>,
    pub(crate) callbacks: Vec<Callback>,
    pub(crate) reliefs: Reliefs,
    pub(crate) ladder: LadderCounts,
    /// The time, and when lanes are looked at.
    pub(crate) watch: Watch,
    /// Carries of [`Carrying`]: begun, and ended.
    carries_begun: AtomicU64,
    carries_ended: AtomicU64,
}

/// While it lives, memory is in a thread's hands: booked, but neither in a lane nor on the shelf.
#[derive(Debug)]
pub(crate) struct Carrying<'a>(&'a Device);

impl Drop for Carrying<'_> {
    fn drop(&mut self) {
        self.0.carries_ended.fetch_add(1, Ordering::AcqRel);
    }
}

/// Why a chunk could not be had.
#[derive(Debug)]
pub(crate) enum Shortage {
    /// The pool's own limit.
    Limit,
    /// The driver's refusal.
    Driver(DriverError),
}

impl Device {
    pub(crate) fn new(
        driver: Arc<dyn Driver>,
        plan: Plan,
        budget: Option<Budget>,
        callbacks: Vec<Callback>,
        reliefs: Reliefs,
        clock: Clock,
    ) -> Device {
        Device {
            budget,
            callbacks,
            reliefs,
            ladder: LadderCounts::default(),
            driver,
            plan,
            stock: Mutex::new(Stock::new(clock.clone())),
            watch: Watch::new(clock),
            lanes: Mutex::new(Lanes::default()),
            booked_bytes: AtomicU64::new(0),
            peak_booked_bytes: AtomicU64::new(0),
            limbo_entries: AtomicU64::new(0),
            spare_events: Mutex::new(Vec::new()),
            leaving: Leaving::default(),
            carries_begun: AtomicU64::new(0),
            carries_ended: AtomicU64::new(0),
        }
    }

    /// Says that the calling thread takes memory into its hands.
    pub(crate) fn carry(&self) -> Carrying<'_> {
        self.carries_begun.fetch_add(1, Ordering::AcqRel);
        Carrying(self)
    }

    /// How often memory was carried; `None` while some thread does. Sums that were taken between
    /// two equal answers are of one moment.
    pub(crate) fn carries(&self) -> Option<u64> {
        let ended = self.carries_ended.load(Ordering::Acquire);
        (self.carries_begun.load(Ordering::Acquire) == ended).then_some(ended)
    }

    pub(crate) fn held_bytes(&self) -> u64 {
        self.booked_bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn peak_held_bytes(&self) -> u64 {
        self.peak_booked_bytes.load(Ordering::Relaxed)
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
            peak_held_bytes: self.peak_held_bytes(),
            limit_bytes: self.plan.limit_bytes,
            lanes: states.iter().filter(|state| !state.is_private).count() as u64,
            idle_lanes_emptied: self.watch.emptied(),
            ladder: self.ladder.stats(),
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
        // Read after the lanes were locked: memory that one of them maps was booked before.
        stats.held_bytes = self.held_bytes().max(mapped_bytes);
        stats.stock_bytes = stats.held_bytes - mapped_bytes;
        // What leaves may come to the shelf, and go from there, between the two answers.
        let leaving_bytes = self.leaving.bytes().min(stats.stock_bytes);
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
            state.live.peak_asked_bytes = state.live.asked_bytes;
        }
        self.peak_booked_bytes.store(self.held_bytes(), Ordering::Relaxed);
    }

    /// Bytes that may still be made under the hard limit and the shared budget.
    pub(crate) fn room_bytes(&self) -> u64 {
        let own = self.plan.limit_bytes.saturating_sub(self.held_bytes());
        self.budget.as_ref().map_or(own, |budget| own.min(budget.room_bytes()))
    }

    /// The shared budget's limit, if it leaves less than the pool's own.
    pub(crate) fn binding_budget_bytes(&self) -> Option<u64> {
        let own = self.plan.limit_bytes.saturating_sub(self.held_bytes());
        self.budget.as_ref().filter(|shared| shared.room_bytes() < own).map(Budget::limit_bytes)
    }

    /// Books memory before it is made, so that no two threads can overrun a limit together.
    fn book(&self, bytes: u64) -> bool {
        let limit = self.plan.limit_bytes;
        let sum = |held: u64| held.checked_add(bytes).filter(|sum| *sum <= limit);
        let relaxed = Ordering::Relaxed;
        if self.booked_bytes.fetch_update(relaxed, relaxed, sum).is_err() {
            return false;
        }
        let shared = self.budget.as_ref().is_none_or(|budget| budget.book(bytes));
        if !shared {
            self.booked_bytes.fetch_sub(bytes, relaxed);
        }
        shared
    }

    fn unbook(&self, bytes: u64) {
        self.booked_bytes.fetch_sub(bytes, Ordering::Relaxed);
        if let Some(budget) = &self.budget {
            budget.unbook(bytes);
        }
    }

    /// Creates a chunk; the booking is undone if the driver refuses.
    pub(crate) fn create_chunk(&self, bytes: u64, turn: Turn) -> Result<Chunk, Shortage> {
        if !self.book(bytes) {
            return Err(Shortage::Limit);
        }
        match turn.with(|| Chunk::create(&self.driver, bytes, &self.plan.props)) {
            Ok(chunk) => {
                self.peak_booked_bytes.fetch_max(self.held_bytes(), Ordering::Relaxed);
                Ok(chunk)
            }
            Err(error) => {
                self.unbook(bytes);
                Err(Shortage::Driver(error))
            }
        }
    }

    /// Gives a chunk's memory back to the driver.
    fn release_chunk(&self, chunk: Chunk, turn: Turn) {
        let bytes = chunk.bytes();
        turn.with(|| drop(chunk));
        self.unbook(bytes);
    }

    /// Settles a chunk that one of its mappings gave back: while another mapping holds it,
    /// nothing happens; the last one puts it on the shelf, or releases it if the shelf is full.
    pub(crate) fn settle(&self, chunk: Arc<Chunk>, turn: Turn) {
        // `into_inner` gives the chunk to exactly one of two threads that settle at once.
        let Some(chunk) = Arc::into_inner(chunk) else { return };
        let overflow = {
            let mut stock = self.stock.lock();
            if stock.bytes() + chunk.bytes() <= self.plan.stock_high_bytes {
                stock.put(chunk, true);
                None
            } else {
                Some(chunk)
            }
        };
        if let Some(chunk) = overflow {
            self.release_chunk(chunk, turn);
        }
    }

    /// Releases chunks of the shelf until it holds at most `keep_bytes`. Returns the bytes given
    /// back.
    pub(crate) fn release_stock(&self, keep_bytes: u64, turn: Turn) -> u64 {
        self.release_old_stock(u64::MAX, keep_bytes, turn)
    }

    /// The same, but only chunks that came to the shelf at `since_ms` or before.
    pub(crate) fn release_old_stock(&self, since_ms: u64, keep_bytes: u64, turn: Turn) -> u64 {
        let _carrying = self.carry();
        self.leaving.sweep(self, Wait::No, turn);
        let mut given = 0;
        loop {
            let chunk = self.stock.lock().take_old(since_ms, keep_bytes);
            let Some(chunk) = chunk else { return given };
            given += chunk.bytes();
            self.release_chunk(chunk, turn);
        }
    }

    /// Makes chunks for the shelf until it holds `bytes`, long ones first: near `most_bytes` and
    /// near the limit they become shorter. Returns the bytes made.
    pub(crate) fn stock_up(
        &self,
        bytes: u64,
        most_bytes: u64,
        turn: Turn,
        stopped: &dyn Fn() -> bool,
    ) -> Result<u64, Shortage> {
        let (shortest, longest) = (self.plan.granularity_bytes, self.plan.stock_chunk_bytes());
        let mut made = 0;
        while !stopped() {
            let shelf = self.stock.lock().bytes();
            if shelf >= bytes {
                break;
            }
            let room = self.room_bytes().min(most_bytes.saturating_sub(shelf).max(shortest));
            if room < shortest {
                return Err(Shortage::Limit);
            }
            let chunk_bytes = longest.min(1 << room.ilog2());
            self.stock_one(chunk_bytes, turn)?;
            made += chunk_bytes;
        }
        Ok(made)
    }

    /// Makes one chunk of `bytes` for the shelf and maps it once, so that mapping it again is the
    /// cheap kind. A chunk is as good without: a failure of the warming is an error only if it
    /// keeps the chunk off the shelf.
    fn stock_one(&self, bytes: u64, turn: Turn) -> Result<(), Shortage> {
        let _carrying = self.carry();
        let chunk = Arc::new(self.create_chunk(bytes, turn)?);
        let warm = self.warm(&chunk, turn).map_err(Shortage::Driver)?;
        if let Some(chunk) = Arc::into_inner(chunk) {
            self.stock.lock().put(chunk, warm);
        }
        Ok(())
    }

    fn warm(&self, chunk: &Arc<Chunk>, turn: Turn) -> Result<bool, DriverError> {
        let mapped = turn
            .with(|| Range::reserve(&self.driver, chunk.bytes(), 0, 0))
            .and_then(|range| turn.with(|| Mapping::map(&range, 0, chunk.clone())));
        let Ok(mapping) = mapped else { return Ok(false) };
        let granted = turn.with(|| mapping.set_access(&self.plan.grants)).is_ok();
        match turn.with(|| mapping.unmap()) {
            Ok(_) => Ok(granted),
            Err((mapping, error)) => {
                tracing::warn!(%error, "a chunk could not be unmapped; tried again later");
                self.leaving.add(self, std::iter::once(mapping), Vec::new());
                Err(error)
            }
        }
    }

    /// Counts entries that came to a lane's limbo.
    pub(crate) fn limbo_grew(&self, entries: usize) {
        self.limbo_entries.fetch_add(entries as u64, Ordering::Relaxed);
    }

    /// Counts entries that left a lane's limbo.
    pub(crate) fn limbo_shrank(&self, entries: usize) {
        self.limbo_entries.fetch_sub(entries as u64, Ordering::Relaxed);
    }

    /// Whether any lane has something in limbo.
    pub(crate) fn has_limbo(&self) -> bool {
        self.limbo_entries.load(Ordering::Relaxed) != 0
    }

    /// An event recorded on `stream` now, or `None` while the stream is being captured: an event
    /// recorded there would become part of the graph and die with it. For the default stream of
    /// another thread it is recorded on the legacy stream, which stands for it (row D-S2).
    pub(crate) fn gate(&self, stream: &Stream) -> Result<Option<Event>, Error> {
        // Held until the record is made: no capture scope opens on the stream meanwhile.
        let captures = capture::open();
        if captures.include(stream) {
            return Ok(None);
        }
        let _relaxed = RelaxedCapture::enter(&self.driver)?;
        if stream.capture_info()?.status != vmm_sys::CaptureStatus::None {
            return Ok(None);
        }
        // An event is of one device, and records only streams of it.
        let home = stream.device() == self.plan.device;
        let spare = if home { self.spare_events.lock().pop() } else { None };
        let event = match spare {
            Some(event) => event,
            None => Event::create(&self.driver, stream.device())?,
        };
        event.record(stream)?;
        Ok(Some(event))
    }

    /// Takes an event back whose gate has passed.
    pub(crate) fn spare(&self, event: Event) {
        if event.device() != self.plan.device {
            return;
        }
        let mut spare = self.spare_events.lock();
        if spare.len() < SPARE_EVENTS_MAX {
            spare.push(event);
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if !self.driver.is_gone() {
            self.leaving.end(self);
            self.release_stock(0, Turn::Requester);
        }
    }
}
