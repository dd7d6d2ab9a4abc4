//! [`Stock`]: chunks made ahead of need and not mapped. The free list of a device.
//!
//! Keyed by length; all chunks of one stock have the properties of their device's plan. A chunk
//! that was mapped before is *warm*: mapping it again costs a third.

use std::collections::BTreeMap;
use vmm_sys::object::Chunk;

#[derive(Debug, Default)]
struct Shelf {
    warm: Vec<Chunk>,
    fresh: Vec<Chunk>,
}

/// The free list of a device.
#[derive(Debug, Default)]
pub(crate) struct Stock {
    shelves: BTreeMap<u64, Shelf>,
    bytes: u64,
}

impl Stock {
    /// Bytes on the shelf.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn put(&mut self, chunk: Chunk, warm: bool) {
        self.bytes += chunk.bytes();
        let shelf = self.shelves.entry(chunk.bytes()).or_default();
        if warm { shelf.warm.push(chunk) } else { shelf.fresh.push(chunk) }
    }

    /// A chunk of exactly `bytes`, a warm one first.
    pub(crate) fn take(&mut self, bytes: u64) -> Option<Chunk> {
        let shelf = self.shelves.get_mut(&bytes)?;
        let chunk = shelf.warm.pop().or_else(|| shelf.fresh.pop())?;
        self.bytes -= bytes;
        Some(chunk)
    }

    /// Some chunk, a fresh and long one first.
    pub(crate) fn take_any(&mut self) -> Option<Chunk> {
        for (bytes, shelf) in self.shelves.iter_mut().rev() {
            if let Some(chunk) = shelf.fresh.pop().or_else(|| shelf.warm.pop()) {
                self.bytes -= bytes;
                return Some(chunk);
            }
        }
        None
    }

    /// Lengths and how many there are of each, ascending.
    pub(crate) fn counts(&self) -> impl Iterator<Item = (u64, usize)> + '_ {
        self.shelves.iter().map(|(bytes, s)| (*bytes, s.warm.len() + s.fresh.len()))
    }
}
