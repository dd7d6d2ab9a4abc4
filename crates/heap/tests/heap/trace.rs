//! A small synthetic trace, replayed with growth: placement is deterministic to the byte.

use vmm_heap::{Heap, HeapConfig, Miss, Placement};

use crate::windows::windows;

const CHUNK_BYTES: u64 = 2 << 20;

/// A fixed sequence of pseudo-random numbers (xorshift).
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// One operation: allocate that many bytes as the next id, or free an id.
pub(crate) enum Op {
    Alloc(u64),
    Free(usize),
}

/// Alternating bursts of allocations and frees, 256 B to 16 MiB; everything is freed at the end.
pub(crate) fn synthetic(ops: usize) -> Vec<Op> {
    let mut random = Random(0x9E37_79B9_7F4A_7C15);
    let (mut trace, mut live, mut next) = (Vec::new(), Vec::new(), 0);
    while trace.len() < ops {
        for _ in 0..random.below(40) {
            let octave = random.below(17);
            trace.push(Op::Alloc((256 << octave) + random.below(256 << octave)));
            live.push(next);
            next += 1;
        }
        for _ in 0..random.below(40).min(live.len() as u64) {
            trace.push(Op::Free(live.swap_remove(random.below(live.len() as u64) as usize)));
        }
    }
    trace.extend(live.into_iter().map(Op::Free));
    trace
}

impl Counts {
    pub(crate) fn misses(&self) -> u64 {
        self.misses
    }
}

/// A heap whose owner maps 2 MiB chunks where the fewest are missing.
pub(crate) struct Grown {
    pub(crate) heap: Heap,
    mapped: Vec<bool>,
    offsets: Vec<u64>,
    pub(crate) counts: Counts,
}

/// What a replay did.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Requests that did not fit even after a drain.
    misses: u64,
    /// Drains that made a request fit.
    drains_that_helped: u64,
    chunks: u64,
    slabs_at_most: u64,
    /// All offsets folded into one number: any block in another place changes it.
    placement: u64,
}

impl Grown {
    pub(crate) fn new(placement: Placement) -> Self {
        let config = HeapConfig { placement, ..HeapConfig::default() };
        let (mapped, offsets, counts) = (Vec::new(), Vec::new(), Counts::default());
        Self { heap: Heap::new(config), mapped, offsets, counts }
    }

    /// With the first chunks mapped ahead.
    pub(crate) fn with_chunks(placement: Placement, chunks: usize) -> Self {
        let mut grown = Self::new(placement);
        grown.heap.insert_free(0, chunks as u64 * CHUNK_BYTES);
        grown.mapped = vec![true; chunks];
        grown
    }

    fn missing(&self, start: u64, bytes: u64) -> impl Iterator<Item = u64> {
        let chunks = start / CHUNK_BYTES..(start + bytes).div_ceil(CHUNK_BYTES);
        chunks.filter(|&chunk| self.mapped.get(chunk as usize) != Some(&true))
    }

    fn grow(&mut self, miss: &Miss) {
        let end_bytes = self.mapped.len() as u64 * CHUNK_BYTES;
        let starts = windows(&self.heap, miss, end_bytes);
        let cost = |&start: &u64| (self.missing(start, miss.bytes).count(), start);
        let start = starts.into_iter().min_by_key(cost).expect("a fresh window is always visited");
        for chunk in self.missing(start, miss.bytes).collect::<Vec<_>>() {
            self.heap.insert_free(chunk * CHUNK_BYTES, CHUNK_BYTES);
            self.mapped.resize(self.mapped.len().max(chunk as usize + 1), false);
            self.mapped[chunk as usize] = true;
            self.counts.chunks += 1;
        }
    }

    fn alloc(&mut self, bytes: u64) -> u64 {
        if let Ok(block) = self.heap.alloc(bytes, 256) {
            return block.offset;
        }
        self.heap.drain();
        let miss = match self.heap.alloc(bytes, 256) {
            Ok(block) => {
                self.counts.drains_that_helped += 1;
                return block.offset;
            }
            Err(miss) => miss,
        };
        self.counts.misses += 1;
        self.grow(&miss);
        self.heap.alloc(bytes, 256).expect("the window was filled").offset
    }

    /// Replays the operations; the trace frees all it allocates.
    pub(crate) fn replay(&mut self, trace: &[Op]) {
        self.offsets.clear();
        for op in trace {
            match *op {
                Op::Alloc(bytes) => {
                    let offset = self.alloc(bytes);
                    self.offsets.push(offset);
                    let counts = &mut self.counts;
                    counts.placement = counts.placement.rotate_left(5) ^ offset;
                    let slabs = self.heap.stats().slab_count;
                    counts.slabs_at_most = counts.slabs_at_most.max(slabs);
                }
                Op::Free(id) => {
                    self.heap.free(self.offsets[id]).expect("the block is live");
                }
            }
        }
    }
}

fn replayed(placement: Placement) -> Counts {
    let mut grown = Grown::new(placement);
    grown.replay(&synthetic(20_000));
    assert_eq!(grown.heap.verify(), Ok(()));
    assert_eq!(grown.heap.stats().blocks, 0);
    grown.heap.drain();
    // All chunks are free, and merged where they touch.
    assert_eq!(grown.heap.stats().large_free_bytes, grown.counts.chunks * CHUNK_BYTES);
    let borders = grown.mapped.windows(2).filter(|pair| !pair[0] && pair[1]).count();
    let mut runs = 0;
    grown.heap.free_runs(&mut |_| runs += 1);
    assert_eq!(runs, borders + usize::from(grown.mapped[0]));
    grown.counts
}

#[test]
fn buddy_places_the_trace_as_ever() {
    let expected = Counts {
        misses: 93,
        drains_that_helped: 0,
        chunks: 679,
        slabs_at_most: 24,
        placement: 13_230_075_426_678_358_301,
    };
    assert_eq!(replayed(Placement::Buddy), expected);
}

#[test]
fn first_fit_places_the_trace_as_ever() {
    let expected = Counts {
        misses: 56,
        drains_that_helped: 0,
        chunks: 465,
        slabs_at_most: 27,
        placement: 4_362_360_228_296_567_502,
    };
    assert_eq!(replayed(Placement::FirstFit), expected);
}
