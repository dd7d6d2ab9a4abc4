//! The slow, obvious heap that the real one is compared with, and how properties are run.

use std::collections::BTreeMap;
use std::fmt::Debug;

use proptest::strategy::Strategy;
use proptest::test_runner::{Config, RngSeed, TestCaseError, TestError, TestRunner};
use vmm_heap::{FreeRun, Heap, HeapStats};

/// Runs a property for many cases from one seed, `VMM_HEAP_SEED` or a fixed one, so that every run
/// is the same; a failure prints the seed and the smallest case found.
pub(crate) fn check<S: Strategy>(
    cases: u32,
    strategy: S,
    test: impl Fn(S::Value) -> Result<(), TestCaseError>,
) where
    S::Value: Debug,
{
    let seed: u64 = match std::env::var("VMM_HEAP_SEED") {
        Ok(text) => text.parse().expect("VMM_HEAP_SEED must be a decimal number"),
        Err(_) => 20_261_129,
    };
    let config = Config {
        cases,
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(seed),
        ..Config::default()
    };
    match TestRunner::new(config).run(&strategy, test) {
        Ok(()) => {}
        Err(TestError::Fail(why, case)) => {
            panic!("VMM_HEAP_SEED={seed}: {why}\nsmallest case: {case:#?}")
        }
        Err(TestError::Abort(why)) => panic!("VMM_HEAP_SEED={seed}: aborted: {why}"),
    }
}

/// A half-open range of bytes.
pub(crate) type Range = (u64, u64);

/// Mapped ranges and used blocks, as maps from start to end.
#[derive(Default)]
pub(crate) struct Model {
    pub(crate) mapped: BTreeMap<u64, u64>,
    pub(crate) used: BTreeMap<u64, u64>,
}

impl Model {
    fn overlaps(map: &BTreeMap<u64, u64>, (start, end): Range) -> bool {
        map.range(..end).next_back().is_some_and(|(_, &e)| e > start)
    }

    /// Whether any byte of the range is mapped.
    pub(crate) fn touches_mapped(&self, range: Range) -> bool {
        Self::overlaps(&self.mapped, range)
    }

    /// Whether any byte of the range is used.
    pub(crate) fn touches_used(&self, range: Range) -> bool {
        Self::overlaps(&self.used, range)
    }

    /// Maps a range of unmapped space, merged with its neighbours.
    pub(crate) fn map(&mut self, (mut start, mut end): Range) {
        assert!(!self.touches_mapped((start, end)));
        if let Some((&s, &e)) = self.mapped.range(..start).next_back()
            && e == start
        {
            self.mapped.remove(&s);
            start = s;
        }
        if let Some(e) = self.mapped.remove(&end) {
            end = e;
        }
        self.mapped.insert(start, end);
    }

    /// Unmaps a range of mapped space.
    pub(crate) fn unmap(&mut self, (start, end): Range) {
        let (&s, &e) = self.mapped.range(..=start).next_back().expect("the range is mapped");
        assert!(e >= end);
        self.mapped.remove(&s);
        for (s, e) in [(s, start), (end, e)] {
            if s < e {
                self.mapped.insert(s, e);
            }
        }
    }

    /// Takes a block; it must be mapped and not used.
    pub(crate) fn take(&mut self, range: Range) -> Result<(), String> {
        let inside = self.mapped.range(..=range.0).next_back().is_some_and(|(_, &e)| e >= range.1);
        if !inside || self.touches_used(range) {
            return Err(format!("block {range:x?} is not mapped free space"));
        }
        self.used.insert(range.0, range.1);
        Ok(())
    }

    /// Maximal mapped ranges without used blocks.
    pub(crate) fn free_runs(&self) -> Vec<Range> {
        let mut runs = Vec::new();
        for (&start, &end) in &self.mapped {
            let mut at = start;
            for (&s, &e) in self.used.range(start..end) {
                runs.push((at, s));
                at = e;
            }
            runs.push((at, end));
        }
        runs.retain(|(start, end)| start < end);
        runs
    }

    /// The lowest start for the request in free mapped space.
    pub(crate) fn first_fit(&self, bytes: u64, align: u64) -> Option<u64> {
        let starts = self.free_runs().into_iter().map(|(s, e)| (s.next_multiple_of(align), e));
        starts.into_iter().find(|(s, e)| s + bytes <= *e).map(|(s, _)| s)
    }

    /// The parts of a range that are not mapped.
    pub(crate) fn missing(&self, (start, end): Range) -> Vec<Range> {
        let mut parts = Vec::new();
        let mut at = start;
        for (&s, &e) in self.mapped.range(..end) {
            if e > at {
                if s > at {
                    parts.push((at, s));
                }
                at = e;
            }
        }
        if at < end {
            parts.push((at, end));
        }
        parts
    }

    /// Sum of the lengths of ranges.
    pub(crate) fn bytes(map: &BTreeMap<u64, u64>) -> u64 {
        map.iter().map(|(start, end)| end - start).sum()
    }
}

/// All free runs.
pub(crate) fn runs(heap: &Heap) -> Vec<FreeRun> {
    let mut runs = Vec::new();
    heap.free_runs(&mut |run| runs.push(run));
    runs
}

/// The free runs as ranges.
pub(crate) fn run_ranges(heap: &Heap) -> Vec<Range> {
    runs(heap).iter().map(|run| (run.offset, run.offset + run.bytes)).collect()
}

/// What a call that fails must leave as it was. A miss is an operation, so the clock may go on.
pub(crate) fn snapshot(heap: &Heap) -> (Vec<FreeRun>, HeapStats) {
    (runs(heap), HeapStats { tick: 0, ..heap.stats() })
}
