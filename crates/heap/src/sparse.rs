//! A table over a sparse space: one index, such as a span or a slab, for each place.
//!
//! It turns an address into what lies there without a hash. The table is cut into pages that are
//! made when their part of the space is first used, so a gap of many TiB costs a pointer a page.

use crate::NIL;

/// `log2` of the entries of a page.
pub(crate) const PAGE_SHIFT: u32 = 12;
/// Entries of a page.
pub(crate) const PAGE_ENTRIES: usize = 1 << PAGE_SHIFT;

/// Entries by place, `NIL` where nothing was set.
pub(crate) struct SparseTable {
    pages: Vec<Option<Box<[u32; PAGE_ENTRIES]>>>,
}

impl SparseTable {
    pub(crate) fn new() -> Self {
        Self { pages: Vec::new() }
    }

    /// Makes room for the places from `first` to `last`.
    pub(crate) fn cover(&mut self, first: usize, last: usize) {
        let (first, last) = (first >> PAGE_SHIFT, last >> PAGE_SHIFT);
        if self.pages.len() <= last {
            self.pages.resize_with(last + 1, || None);
        }
        for page in &mut self.pages[first..=last] {
            page.get_or_insert_with(|| Box::new([NIL; PAGE_ENTRIES]));
        }
    }

    /// The entry of a place.
    #[inline(always)]
    pub(crate) fn get(&self, place: usize) -> u32 {
        match self.pages.get(place >> PAGE_SHIFT) {
            Some(Some(page)) => page[place % PAGE_ENTRIES],
            _ => NIL,
        }
    }

    /// Sets the entry of a place that is covered.
    #[inline(always)]
    pub(crate) fn set(&mut self, place: usize, entry: u32) {
        if let Some(Some(page)) = self.pages.get_mut(place >> PAGE_SHIFT) {
            page[place % PAGE_ENTRIES] = entry;
        } else {
            debug_assert!(false, "place {place} is not covered");
        }
    }

    /// The entry of the last place before `place` that has one, or `NIL`. A scan.
    pub(crate) fn last_before(&self, place: usize) -> u32 {
        const BATCH: usize = 16;
        let own = place >> PAGE_SHIFT;
        for (page, index) in self.pages.iter().zip(0..own + 1).rev() {
            let limit = if index == own { place % PAGE_ENTRIES } else { PAGE_ENTRIES };
            let entries = page.as_ref().map_or(&[][..], |page| &page[..limit]);
            // In batches, because comparing a whole batch is a few vector instructions.
            for batch in entries.rchunks(BATCH) {
                if batch.iter().any(|&entry| entry != NIL)
                    && let Some(&entry) = batch.iter().rev().find(|&&entry| entry != NIL)
                {
                    return entry;
                }
            }
        }
        NIL
    }

    /// How many places have an entry.
    pub(crate) fn count(&self) -> usize {
        let entries = self.pages.iter().flatten().flat_map(|page| page.iter());
        entries.filter(|&&entry| entry != NIL).count()
    }

    pub(crate) fn metadata_bytes(&self) -> u64 {
        let made = self.pages.iter().flatten().count() * size_of::<[u32; PAGE_ENTRIES]>();
        (made + self.pages.capacity() * size_of::<usize>()) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_found_and_the_last_before_a_place_too() {
        let mut table = SparseTable::new();
        let places = [0, 3, 5, 17, PAGE_ENTRIES - 1, PAGE_ENTRIES, 50 * PAGE_ENTRIES + 3];
        for (&place, entry) in places.iter().zip(100..) {
            table.cover(place, place);
            table.set(place, entry);
        }
        assert_eq!(table.count(), places.len());
        assert_eq!(table.last_before(0), NIL);
        for (i, &place) in places.iter().enumerate() {
            assert_eq!(table.get(place), 100 + i as u32);
            assert_eq!(table.get(place + 1) != NIL, places.contains(&(place + 1)));
            let next = places.get(i + 1).copied().unwrap_or(usize::MAX >> 1);
            for after in [place + 1, next] {
                assert_eq!(table.last_before(after), 100 + i as u32, "before {after}");
            }
        }
        assert_eq!(table.get(usize::MAX), NIL);
    }
}
