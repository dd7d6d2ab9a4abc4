//! The heap against the slow, obvious model, over random operations.

use crate::shadow::{Model, Range, check, run_ranges, snapshot};
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;
use vmm_heap::{GRANULE_BYTES, Heap, HeapConfig, Placement};

/// Where space may be mapped: at the start, across the border of a table of 1 GiB, far away.
pub(crate) const ISLANDS: [u64; 3] = [0, (1 << 30) - (1 << 20), 40 << 30];

/// One operation. Places are counted in units, so that small numbers meet often.
#[derive(Clone, Debug)]
pub(crate) enum Action {
    Insert { island: usize, at: u64, units: u64 },
    Remove { island: usize, at: u64, units: u64 },
    Alloc { bytes: u64, align_shift: u32 },
    AllocAt { island: usize, at: u64, units: u64 },
    Free { nth: usize },
    FreeBad { nth: usize, shift: u64 },
    Drain,
}

/// A heap to test: the unit of places, and the largest request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) unit_bytes: u64,
    request_max_bytes: u64,
}

/// Many spans in one cell.
pub(crate) const TINY: Shape =
    Shape { unit_bytes: GRANULE_BYTES, request_max_bytes: 20 * GRANULE_BYTES };
/// Space mapped in chunks of eight granules, blocks of any length.
pub(crate) const CHUNKS: Shape =
    Shape { unit_bytes: 8 * GRANULE_BYTES, request_max_bytes: 40 * GRANULE_BYTES };
/// Spans around the size of a cell.
const CELLS: Shape = Shape { unit_bytes: 96 << 10, request_max_bytes: 900 << 10 };
/// Slabs and blocks of many cells.
const LARGE: Shape = Shape { unit_bytes: 512 << 10, request_max_bytes: 8 << 20 };

pub(crate) fn actions(shape: Shape) -> impl Strategy<Value = Vec<Action>> {
    let place = || (0..ISLANDS.len(), 0..48u64, 1..16u64);
    let alloc = (0.0..1.0f64, prop_oneof![4 => Just(0), 1 => 8..24u32]);
    let action = prop_oneof![
        2 => place().prop_map(|(island, at, units)| Action::Insert { island, at, units }),
        1 => place().prop_map(|(island, at, units)| Action::Remove { island, at, units }),
        6 => alloc.prop_map(move |(size, align_shift)| Action::Alloc {
            // Mostly small ones, down to nothing.
            bytes: (size * size * shape.request_max_bytes as f64) as u64,
            align_shift,
        }),
        1 => place().prop_map(|(island, at, units)| Action::AllocAt { island, at, units }),
        5 => any::<usize>().prop_map(|nth| Action::Free { nth }),
        1 => (any::<usize>(), 0..64u64).prop_map(|(nth, shift)| Action::FreeBad { nth, shift }),
        1 => Just(Action::Drain),
    ];
    prop::collection::vec(action, 1..80)
}

/// The heap beside its model.
pub(crate) struct Pair {
    pub(crate) heap: Heap,
    pub(crate) model: Model,
    pub(crate) shape: Shape,
}

impl Pair {
    pub(crate) fn new(config: HeapConfig, shape: Shape) -> Self {
        Self { heap: Heap::new(config), model: Model::default(), shape }
    }

    fn range(&self, island: usize, at: u64, units: u64) -> Range {
        let start = ISLANDS[island] + at * self.shape.unit_bytes;
        (start, start + units * self.shape.unit_bytes)
    }

    /// Without slabs the large placement holds exactly the blocks handed out.
    fn exact(&self) -> bool {
        self.heap.config().small_max_bytes == 0
    }

    fn nth_used(&self, nth: usize) -> Option<Range> {
        let count = self.model.used.len();
        (count > 0).then(|| self.model.used.iter().nth(nth % count).map(|(&s, &e)| (s, e)))?
    }

    /// Applies an action to both and compares the answers.
    pub(crate) fn apply(&mut self, action: &Action) -> Result<(), TestCaseError> {
        match *action {
            Action::Insert { island, at, units } => {
                let range = self.range(island, at, units);
                if !self.model.touches_mapped(range) {
                    self.heap.insert_free(range.0, range.1 - range.0);
                    self.model.map(range);
                }
            }
            Action::Remove { island, at, units } => {
                let range = self.range(island, at, units);
                self.on_exact(range, true)?;
            }
            Action::AllocAt { island, at, units } => {
                let range = self.range(island, at, units);
                self.on_exact(range, false)?;
            }
            Action::Alloc { bytes, align_shift } => self.alloc(bytes, 1 << align_shift)?,
            Action::Free { nth } => {
                if let Some((start, end)) = self.nth_used(nth) {
                    prop_assert_eq!(self.heap.block_bytes(start), Some(end - start));
                    prop_assert_eq!(self.heap.free(start), Ok(end - start));
                    self.model.used.remove(&start);
                    self.rejects_free(start)?;
                }
            }
            Action::FreeBad { nth, shift } => {
                let (start, end) = self.nth_used(nth).unwrap_or((0, 1 << 20));
                // Inside the block, or around it; one byte off too.
                for offset in [start + shift * GRANULE_BYTES, start + 1, end, u64::MAX - shift] {
                    if !self.model.used.contains_key(&offset) {
                        self.rejects_free(offset)?;
                    }
                }
            }
            Action::Drain => {
                let magazines = self.heap.stats().magazine_bytes;
                prop_assert_eq!(self.heap.drain(), magazines > 0);
                prop_assert_eq!(self.heap.stats().magazine_bytes, 0);
            }
        }
        Ok(())
    }

    fn rejects_free(&mut self, offset: u64) -> Result<(), TestCaseError> {
        let before = snapshot(&self.heap);
        prop_assert_eq!(self.heap.block_bytes(offset), None);
        prop_assert!(self.heap.free(offset).is_err());
        prop_assert_eq!(before, snapshot(&self.heap));
        Ok(())
    }

    /// `remove_free` or `alloc_at` of a range.
    fn on_exact(&mut self, range: Range, remove: bool) -> Result<(), TestCaseError> {
        let (offset, bytes) = (range.0, range.1 - range.0);
        let free = run_ranges(&self.heap).iter().any(|run| run.0 <= offset && range.1 <= run.1);
        let before = snapshot(&self.heap);
        if remove {
            prop_assert_eq!(self.heap.remove_free(offset, bytes).is_ok(), free);
        } else {
            prop_assert_eq!(self.heap.alloc_at(offset, bytes).is_ok(), free);
        }
        if !free {
            prop_assert_eq!(before, snapshot(&self.heap));
        } else if remove {
            self.model.unmap(range);
        } else {
            self.model.take(range).map_err(TestCaseError::fail)?;
        }
        Ok(())
    }

    fn alloc(&mut self, bytes: u64, align: u64) -> Result<(), TestCaseError> {
        let rounded = bytes.max(1).next_multiple_of(GRANULE_BYTES);
        let before = snapshot(&self.heap);
        let config = *self.heap.config();
        let natural = match config.placement {
            Placement::Buddy => rounded.next_power_of_two(),
            Placement::FirstFit => GRANULE_BYTES,
        };
        match self.heap.alloc(bytes, align) {
            Ok(block) => {
                prop_assert_eq!(block.bytes, rounded);
                prop_assert_eq!(block.offset % align.max(GRANULE_BYTES), 0);
                if self.exact() {
                    prop_assert_eq!(block.offset % natural, 0);
                    if config.placement == Placement::FirstFit {
                        let lowest = self.model.first_fit(rounded, align.max(GRANULE_BYTES));
                        prop_assert_eq!(lowest, Some(block.offset));
                    }
                }
                let range = (block.offset, block.offset + block.bytes);
                self.model.take(range).map_err(TestCaseError::fail)?;
            }
            Err(miss) => {
                prop_assert_eq!(&before, &snapshot(&self.heap));
                let small = rounded <= config.small_max_bytes && align <= GRANULE_BYTES;
                let bytes = if small { config.slab_bytes } else { rounded };
                prop_assert_eq!(miss.bytes, bytes);
                // What the miss asks for is really nowhere to be had.
                let fits =
                    |(start, end): &Range| start.next_multiple_of(miss.align) + miss.bytes <= *end;
                prop_assert!(!run_ranges(&self.heap).iter().any(fits), "{miss:?}");
            }
        }
        Ok(())
    }

    /// What must hold after each step.
    pub(crate) fn compare(&self) -> Result<(), TestCaseError> {
        self.heap.verify().map_err(TestCaseError::fail)?;
        let stats = self.heap.stats();
        prop_assert_eq!(stats.mapped_bytes, Model::bytes(&self.model.mapped));
        prop_assert_eq!(stats.used_bytes, Model::bytes(&self.model.used));
        prop_assert_eq!(stats.mapped_bytes, stats.used_bytes + stats.free_bytes);
        let parts = stats.large_free_bytes + stats.slab_free_bytes + stats.magazine_bytes;
        prop_assert_eq!(stats.free_bytes, parts);
        prop_assert_eq!(stats.blocks, self.model.used.len() as u64);
        let ranges = run_ranges(&self.heap);
        let longest = ranges.iter().map(|run| run.1 - run.0).max().unwrap_or(0);
        prop_assert_eq!(self.heap.largest_free_bytes(), longest);
        if self.exact() {
            prop_assert_eq!(ranges, self.model.free_runs());
        }
        Ok(())
    }

    /// After the last free and a drain, what is free is what was mapped.
    fn empty(mut self) -> Result<(), TestCaseError> {
        while let Some((&start, &end)) = self.model.used.iter().next() {
            prop_assert_eq!(self.heap.free(start), Ok(end - start));
            self.model.used.remove(&start);
        }
        self.heap.drain();
        self.compare()?;
        prop_assert_eq!(run_ranges(&self.heap), self.model.free_runs());
        prop_assert_eq!(self.heap.stats().slab_count, 0);
        Ok(())
    }
}

fn follows_the_model(config: HeapConfig, shape: Shape) {
    for placement in [Placement::Buddy, Placement::FirstFit] {
        let config = HeapConfig { placement, ..config };
        check(1000, actions(shape), |actions| {
            let mut pair = Pair::new(config, shape);
            for action in &actions {
                pair.apply(action)?;
                pair.compare()?;
            }
            pair.empty()
        });
    }
}

fn no_slabs() -> HeapConfig {
    HeapConfig { small_max_bytes: 0, ..HeapConfig::default() }
}

#[test]
fn without_slabs_granule_by_granule() {
    follows_the_model(no_slabs(), TINY);
}

#[test]
fn without_slabs_around_the_size_of_a_cell() {
    follows_the_model(no_slabs(), CELLS);
}

#[test]
fn with_slabs_of_half_a_mebibyte() {
    let config = HeapConfig { slab_bytes: 512 << 10, magazine_depth: 2, ..HeapConfig::default() };
    follows_the_model(config, CELLS);
}

#[test]
fn with_default_settings() {
    follows_the_model(HeapConfig::default(), LARGE);
}

#[test]
fn with_slabs_without_magazines() {
    let config = HeapConfig { slab_bytes: 64 << 10, magazine_depth: 0, ..HeapConfig::default() };
    follows_the_model(config, TINY);
}
