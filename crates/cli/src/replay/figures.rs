//! What a pass is reported with.

use vmm_sys::CallCounts;

/// The figures of one pass.
#[derive(Clone, Debug, PartialEq)]
pub struct PassFigures {
    /// Counted from 1.
    pub pass: u32,
    /// Allocations and frees.
    pub ops: usize,
    /// Mean nanoseconds of an operation over the whole pass. Without the time inside driver calls,
    /// unless the allocator is the driver ([`super::Target::IS_DRIVER`]).
    pub mean_ns: f64,
    /// From the timed pass; driver calls are included.
    pub latency: Latency,
    /// The most physical memory held, in bytes.
    pub peak_held_bytes: u64,
    /// The driver calls of the counted pass.
    pub calls: CallCounts,
    /// Their time in nanoseconds, measured or modelled.
    pub driver_ns: u64,
}

/// Times of single operations, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Latency {
    /// Half of all operations took at most this.
    pub median_ns: u64,
    /// 99 % of all operations took at most this.
    pub p99_ns: u64,
    /// The slowest.
    pub max_ns: u64,
}

impl Latency {
    /// By nearest rank. All zero if there is no sample. Reorders the samples.
    pub fn of(samples: &mut [u64]) -> Latency {
        let count = samples.len();
        if count == 0 {
            return Latency::default();
        }
        let mut rank = |percent: usize| {
            let index = (count * percent).div_ceil(100).max(1) - 1;
            *samples.select_nth_unstable(index).1
        };
        Latency { median_ns: rank(50), p99_ns: rank(99), max_ns: rank(100) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_occurred() {
        let mut samples: Vec<u64> = (1..=200).rev().collect();
        let latency = Latency::of(&mut samples);
        assert_eq!(latency, Latency { median_ns: 100, p99_ns: 198, max_ns: 200 });
        let one = Latency::of(&mut [7]);
        assert_eq!(one, Latency { median_ns: 7, p99_ns: 7, max_ns: 7 });
        assert_eq!(Latency::of(&mut [5, 9]), Latency { median_ns: 5, p99_ns: 9, max_ns: 9 });
        assert_eq!(Latency::of(&mut []), Latency::default());
    }
}
