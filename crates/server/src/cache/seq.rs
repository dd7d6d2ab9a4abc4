//! [`Seq`]: a sequence of a cache of any form.

use vmm_kv::{KvError, PagedSequence, Sequence};

use super::{FixedSequence, HOST};

/// A sequence of a cache; dropping it frees it.
#[derive(Debug)]
pub enum Seq {
    /// A slot.
    Fixed(FixedSequence),
    /// Addresses in a row.
    Contiguous(Sequence),
    /// Blocks.
    Paged(PagedSequence),
}

impl Seq {
    /// Its address, if it has one.
    pub(super) fn address(&self) -> Option<u64> {
        match self {
            Seq::Fixed(sequence) => Some(sequence.address()),
            Seq::Contiguous(sequence) => Some(sequence.address()),
            Seq::Paged(_) => None,
        }
    }

    pub(super) fn paged(&self) -> Option<&PagedSequence> {
        match self {
            Seq::Paged(sequence) => Some(sequence),
            Seq::Fixed(_) | Seq::Contiguous(_) => None,
        }
    }

    /// Tokens that it has memory for.
    pub fn tokens(&self) -> u64 {
        match self {
            Seq::Fixed(sequence) => sequence.tokens(),
            Seq::Contiguous(sequence) => sequence.tokens(),
            Seq::Paged(sequence) => sequence.tokens(),
        }
    }

    /// Whether more tokens can be appended without waiting for memory.
    pub fn is_ready(&self, count: u64) -> bool {
        match self {
            Seq::Fixed(_) => true,
            Seq::Contiguous(sequence) => sequence.is_ready(count),
            Seq::Paged(sequence) => sequence.is_ready(count),
        }
    }

    /// Makes room for more tokens.
    ///
    /// # Errors
    /// As the form's `append`: [`KvError::NoMemory`] if there is none.
    pub fn append(&mut self, count: u64) -> Result<(), KvError> {
        match self {
            Seq::Fixed(sequence) => sequence.append(count).map(drop),
            Seq::Contiguous(sequence) => sequence.append(count).map(drop),
            Seq::Paged(sequence) => sequence.append(count).map(drop),
        }
    }

    /// Moves it to the host. False if the form cannot.
    ///
    /// # Errors
    /// The host has no room; the driver's.
    pub fn park(&mut self) -> Result<bool, KvError> {
        match self {
            Seq::Fixed(_) => Ok(false),
            Seq::Contiguous(sequence) => sequence.park(HOST).map(|_| true),
            Seq::Paged(sequence) => sequence.park().map(|_| true),
        }
    }

    /// Brings it back.
    ///
    /// # Errors
    /// [`KvError::NoMemory`] if there is no room.
    pub fn resume(&mut self) -> Result<(), KvError> {
        match self {
            Seq::Fixed(_) => Ok(()),
            Seq::Contiguous(sequence) => sequence.resume().map(drop),
            Seq::Paged(sequence) => sequence.resume().map(drop),
        }
    }
}
