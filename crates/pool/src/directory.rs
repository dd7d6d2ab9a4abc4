//! The directory: from a plain address to the lane it lies in, without a hash.
//!
//! Lanes reserve addresses in ranges that start at multiples of a page of 32 MiB or more, so a page
//! belongs to one lane at most. A table of two levels holds, for each page, the number of the
//! lane's shell; a second one holds the shells by number. Both are read without a lock; nothing
//! in them is ever freed, so what is read is at worst out of date, and the reader checks it under
//! the lane's lock.
//!
//! Only lanes that hand out raw addresses are entered: at their first such request, and at each
//! range that is added later. A lane leaves the directory when it retires, before its ranges are
//! given back.

use std::sync::OnceLock;

use crate::lane::LaneCell;
use crate::sync::atomic::{AtomicU32, Ordering};
use crate::sync::global;

/// `log2` of the bytes of a page: lanes align their ranges to this at least.
pub(crate) const PAGE_SHIFT: u32 = 25;
/// `log2` of the addresses covered: device addresses are below 2^48.
const SPACE_SHIFT: u32 = 48;
const LEAF_SHIFT: u32 = 11;
const LEAF_PAGES: usize = 1 << LEAF_SHIFT;
const LEAVES: usize = 1 << (SPACE_SHIFT - PAGE_SHIFT - LEAF_SHIFT);

/// A shell's number, or 0 where no lane is.
type Leaf = Box<[AtomicU32; LEAF_PAGES]>;

global! {
    static PAGES: [OnceLock<Leaf>; LEAVES] = [const { OnceLock::new() }; LEAVES];
}

global! {
    /// Shells by number, from 1: those from 2^k on in the k-th array, which is made when its first
    /// shell is needed and never moves.
    static SHELLS: [OnceLock<Box<[LaneCell]>>; u32::BITS as usize] =
        [const { OnceLock::new() }; u32::BITS as usize];
}

global! {
    static LAST_SHELL: AtomicU32 = AtomicU32::new(0);
}

/// A shell that no lane has used yet.
pub(crate) fn new_shell() -> &'static LaneCell {
    loop {
        // More than the 2^32 numbers would need more memory than there are addresses.
        let number = LAST_SHELL.fetch_add(1, Ordering::Relaxed) + 1;
        let array = number.ilog2();
        SHELLS[array as usize]
            .get_or_init(|| (1 << array..2 << array).map(LaneCell::vacant).collect());
        if let Some(cell) = shell(number) {
            return cell;
        }
    }
}

/// The shell of a number.
#[inline]
fn shell(number: u32) -> Option<&'static LaneCell> {
    let array = number.checked_ilog2()?;
    let shells = SHELLS[array as usize].get()?;
    shells.get((number - (1 << array)) as usize)
}

fn page_entry(page: u64) -> Option<&'static AtomicU32> {
    let leaf = PAGES.get((page >> LEAF_SHIFT) as usize)?;
    let leaf = leaf.get_or_init(|| Box::new([const { AtomicU32::new(0) }; LEAF_PAGES]));
    leaf.get(page as usize % LEAF_PAGES)
}

fn pages(address: u64, bytes: u64) -> std::ops::Range<u64> {
    address >> PAGE_SHIFT..(address + bytes).div_ceil(1 << PAGE_SHIFT)
}

/// The shell of the lane that may hold `address`, for its lock to tell.
#[inline]
pub(crate) fn lane_at(address: u64) -> Option<&'static LaneCell> {
    let page = address >> PAGE_SHIFT;
    let leaf = PAGES.get((page >> LEAF_SHIFT) as usize)?.get()?;
    shell(leaf[page as usize % LEAF_PAGES].load(Ordering::Acquire))
}

/// Enters a range of a lane, all pages or none.
///
/// # Errors
/// The first address that another lane has, which happens where two drivers of one process (two
/// simulated machines) give out the same addresses, or that lies above all device addresses.
pub(crate) fn enter(address: u64, bytes: u64, cell: &'static LaneCell) -> Result<(), u64> {
    for page in pages(address, bytes) {
        let taken = |entry: &AtomicU32| {
            let ordering = (Ordering::AcqRel, Ordering::Relaxed);
            entry.compare_exchange(0, cell.number(), ordering.0, ordering.1).is_err()
        };
        if page_entry(page).is_none_or(taken) {
            let refused = (page << PAGE_SHIFT).max(address);
            leave(address, refused - address, cell);
            return Err(refused);
        }
    }
    Ok(())
}

/// Takes a range of a lane out again.
pub(crate) fn leave(address: u64, bytes: u64, cell: &'static LaneCell) {
    for entry in pages(address, bytes).filter_map(page_entry) {
        // Another lane's entry stays: a range that could not be entered has none of its own.
        let ordering = (Ordering::AcqRel, Ordering::Relaxed);
        let _others = entry.compare_exchange(cell.number(), 0, ordering.0, ordering.1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 1 << PAGE_SHIFT;
    /// Addresses that no driver gives out: the tests beside this one share the table.
    const BASE: u64 = 1 << 40;

    fn number_at(address: u64) -> Option<u32> {
        lane_at(address).map(LaneCell::number)
    }

    #[test]
    fn a_range_is_found_at_each_of_its_addresses_and_nowhere_else() {
        let cell = new_shell();
        let own = Some(cell.number());
        // Over the border of two leaves, the last page in part.
        let start = BASE + (LEAF_PAGES as u64 - 2) * PAGE;
        enter(start, 3 * PAGE + 5, cell).unwrap();
        for at in [0, 1, PAGE - 1, PAGE, 2 * PAGE, 3 * PAGE, 3 * PAGE + 4] {
            assert_eq!(number_at(start + at), own, "{at}");
        }
        for outside in [start - 1, start + 4 * PAGE, 0, 1 << 48, u64::MAX] {
            assert_eq!(number_at(outside), None, "{outside:#x}");
        }
        leave(start, 3 * PAGE + 5, cell);
        assert!((0..4).all(|page| number_at(start + page * PAGE).is_none()));
    }

    #[test]
    fn what_another_lane_has_is_refused_and_left_alone() {
        let (first, second) = (new_shell(), new_shell());
        let start = BASE << 1;
        enter(start + 2 * PAGE, PAGE, first).unwrap();
        assert_eq!(enter(start, 4 * PAGE, second), Err(start + 2 * PAGE));
        assert_eq!(number_at(start), None, "all pages or none");
        leave(start, 4 * PAGE, second);
        assert_eq!(number_at(start + 2 * PAGE), Some(first.number()));
        leave(start + 2 * PAGE, PAGE, first);
        assert_eq!(enter((1 << 48) - PAGE, 2 * PAGE, second), Err(1 << 48));
        assert_eq!(number_at((1 << 48) - PAGE), None);
    }

    #[test]
    fn shells_have_numbers_of_their_own_and_are_found_by_them() {
        let threads: Vec<_> = (0..4)
            .map(|_| std::thread::spawn(|| (0..50).map(|_| new_shell().number()).collect()))
            .collect();
        let mut numbers: Vec<u32> =
            threads.into_iter().flat_map(|t| -> Vec<u32> { t.join().unwrap() }).collect();
        assert!(numbers.iter().all(|n| shell(*n).is_some_and(|cell| cell.number() == *n)));
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), 200);
        assert!(shell(0).is_none());
    }
}
