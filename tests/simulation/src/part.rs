//! [`Part`]: an actor's slots of an elastic buffer, and what must be in them.

use std::sync::Arc;

use vmm_pool::Piece;
use vmm_sys::object::Stream;

use crate::kernels::Contents;
use crate::world::Elastic;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Backing {
    Absent,
    Committed,
    /// A call failed on the way.
    Unknown,
}

/// What a slot must hold.
#[derive(Clone, Debug)]
pub(crate) struct Known {
    pub(crate) version: u32,
    /// Or of one of these: written at its mate's address, which may be the same memory or not any more.
    pub(crate) or: Vec<u32>,
    /// Of the drops of contents: see `Elastic::epoch`.
    pub(crate) epoch: u32,
    /// The slot's generation when it was written.
    pub(crate) generation: u64,
    /// How often the buffer had woken by then.
    pub(crate) wakes: u32,
}

#[derive(Clone, Debug)]
pub(crate) struct Slot {
    pub(crate) backing: Backing,
    pub(crate) known: Option<Known>,
    /// The stream that used it last.
    pub(crate) last: Option<Stream>,
    /// The other slot that its chunk may stand in.
    pub(crate) mate: Option<usize>,
}

/// An actor's part of an elastic buffer.
pub(crate) struct Part {
    pub(crate) elastic: Arc<Elastic>,
    /// Its first slot.
    first: u64,
    pub(crate) slots: Vec<Slot>,
    /// Nobody else has a part.
    pub(crate) is_whole: bool,
    pub(crate) slot_bytes: u64,
}

impl Part {
    pub(crate) fn new(elastic: Arc<Elastic>, first: u64, slots: u64, is_whole: bool) -> Part {
        let slot = Slot { backing: Backing::Absent, known: None, last: None, mate: None };
        let slot_bytes = elastic.buffer.chunk_bytes();
        Part { elastic, first, slots: vec![slot; slots as usize], is_whole, slot_bytes }
    }

    /// The bytes of slots from `at` on, from the start of the buffer.
    pub(crate) fn bytes(&self, at: usize, count: usize) -> std::ops::Range<u64> {
        let start = (self.first + at as u64) * self.slot_bytes;
        start..start + count as u64 * self.slot_bytes
    }

    pub(crate) fn contents(&self, at: usize, version: u32) -> Contents {
        let address = self.elastic.buffer.address() + self.bytes(at, 1).start;
        Contents { address, bytes: self.slot_bytes, version }
    }

    pub(crate) fn piece(&self, at: usize) -> Option<Piece> {
        let offset = self.bytes(at, 1).start;
        self.elastic.buffer.pieces().into_iter().find(|piece| piece.offset == offset)
    }

    pub(crate) fn pick(&self, choice: u64, wanted: impl Fn(&Slot) -> bool) -> Option<usize> {
        let fit: Vec<usize> = (0..self.slots.len()).filter(|at| wanted(&self.slots[*at])).collect();
        (!fit.is_empty()).then(|| fit[choice as usize % fit.len()])
    }

    /// What must be in a slot, unless somebody dropped it.
    pub(crate) fn known(&self, at: usize) -> Option<Contents> {
        let known = self.slots[at].known.as_ref().filter(|known| known.or.is_empty())?;
        let is_kept = self.elastic.epoch() == Some(known.epoch);
        is_kept.then(|| self.contents(at, known.version))
    }

    pub(crate) fn last(&self, at: usize) -> Option<&Stream> {
        self.slots[at].last.as_ref()
    }

    /// The slot's memory came anew.
    pub(crate) fn came(&mut self, at: usize) {
        if self.slots[at].backing != Backing::Committed {
            let last = self.slots[at].last.take();
            self.slots[at] = Slot { backing: Backing::Committed, known: None, last, mate: None };
        }
    }

    pub(crate) fn went(&mut self, at: usize, backing: Backing) {
        self.part(at);
        self.slots[at].backing = backing;
        self.slots[at].known = None;
    }

    /// Two slots have chunks of their own from now on.
    pub(crate) fn part(&mut self, at: usize) {
        if let Some(mate) = self.slots[at].mate.take() {
            self.slots[mate].mate = None;
        }
    }

    /// The slot has these contents from now on, and its mate perhaps: a use that begins during a move is
    /// held, and nobody can say what it finds there.
    pub(crate) fn set(&mut self, at: usize, known: Option<Known>, stream: &Stream) {
        if let Some(mate) = self.slots[at].mate {
            let epoch = known.as_ref().map(|known| known.epoch);
            let mut mates = self.slots[mate].known.take();
            mates = mates.filter(|mates| Some(mates.epoch) == epoch);
            if let (Some(mates), Some(known)) = (&mut mates, &known) {
                mates.or.push(known.version);
            }
            self.slots[mate].known = mates;
            self.slots[mate].last = Some(stream.clone());
        }
        self.slots[at].known = known;
        self.slots[at].last = Some(stream.clone());
    }
}
