//! The table of cells: which span starts first in each 256 KiB of a space.
//!
//! It turns an address into a span without a hash. The table is cut into regions of 1 GiB that are
//! made when space is inserted there, so a sparse space of many TiB costs only what is used of it.

use crate::NIL;

/// `log2` of the bytes of a cell.
pub(crate) const CELL_SHIFT: u32 = 18;
/// `log2` of the cells of a region.
pub(crate) const REGION_SHIFT: u32 = 12;
/// Cells of a region.
pub(crate) const REGION_CELLS: usize = 1 << REGION_SHIFT;

/// The cell in which `offset` lies.
#[inline(always)]
pub(crate) fn cell_of(offset: u64) -> usize {
    (offset >> CELL_SHIFT) as usize
}

/// For each region that ever held space, the id of the first span that starts in each cell.
pub(crate) struct Cells {
    regions: Vec<Option<Box<[u32; REGION_CELLS]>>>,
}

impl Cells {
    pub(crate) fn new() -> Self {
        Self { regions: Vec::new() }
    }

    /// Makes the table cover `[offset, offset + bytes)`.
    pub(crate) fn cover(&mut self, offset: u64, bytes: u64) {
        let first = cell_of(offset) >> REGION_SHIFT;
        let last = cell_of(offset + bytes - 1) >> REGION_SHIFT;
        if self.regions.len() <= last {
            self.regions.resize_with(last + 1, || None);
        }
        for region in &mut self.regions[first..=last] {
            region.get_or_insert_with(|| Box::new([NIL; REGION_CELLS]));
        }
    }

    /// The first span that starts in `cell`, or `NIL`.
    #[inline(always)]
    pub(crate) fn get(&self, cell: usize) -> u32 {
        match self.regions.get(cell >> REGION_SHIFT) {
            Some(Some(region)) => region[cell & (REGION_CELLS - 1)],
            _ => NIL,
        }
    }

    /// Writes the first span that starts in `cell`.
    #[inline(always)]
    pub(crate) fn set(&mut self, cell: usize, id: u32) {
        // `cover` made the region before any span could start in it.
        if let Some(Some(region)) = self.regions.get_mut(cell >> REGION_SHIFT) {
            region[cell & (REGION_CELLS - 1)] = id;
        }
    }

    /// The entry of the last cell before `cell` that has one, or `NIL`. A scan.
    pub(crate) fn last_before(&self, cell: usize) -> u32 {
        const BATCH: usize = 16;
        let own = cell >> REGION_SHIFT;
        for (region, index) in self.regions.iter().zip(0..own + 1).rev() {
            let limit = if index == own { cell & (REGION_CELLS - 1) } else { REGION_CELLS };
            let entries = region.as_ref().map_or(&[][..], |region| &region[..limit]);
            // In batches, because comparing a whole batch is a few vector instructions.
            for batch in entries.rchunks(BATCH) {
                if batch.iter().any(|&id| id != NIL)
                    && let Some(&id) = batch.iter().rev().find(|&&id| id != NIL)
                {
                    return id;
                }
            }
        }
        NIL
    }

    /// How many cells have an entry.
    pub(crate) fn count(&self) -> usize {
        self.regions.iter().flatten().flat_map(|r| r.iter()).filter(|&&id| id != NIL).count()
    }

    pub(crate) fn metadata_bytes(&self) -> u64 {
        let made = self.regions.iter().flatten().count() * size_of::<[u32; REGION_CELLS]>();
        (made + self.regions.capacity() * size_of::<usize>()) as u64
    }
}
