//! The address ledger: which addresses are reserved, and which are free to be.
//!
//! Addresses lie between 2^47 and 2^48, where no host memory of a process is: a device address
//! never equals a host address by accident, and still fits in 48 bits.
//!
//! Invariant: `gaps` and what was taken partition the space; `by_size` holds exactly the gaps.

use std::collections::{BTreeMap, BTreeSet};

/// The first address of the space.
pub(super) const SPACE_START: u64 = 1 << 47;

/// Reserved ranges and the gaps between them.
#[derive(Debug)]
pub(super) struct AddressSpace {
    end: u64,
    /// Free addresses: start to length.
    gaps: BTreeMap<u64, u64>,
    /// The same, by (length, start), for the best fit.
    by_size: BTreeSet<(u64, u64)>,
    /// What reserve gave out: start to length. Legacy allocations are taken but not listed.
    ranges: BTreeMap<u64, u64>,
    reserved_bytes: u64,
}

fn align_up(address: u64, align: u64) -> Option<u64> {
    address.checked_next_multiple_of(align)
}

impl AddressSpace {
    pub(super) fn new(bytes: u64) -> AddressSpace {
        let mut space = AddressSpace {
            end: SPACE_START + bytes,
            gaps: BTreeMap::new(),
            by_size: BTreeSet::new(),
            ranges: BTreeMap::new(),
            reserved_bytes: 0,
        };
        space.insert_gap(SPACE_START, bytes);
        space
    }

    /// Books a gap; an empty one is none.
    fn insert_gap(&mut self, start: u64, bytes: u64) {
        if bytes > 0 {
            self.gaps.insert(start, bytes);
            self.by_size.insert((bytes, start));
        }
    }

    /// Takes a gap off the books.
    fn remove_gap(&mut self, start: u64, bytes: u64) {
        self.gaps.remove(&start);
        self.by_size.remove(&(bytes, start));
    }

    /// Takes `bytes` out of the gaps: at `hint` if that is free, else the best fit.
    pub(super) fn take(&mut self, bytes: u64, align: u64, hint: Option<u64>) -> Option<u64> {
        let (gap_start, gap_bytes, at) = hint
            .and_then(|hint| self.gap_around(hint, bytes, align))
            .or_else(|| self.best_fit(bytes, align))?;
        self.remove_gap(gap_start, gap_bytes);
        self.insert_gap(gap_start, at - gap_start);
        self.insert_gap(at + bytes, gap_start + gap_bytes - (at + bytes));
        Some(at)
    }

    /// The gap that has room at exactly this address.
    fn gap_around(&self, hint: u64, bytes: u64, align: u64) -> Option<(u64, u64, u64)> {
        let end = hint.checked_add(bytes).filter(|end| *end <= self.end)?;
        let (&start, &length) = self.gaps.range(..=hint).next_back()?;
        (hint.is_multiple_of(align) && end <= start + length).then_some((start, length, hint))
    }

    /// The smallest gap with room at the alignment, the lowest of equals.
    fn best_fit(&self, bytes: u64, align: u64) -> Option<(u64, u64, u64)> {
        self.by_size.range((bytes, 0)..).find_map(|&(length, start)| {
            let at = align_up(start, align)?;
            (at.checked_add(bytes)? <= start + length).then_some((start, length, at))
        })
    }

    /// Puts addresses back, joined with their free neighbours.
    pub(super) fn give(&mut self, address: u64, bytes: u64) {
        let (mut start, mut end) = (address, address + bytes);
        if let Some((&before, &length)) = self.gaps.range(..address).next_back()
            && before + length == address
        {
            self.remove_gap(before, length);
            start = before;
        }
        if let Some(&length) = self.gaps.get(&end) {
            self.remove_gap(end, length);
            end += length;
        }
        self.insert_gap(start, end - start);
    }

    /// Takes addresses and lists them as a range.
    pub(super) fn reserve(&mut self, bytes: u64, align: u64, hint: Option<u64>) -> Option<u64> {
        let address = self.take(bytes, align, hint)?;
        self.ranges.insert(address, bytes);
        self.reserved_bytes += bytes;
        Some(address)
    }

    /// Whether reserve gave out exactly this.
    pub(super) fn is_range(&self, address: u64, bytes: u64) -> bool {
        self.ranges.get(&address) == Some(&bytes)
    }

    /// Gives a range back. The caller has checked [`AddressSpace::is_range`].
    pub(super) fn free(&mut self, address: u64, bytes: u64) {
        self.ranges.remove(&address);
        self.reserved_bytes -= bytes;
        self.give(address, bytes);
    }

    /// Whether every address is reserved, in one range or in adjacent ones (row D-R5).
    pub(super) fn covers(&self, address: u64, bytes: u64) -> bool {
        let Some(end) = address.checked_add(bytes) else { return false };
        let mut at = address;
        while at < end {
            match self.ranges.range(..=at).next_back() {
                Some((&start, &length)) if start + length > at => at = start + length,
                _ => return false,
            }
        }
        bytes > 0
    }

    pub(super) fn range_count(&self) -> usize {
        self.ranges.len()
    }

    pub(super) fn reserved_bytes(&self) -> u64 {
        self.reserved_bytes
    }

    /// The reserved ranges, for reports.
    pub(super) fn ranges(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.ranges.iter().map(|(start, bytes)| (*start, *bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const G: u64 = 2 << 20;

    #[test]
    fn gaps_join_again_and_nothing_creeps() {
        let mut space = AddressSpace::new(16 * G);
        let ranges: Vec<u64> = (0..16).map(|_| space.reserve(G, G, None).unwrap()).collect();
        assert_eq!(space.reserve(G, G, None), None);
        for address in ranges.iter().step_by(2).chain(ranges.iter().skip(1).step_by(2)) {
            space.free(*address, G);
        }
        assert_eq!(space.reserved_bytes(), 0);
        assert_eq!(space.gaps.len(), 1);
        assert_eq!(space.reserve(16 * G, G, None), Some(SPACE_START));
    }

    #[test]
    fn a_hint_is_followed_where_it_is_free_and_aligned() {
        let mut space = AddressSpace::new(16 * G);
        let first = space.reserve(G, G, None).unwrap();
        assert_eq!(space.reserve(G, G, Some(first + G)), Some(first + G));
        let elsewhere = space.reserve(G, G, Some(first)).unwrap();
        assert_ne!(elsewhere, first);
        assert_ne!(space.reserve(G, G, Some(first + 8 * G + 4096)), Some(first + 8 * G + 4096));
        assert!(space.reserve(G, G, Some(u64::MAX - 10)).is_some());
        assert!(space.covers(first, 3 * G) && !space.covers(first, 8 * G));
    }
}
