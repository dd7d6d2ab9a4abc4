//! Other places for a sequence's memory: parked on the host while others need the device's, and back.

use vmm_pool::{Error, Move, Place};

use super::core::Core;
use super::sequence::Sequence;
use crate::error::KvError;
use crate::memory::{Form, Need};

impl Sequence {
    /// Moves its memory to another place, a node of the host for example, until
    /// [`resume`](Sequence::resume): addresses and contents stay, and the device has room for others. It
    /// cannot grow meanwhile. What it has in common with others it has for itself afterwards. Returns
    /// the bytes that moved.
    ///
    /// The whole cache is held while the memory moves, as by
    /// [`ElasticBuffer::migrate`](vmm_pool::ElasticBuffer::migrate): park between steps.
    ///
    /// # Errors
    /// It is as it was. As [`ElasticBuffer::migrate`](vmm_pool::ElasticBuffer::migrate).
    pub fn park(&mut self, place: impl Into<Place>) -> Result<u64, KvError> {
        let core = self.core();
        let bytes = {
            let held = core.memory.hands.take()?;
            core.collect(&held);
            core.relocate(self.number, place.into())?
        };
        self.set_parked(true);
        Ok(bytes)
    }

    /// Brings a parked sequence's memory to the cache's device. Returns the bytes that moved. Does
    /// nothing to one that is not parked.
    ///
    /// # Errors
    /// It stays parked. [`KvError::NoMemory`] after everything that could help was tried, hooks
    /// included; as [`ElasticBuffer::migrate`](vmm_pool::ElasticBuffer::migrate).
    pub fn resume(&mut self) -> Result<u64, KvError> {
        if !self.is_parked {
            return Ok(0);
        }
        let core = self.core();
        let bytes = core.geometry.bytes(core.books().stands(self.number));
        let need = Need { tokens: self.tokens(), bytes };
        let bytes = core.with_room(need, |_| {
            core.relocate(self.number, Place::Device(core.memory.buffer.device()))
        })?;
        self.set_parked(false);
        Ok(bytes)
    }

    fn set_parked(&mut self, is_parked: bool) {
        self.is_parked = is_parked;
        self.core().slot(self.number).set_parked(is_parked);
        self.look_again();
    }

    /// Whether it is parked.
    pub fn is_parked(&self) -> bool {
        self.is_parked
    }

    /// Moves its memory to another device, which keeps it usable there: it goes on growing at home.
    /// Otherwise as [`Sequence::park`].
    ///
    /// # Errors
    /// As [`Sequence::park`]; [`KvError::Parked`].
    pub fn migrate(&mut self, place: impl Into<Place>) -> Result<u64, KvError> {
        if self.is_parked {
            return Err(KvError::Parked);
        }
        let core = self.core();
        let held = core.memory.hands.take()?;
        core.collect(&held);
        Ok(core.relocate(self.number, place.into())?)
    }

    /// Where its memory lies, in bytes by place.
    pub fn places(&self) -> Vec<(Place, u64)> {
        let core = self.core();
        let span = core.geometry.span(self.number);
        let mut places: Vec<(Place, u64)> = Vec::new();
        for piece in core.memory.buffer.pieces() {
            if !span.contains(&piece.offset) {
                continue;
            }
            match places.iter_mut().find(|(place, _)| *place == piece.place) {
                Some((_, bytes)) => *bytes += piece.bytes,
                None => places.push((piece.place, piece.bytes)),
            }
        }
        places.sort_unstable();
        places
    }
}

impl Core {
    /// Moves all that stands in a slot. With the hands.
    fn relocate(&self, slot: u32, place: Place) -> Result<u64, Error> {
        let buffer = &self.memory.buffer;
        let moved = buffer.migrate(Move::to(place).range(self.geometry.span(slot)))?;
        let is_home = place == Place::Device(buffer.device());
        // A chunk that moved is nobody else's any more. One that lay there already may be.
        let is_linked = self.books().links.is_shared(slot);
        let pieces = if is_linked { buffer.pieces() } else { Vec::new() };
        let mut books = self.books();
        for chunk in 0..books.stands(slot) {
            let shared = |range: std::ops::Range<u64>| {
                let at = pieces.binary_search_by_key(&range.start, |piece| piece.offset);
                at.is_ok_and(|at| pieces[at].shared)
            };
            if !self.geometry.ranges(slot, chunk..chunk + 1).any(shared) {
                books.links.unlink_one(slot, chunk);
            }
        }
        books.set_elsewhere(slot, !is_home);
        Ok(moved.bytes)
    }
}
