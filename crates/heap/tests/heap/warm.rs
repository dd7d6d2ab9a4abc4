//! A warm operation allocates nothing on the host.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use vmm_heap::Placement;

use crate::trace::{Grown, synthetic};

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator, with a count for each thread: tests run beside each other.
struct Counting;

// SAFETY: every call is passed on as it is; counting neither allocates (the cell is const and has
// no destructor) nor unwinds.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Host allocations while `work` runs.
fn allocations(work: impl FnOnce()) -> u64 {
    let before = ALLOCATIONS.get();
    work();
    ALLOCATIONS.get() - before
}

#[test]
fn replaying_what_was_replayed_before_allocates_nothing() {
    for placement in [Placement::Buddy, Placement::FirstFit] {
        let trace = synthetic(20_000);
        let mut grown = Grown::with_chunks(placement, 2000);
        assert!(allocations(|| grown.replay(&trace)) > 0, "the count does not work");
        grown.replay(&trace);
        assert_eq!(allocations(|| grown.replay(&trace)), 0, "{placement:?}");
        assert_eq!(grown.counts.misses(), 0, "{placement:?} was not warm");
    }
}
