//! A trace made ready to run: one flat list of steps, each with its stream.

use std::num::NonZeroU16;

use crate::trace::{Op, Trace};

/// One step of a pass, small enough that reading the list costs the host next to nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Allocates the next block of the trace.
    Alloc {
        /// Bytes.
        bytes: u64,
        /// Where the block is kept.
        slot: u32,
        /// Index of its stream.
        stream: u16,
    },
    /// Work on another stream uses the block in `slot`. Follows the block's allocation, and is
    /// part of it: no operation of its own.
    Cross {
        /// Where the block is.
        slot: u32,
        /// Index of the other stream.
        stream: u16,
    },
    /// Frees the block in `slot`.
    Free {
        /// Where the block is.
        slot: u32,
    },
}

/// Spreads the blocks of a trace over streams, whatever streams it names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spread {
    /// How many.
    pub streams: NonZeroU16,
    /// The same seed gives the same streams.
    pub seed: u64,
}

/// One block in this many is used on a second stream too.
const CROSSING_ONE_IN: u64 = 8;

/// The steps of one pass.
#[derive(Debug)]
pub struct Plan<'t> {
    /// The trace they come from.
    pub trace: &'t Trace,
    /// In order.
    pub steps: Vec<Step>,
    /// Number of streams that the steps use.
    pub streams: usize,
    /// Index of the step with which live bytes first reach their peak.
    pub peak_step: usize,
}

impl<'t> Plan<'t> {
    /// The steps of a trace: on its own streams, or spread over others.
    pub fn new(trace: &'t Trace, spread: Option<Spread>) -> Plan<'t> {
        let mut random = SplitMix64(spread.map_or(0, |spread| spread.seed));
        let mut blocks = trace.blocks.iter();
        let mut steps = Vec::with_capacity(trace.ops.len());
        for op in &trace.ops {
            match *op {
                Op::Alloc { slot } => {
                    let block = blocks.next().expect("a trace has a block for each of its allocs");
                    // Fits: a trace has at most 65535 streams.
                    let own = block.stream as u16;
                    let (stream, other) = match spread {
                        None => (own, None),
                        Some(spread) => random.streams(spread.streams.get()),
                    };
                    steps.push(Step::Alloc { bytes: block.bytes, slot, stream });
                    if let Some(stream) = other {
                        steps.push(Step::Cross { slot, stream });
                    }
                }
                Op::Free { slot } => steps.push(Step::Free { slot }),
            }
        }
        let streams = spread.map_or(trace.streams, |spread| spread.streams.get().into());
        let peak_step = peak_step(trace, &steps);
        Plan { trace, steps, streams, peak_step }
    }
}

fn peak_step(trace: &Trace, steps: &[Step]) -> usize {
    let mut slot_bytes = vec![0; trace.slots];
    let mut live_bytes = 0;
    let peak = steps.iter().position(|step| {
        match *step {
            Step::Alloc { bytes, slot, .. } => {
                slot_bytes[slot as usize] = bytes;
                live_bytes += bytes;
            }
            Step::Cross { .. } => {}
            Step::Free { slot } => live_bytes -= slot_bytes[slot as usize],
        }
        live_bytes == trace.peak_live_bytes
    });
    peak.unwrap_or(0) // never: the trace took its peak from the same steps
}

/// Vigna's SplitMix64: tiny, and the same on every machine.
struct SplitMix64(u64);

impl SplitMix64 {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A stream for a block, and a different one that uses it too, for some blocks.
    fn streams(&mut self, streams: u16) -> (u16, Option<u16>) {
        let count = u64::from(streams);
        let (home, crosses, step) = (self.next() % count, self.next(), self.next());
        // Casts fit: a remainder by `count` is below 2^16.
        if count == 1 || !crosses.is_multiple_of(CROSSING_ONE_IN) {
            return (home as u16, None);
        }
        let other = (home + 1 + step % (count - 1)) % count;
        (home as u16, Some(other as u16))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn trace(blocks: u64) -> Trace {
        let text: String = (0..blocks).map(|id| format!("a {id} 512 {} 0\n", id % 3)).collect();
        Trace::read(text.as_bytes(), Path::new("t")).unwrap()
    }

    fn spread(streams: u16, seed: u64) -> Option<Spread> {
        Some(Spread { streams: NonZeroU16::new(streams).unwrap(), seed })
    }

    #[test]
    fn without_a_spread_blocks_stay_on_the_streams_of_the_trace() {
        let trace = trace(4);
        let plan = Plan::new(&trace, None);
        assert_eq!(plan.streams, 3);
        let streams: Vec<u16> = plan
            .steps
            .iter()
            .map(|step| match step {
                Step::Alloc { stream, .. } => *stream,
                other => panic!("{other:?} in a trace of allocs"),
            })
            .collect();
        assert_eq!(streams, [0, 1, 2, 0]);
    }

    #[test]
    fn a_spread_uses_every_stream_and_crosses_about_one_block_in_eight() {
        let trace = trace(8000);
        let plan = Plan::new(&trace, spread(4, 7));
        let mut used = [0; 4];
        let mut crossings = 0;
        let mut home = 0;
        for step in &plan.steps {
            match *step {
                Step::Alloc { stream, .. } => {
                    used[usize::from(stream)] += 1;
                    home = stream;
                }
                Step::Cross { stream, .. } => {
                    assert_ne!(stream, home);
                    assert!(stream < 4);
                    crossings += 1;
                }
                Step::Free { .. } => panic!("a free in a trace of allocs"),
            }
        }
        assert!(used.iter().all(|count| (1800..2200).contains(count)), "{used:?}");
        assert!((850..1150).contains(&crossings), "{crossings}");
    }

    #[test]
    fn the_seed_decides_and_one_stream_never_crosses() {
        let trace = trace(500);
        assert_eq!(Plan::new(&trace, spread(4, 7)).steps, Plan::new(&trace, spread(4, 7)).steps);
        assert_ne!(Plan::new(&trace, spread(4, 7)).steps, Plan::new(&trace, spread(4, 8)).steps);
        assert_eq!(Plan::new(&trace, spread(1, 7)).steps.len(), 500);
    }

    #[test]
    fn the_peak_is_found_where_it_is_first_reached() {
        let text = "a 1 300 0 0\nf 1 0\na 2 100 0 0\na 3 400 0 0\nf 2 0\na 4 100 0 0\n";
        let trace = Trace::read(text.as_bytes(), Path::new("t")).unwrap();
        assert_eq!(Plan::new(&trace, None).peak_step, 3);
    }

    #[test]
    fn a_step_stays_small() {
        assert_eq!(size_of::<Step>(), 16);
    }
}
