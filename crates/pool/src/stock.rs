//! [`Stock`]: chunks made ahead of need and not mapped. The free list of a place.
//!
//! Keyed by properties, fixed when a chunk is made, and length. A chunk that was mapped before is
//! *warm*: mapping it again costs a third.

use std::collections::BTreeMap;

use vmm_sys::ChunkProps;
use vmm_sys::object::Chunk;

use crate::idle::Clock;

/// Chunks of one length, those that came last behind, and when each came, in milliseconds.
#[derive(Debug, Default)]
struct Shelf {
    warm: Vec<(Chunk, u64)>,
    fresh: Vec<(Chunk, u64)>,
}

/// A chunk from the shelf, and what the shelf knew of it.
#[derive(Debug)]
pub(crate) struct Taken {
    pub(crate) chunk: Chunk,
    pub(crate) warm: bool,
    pub(crate) came_ms: u64,
}

/// The free list of a place.
#[derive(Debug)]
pub(crate) struct Stock {
    shelves: BTreeMap<ChunkProps, BTreeMap<u64, Shelf>>,
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
        let came_ms = self.clock.now_ms();
        self.put_back(Taken { chunk, warm, came_ms });
    }

    /// Puts a chunk back as if it had never been taken.
    pub(crate) fn put_back(&mut self, Taken { chunk, warm, came_ms }: Taken) {
        self.bytes += chunk.bytes();
        let kind = self.shelves.entry(*chunk.props()).or_default();
        let shelf = kind.entry(chunk.bytes()).or_default();
        if warm { shelf.warm.push((chunk, came_ms)) } else { shelf.fresh.push((chunk, came_ms)) }
    }

    /// A chunk of exactly `bytes` with these properties, a warm one first.
    pub(crate) fn take(&mut self, props: &ChunkProps, bytes: u64) -> Option<Chunk> {
        let shelf = self.shelves.get_mut(props)?.get_mut(&bytes)?;
        let (chunk, _) = shelf.warm.pop().or_else(|| shelf.fresh.pop())?;
        self.bytes -= bytes;
        Some(chunk)
    }

    /// Some chunk that came at `since_ms` or before, if the shelf holds more than `keep_bytes`: a
    /// fresh and long one first.
    pub(crate) fn take_old(&mut self, since_ms: u64, keep_bytes: u64) -> Option<Taken> {
        if self.bytes <= keep_bytes {
            return None;
        }
        let kinds = self.shelves.values_mut();
        let mut shelves: Vec<_> = kinds.flat_map(BTreeMap::iter_mut).collect();
        shelves.sort_by_key(|(bytes, _)| std::cmp::Reverse(**bytes));
        for (bytes, shelf) in shelves {
            for (chunks, warm) in [(&mut shelf.fresh, false), (&mut shelf.warm, true)] {
                if let Some(place) = chunks.iter().rposition(|(_, came_ms)| *came_ms <= since_ms) {
                    self.bytes -= bytes;
                    let (chunk, came_ms) = chunks.remove(place);
                    return Some(Taken { chunk, warm, came_ms });
                }
            }
        }
        None
    }

    /// The shortest chunk of at least `bytes` with these properties, else the longest.
    pub(crate) fn take_near(&mut self, props: &ChunkProps, bytes: u64) -> Option<Chunk> {
        let held = |(length, shelf): (&u64, &Shelf)| {
            (shelf.warm.len() + shelf.fresh.len() > 0).then_some(*length)
        };
        let shelves = self.shelves.get(props)?;
        let longer = shelves.range(bytes..).find_map(held);
        let length = longer.or_else(|| shelves.iter().rev().find_map(held))?;
        self.take(props, length)
    }

    /// Lengths of chunks with these properties and how many there are of each, ascending.
    pub(crate) fn counts(&self, props: &ChunkProps) -> impl Iterator<Item = (u64, usize)> + '_ {
        let shelves = self.shelves.get(props).into_iter().flatten();
        shelves.map(|(bytes, shelf)| (*bytes, shelf.warm.len() + shelf.fresh.len()))
    }
}
