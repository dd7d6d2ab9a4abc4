//! [`Stock`]: chunks made ahead of need and not mapped. The free list of a device.
//!
//! Keyed by length; all chunks of one stock have the properties of their device's plan. A chunk
//! that was mapped before is *warm*: mapping it again costs a third.

use std::collections::BTreeMap;
use vmm_sys::object::Chunk;

use crate::idle::Clock;

/// Chunks of one length, those that came last behind, and when each came, in milliseconds.
#[derive(Debug, Default)]
struct Shelf {
    warm: Vec<(Chunk, u64)>,
    fresh: Vec<(Chunk, u64)>,
}

/// The free list of a device.
#[derive(Debug)]
pub(crate) struct Stock {
    shelves: BTreeMap<u64, Shelf>,
    bytes: u64,
    clock: Clock,
}

impl Stock {
    pub(crate) fn new(clock: Clock) -> Stock {
        Stock { shelves: BTreeMap::new(), bytes: 0, clock }
    }

    /// Bytes on the shelf.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn put(&mut self, chunk: Chunk, warm: bool) {
        let now_ms = self.clock.now_ms();
        self.bytes += chunk.bytes();
        let shelf = self.shelves.entry(chunk.bytes()).or_default();
        if warm { shelf.warm.push((chunk, now_ms)) } else { shelf.fresh.push((chunk, now_ms)) }
    }

    /// A chunk of exactly `bytes`, a warm one first.
    pub(crate) fn take(&mut self, bytes: u64) -> Option<Chunk> {
        let shelf = self.shelves.get_mut(&bytes)?;
        let (chunk, _) = shelf.warm.pop().or_else(|| shelf.fresh.pop())?;
        self.bytes -= bytes;
        Some(chunk)
    }

    /// Some chunk that came at `since_ms` or before, if the shelf holds more than `keep_bytes`: a
    /// fresh and long one first.
    pub(crate) fn take_old(&mut self, since_ms: u64, keep_bytes: u64) -> Option<Chunk> {
        if self.bytes <= keep_bytes {
            return None;
        }
        for (bytes, shelf) in self.shelves.iter_mut().rev() {
            for chunks in [&mut shelf.fresh, &mut shelf.warm] {
                if let Some(place) = chunks.iter().rposition(|(_, came_ms)| *came_ms <= since_ms) {
                    self.bytes -= bytes;
                    return Some(chunks.remove(place).0);
                }
            }
        }
        None
    }

    /// Lengths and how many there are of each, ascending.
    pub(crate) fn counts(&self) -> impl Iterator<Item = (u64, usize)> + '_ {
        self.shelves.iter().map(|(bytes, s)| (*bytes, s.warm.len() + s.fresh.len()))
    }
}
