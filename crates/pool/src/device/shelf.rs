//! The device's stock: what comes to the shelf, what is made for it, and what goes back.

use std::sync::Arc;

use vmm_sys::DriverError;
use vmm_sys::object::{Chunk, Mapping, Range};

use super::{Device, Shortage};
use crate::lane::Wait;
use crate::stock::Stock;
use crate::turn::Turn;

impl Device {
    /// Settles a chunk that one of its mappings gave back: while another mapping holds it,
    /// nothing happens; the last one puts it on the shelf, or releases it if the shelf is full.
    pub(crate) fn settle(&self, chunk: Arc<Chunk>, turn: Turn) {
        // `into_inner` gives the chunk to exactly one of two threads that settle at once.
        let Some(chunk) = Arc::into_inner(chunk) else { return };
        let now_ms = self.watch.now_ms();
        let overflow = {
            let mut stock = self.stock.lock();
            if stock.bytes() + chunk.bytes() <= self.plan.stock_high_bytes {
                stock.put(chunk, true, now_ms);
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
        self.release(turn, &mut |stock| {
            if stock.bytes() <= keep_bytes { None } else { stock.take_any() }
        })
    }

    /// Releases chunks that have lain on the shelf since `since_ms` at least, until it holds at most
    /// `keep_bytes`. Returns the bytes given back.
    pub(crate) fn release_old_stock(&self, since_ms: u64, keep_bytes: u64, turn: Turn) -> u64 {
        self.release(turn, &mut |stock| {
            if stock.bytes() <= keep_bytes { None } else { stock.take_old(since_ms) }
        })
    }

    fn release(&self, turn: Turn, take: &mut dyn FnMut(&mut Stock) -> Option<Chunk>) -> u64 {
        let _carrying = self.carry();
        self.leaving.sweep(self, Wait::No, turn);
        let mut given = 0;
        loop {
            let chunk = take(&mut self.stock.lock());
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
            self.stock.lock().put(chunk, warm, self.watch.now_ms());
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
}
