//! First fit by address.
//!
//! The tree holds for each cell of 1 MiB the largest free span that starts in it, so the lowest
//! address that fits is in the lowest cell that holds enough. How many free spans start in a cell
//! is not limited: exact ranges, trimmed tails, requests without slabs and slabs of any size may
//! leave several. Then the walk over the spans of the cell, in address order, picks the first that
//! fits, and the cell's value is worked out anew by the same walk after each change. As a
//! rule both see one span or two, and the cost is that of the tree. (Cells of 256 KiB, in which never
//! more than one block starts: 5 % slower on traces of training, for tables four times as long. Of
//! 2 MiB: no faster.)
//!
//! # What was tried and dropped
//!
//! Measured on traces of training and inference, 2026-11-29, Xeon at 2.3 GHz; none gained more than
//! the noise of 2 %. Storing whole vectors into the tree, so that the next vector load need not
//! wait for a narrow store: 2 % slower. Cutting values off at 64 MiB or 1 GiB, so that a long free
//! tail changes nothing above its cell: no gain, and slower for requests above the limit. Looking
//! at the lowest 16 GiB before the root: no gain.

use super::lanes::Lanes;
use super::space::{Index, Left};
use super::spans::{Spans, cell_of};
use super::tree::{MaxTree, value_of};
use crate::{NIL, align_up};

/// The tree, and the way to look at its nodes.
pub(crate) struct FirstFit<L> {
    lanes: L,
    tree: MaxTree,
}

/// The first free span that starts in `cell` and fits the request, and where.
#[inline(always)]
fn fit_in_cell(spans: &Spans, cell: usize, bytes: u64, align: u64) -> Option<(u32, u64)> {
    let mut id = spans.first_in(cell);
    while id != NIL {
        let span = spans.at(id);
        // The list goes on into the cells behind.
        if cell_of(span.offset) != cell {
            return None;
        }
        if span.is_free() {
            let start = align_up(span.offset, align);
            if start + bytes <= span.end() {
                return Some((id, start));
            }
        }
        id = span.next;
    }
    None
}

impl<L: Lanes> FirstFit<L> {
    pub(crate) fn new(lanes: L) -> Self {
        Self { lanes, tree: MaxTree::new() }
    }

    /// Goes on behind cells that hold enough bytes, but not in an aligned place.
    fn find_from(&self, spans: &Spans, from: usize, bytes: u64, align: u64) -> Option<(u32, u64)> {
        let mut from = from;
        loop {
            let cell = self.tree.first_from(self.lanes, from, value_of(bytes))?;
            if let Some(found) = fit_in_cell(spans, cell, bytes, align) {
                return Some(found);
            }
            from = cell + 1;
        }
    }
}

impl<L: Lanes> Index for FirstFit<L> {
    fn placement_align(&self, _bytes: u64, align: u64) -> u64 {
        align
    }

    #[inline(always)]
    fn find(&self, spans: &Spans, bytes: u64, align: u64) -> Option<(u32, u64)> {
        let cell = self.tree.first(self.lanes, value_of(bytes))?;
        // It holds enough bytes; only an alignment, or a length that the tree cuts off, can make
        // them not fit.
        if let Some(found) = fit_in_cell(spans, cell, bytes, align) {
            return Some(found);
        }
        self.find_from(spans, cell + 1, bytes, align)
    }

    fn cover(&mut self, offset: u64, bytes: u64) {
        self.tree.cover(cell_of(offset), cell_of(offset + bytes - 1));
    }

    /// Nothing: the cell is looked at again when the operation has changed the spans.
    #[inline(always)]
    fn detach(&mut self, _spans: &Spans, _id: u32) {}

    #[inline(always)]
    fn cut(&mut self, spans: &Spans, offset: u64, left: Left) {
        let cell = cell_of(offset);
        let value = value_of(spans.largest_free_in(cell));
        if left.behind == NIL || cell_of(spans.at(left.behind).offset) == cell {
            return self.tree.set(self.lanes, cell, value);
        }
        // The used span reaches into the cell from below, so this is the first that starts there.
        let behind = spans.at(left.behind).offset;
        let behind_value = value_of(spans.largest_free_from(left.behind, cell_of(behind)));
        // What is left comes before what is gone: then a maximum that both share does not fall and
        // rise again.
        self.tree.set(self.lanes, cell_of(behind), behind_value);
        self.tree.set(self.lanes, cell, value);
    }

    #[inline(always)]
    fn merge(&mut self, spans: &Spans, id: u32, dead_offset: Option<u64>) {
        let cell = cell_of(spans.at(id).offset);
        self.tree.set(self.lanes, cell, value_of(spans.largest_free_in(cell)));
        if let Some(dead_offset) = dead_offset
            && cell_of(dead_offset) != cell
        {
            // The merged span reaches into the cell from below: what starts there comes behind it.
            let dead_cell = cell_of(dead_offset);
            let value = value_of(spans.largest_free_behind(id, dead_cell));
            self.tree.set(self.lanes, dead_cell, value);
        }
    }

    fn metadata_bytes(&self) -> u64 {
        self.tree.metadata_bytes()
    }

    fn verify(&self, spans: &Spans) -> Result<(), String> {
        let mut cells: Vec<usize> =
            spans.iter().filter(|span| span.is_free()).map(|span| cell_of(span.offset)).collect();
        cells.dedup();
        self.tree
            .verify(cells.into_iter().map(|cell| (cell, value_of(spans.largest_free_in(cell)))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GRANULE_BYTES;
    use crate::large::lanes::Plain;
    use crate::large::space::Space;

    fn space(ranges: &[(u64, u64)]) -> Space<FirstFit<Plain>> {
        let mut space = Space::new(FirstFit::new(Plain));
        for &(offset, bytes) in ranges {
            space.insert_free(offset, bytes, 0);
        }
        space.verify().expect("consistent");
        space
    }

    #[test]
    fn the_lowest_address_wins_among_spans_of_one_cell() {
        let mut space = space(&[(0, 1024), (2048, 2048), (8192, 65536)]);
        assert_eq!(space.alloc(1536, GRANULE_BYTES), Some(2048));
        assert_eq!(space.alloc(1024, GRANULE_BYTES), Some(0));
        assert_eq!(space.alloc(512, GRANULE_BYTES), Some(3584));
        assert_eq!(space.alloc(512, GRANULE_BYTES), Some(8192));
        space.verify().expect("consistent");
    }

    #[test]
    fn spans_that_are_long_enough_but_not_aligned_are_passed_over() {
        let mib = 1 << 20;
        let mut space = space(&[(mib, mib), (5 * mib + 512, 2 * mib), (9 * mib, 4 * mib)]);
        assert_eq!(space.alloc(2 * mib, 2 * mib), Some(10 * mib));
        assert_eq!(space.alloc(2 * mib, 2 * mib), None);
        assert_eq!(space.alloc(mib, mib), Some(mib));
        assert_eq!(space.alloc(mib, mib), Some(6 * mib));
        space.verify().expect("consistent");
    }

    /// Lengths above 1 TiB look alike to the tree.
    #[test]
    fn runs_above_the_largest_value_of_the_tree() {
        let tib = 1u64 << 40;
        let mut space = space(&[(0, tib + (64 << 20)), (2 * tib, tib + (128 << 20))]);
        assert_eq!(space.alloc(tib + (100 << 20), GRANULE_BYTES), Some(2 * tib));
        assert_eq!(space.alloc(tib + (100 << 20), GRANULE_BYTES), None);
        assert_eq!(space.alloc(tib, GRANULE_BYTES), Some(0));
        space.verify().expect("consistent");
    }
}
