//! Decisions of growth, pure: numbers in, numbers out.
//!
//! A *slot* is one granularity of addresses. A *run* is a stretch of slots without memory that a
//! window needs; [`cover`] says which chunks go where.

use crate::config::{ChunkSize, Plan};

/// The chunk length a lane grows by, in bytes: a power of two near its peak live bytes / 256.
pub(crate) fn chunk_bytes(plan: &Plan, peak_live_bytes: u64) -> u64 {
    match plan.chunk {
        ChunkSize::Fixed(bytes) => bytes,
        ChunkSize::Auto => {
            let near = (peak_live_bytes / 256).max(1);
            let floor = 1u64 << near.ilog2();
            floor.clamp(plan.chunk_min_bytes, plan.chunk_max_bytes)
        }
    }
}

/// How many bytes may be created before free chunks should move instead: until the device holds
/// (1 + soft limit) x the peak of what its lanes together had alive.
pub(crate) fn soft_allowance_bytes(
    soft_limit: Option<f64>,
    peak_live_bytes: u64,
    held_bytes: u64,
) -> u64 {
    match soft_limit {
        None => u64::MAX,
        Some(fraction) => {
            let limit = peak_live_bytes as f64 * (1.0 + fraction);
            (limit as u64).saturating_sub(held_bytes)
        }
    }
}

/// A stretch of slots that needs memory. At the tail a chunk may reach beyond the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) first_slot: u32,
    pub(crate) slots: u32,
    /// Slots beyond the end, up to the next barrier, that a chunk may also cover.
    pub(crate) spare_slots: u32,
}

/// Where chunks can come from, in slots.
#[derive(Debug)]
pub(crate) struct Supply {
    /// Chunks on the shelf: (slots, how many), ascending.
    pub(crate) stock: Vec<(u32, u32)>,
    /// Lengths of the lane's own wholly free chunks, coldest first; taken ones become 0.
    pub(crate) free_chunks: Vec<u32>,
    /// Slots that may be created at all (hard limit).
    pub(crate) create_slots: u64,
    /// Slots that may be created before own free chunks are preferred. What is on the shelf is held
    /// already, and comes first.
    pub(crate) soft_slots: u64,
    /// The growth chunk.
    pub(crate) chunk_slots: u32,
    /// Create no more than is missing, though shorter chunks cost more each.
    pub(crate) exact: bool,
}

/// Where one chunk comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// From the shelf.
    Stock,
    /// New.
    Create,
    /// The lane's own free chunk of this index, aliased.
    Free(usize),
}

/// One chunk and its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) first_slot: u32,
    pub(crate) slots: u32,
    pub(crate) source: Source,
}

impl Supply {
    /// The longest chunk on the shelf of at most `want` slots, else the shortest that fits in
    /// `room`: it is held already, so using it costs nothing.
    fn take_stock(&mut self, want: u32, room: u32) -> Option<u32> {
        let held = |entry: &&mut (u32, u32)| entry.1 > 0;
        let fits = self.stock.iter_mut().rev().filter(held).find(|e| e.0 <= want);
        let entry = match fits {
            Some(entry) => entry,
            None => self.stock.iter_mut().filter(held).find(|e| e.0 > want && e.0 <= room)?,
        };
        entry.1 -= 1;
        Some(entry.0)
    }

    /// The coldest own free chunk of at most `slots`, the longest class first.
    fn take_free(&mut self, slots: u32) -> Option<(usize, u32)> {
        let best = self.free_chunks.iter().copied().filter(|s| *s <= slots).max()?;
        if best == 0 {
            return None;
        }
        let index = self.free_chunks.iter().position(|s| *s == best)?;
        self.free_chunks[index] = 0;
        Some((index, best))
    }

    /// A new chunk of exactly `slots`.
    fn take_create(&mut self, slots: u32) -> Option<(u32, Source)> {
        let left = self.create_slots.checked_sub(u64::from(slots))?;
        self.create_slots = left;
        self.soft_slots = self.soft_slots.saturating_sub(u64::from(slots));
        Some((slots, Source::Create))
    }

    fn take_own(&mut self, want: u32) -> Option<(u32, Source)> {
        self.take_free(want).map(|(index, slots)| (slots, Source::Free(index)))
    }

    /// One chunk for a run that lacks `left` slots and has `room` for more. Whole growth chunks:
    /// at the tail one may reach beyond what is needed.
    fn take(&mut self, left: u32, room: u32) -> Option<(u32, Source)> {
        let want = self.chunk_slots.min(1 << room.ilog2());
        let make = if self.exact { self.chunk_slots.min(1 << left.ilog2()) } else { want };
        if let Some(slots) = self.take_stock(want, room) {
            return Some((slots, Source::Stock));
        }
        let taken = if self.soft_slots >= u64::from(want) {
            self.take_create(make).or_else(|| self.take_own(want))
        } else {
            self.take_own(want).or_else(|| self.take_create(make))
        };
        taken.or_else(|| {
            // The limit leaves less than a whole growth chunk: then a shorter one.
            let most = self.create_slots.min(u64::from(make)).max(1);
            self.take_create(1 << most.ilog2())
        })
    }
}

/// Chooses chunks for every run, or `None` if the supply does not suffice.
pub(crate) fn cover(runs: &[Run], mut supply: Supply) -> Option<Vec<Piece>> {
    let mut pieces = Vec::new();
    for run in runs {
        let mut first_slot = run.first_slot;
        let mut left = run.slots;
        while left > 0 {
            let room = left.saturating_add(run.spare_slots);
            let (slots, source) = supply.take(left, room)?;
            pieces.push(Piece { first_slot, slots, source });
            first_slot += slots;
            left = left.saturating_sub(slots);
        }
    }
    Some(pieces)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn supply() -> Supply {
        Supply {
            stock: vec![],
            free_chunks: vec![],
            create_slots: u64::MAX,
            soft_slots: u64::MAX,
            chunk_slots: 4,
            exact: false,
        }
    }

    fn run(first_slot: u32, slots: u32, spare_slots: u32) -> Run {
        Run { first_slot, slots, spare_slots }
    }

    #[test]
    fn a_hole_is_covered_exactly_and_the_tail_by_whole_chunks() {
        let pieces = cover(&[run(3, 7, 0), run(20, 1, 100)], supply()).unwrap();
        let lengths: Vec<_> = pieces.iter().map(|p| (p.first_slot, p.slots)).collect();
        assert_eq!(lengths, [(3, 4), (7, 2), (9, 1), (20, 4)]);
    }

    #[test]
    fn where_memory_is_short_no_more_is_made_than_is_missing() {
        let supply = Supply { exact: true, free_chunks: vec![4], soft_slots: 0, ..supply() };
        let pieces = cover(&[run(0, 7, 100)], supply).unwrap();
        let lengths: Vec<_> = pieces.iter().map(|p| (p.slots, p.source)).collect();
        assert_eq!(lengths, [(4, Source::Free(0)), (2, Source::Create), (1, Source::Create)]);
    }

    #[test]
    fn stock_comes_before_creation() {
        let mut supply = supply();
        supply.stock = vec![(1, 1), (4, 1)];
        let pieces = cover(&[run(0, 9, 0)], supply).unwrap();
        let sources: Vec<_> = pieces.iter().map(|p| (p.slots, p.source)).collect();
        assert_eq!(sources, [(4, Source::Stock), (1, Source::Stock), (4, Source::Create)]);
    }

    #[test]
    fn a_longer_chunk_on_the_shelf_serves_where_there_is_room() {
        let mut supply = supply();
        supply.stock = vec![(16, 2)];
        let pieces = cover(&[run(0, 3, 0), run(9, 2, 40)], supply).unwrap();
        let sources: Vec<_> = pieces.iter().map(|p| (p.slots, p.source)).collect();
        assert_eq!(sources, [(2, Source::Create), (1, Source::Create), (16, Source::Stock)]);
    }

    #[test]
    fn beyond_the_soft_limit_free_chunks_are_taken_coldest_first() {
        let mut supply = supply();
        supply.soft_slots = 4;
        supply.free_chunks = vec![1, 4, 4];
        let pieces = cover(&[run(0, 12, 0)], supply).unwrap();
        let sources: Vec<_> = pieces.iter().map(|p| p.source).collect();
        assert_eq!(sources, [Source::Create, Source::Free(1), Source::Free(2)]);
    }

    #[test]
    fn the_hard_limit_leaves_only_what_is_held() {
        let mut supply = supply();
        supply.create_slots = 2;
        supply.free_chunks = vec![2];
        assert_eq!(cover(&[run(0, 5, 0)], supply), None);
    }
}
