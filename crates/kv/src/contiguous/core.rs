//! [`Core`]: the cache behind its handles. Memory comes, is written down, and goes; all of it with the
//! hands.

use std::sync::Arc;

use vmm_pool::{Error, Growth};

use super::books::{Books, Use};
use super::geometry::Geometry;
use super::slot::Slot;
use crate::error::KvError;
use crate::grower::Chores;
use crate::hands::Held;
use crate::memory::{Form, Memory, Need, count};
use crate::sync::{Mutex, MutexGuard};

/// What the handles, the sequences and the thread share.
#[derive(Debug)]
pub(super) struct Core {
    pub(super) geometry: Geometry,
    pub(super) memory: Memory,
    pub(super) slots: Vec<Arc<Slot>>,
    /// Never locked at the driver.
    books: Mutex<Books>,
    pub(super) ahead_tokens: u64,
    /// Of memory that no open sequence has, in chunks of one part.
    keep_idle_chunks: u64,
    /// How much more than it needs a sequence may find in its slot, in chunks of one part.
    spare_chunks: u64,
}

/// What a sequence that opens in a warm slot finds beyond its need and what is to lie ahead. More of it
/// would be nobody's: neither tokens' nor idle.
const SPARE_CHUNKS: u64 = 8;

impl Core {
    pub(super) fn new(
        geometry: Geometry,
        memory: Memory,
        sequences: u32,
        ahead_tokens: u64,
        keep_idle_bytes: u64,
    ) -> Core {
        let keep_idle_chunks = keep_idle_bytes / geometry.bytes(1);
        // Where all that idles is to be kept, so is what a slot has too much.
        let all_chunks = geometry.chunks_for(geometry.max_tokens()) * u64::from(sequences);
        let keeps_all = keep_idle_chunks >= all_chunks;
        let spare_chunks = if keeps_all { u64::MAX } else { SPARE_CHUNKS };
        let slots = (0..sequences).map(|_| Arc::default()).collect();
        let books = Mutex::new(Books::new(sequences));
        Core { geometry, memory, slots, books, ahead_tokens, keep_idle_chunks, spare_chunks }
    }

    pub(super) fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock()
    }

    pub(super) fn slot(&self, slot: u32) -> &Arc<Slot> {
        &self.slots[slot as usize]
    }

    /// Chunks of each part for a sequence of `tokens` and what is to lie ahead of them.
    pub(super) fn chunks_ahead(&self, tokens: u64) -> u64 {
        self.geometry.chunks_for(tokens.saturating_add(self.ahead_tokens))
    }

    /// Has what was put off done by the thread, or here if there is none.
    pub(super) fn wake(&self) {
        if !self.memory.bell.ring() {
            self.work();
        }
    }

    /// Does what was put off, unless somebody is at it.
    fn work(&self) {
        if let Some(held) = self.memory.hands.try_take() {
            self.do_all(&held);
        }
    }

    fn do_all(&self, held: &Held<'_>) {
        self.tidy(held);
        self.serve_asks(held);
        // Who asked may be gone when it comes.
        self.tidy(held);
    }

    /// Takes away what nobody has, but for what is to be kept.
    fn tidy(&self, held: &Held<'_>) {
        self.collect(held);
        self.give_idle(held, self.geometry.bytes(self.keep_idle_chunks));
    }

    /// Does what was put off, and waits for who is at it.
    pub(super) fn settle(&self) -> Result<(), Error> {
        let held = self.memory.hands.take()?;
        self.do_all(&held);
        Ok(())
    }

    /// Opens a slot for a sequence of `tokens`, for which memory stands afterwards.
    pub(super) fn open(&self, tokens: u64) -> Result<u32, KvError> {
        let slot = self.open_for(tokens)?;
        if let Err(error) = self.need(slot, tokens) {
            self.leave(slot);
            return Err(error);
        }
        let has_work = self.books().has_rest(slot);
        if has_work {
            self.wake();
        }
        Ok(slot)
    }

    /// Opens a slot for a sequence that is to have `tokens`, and asks for the memory that is missing.
    pub(super) fn open_ahead(&self, tokens: u64) -> Result<u32, KvError> {
        let slot = self.open_for(tokens)?;
        let chunks = self.geometry.chunks_for(tokens);
        let has_work = {
            let mut books = self.books();
            let is_missing = books.stands(slot) < chunks;
            if is_missing {
                self.slot(slot).want(chunks);
                books.ask(slot);
            }
            is_missing || books.has_rest(slot)
        };
        if has_work {
            self.wake();
        }
        Ok(slot)
    }

    /// Opens a slot, a warm one if there is any. What that has far beyond `tokens` goes.
    fn open_for(&self, tokens: u64) -> Result<u32, KvError> {
        let chunks = self.geometry.chunks_for(tokens);
        let slot = self.open_slot(|books| books.open(chunks))?;
        let mut books = self.books();
        books.write_off(slot, self.chunks_ahead(tokens).saturating_add(self.spare_chunks));
        self.slot(slot).begin(0, books.stands(slot));
        Ok(slot)
    }

    /// Opens a slot that `choose` finds, after emptying those that were left if need be.
    pub(super) fn open_slot(
        &self,
        choose: impl Fn(&mut Books) -> Option<u32>,
    ) -> Result<u32, KvError> {
        let found = choose(&mut self.books());
        if let Some(slot) = found {
            return Ok(slot);
        }
        let held = self.memory.hands.take()?;
        self.collect(&held);
        let mut books = self.books();
        let max_sequences = books.slots();
        choose(&mut books).ok_or(KvError::TooManySequences { max_sequences })
    }

    /// Opens a slot in which nothing stands.
    pub(super) fn open_empty(&self) -> Result<u32, KvError> {
        self.open_slot(Books::open_empty).or_else(|error| {
            let held = self.memory.hands.take()?;
            let has_one = self.books().write_off_one();
            if !has_one {
                return Err(error);
            }
            self.collect(&held);
            self.books().open_empty().ok_or(error)
        })
    }

    /// A sequence is gone. Makes no driver call if there is a thread for it.
    pub(super) fn leave(&self, slot: u32) {
        let has_work = {
            let mut books = self.books();
            self.slot(slot).begin(0, 0);
            books.leave(slot);
            books.has_work(self.keep_idle_chunks)
        };
        if has_work {
            self.wake();
        }
    }

    /// Has memory for `tokens` of a sequence stand, whatever it takes.
    pub(super) fn need(&self, slot: u32, tokens: u64) -> Result<(), KvError> {
        let chunks = self.geometry.chunks_for(tokens);
        {
            // What stands from earlier is as good.
            let books = self.books();
            if books.stands(slot) >= chunks && !books.rest_is_linked(slot) {
                self.publish(&books, slot);
                return Ok(());
            }
        }
        let stands = self.books().stands(slot);
        let missing = chunks.saturating_sub(stands);
        let tokens = tokens.saturating_sub(self.geometry.tokens_in(stands));
        let need = Need { tokens, bytes: self.geometry.bytes(missing) };
        self.with_room(need, |held| {
            if self.grow(held, &[(slot, chunks)])? > 0 {
                count(&self.memory.counts.foreground_growths);
            }
            Ok(())
        })
    }

    /// Commits what is missing, for all of them or for none. Returns the bytes.
    fn grow(&self, held: &Held<'_>, wants: &[(u32, u64)]) -> Result<u64, Error> {
        let mut ranges = Vec::new();
        for &(slot, chunks) in wants {
            let is_linked = self.books().rest_is_linked(slot);
            if is_linked {
                self.take_rest(held, slot)?;
            }
            let stands = self.books().stands(slot);
            ranges.extend(self.geometry.ranges(slot, stands..chunks.max(stands)));
        }
        let growth = self.memory.lending.apply(Growth::ranges(ranges));
        let grown = self.memory.buffer.grow(growth)?;
        let mut books = self.books();
        for &(slot, chunks) in wants {
            // It was cut short meanwhile: what came is taken away with the rest.
            if books.rest_is_linked(slot) {
                continue;
            }
            let stands = books.stands(slot).max(chunks);
            books.set_stands(slot, stands);
            if !grown.borrowed.is_empty() {
                books.borrows(slot);
            }
            self.publish(&books, slot);
        }
        Ok(grown.bytes)
    }

    /// Tells a slot's sequence what stands.
    pub(super) fn publish(&self, books: &Books, slot: u32) {
        if books.used(slot) == Use::Open {
            self.slot(slot).set_usable_chunks(books.stands(slot));
        }
    }

    /// Grows those who asked ahead of need: together, else one by one. Nobody is pressed for it.
    fn serve_asks(&self, held: &Held<'_>) {
        loop {
            let asks = self.books().take_asks();
            if asks.is_empty() {
                return;
            }
            let wanted = |slot: u32| (slot, self.slot(slot).wanted_chunks());
            let asks: Vec<(u32, u64)> = asks.into_iter().map(wanted).collect();
            let mut wants = asks.clone();
            wants.retain(|&(slot, chunks)| chunks > self.books().stands(slot));
            self.grow_ahead(held, &wants);
            let mut books = self.books();
            for (slot, chunks) in asks {
                // Who wants more meanwhile has not asked again.
                if !self.slot(slot).end_wait(chunks) {
                    books.ask(slot);
                }
            }
        }
    }

    /// Gives so much of the cache's own idle memory back that `bytes` can be had, if there is as much.
    fn make_idle_go(&self, held: &Held<'_>, bytes: u64) -> bool {
        let missing_bytes = bytes.saturating_sub(self.memory.room_bytes());
        let idle_bytes = self.geometry.bytes(self.books().idle());
        idle_bytes >= missing_bytes
            && self.give_idle(held, idle_bytes - missing_bytes) >= missing_bytes
            && self.memory.has_room(bytes)
    }

    fn grow_ahead(&self, held: &Held<'_>, wants: &[(u32, u64)]) {
        let missing = |&(slot, chunks): &(u32, u64)| {
            self.geometry.bytes(chunks.saturating_sub(self.books().stands(slot)))
        };
        let has_room = |wants: &[(u32, u64)]| {
            let bytes = wants.iter().map(missing).sum();
            self.memory.has_room(bytes) || self.make_idle_go(held, bytes)
        };
        let grow = |wants: &[(u32, u64)]| match self.grow(held, wants) {
            Ok(0) => true,
            Ok(_) => {
                count(&self.memory.counts.background_growths);
                true
            }
            Err(error) => {
                vmm_sys::say!(debug, %error, sequences = wants.len(), "no growth ahead");
                false
            }
        };
        if wants.is_empty() || has_room(wants) && grow(wants) {
            return;
        }
        for want in wants {
            // Where there is none for one there is none for others.
            if !has_room(&[*want]) || !grow(&[*want]) {
                break;
            }
        }
    }

    /// Takes away what is behind the chunks that stand in a slot.
    pub(super) fn take_rest(&self, _held: &Held<'_>, slot: u32) -> Result<(), Error> {
        let stands = self.books().stands(slot);
        if stands == 0 {
            self.memory.buffer.decommit(self.geometry.span(slot))?;
        } else {
            for range in self.geometry.beyond(slot, stands) {
                self.memory.buffer.decommit(range)?;
            }
        }
        self.books().rest_is_gone(slot, stands);
        Ok(())
    }

    /// Takes away all that stands in a slot whose sequence is gone.
    fn empty(&self, slot: u32) -> Result<(), Error> {
        self.memory.buffer.decommit(self.geometry.span(slot))?;
        self.books().is_emptied(slot);
        Ok(())
    }

    /// Takes away what was written off, and what the next sequence has no use for. What cannot be
    /// taken now, since the cache sleeps for example, is tried again later.
    fn collect_all(&self, held: &Held<'_>) -> Result<(), Error> {
        let (left, rests) = {
            let books = self.books();
            (books.left(), books.rests())
        };
        left.into_iter().try_for_each(|slot| self.empty(slot))?;
        for slot in rests {
            if self.books().has_rest(slot) {
                self.take_rest(held, slot)?;
            }
        }
        Ok(())
    }
}

impl Form for Core {
    fn memory(&self) -> &Memory {
        &self.memory
    }

    fn collect(&self, held: &Held<'_>) {
        if let Err(error) = self.collect_all(held) {
            vmm_sys::say!(debug, %error, "memory that sequences left is taken away later");
        }
    }

    fn give_idle(&self, held: &Held<'_>, keep_bytes: u64) -> u64 {
        let keep = keep_bytes / self.geometry.bytes(1);
        let mut given = 0;
        loop {
            let chunks = self.books().write_off_idle(keep);
            let Some(chunks) = chunks else { break };
            given += self.geometry.bytes(chunks);
        }
        if given > 0 {
            self.collect(held);
        }
        given
    }
}

impl Chores for Core {
    fn do_chores(&self) {
        if self.settle().is_err() {
            vmm_sys::say!(debug, "growth ahead waits for another change");
        }
    }
}
