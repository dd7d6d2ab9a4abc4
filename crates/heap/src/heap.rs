//! The heap: small requests to the slabs, the rest to the large placement.

use std::fmt;

use crate::config::HeapConfig;
use crate::error::{Miss, NotAllocated, NotFree};
use crate::large::Large;
use crate::slab::Slabs;
use crate::stats::{FreeRun, HeapStats};
use crate::{GRANULE_BYTES, GRANULE_SHIFT, SPACE_BYTES, round_to_granule};

/// A block handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Block {
    /// Start, in bytes: a multiple of the granule and of the alignment asked for.
    pub offset: u64,
    /// Bytes taken from the heap: the request rounded up to the granule.
    pub bytes: u64,
}

/// Placement of blocks in one address space. See the [crate page](crate).
///
/// Every mapped byte is in exactly one place:
/// `mapped = large blocks + large free runs + slabs`, and in each slab
/// `slab = small blocks + blocks in magazines + free blocks`.
pub struct Heap {
    pub(crate) config: HeapConfig,
    pub(crate) slabs: Slabs,
    pub(crate) large: Large,
    large_blocks: u64,
    tick: u64,
}

impl fmt::Debug for Heap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (config, stats) = (&self.config, self.stats());
        f.debug_struct("Heap").field("config", config).field("stats", &stats).finish()
    }
}

impl Heap {
    /// An empty heap: nothing is mapped.
    pub fn new(config: HeapConfig) -> Self {
        let config = config.resolve();
        Self {
            slabs: Slabs::new(&config),
            large: Large::new(config.placement),
            config,
            large_blocks: 0,
            tick: 0,
        }
    }

    /// The settings in use: those given, moved into range.
    pub fn config(&self) -> &HeapConfig {
        &self.config
    }

    /// `[offset, offset + bytes)` becomes mapped free space: growth, or a hole filled again. It
    /// merges with free neighbours.
    ///
    /// # Panics
    ///
    /// If the range is empty, not made of whole granules, ends above 2^47, or overlaps mapped
    /// space: the caller has lost track of what it mapped.
    pub fn insert_free(&mut self, offset: u64, bytes: u64) {
        self.large.insert_free(offset, bytes, self.tick);
    }

    /// Free space becomes unmapped: trim, punch. Slabs and magazines are not free space; see
    /// [`drain`](Self::drain).
    ///
    /// # Errors
    ///
    /// [`NotFree`] unless the range is made of whole granules that are all free in the large
    /// placement.
    pub fn remove_free(&mut self, offset: u64, bytes: u64) -> Result<(), NotFree> {
        self.large.remove_free(offset, bytes)
    }

    /// Takes a block of at least `bytes` at a multiple of `align`, a power of two (any other value
    /// is rounded up to one). Blocks are aligned to the granule anyway. A request for no bytes is
    /// served as one for one byte.
    ///
    /// A small request with an alignment above the granule goes to the large placement: it fills
    /// a gap there that is too short for anything else.
    ///
    /// # Errors
    ///
    /// [`Miss`] if nothing fits; it says what would have to be free. Magazines are not drained.
    #[inline]
    pub fn alloc(&mut self, bytes: u64, align: u64) -> Result<Block, Miss> {
        self.tick += 1;
        let bytes = round_to_granule(bytes);
        if bytes <= self.config.small_max_bytes && align <= GRANULE_BYTES {
            let units = (bytes >> GRANULE_SHIFT) as u32;
            // A magazine or a slab, in most programs almost always.
            if let Some(offset) = self.slabs.alloc(units) {
                return Ok(Block { offset, bytes });
            }
            return self.alloc_in_new_slab(units);
        }
        self.alloc_large(bytes, align)
    }

    #[inline]
    fn alloc_large(&mut self, bytes: u64, align: u64) -> Result<Block, Miss> {
        let align = placeable_align(align);
        // Above the size of any space the arithmetic of placements could overflow.
        if bytes > SPACE_BYTES {
            return Err(Miss { bytes, align });
        }
        match self.large.alloc(bytes, align) {
            Some(offset) => {
                self.large_blocks += 1;
                Ok(Block { offset, bytes })
            }
            None => Err(self.miss(bytes, align)),
        }
    }

    #[cold]
    fn alloc_in_new_slab(&mut self, units: u32) -> Result<Block, Miss> {
        let slab_bytes = self.config.slab_bytes;
        let base = self.large.alloc(slab_bytes, slab_bytes);
        let base = base.ok_or_else(|| self.miss(slab_bytes, slab_bytes))?;
        self.slabs.add(base);
        let offset = self.slabs.alloc(units).expect("a new slab holds any small request");
        Ok(Block { offset, bytes: u64::from(units) << GRANULE_SHIFT })
    }

    #[cold]
    fn miss(&self, bytes: u64, align: u64) -> Miss {
        Miss { bytes, align: self.large.placement_align(bytes, align) }
    }

    /// Takes exactly `[offset, offset + bytes)` as one block: the other half of
    /// [`windows`](Self::windows).
    ///
    /// # Errors
    ///
    /// [`NotFree`] unless the range is made of whole granules that are all free in the large
    /// placement.
    pub fn alloc_at(&mut self, offset: u64, bytes: u64) -> Result<Block, NotFree> {
        self.large.alloc_at(offset, bytes)?;
        self.tick += 1;
        self.large_blocks += 1;
        Ok(Block { offset, bytes })
    }

    /// Frees the block at `offset` and returns its length in bytes.
    ///
    /// # Errors
    ///
    /// [`NotAllocated`] if no live block starts there: an interior offset, or a second free.
    #[inline]
    pub fn free(&mut self, offset: u64) -> Result<u64, NotAllocated> {
        self.free_if(offset, 0)
    }

    /// As [`free`](Self::free), but only a block that a request for `bytes` would have got.
    ///
    /// # Errors
    ///
    /// [`NotAllocated`] also if the block has another length.
    #[inline]
    pub fn free_exact(&mut self, offset: u64, bytes: u64) -> Result<u64, NotAllocated> {
        self.free_if(offset, round_to_granule(bytes))
    }

    /// Frees a block of any length if `wanted_bytes` are 0.
    #[inline(always)]
    fn free_if(&mut self, offset: u64, wanted_bytes: u64) -> Result<u64, NotAllocated> {
        // An offset in a slab is the slab's to judge, so that its own span cannot be freed.
        if let Some(found) = self.slabs.free(offset, wanted_bytes) {
            let freed = found.map_err(|_| NotAllocated { offset })?;
            self.tick += 1;
            if let Some(base) = freed.empty_slab {
                self.large.free(base, 0, self.tick);
            }
            return Ok(freed.bytes);
        }
        let tick = self.tick + 1;
        let bytes = self.large.free(offset, wanted_bytes, tick).ok_or(NotAllocated { offset })?;
        self.tick = tick;
        self.large_blocks -= 1;
        Ok(bytes)
    }

    /// Length in bytes of the block that starts at `offset`, if one does.
    #[inline]
    pub fn block_bytes(&self, offset: u64) -> Option<u64> {
        match self.slabs.block_bytes(offset) {
            Some(found) => found.ok(),
            None => self.large.used_bytes_at(offset),
        }
    }

    /// Empties the magazines and returns the slabs that are empty then to the large placement.
    /// True if anything moved, so that a request that missed may fit now.
    pub fn drain(&mut self) -> bool {
        let (large, tick) = (&mut self.large, self.tick);
        self.slabs.drain(&mut |base| {
            large.free(base, 0, tick);
        })
    }

    /// Calls `visit` with starts at which `need` would fit if all unmapped space under it were
    /// mapped. `end_bytes` is the end of the addresses in use; a window may reach beyond it, and
    /// the first one wholly beyond it is always visited. A start may be visited twice.
    ///
    /// In every gap between used blocks, a start that needs the fewest unmapped bytes is among
    /// them; so are those where the request starts or ends with a free run, and those at the ends
    /// of the gap. After [`insert_free`](Self::insert_free) of the missing parts,
    /// [`alloc_at`](Self::alloc_at) of the window succeeds, and so does the
    /// [`alloc`](Self::alloc) that missed.
    pub fn windows(&self, need: &Miss, end_bytes: u64, visit: &mut dyn FnMut(u64)) {
        if need.bytes == 0 || need.bytes > SPACE_BYTES {
            return;
        }
        let align = self.large.placement_align(need.bytes, placeable_align(need.align));
        self.large.windows(need.bytes, align, end_bytes.min(SPACE_BYTES), visit);
    }

    /// Calls `visit` with each maximal free run of the large placement, in address order.
    pub fn free_runs(&self, visit: &mut dyn FnMut(FreeRun)) {
        self.large.free_runs(visit);
    }

    /// The longest free run of the large placement, in bytes. Walks all of them.
    pub fn largest_free_bytes(&self) -> u64 {
        let mut largest = 0;
        self.free_runs(&mut |run| largest = largest.max(run.bytes));
        largest
    }

    /// Operations so far: the clock of [`FreeRun::last_freed_tick`].
    #[inline]
    pub fn tick(&self) -> u64 {
        self.tick
    }

    /// Where the bytes are.
    pub fn stats(&self) -> HeapStats {
        // To the large placement a slab is a used span, whatever is free inside.
        let slab_bytes = self.slabs.count() * self.config.slab_bytes;
        let mapped_bytes = self.large.mapped_bytes();
        let used_bytes = self.large.used_bytes() - slab_bytes + self.slabs.used_bytes();
        let magazine_bytes = self.slabs.magazine_bytes();
        HeapStats {
            mapped_bytes,
            used_bytes,
            free_bytes: mapped_bytes - used_bytes,
            large_free_bytes: mapped_bytes - self.large.used_bytes(),
            slab_free_bytes: slab_bytes - self.slabs.used_bytes() - magazine_bytes,
            magazine_bytes,
            blocks: self.large_blocks + self.slabs.blocks(),
            slab_count: self.slabs.count(),
            tick: self.tick,
            metadata_bytes: self.large.metadata_bytes() + self.slabs.metadata_bytes(),
        }
    }

    /// Blocks of the large placement, without slabs.
    pub(crate) fn large_blocks(&self) -> u64 {
        self.large_blocks
    }
}

/// The alignment asked for, as one that a placement can use.
#[inline]
fn placeable_align(align: u64) -> u64 {
    if align <= GRANULE_BYTES {
        return GRANULE_BYTES;
    }
    // The highest power of two: only offset 0 is that much aligned.
    align.checked_next_power_of_two().unwrap_or(1 << 63)
}

#[cfg(test)]
mod tests;
