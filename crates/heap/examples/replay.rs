//! Replays traces on a heap and prints what placement costs: host time, memory, and chunk moves.
//!
//! ```text
//! cargo run --release -p vmm-heap --example replay -- [--passes N] [--chunk BYTES] FILE...
//! ```
//!
//! A trace is text: `a ID BYTES ...` allocates, `f ID ...` frees, `#` starts a comment. Memory is
//! only counted: a model of a pool maps chunks of one size where the fewest are missing, makes new
//! ones while it holds at most 1.01 times the peak of live bytes, and beyond that moves free chunks,
//! coldest first. Host time is that of whole passes, look-up of the trace included, misses too;
//! `ns/op` is the quietest pass, because a busy machine only adds.

use std::collections::HashMap;
use std::process::ExitCode;
use std::time::Instant;

use vmm_heap::{Heap, HeapConfig, Miss, Placement};

/// How far above the peak of live bytes the model goes before it moves chunks.
const SOFT_LIMIT: f64 = 1.01;

/// An operation on a slot of the table of live blocks.
#[derive(Clone, Copy)]
enum Op {
    Alloc { slot: u32, bytes: u64 },
    Free { slot: u32 },
}

struct Trace {
    ops: Vec<Op>,
    slots: usize,
    peak_live_bytes: u64,
}

impl Trace {
    fn parse(text: &str) -> Result<Self, String> {
        let mut trace = Self { ops: Vec::new(), slots: 0, peak_live_bytes: 0 };
        let mut live: HashMap<u64, (u32, u64)> = HashMap::new();
        let mut unused: Vec<u32> = Vec::new();
        let mut live_bytes = 0;
        for (number, line) in text.lines().enumerate() {
            let fields: Vec<&str> = line.split_ascii_whitespace().collect();
            let wrong = || format!("line {}: expected 'a ID BYTES' or 'f ID'", number + 1);
            let field = |i: usize| fields.get(i).and_then(|f| f.parse::<u64>().ok());
            match fields.first() {
                Some(&"a") => {
                    let id = field(1).ok_or_else(wrong)?;
                    let bytes = field(2).ok_or_else(wrong)?;
                    let slot = unused.pop().unwrap_or_else(|| {
                        trace.slots += 1;
                        trace.slots as u32 - 1
                    });
                    live.insert(id, (slot, bytes));
                    live_bytes += bytes.next_multiple_of(512);
                    trace.peak_live_bytes = trace.peak_live_bytes.max(live_bytes);
                    trace.ops.push(Op::Alloc { slot, bytes });
                }
                Some(&"f") => {
                    let id = field(1).ok_or_else(wrong)?;
                    let (slot, bytes) = live.remove(&id).ok_or_else(wrong)?;
                    live_bytes -= bytes.next_multiple_of(512);
                    unused.push(slot);
                    trace.ops.push(Op::Free { slot });
                }
                Some(first) if !first.starts_with('#') => return Err(wrong()),
                _ => {}
            }
        }
        // So that passes can follow each other; sorted, so that all runs are the same.
        let mut left: Vec<u32> = live.values().map(|&(slot, _)| slot).collect();
        left.sort_unstable();
        trace.ops.extend(left.into_iter().map(|slot| Op::Free { slot }));
        Ok(trace)
    }
}

/// The model of a pool around a heap.
struct Pool {
    heap: Heap,
    chunk_bytes: u64,
    /// By chunk of the address space: backed or not.
    mapped: Vec<bool>,
    held_bytes: u64,
    held_peak_bytes: u64,
    live_bytes: u64,
    live_peak_bytes: u64,
    created: u64,
    moved: u64,
    misses: u64,
}

impl Pool {
    fn new(placement: Placement, chunk_bytes: u64) -> Self {
        Self {
            heap: Heap::new(HeapConfig { placement, ..HeapConfig::default() }),
            chunk_bytes,
            mapped: Vec::new(),
            held_bytes: 0,
            held_peak_bytes: 0,
            live_bytes: 0,
            live_peak_bytes: 0,
            created: 0,
            moved: 0,
            misses: 0,
        }
    }

    /// Chunks of a range that have no backing.
    fn missing(&self, start: u64, bytes: u64) -> impl Iterator<Item = u64> {
        let chunks = start / self.chunk_bytes..(start + bytes).div_ceil(self.chunk_bytes);
        chunks.filter(|&chunk| self.mapped.get(chunk as usize) != Some(&true))
    }

    /// Whole chunks that are free, outside a window, coldest last.
    fn free_chunks(&self, start: u64, bytes: u64) -> Vec<u64> {
        let mut found = Vec::new();
        let window = start / self.chunk_bytes..(start + bytes).div_ceil(self.chunk_bytes);
        self.heap.free_runs(&mut |run| {
            let first = run.offset.div_ceil(self.chunk_bytes);
            let end = (run.offset + run.bytes) / self.chunk_bytes;
            let outside = (first..end).filter(|chunk| !window.contains(chunk));
            found.extend(outside.map(|chunk| (run.last_freed_tick, chunk)));
        });
        found.sort_unstable_by(|a, b| b.cmp(a));
        found.into_iter().map(|(_, chunk)| chunk).collect()
    }

    /// Backs the window that needs the fewest chunks.
    fn grow(&mut self, miss: &Miss) {
        self.misses += 1;
        let end_bytes = self.mapped.len() as u64 * self.chunk_bytes;
        let mut best = (usize::MAX, 0);
        self.heap.windows(miss, end_bytes, &mut |start| {
            best = best.min((self.missing(start, miss.bytes).count(), start));
        });
        let budget = (self.live_peak_bytes as f64 * SOFT_LIMIT) as u64;
        let mut punchable = None;
        for chunk in self.missing(best.1, miss.bytes).collect::<Vec<_>>() {
            let mut victim = None;
            if self.held_bytes + self.chunk_bytes > budget {
                let chunks = punchable.get_or_insert_with(|| self.free_chunks(best.1, miss.bytes));
                victim = chunks.pop();
            }
            if let Some(victim) = victim {
                let offset = victim * self.chunk_bytes;
                self.heap.remove_free(offset, self.chunk_bytes).expect("the chunk is free");
                self.mapped[victim as usize] = false;
                self.moved += 1;
            } else {
                self.created += 1;
                self.held_bytes += self.chunk_bytes;
                self.held_peak_bytes = self.held_peak_bytes.max(self.held_bytes);
            }
            self.heap.insert_free(chunk * self.chunk_bytes, self.chunk_bytes);
            self.mapped.resize(self.mapped.len().max(chunk as usize + 1), false);
            self.mapped[chunk as usize] = true;
        }
    }

    #[inline]
    fn alloc(&mut self, bytes: u64) -> u64 {
        self.live_bytes += bytes.next_multiple_of(512);
        self.live_peak_bytes = self.live_peak_bytes.max(self.live_bytes);
        match self.heap.alloc(bytes, 256) {
            Ok(block) => block.offset,
            Err(_) => self.alloc_slowly(bytes),
        }
    }

    #[cold]
    fn alloc_slowly(&mut self, bytes: u64) -> u64 {
        self.heap.drain();
        loop {
            match self.heap.alloc(bytes, 256) {
                Ok(block) => return block.offset,
                Err(miss) => self.grow(&miss),
            }
        }
    }

    #[inline]
    fn free(&mut self, offset: u64) {
        self.live_bytes -= self.heap.free(offset).expect("the block is live");
    }

    fn replay(&mut self, trace: &Trace, offsets: &mut [u64]) {
        for op in &trace.ops {
            match *op {
                Op::Alloc { slot, bytes } => offsets[slot as usize] = self.alloc(bytes),
                Op::Free { slot } => self.free(offsets[slot as usize]),
            }
        }
    }
}

/// A power of two near the peak of live bytes / 256, within 2 to 32 MiB.
fn default_chunk_bytes(peak_live_bytes: u64) -> u64 {
    let share = (peak_live_bytes / 256).max(1);
    (1u64 << share.ilog2()).clamp(2 << 20, 32 << 20)
}

fn report(name: &str, trace: &Trace, placement: Placement, chunk_bytes: u64, passes: u32) {
    let mut pool = Pool::new(placement, chunk_bytes);
    let mut offsets = vec![0; trace.slots];
    let mut nanos = f64::INFINITY;
    let mut first = (0.0, 0, 0);
    let ratio = |pool: &Pool| pool.held_peak_bytes as f64 / trace.peak_live_bytes as f64;
    for pass in 0..passes {
        let start = Instant::now();
        pool.replay(trace, &mut offsets);
        let elapsed = start.elapsed().as_nanos() as f64 / trace.ops.len() as f64;
        nanos = nanos.min(elapsed);
        if pass == 0 {
            first = (ratio(&pool), pool.created + pool.moved, pool.misses);
        }
    }
    let warm = u64::from(passes.saturating_sub(1).max(1));
    println!(
        "{name:<16} {:<9} {nanos:>7.1} {:>7.3} {:>7.3} {:>8} {:>8} {:>7} {:>9}",
        format!("{placement:?}"),
        first.0,
        ratio(&pool),
        first.1,
        (pool.created + pool.moved - first.1) / warm,
        (pool.misses - first.2) / warm,
        pool.heap.stats().metadata_bytes / 1024,
    );
}

fn run() -> Result<(), String> {
    let (mut passes, mut chunk, mut files) = (20, None, Vec::new());
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut number = || {
            let value = args.next().and_then(|value| value.parse::<u64>().ok());
            value.ok_or_else(|| format!("{arg} expects a number"))
        };
        match arg.as_str() {
            "--passes" => passes = number()?.clamp(1, 1 << 20) as u32,
            "--chunk" => chunk = Some(number()?.next_multiple_of(512)),
            _ => files.push(arg),
        }
    }
    if files.is_empty() {
        return Err("expected at least one trace file".into());
    }
    println!(
        "{:<16} {:<9} {:>7} {:>7} {:>7} {:>8} {:>8} {:>7} {:>9}",
        "trace", "placement", "ns/op", "ratio", "ratio_n", "chunks", "warm", "misses", "meta_KiB"
    );
    for file in files {
        let text = std::fs::read_to_string(&file).map_err(|error| format!("{file}: {error}"))?;
        let trace = Trace::parse(&text).map_err(|error| format!("{file}: {error}"))?;
        let chunk_bytes = chunk.unwrap_or_else(|| default_chunk_bytes(trace.peak_live_bytes));
        let name = file.rsplit('/').next().unwrap_or(&file).trim_end_matches(".trace");
        for placement in [Placement::FirstFit, Placement::Buddy] {
            report(name, &trace, placement, chunk_bytes, passes);
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
