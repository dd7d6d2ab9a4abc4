//! Slabs: blocks of up to `small_max_bytes`, cut from pieces of the large placement.
//!
//! Blocks of all small sizes share a slab. A free block is cut by best fit and merged with its
//! neighbours when it is given back, so a slab has no size of its own. A slab without blocks is
//! given back at once, and none is kept: the magazines already absorb the change between one block
//! and none, and an empty slab that stays would pin the chunk below it.
//!
//! A slab is aligned to its size, so it is found from an offset by a shift, and it pins one chunk
//! of its size, not parts of two. (Slabs at any offset were tried on traces: no denser.)
//!
//! ```text
//! offset --shift--> number --table--> slab --granule--> state and length of the block
//! ```

mod bins;
mod magazine;
mod table;

use bins::Bins;
use magazine::Magazines;
use table::{State, Table};

use crate::config::HeapConfig;
use crate::sparse::SparseTable;
use crate::{GRANULE_BYTES, GRANULE_SHIFT, NIL};

/// All slabs of a heap.
pub(crate) struct Slabs {
    table: Table,
    bins: Bins,
    magazines: Magazines,
    /// Number of the slab at each multiple of the slab size, or `NIL`.
    numbers: SparseTable,
    slab_shift: u32,
    used_bytes: u64,
    blocks: u64,
}

/// What a freed block was, and whether its slab is now empty.
pub(crate) struct Freed {
    pub(crate) bytes: u64,
    pub(crate) empty_slab: Option<u64>,
}

/// An offset that lies in a slab, but at which no block handed out starts.
pub(crate) struct NoBlock;

impl Slabs {
    /// No slabs yet; `config` is resolved.
    pub(crate) fn new(config: &HeapConfig) -> Self {
        let units_max = (config.small_max_bytes >> GRANULE_SHIFT) as u32;
        Self {
            table: Table::new(config.slab_bytes),
            bins: Bins::new(units_max),
            magazines: Magazines::new(units_max, config.magazine_depth),
            numbers: SparseTable::new(),
            slab_shift: config.slab_bytes.trailing_zeros(),
            used_bytes: 0,
            blocks: 0,
        }
    }

    /// Takes `units` granules from a magazine or a slab; `None` if a new slab is needed.
    #[inline(always)]
    pub(crate) fn alloc(&mut self, units: u32) -> Option<u64> {
        let handle = self.magazines.top(units);
        let offset = if handle != NIL {
            let (offset, granule) = self.table.block_mut(handle);
            self.magazines.pop(granule, units);
            offset
        } else {
            self.cut(units)?
        };
        self.used_bytes += u64::from(units) << GRANULE_SHIFT;
        self.blocks += 1;
        Some(offset)
    }

    /// Cuts a block from the low end of the best free one, and returns its offset.
    fn cut(&mut self, units: u32) -> Option<u64> {
        let handle = self.bins.best_fit(units)?;
        self.bins.remove(&mut self.table, handle);
        // The low end is handed out; the rest stays free behind it.
        let rest_units = self.table.granule(handle).units() - units;
        self.table.set_block(handle, units, State::Used);
        if rest_units > 0 {
            let rest = handle + units;
            self.table.set_block(rest, rest_units, State::Free);
            self.bins.insert(&mut self.table, rest);
        }
        let slab = self.table.slab_of(handle);
        self.table.slab_mut(slab).live += 1;
        Some(self.table.offset(handle))
    }

    /// Number of the slab that `offset` lies in.
    #[inline(always)]
    fn slab_at(&self, offset: u64) -> Option<u32> {
        let number = self.numbers.get((offset >> self.slab_shift) as usize);
        (number != NIL).then_some(number)
    }

    /// Frees the block at `offset`, if it has `wanted_bytes` or those are 0: `None` if the offset
    /// lies in no slab.
    #[inline(always)]
    pub(crate) fn free(
        &mut self,
        offset: u64,
        wanted_bytes: u64,
    ) -> Option<Result<Freed, NoBlock>> {
        let number = self.slab_at(offset)?;
        let (handle, granule) = self.table.find_mut(number, offset);
        let Some(bytes) = granule
            .block_bytes_at(offset)
            .filter(|bytes| wanted_bytes == 0 || wanted_bytes == *bytes)
        else {
            return Some(Err(NoBlock));
        };
        self.used_bytes -= bytes;
        self.blocks -= 1;
        let units = granule.units();
        let empty_slab =
            if self.magazines.push(granule, handle, units) { None } else { self.give_back(handle) };
        Some(Ok(Freed { bytes, empty_slab }))
    }

    /// Makes a block free, merged with its neighbours. Returns the slab if it is empty now: it is
    /// forgotten here, and the caller frees it in the large placement.
    fn give_back(&mut self, handle: u32) -> Option<u64> {
        let table = &mut self.table;
        // Heads inside the merged block are wiped: an offset there is no block any more.
        let mut first = handle;
        let mut units = table.granule(handle).units();
        if let Some(behind) = table.free_behind(handle, units) {
            self.bins.remove(table, behind);
            let granule = table.granule_mut(behind);
            units += granule.units();
            granule.set_state(State::None);
        }
        if let Some(before) = table.free_before(handle) {
            self.bins.remove(table, before);
            units += table.granule(before).units();
            table.granule_mut(handle).set_state(State::None);
            first = before;
        }
        let number = table.slab_of(handle);
        let slab = table.slab_mut(number);
        slab.live -= 1;
        // Blocks in magazines count as live: their slab stays until they are drained.
        if slab.live > 0 {
            table.set_block(first, units, State::Free);
            self.bins.insert(table, first);
            return None;
        }
        let base = slab.base;
        // The block is the whole slab now, and in no list.
        table.granule_mut(first).set_state(State::None);
        table.remove(number);
        self.numbers.set((base >> self.slab_shift) as usize, NIL);
        Some(base)
    }

    /// Adds a slab at `base`, a multiple of the slab size.
    pub(crate) fn add(&mut self, base: u64) {
        let place = (base >> self.slab_shift) as usize;
        let number = self.table.add(base);
        self.numbers.cover(place, place);
        self.numbers.set(place, number);
        let handle = self.table.handle(number, 0);
        self.table.set_block(handle, self.table.slab_units(), State::Free);
        self.bins.insert(&mut self.table, handle);
    }

    /// Empties the magazines. Calls `give_back` with each slab that is empty then; true if any
    /// magazine held a block.
    pub(crate) fn drain(&mut self, give_back: &mut dyn FnMut(u64)) -> bool {
        let mut moved = false;
        for units in 1..=self.magazines.units_max() {
            loop {
                let handle = self.magazines.top(units);
                if handle == NIL {
                    break;
                }
                self.magazines.pop(self.table.granule_mut(handle), units);
                moved = true;
                if let Some(base) = self.give_back(handle) {
                    give_back(base);
                }
            }
        }
        moved
    }

    /// Length of the block at `offset`: `None` if the offset lies in no slab.
    #[inline]
    pub(crate) fn block_bytes(&self, offset: u64) -> Option<Result<u64, NoBlock>> {
        let number = self.slab_at(offset)?;
        let granule = self.table.find(number, offset);
        Some(granule.block_bytes_at(offset).ok_or(NoBlock))
    }

    pub(crate) fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    pub(crate) fn magazine_bytes(&self) -> u64 {
        self.magazines.bytes()
    }

    pub(crate) fn blocks(&self) -> u64 {
        self.blocks
    }

    pub(crate) fn count(&self) -> u64 {
        self.table.count()
    }

    pub(crate) fn metadata_bytes(&self) -> u64 {
        self.table.metadata_bytes()
            + self.bins.metadata_bytes()
            + self.magazines.metadata_bytes()
            + self.numbers.metadata_bytes()
    }

    /// Offsets of the slabs, in no order.
    pub(crate) fn bases(&self) -> impl Iterator<Item = u64> {
        self.table.slabs().filter(|(_, slab)| !slab.is_vacant()).map(|(_, slab)| slab.base)
    }

    /// Checks table, bins, magazines and sums against each other.
    pub(crate) fn verify(&self) -> Result<(), String> {
        let (mut free, mut used, mut cached, mut used_units) = (0u64, 0u64, 0u64, 0u64);
        for (number, slab) in self.table.slabs().filter(|(_, slab)| !slab.is_vacant()) {
            let place = (slab.base >> self.slab_shift) as usize;
            if (place as u64) << self.slab_shift != slab.base || self.numbers.get(place) != number {
                return Err(format!("slab {number} at {:#x} is not found there", slab.base));
            }
            let mut live = 0;
            self.table.walk(number, &mut |_, units, state| {
                live += u32::from(state != State::Free);
                match state {
                    State::Free => free += 1,
                    State::Cached => cached += 1,
                    State::Used => {
                        used += 1;
                        used_units += u64::from(units);
                    }
                    State::None => return Err("a block without a state".into()),
                }
                Ok(())
            })?;
            if live != slab.live || live == 0 {
                return Err(format!("slab {number} has {live} blocks, counted {}", slab.live));
            }
        }
        let listed = (self.bins.verify(&self.table)?, self.magazines.verify(&self.table)?);
        if listed != (free, cached) {
            return Err(format!("lists hold {listed:?} free and cached, slabs {free}, {cached}"));
        }
        let counted = (self.blocks, self.used_bytes, self.count());
        let slabs = self.numbers.count() as u64;
        if counted != (used, used_units * GRANULE_BYTES, slabs) {
            return Err(format!("counted {counted:?}, walked {used}, {used_units}, {slabs}"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLAB_BYTES: u64 = 64 << 10;

    /// One slab at 64 KiB; magazines of the given depth.
    fn slabs(magazine_depth: u32) -> Slabs {
        let config = HeapConfig {
            slab_bytes: SLAB_BYTES,
            small_max_bytes: SLAB_BYTES,
            magazine_depth,
            ..HeapConfig::default()
        };
        let mut slabs = Slabs::new(&config.resolve());
        assert_eq!(slabs.alloc(1), None);
        slabs.add(SLAB_BYTES);
        slabs
    }

    /// Allocates and returns the granule within the slab.
    fn alloc(slabs: &mut Slabs, units: u32) -> Option<u64> {
        let offset = slabs.alloc(units);
        slabs.verify().expect("consistent");
        offset.map(|offset| (offset - SLAB_BYTES) / GRANULE_BYTES)
    }

    /// Frees the block at a granule within the slab; returns the slab if that emptied it.
    fn free(slabs: &mut Slabs, granule: u64) -> Option<u64> {
        let freed = slabs.free(SLAB_BYTES + granule * GRANULE_BYTES, 0);
        let Some(Ok(freed)) = freed else { panic!("no block at granule {granule}") };
        slabs.verify().expect("consistent");
        freed.empty_slab
    }

    #[test]
    fn a_freed_gap_of_the_closest_length_is_used_first() {
        let mut slabs = slabs(0);
        let blocks: Vec<u64> =
            [10, 1, 4, 1, 6, 1].iter().map(|&u| alloc(&mut slabs, u).unwrap()).collect();
        assert_eq!(blocks, [0, 10, 11, 15, 16, 22]);
        for gap in [0, 11, 16] {
            assert_eq!(free(&mut slabs, gap), None);
        }
        assert_eq!(alloc(&mut slabs, 3), Some(11));
        assert_eq!(alloc(&mut slabs, 5), Some(16));
        assert_eq!(alloc(&mut slabs, 7), Some(0));
        assert_eq!(alloc(&mut slabs, 50), Some(23));
    }

    #[test]
    fn the_last_block_takes_the_slab_with_it() {
        let mut slabs = slabs(0);
        for granule in 0..128 {
            assert_eq!(alloc(&mut slabs, 1), Some(granule));
        }
        assert_eq!(alloc(&mut slabs, 1), None);
        for granule in (0..128).map(|i| i * 37 % 128) {
            let emptied = granule == 127 * 37 % 128;
            assert_eq!(free(&mut slabs, granule), emptied.then_some(SLAB_BYTES));
        }
        assert_eq!((slabs.count(), slabs.used_bytes(), slabs.blocks()), (0, 0, 0));
        assert!(slabs.free(SLAB_BYTES, 0).is_none());
        // The table of the slab is used again, and holds no trace of the old blocks.
        slabs.add(0);
        assert_eq!(slabs.alloc(128), Some(0));
        slabs.verify().expect("consistent");
    }

    #[test]
    fn magazines_hand_out_what_was_freed_last_and_no_more_than_they_hold() {
        let mut slabs = slabs(2);
        for granule in [0, 2, 4, 6] {
            assert_eq!(alloc(&mut slabs, 2), Some(granule));
        }
        for granule in [0, 4, 6] {
            assert_eq!(free(&mut slabs, granule), None);
        }
        assert_eq!(slabs.magazine_bytes(), 2 * 2 * GRANULE_BYTES);
        assert!(matches!(slabs.free(SLAB_BYTES, 0), Some(Err(NoBlock))), "a second free");
        assert_eq!(alloc(&mut slabs, 2), Some(4));
        assert_eq!(alloc(&mut slabs, 2), Some(0));
        // 6 did not fit into the magazine and is merged with the rest of the slab.
        assert_eq!(alloc(&mut slabs, 3), Some(6));
    }

    #[test]
    fn draining_empties_magazines_and_slabs() {
        let mut slabs = slabs(16);
        assert_eq!(alloc(&mut slabs, 5), Some(0));
        assert_eq!(free(&mut slabs, 0), None);
        let mut empty = Vec::new();
        assert!(slabs.drain(&mut |base| empty.push(base)));
        assert_eq!(empty, [SLAB_BYTES]);
        assert!(!slabs.drain(&mut |base| empty.push(base)));
        slabs.verify().expect("consistent");
    }
}
