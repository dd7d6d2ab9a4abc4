//! [`Depot`]: the physical memory of one place, a device or a host NUMA node: what is owned, booked
//! before it is made, and what of it stands ready.
//!
//! The only door to physical memory: nothing else creates and releases chunks.

use std::sync::Arc;

use vmm_sys::object::{Chunk, Mapping, Range};
use vmm_sys::{AccessGrant, ChunkProps, DeviceId, Driver, DriverError};

use crate::account::Account;
use crate::budget::Budget;
use crate::carries::Carries;
use crate::idle::Clock;
use crate::landing::{Landing, Spare};
use crate::leaving::Leaving;
use crate::lending::Lending;
use crate::obstacle;
use crate::past::{self, Past};
use crate::stock::{Stock, Taken};
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::turn::Turn;

/// What is fixed about a place when the pool is built.
#[derive(Clone, Debug)]
pub(crate) struct Terms {
    /// Plain chunks there: the kind that is made ahead of need.
    pub(crate) plain: ChunkProps,
    /// Who is granted a chunk when it is mapped once to warm it.
    pub(crate) warmer: DeviceId,
    /// The shortest plain chunk.
    pub(crate) granularity_bytes: u64,
    /// The length of chunks made ahead of need.
    pub(crate) stock_chunk_bytes: u64,
    pub(crate) limit_bytes: u64,
    pub(crate) stock_high_bytes: u64,
    /// What buffers whose home is elsewhere may borrow.
    pub(crate) lends_bytes: u64,
    /// Those that name no lender included.
    pub(crate) lends_to_any: bool,
}

/// The physical memory of one place.
#[derive(Debug)]
pub(crate) struct Depot {
    driver: Arc<dyn Driver>,
    pub(crate) terms: Terms,
    pub(crate) stock: Mutex<Stock>,
    /// Mappings of chunks of this place that belong to nobody any more.
    pub(crate) leaving: Leaving,
    /// Chunks that stand ready for contents: of a node of the host.
    pub(crate) landing: Landing,
    /// Physical bytes owned, booked before they are made.
    pub(crate) account: Arc<Account>,
    /// Of these, at the addresses of elastic buffers, and behind peer anchors.
    elastic_bytes: Arc<AtomicU64>,
    anchor_bytes: AtomicU64,
    /// What was zeroed for its next user.
    scrubbed_bytes: AtomicU64,
    /// What of it is in buffers whose home is elsewhere, and the other way round.
    pub(crate) lending: Arc<Lending>,
    /// Memory in threads' hands.
    pub(crate) carries: Carries,
}

/// A chunk of an elastic buffer: counted as such as long as this lives, once in however many slots it
/// stands.
#[derive(Debug)]
pub(crate) struct Footing {
    sum_bytes: Arc<AtomicU64>,
    bytes: u64,
}

impl Drop for Footing {
    fn drop(&mut self) {
        self.sum_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
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

impl Depot {
    pub(crate) fn new(
        driver: Arc<dyn Driver>,
        terms: Terms,
        budget: Option<Budget>,
        clock: Clock,
    ) -> Depot {
        Depot {
            account: Account::new(terms.limit_bytes, budget),
            lending: Lending::new(terms.lends_bytes, terms.lends_to_any),
            driver,
            terms,
            stock: Mutex::new(Stock::new(clock)),
            leaving: Leaving::default(),
            landing: Landing::default(),
            elastic_bytes: Arc::default(),
            anchor_bytes: AtomicU64::new(0),
            scrubbed_bytes: AtomicU64::new(0),
            carries: Carries::default(),
        }
    }

    pub(crate) fn held_bytes(&self) -> u64 {
        self.account.held_bytes()
    }

    /// Bytes of the chunks at the addresses of elastic buffers.
    pub(crate) fn elastic_bytes(&self) -> u64 {
        self.elastic_bytes.load(Ordering::Relaxed)
    }

    /// Counts a chunk of `bytes` as one of an elastic buffer.
    pub(crate) fn footing(&self, bytes: u64) -> Footing {
        self.elastic_bytes.fetch_add(bytes, Ordering::Relaxed);
        Footing { sum_bytes: self.elastic_bytes.clone(), bytes }
    }

    /// Bytes behind peer anchors.
    pub(crate) fn anchor_bytes(&self) -> u64 {
        self.anchor_bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn anchors_grew(&self, bytes: u64) {
        self.anchor_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn anchors_shrank(&self, bytes: u64) {
        self.anchor_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Bytes that were zeroed for their next user, since the start.
    pub(crate) fn scrubbed_bytes(&self) -> u64 {
        self.scrubbed_bytes.load(Ordering::Relaxed)
    }

    /// Counts `bytes` as zeroed.
    pub(crate) fn scrubbed(&self, bytes: u64) {
        self.scrubbed_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn peak_held_bytes(&self) -> u64 {
        self.account.peak_held_bytes()
    }

    /// Starts a new peak from the present figure.
    pub(crate) fn reset_peak(&self) {
        self.account.reset_peak();
    }

    /// Bytes that may still be made under the hard limit and the shared budget.
    pub(crate) fn room_bytes(&self) -> u64 {
        self.account.room_bytes()
    }

    /// The shared budget's limit, if it leaves less than the pool's own.
    pub(crate) fn binding_budget_bytes(&self) -> Option<u64> {
        self.account.binding_budget_bytes()
    }

    /// Creates a chunk. Its booking ends when the driver has taken it back.
    pub(crate) fn create(
        &self,
        bytes: u64,
        props: &ChunkProps,
        turn: Turn,
    ) -> Result<Chunk, Shortage> {
        let booking = self.account.book(bytes).ok_or(Shortage::Limit)?;
        let made = turn.with(|| Chunk::create(&self.driver, bytes, props));
        let chunk = made.map_err(Shortage::Driver)?;
        self.account.note_peak();
        Ok(chunk.with_receipt(Past::new(booking)))
    }

    /// Gives a chunk's memory back to the driver. If the driver refuses, it takes memory as before
    /// and goes to the shelf, whatever that may hold.
    pub(crate) fn release(&self, chunk: Chunk, turn: Turn) {
        if let Err(chunk) = try_release(chunk, turn) {
            self.stock.lock().put(chunk, true);
        }
    }

    /// Settles a chunk that one of its mappings gave back: while another mapping holds it,
    /// nothing happens; the last one puts it on the shelf, or releases it if the shelf is full, or if
    /// another process may have it.
    pub(crate) fn settle(&self, chunk: Arc<Chunk>, turn: Turn) {
        // `into_inner` gives the chunk to exactly one of two threads that settle at once.
        let Some(chunk) = Arc::into_inner(chunk) else { return };
        let overflow = {
            let mut stock = self.stock.lock();
            let has_room = stock.bytes() + chunk.bytes() <= self.terms.stock_high_bytes;
            if has_room && !past::is_outside(&chunk) {
                stock.put(chunk, true);
                None
            } else {
                Some(chunk)
            }
        };
        if let Some(chunk) = overflow {
            self.release(chunk, turn);
        }
    }

    /// Releases chunks of the shelf until it holds at most `keep_bytes`, as far as the driver takes
    /// them back. Returns the bytes given back.
    pub(crate) fn release_stock(&self, keep_bytes: u64, turn: Turn) -> u64 {
        if keep_bytes == 0 {
            self.clear_landing(turn);
        }
        self.release_old_stock(u64::MAX, keep_bytes, turn)
    }

    /// Unmaps what nobody uses, and gives its chunk. What the driver refuses is tried again later, and
    /// gives nothing.
    pub(crate) fn unmap(&self, mapping: Mapping, turn: Turn) -> Option<Arc<Chunk>> {
        let (mapping, error) = match turn.with(|| mapping.unmap()) {
            Ok(chunk) => return Some(chunk),
            Err(refused) => refused,
        };
        obstacle::tell(&error, "a mapping could not be unmapped");
        self.leaving.add(std::iter::once(mapping), Vec::new());
        None
    }

    /// Puts what stands ready for contents on the shelf.
    fn clear_landing(&self, turn: Turn) {
        let _carrying = self.carries.begin();
        while let Some(Spare { mapping, .. }) = self.landing.take_any() {
            if let Some(chunk) = self.unmap(mapping, turn) {
                self.settle(chunk, turn);
            }
        }
    }

    /// The same, but only chunks that came to the shelf at `since_ms` or before.
    pub(crate) fn release_old_stock(&self, since_ms: u64, keep_bytes: u64, turn: Turn) -> u64 {
        let _carrying = self.carries.begin();
        let mut given = 0;
        let mut refused = Vec::new();
        loop {
            let taken = self.stock.lock().take_old(since_ms, keep_bytes);
            let Some(Taken { chunk, warm, came_ms }) = taken else { break };
            let bytes = chunk.bytes();
            match try_release(chunk, turn) {
                Ok(()) => given += bytes,
                Err(chunk) => refused.push(Taken { chunk, warm, came_ms }),
            }
        }
        let mut stock = self.stock.lock();
        refused.into_iter().for_each(|taken| stock.put_back(taken));
        given
    }

    /// Gives back plain chunks of the shelf, so that `bytes` can be made in other lengths: no chunk more
    /// than that takes, and `keep_bytes` stay there.
    pub(crate) fn release_for(&self, bytes: u64, keep_bytes: u64, turn: Turn) {
        let _carrying = self.carries.begin();
        let mut missing_bytes = bytes;
        while missing_bytes > 0 {
            let chunk = self.stock.lock().take_near(&self.terms.plain, missing_bytes, keep_bytes);
            let Some(chunk) = chunk else { return };
            missing_bytes = missing_bytes.saturating_sub(chunk.bytes());
            self.release(chunk, turn);
        }
    }

    /// Makes chunks for the shelf until it holds `bytes`, long ones first: near `most_bytes` and
    /// near the limit they become shorter. Beyond `most_bytes` it comes by less than the shortest chunk,
    /// whoever else fills it meanwhile. Returns the bytes made.
    pub(crate) fn stock_up(
        &self,
        bytes: u64,
        most_bytes: u64,
        turn: Turn,
        stopped: &dyn Fn() -> bool,
    ) -> Result<u64, Shortage> {
        let (shortest, longest) = (self.terms.granularity_bytes, self.terms.stock_chunk_bytes);
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
            made += self.stock_one(chunk_bytes, most_bytes, turn)?;
        }
        Ok(made)
    }

    /// Makes one chunk of `bytes` for the shelf and maps it once, so that mapping it again is the
    /// cheap kind. A chunk is as good without: a failure of the warming is an error only if it
    /// keeps the chunk off the shelf. Returns the bytes that came to the shelf: none if others have filled
    /// it meanwhile.
    fn stock_one(&self, bytes: u64, most_bytes: u64, turn: Turn) -> Result<u64, Shortage> {
        let _carrying = self.carries.begin();
        let chunk = Arc::new(self.create(bytes, &self.terms.plain, turn)?);
        match self.warm(&chunk, turn) {
            Ok(warm) => {
                let Some(chunk) = Arc::into_inner(chunk) else { return Ok(bytes) };
                let mut stock = self.stock.lock();
                // The shortest one may pass the mark, which need not be a multiple of it.
                let is_shortest = bytes <= self.terms.granularity_bytes;
                let has_room = stock.bytes().saturating_add(bytes) <= most_bytes
                    || is_shortest && stock.bytes() < most_bytes;
                if has_room {
                    stock.put(chunk, warm);
                    return Ok(bytes);
                }
                drop(stock);
                self.release(chunk, turn);
                Ok(0)
            }
            Err(error) => {
                // Another thread may have unmapped it by now, and then nobody else has it.
                self.settle(chunk, turn);
                Err(Shortage::Driver(error))
            }
        }
    }

    fn warm(&self, chunk: &Arc<Chunk>, turn: Turn) -> Result<bool, DriverError> {
        let mapped = turn
            .with(|| Range::reserve(&self.driver, chunk.bytes(), 0, 0))
            .and_then(|range| turn.with(|| Mapping::map(&range, 0, chunk.clone())));
        let Ok(mapping) = mapped else { return Ok(false) };
        let grants = [AccessGrant::read_write(self.terms.warmer)];
        let granted = turn.with(|| mapping.set_access(&grants)).is_ok();
        match turn.with(|| mapping.unmap()) {
            Ok(_) => Ok(granted),
            Err((mapping, error)) => {
                obstacle::tell(&error, "a chunk could not be unmapped");
                self.leaving.add(std::iter::once(mapping), Vec::new());
                Err(error)
            }
        }
    }
}

/// Gives a chunk back to the driver, or to the caller if the driver refuses.
fn try_release(chunk: Chunk, turn: Turn) -> Result<(), Chunk> {
    turn.with(|| chunk.release()).map_err(|(chunk, error)| {
        obstacle::tell(&error, "the driver refused to take a chunk back");
        chunk
    })
}
