//! Windows: every one that is visited works, and the cheapest is among them.

use std::collections::BTreeMap;

use proptest::prelude::*;
use proptest::test_runner::TestCaseError;
use vmm_heap::{GRANULE_BYTES, Heap, HeapConfig, Miss, Placement};

use crate::operations::{CHUNKS, ISLANDS, Pair, Shape, TINY, actions};
use crate::shadow::{Model, Range, check, run_ranges};

/// All windows for a request.
pub(crate) fn windows(heap: &Heap, need: &Miss, end_bytes: u64) -> Vec<u64> {
    let mut starts = Vec::new();
    heap.windows(need, end_bytes, &mut |start| starts.push(start));
    starts
}

/// The end of the addresses in use.
fn end_of(model: &Model) -> u64 {
    model.mapped.last_key_value().map_or(0, |(_, &end)| end)
}

/// For each gap between used blocks (by how many lie before it), the fewest units to map: chunks,
/// all or nothing of each.
#[derive(Default)]
struct Cheapest(BTreeMap<usize, u64>);

impl Cheapest {
    fn offer(&mut self, pair: &Pair, range: Range) {
        let unit = pair.shape.unit_bytes;
        let units = |&(start, end): &Range| end.div_ceil(unit) - start / unit;
        let missing: u64 = pair.model.missing(range).iter().map(units).sum();
        let gap = pair.model.used.range(..range.0).count();
        self.0.entry(gap).and_modify(|least| *least = missing.min(*least)).or_insert(missing);
    }
}

/// Maps what is missing, takes the window, and undoes both.
fn window_works(pair: &mut Pair, range: Range) -> Result<(), TestCaseError> {
    let before = run_ranges(&pair.heap);
    let (offset, bytes) = (range.0, range.1 - range.0);
    let missing = pair.model.missing(range);
    for &(start, end) in &missing {
        pair.heap.insert_free(start, end - start);
    }
    let block = pair.heap.alloc_at(offset, bytes);
    prop_assert_eq!(block.map(|block| (block.offset, block.bytes)), Ok((offset, bytes)));
    prop_assert_eq!(pair.heap.free(offset), Ok(bytes));
    for &(start, end) in &missing {
        prop_assert_eq!(pair.heap.remove_free(start, end - start), Ok(()));
    }
    prop_assert_eq!(before, run_ranges(&pair.heap));
    pair.compare()
}

fn visits_the_cheapest(pair: &mut Pair, bytes: u64, align: u64) -> Result<(), TestCaseError> {
    let natural = match pair.heap.config().placement {
        Placement::Buddy => bytes.next_power_of_two(),
        Placement::FirstFit => GRANULE_BYTES,
    };
    let grid = align.max(natural);
    let end_bytes = end_of(&pair.model);
    let visited = windows(&pair.heap, &Miss { bytes, align }, end_bytes);
    prop_assert!(visited.iter().any(|&start| start >= end_bytes), "no fresh window");
    let mut offered = Cheapest::default();
    for &start in &visited {
        let range = (start, start + bytes);
        prop_assert_eq!(start % grid, 0);
        prop_assert!(!pair.model.touches_used(range), "window {range:x?} is used");
        offered.offer(pair, range);
        window_works(pair, range)?;
    }
    let mut possible = Cheapest::default();
    for island in ISLANDS {
        let first = island.saturating_sub(bytes + grid).next_multiple_of(grid);
        let end = island + 64 * pair.shape.unit_bytes + grid;
        for start in (first..end).step_by(grid as usize) {
            let range = (start, start + bytes);
            if !pair.model.touches_used(range) {
                possible.offer(pair, range);
            }
        }
    }
    for (gap, bytes) in possible.0 {
        prop_assert_eq!(offered.0.get(&gap), Some(&bytes), "behind {} used blocks", gap);
    }
    Ok(())
}

fn cheapest_is_visited(shape: Shape, align_shift: std::ops::Range<u32>) {
    for placement in [Placement::Buddy, Placement::FirstFit] {
        let config = HeapConfig { placement, small_max_bytes: 0, ..HeapConfig::default() };
        let request = (1..40u64, align_shift.clone());
        check(1500, (actions(shape), request), |(actions, (granules, align_shift))| {
            let mut pair = Pair::new(config, shape);
            for action in &actions {
                pair.apply(action)?;
            }
            visits_the_cheapest(&mut pair, granules * GRANULE_BYTES, 1 << align_shift)
        });
    }
}

#[test]
fn the_window_with_the_fewest_missing_bytes_is_visited() {
    cheapest_is_visited(TINY, 9..15);
}

#[test]
fn the_window_with_the_fewest_missing_chunks_is_visited() {
    cheapest_is_visited(CHUNKS, 9..15);
}

/// Blocks at 8 and 40 granules; in the gap between, free runs at 12 and 24.
#[test]
fn windows_lean_on_both_sides_of_each_free_run_and_of_the_gap() {
    for (placement, align, expected) in [
        (Placement::FirstFit, 512, &[10, 12, 24, 18, 30, 42, 64][..]),
        // At multiples of four: the nearest ones on either side.
        (Placement::FirstFit, 2048, &[12, 24, 16, 20, 28, 44, 64]),
        // Ten granules go to a multiple of sixteen.
        (Placement::Buddy, 512, &[16, 48, 64]),
    ] {
        let config = HeapConfig { placement, small_max_bytes: 0, ..HeapConfig::default() };
        let mut heap = Heap::new(config);
        for (granule, granules) in [(8, 2), (12, 4), (24, 4), (40, 2)] {
            heap.insert_free(granule * GRANULE_BYTES, granules * GRANULE_BYTES);
        }
        for granule in [8, 40] {
            heap.alloc_at(granule * GRANULE_BYTES, 2 * GRANULE_BYTES).expect("free");
        }
        let need = Miss { bytes: 10 * GRANULE_BYTES, align };
        let mut starts = windows(&heap, &need, 64 * GRANULE_BYTES);
        starts.iter_mut().for_each(|start| *start /= GRANULE_BYTES);
        assert_eq!(starts, expected, "{placement:?} aligned to {align}");
    }
}

/// Grows by a window whenever a request misses: then it must not miss again.
#[test]
fn a_filled_window_serves_the_request_that_missed() {
    for placement in [Placement::Buddy, Placement::FirstFit] {
        let config = HeapConfig { placement, slab_bytes: 64 << 10, ..HeapConfig::default() };
        let request = (1..200_000u64, prop_oneof![3 => Just(0), 1 => 9..17u32], any::<usize>());
        check(1000, prop::collection::vec(request, 1..40), |requests| {
            let mut pair = Pair::new(config, TINY);
            for (bytes, align_shift, pick) in requests {
                let align = 1 << align_shift;
                if let Err(miss) = pair.heap.alloc(bytes, align) {
                    let starts = windows(&pair.heap, &miss, end_of(&pair.model));
                    let start = starts[pick % starts.len()];
                    for range in pair.model.missing((start, start + miss.bytes)) {
                        pair.heap.insert_free(range.0, range.1 - range.0);
                        pair.model.map(range);
                    }
                    prop_assert!(pair.heap.alloc(bytes, align).is_ok());
                }
                pair.heap.verify().map_err(TestCaseError::fail)?;
            }
            Ok(())
        });
    }
}

#[test]
fn impossible_requests_have_no_window() {
    let heap = Heap::new(HeapConfig::default());
    for bytes in [0, (1 << 47) + 512, u64::MAX] {
        assert!(windows(&heap, &Miss { bytes, align: 512 }, 0).is_empty(), "{bytes}");
    }
    // Nothing fits behind the end of the space.
    let need = Miss { bytes: 512, align: 512 };
    assert_eq!(windows(&heap, &need, u64::MAX), [0]);
}
