//! [`Stock`]: chunks made ahead of need and not mapped. The free list of a place.
//!
//! Keyed by properties, fixed when a chunk is made, by who used it last, and length. A chunk that was
//! mapped before is *warm*: mapping it again costs a third. One that another process may have is here
//! only if the driver refused to take it back, and is given to nobody.

use std::collections::BTreeMap;

use vmm_sys::ChunkProps;
use vmm_sys::object::Chunk;

use crate::idle::Clock;
use crate::past::{self, User};

/// Chunks of one length, those that came last behind, and when each came, in milliseconds.
#[derive(Debug, Default)]
struct Shelf {
    warm: Vec<(Chunk, u64)>,
    fresh: Vec<(Chunk, u64)>,
}

/// Chunks of one user, by length.
type Shelves = BTreeMap<u64, Shelf>;

impl Shelf {
    fn pop(&mut self) -> Option<Chunk> {
        self.warm.pop().or_else(|| self.fresh.pop()).map(|(chunk, _)| chunk)
    }

    fn count(&self) -> usize {
        self.warm.len() + self.fresh.len()
    }
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
    /// By properties and last user. What nobody used lies with what the nameless did.
    shelves: BTreeMap<ChunkProps, BTreeMap<User, Shelves>>,
    /// What only the driver gets.
    outside: Vec<Taken>,
    bytes: u64,
    clock: Clock,
}

impl Stock {
    pub(crate) fn new(clock: Clock) -> Stock {
        Stock { shelves: BTreeMap::new(), outside: Vec::new(), bytes: 0, clock }
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
    pub(crate) fn put_back(&mut self, taken: Taken) {
        self.bytes += taken.chunk.bytes();
        if past::is_outside(&taken.chunk) {
            self.outside.push(taken);
            return;
        }
        let Taken { chunk, warm, came_ms } = taken;
        let user = match past::user_of(&chunk) {
            User::Nobody => User::Nameless,
            user => user,
        };
        let kind = self.shelves.entry(*chunk.props()).or_default().entry(user).or_default();
        let shelf = kind.entry(chunk.bytes()).or_default();
        if warm { shelf.warm.push((chunk, came_ms)) } else { shelf.fresh.push((chunk, came_ms)) }
    }

    /// A chunk of exactly `bytes` with these properties, a warm one first, that nobody used but the
    /// nameless.
    pub(crate) fn take(&mut self, props: &ChunkProps, bytes: u64) -> Option<Chunk> {
        self.take_of(props, bytes, &User::Nameless)
    }

    /// The same for `user`: what it used itself first, what others did last.
    pub(crate) fn take_for(
        &mut self,
        props: &ChunkProps,
        bytes: u64,
        user: &User,
    ) -> Option<Chunk> {
        let own = self.take_of(props, bytes, user).or_else(|| self.take(props, bytes));
        own.or_else(|| self.take_any(props, bytes))
    }

    fn take_of(&mut self, props: &ChunkProps, bytes: u64, user: &User) -> Option<Chunk> {
        let chunk = self.shelves.get_mut(props)?.get_mut(user)?.get_mut(&bytes)?.pop()?;
        self.bytes -= bytes;
        Some(chunk)
    }

    fn take_any(&mut self, props: &ChunkProps, bytes: u64) -> Option<Chunk> {
        let mut shelves = self.shelves.get_mut(props)?.values_mut();
        let chunk = shelves.find_map(|it| it.get_mut(&bytes)?.pop())?;
        self.bytes -= bytes;
        Some(chunk)
    }

    /// Some chunk that came at `since_ms` or before, if the shelf holds more than `keep_bytes`: a
    /// fresh and long one first. Before them, whatever is of no use here.
    pub(crate) fn take_old(&mut self, since_ms: u64, keep_bytes: u64) -> Option<Taken> {
        if let Some(taken) = self.outside.pop() {
            self.bytes -= taken.chunk.bytes();
            return Some(taken);
        }
        if self.bytes <= keep_bytes {
            return None;
        }
        let kinds = self.shelves.values_mut().flat_map(BTreeMap::values_mut);
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

    /// The shortest chunk of at least `bytes` with these properties, else the longest, among those
    /// whose going leaves `keep_bytes` on the shelf.
    pub(crate) fn take_near(
        &mut self,
        props: &ChunkProps,
        bytes: u64,
        keep_bytes: u64,
    ) -> Option<Chunk> {
        let most_bytes = self.bytes.saturating_sub(keep_bytes);
        let held = self.counts_of_all(props).filter(|(_, count)| *count > 0);
        let mut lengths: Vec<u64> = held.map(|(length, _)| length).collect();
        lengths.sort_unstable();
        let mut may_go = lengths.iter().filter(|length| **length <= most_bytes);
        let longer = may_go.clone().find(|length| **length >= bytes);
        let length = *longer.or_else(|| may_go.next_back())?;
        self.take_any(props, length)
    }

    /// Lengths of chunks with these properties that [`Stock::take`] gives, and how many there are of
    /// each, ascending.
    pub(crate) fn counts(&self, props: &ChunkProps) -> impl Iterator<Item = (u64, usize)> + '_ {
        let shelves = self.shelves.get(props).and_then(|users| users.get(&User::Nameless));
        shelves.into_iter().flatten().map(|(bytes, shelf)| (*bytes, shelf.count()))
    }

    /// The same of chunks that [`Stock::take_for`] gives: user by user, so that lengths come again.
    pub(crate) fn counts_of_all(
        &self,
        props: &ChunkProps,
    ) -> impl Iterator<Item = (u64, usize)> + '_ {
        let shelves = self.shelves.get(props).into_iter().flat_map(BTreeMap::values).flatten();
        shelves.map(|(bytes, shelf)| (*bytes, shelf.count()))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use vmm_sys::sim::Sim;
    use vmm_sys::{DeviceId, Driver};

    use super::*;

    const MIB: u64 = 1 << 20;

    /// What is taken one after another, in MiB, from a stock of these lengths, until as much is had.
    fn exchanged(lengths: &[u64], mib: u64, keep_mib: u64) -> Vec<u64> {
        let driver: Arc<dyn Driver> = Sim::builder().build();
        let props = ChunkProps::on_device(DeviceId(0));
        let mut stock = Stock::new(Clock::default());
        for length in lengths {
            stock.put(Chunk::create(&driver, length * MIB, &props).unwrap(), true);
        }
        let mut taken: Vec<u64> = Vec::new();
        while taken.iter().sum::<u64>() < mib {
            let missing_bytes = (mib - taken.iter().sum::<u64>()) * MIB;
            let Some(chunk) = stock.take_near(&props, missing_bytes, keep_mib * MIB) else { break };
            taken.push(chunk.bytes() / MIB);
        }
        taken
    }

    #[test]
    fn no_chunk_more_is_exchanged_than_it_takes() {
        assert_eq!(exchanged(&[2, 2, 8, 32], 10, 0), [32]);
        assert_eq!(exchanged(&[8, 8, 32], 6, 0), [8]);
        assert_eq!(exchanged(&[8, 8, 8], 20, 0), [8, 8, 8]);
        assert_eq!(exchanged(&[8, 8, 4], 10, 0), [8, 4]);
        assert_eq!(exchanged(&[8, 2], 100, 0), [8, 2]);
    }

    #[test]
    fn what_is_kept_stays() {
        assert_eq!(exchanged(&[32, 8], 40, 8), [32]);
        assert_eq!(exchanged(&[32, 8], 20, 16), [8]);
        assert_eq!(exchanged(&[32, 32], 2, 33), []);
        assert_eq!(exchanged(&[32, 8], 2, u64::MAX >> 20), []);
    }
}
