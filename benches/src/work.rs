//! The load: pairs of one allocation and one free, by one thread.
//!
//! Loops here read no clock and draw no random size: sizes come from a table made before.

use std::hint::black_box;

use vmm_pool_cli::replay::Cause;

use crate::subject::Subject;

/// Xorshift, 32 bits: the shifts 13, 17, 5. Fast, and the same everywhere.
#[derive(Clone, Debug)]
pub struct XorShift(u32);

impl XorShift {
    /// Starts from `seed`, which must not be 0: that would give zeros for ever.
    pub fn new(seed: u32) -> XorShift {
        XorShift(seed.max(1))
    }

    /// The next number.
    #[inline]
    pub fn next_u32(&mut self) -> u32 {
        let mut x = self.0;
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        self.0 = x;
        x
    }

    /// A number below `end`, by a multiplication: a division would be part of what is measured.
    #[inline]
    pub fn below(&mut self, end: usize) -> usize {
        ((u64::from(self.next_u32()) * end as u64) >> 32) as usize
    }
}

/// Sizes of one workload, used in turn. A power of two of them.
#[derive(Clone, Debug)]
pub struct Sizes(Vec<u64>);

/// Long enough that a round lasts several times as many pairs as there are live blocks.
const MIXED_SIZES: usize = 1 << 16;
/// Seeds are fixed: each run asks for the same bytes in the same order.
const SIZES_SEED: u32 = 0x5eed_0001;
const VICTIM_SEED: u32 = 0x5eed_0002;

impl Sizes {
    /// The same size every time.
    pub fn one(bytes: u64) -> Sizes {
        Sizes(vec![bytes])
    }

    /// Log-uniform between two sizes: each octave is as likely as any other.
    pub fn log_uniform(min_bytes: u64, max_bytes: u64) -> Sizes {
        let (low, high) = ((min_bytes as f64).ln(), (max_bytes as f64).ln());
        let mut random = XorShift::new(SIZES_SEED);
        let draw = |_| {
            let share = f64::from(random.next_u32()) / f64::from(u32::MAX);
            ((low + share * (high - low)).exp() as u64).clamp(min_bytes, max_bytes)
        };
        Sizes((0..MIXED_SIZES).map(draw).collect())
    }

    #[inline]
    fn at(&self, turn: usize) -> u64 {
        self.0[turn & (self.0.len() - 1)]
    }
}

/// Free memory beside the live blocks, as a multiple of their bytes: so much that a request of a
/// random size always finds a hole, with either placement. The loads here measure warm operations;
/// how much memory a placement needs is another question, which the replay answers.
pub const SPARE_FACTOR: u64 = 2;

/// Live blocks of a subject, and what comes next.
pub struct Live<S: Subject> {
    subject: S,
    blocks: Vec<S::Block>,
    sizes: Sizes,
    turn: usize,
    random: XorShift,
}

impl<S: Subject> Live<S> {
    /// Brings a subject into the state that is measured: `count` live blocks that were replaced at
    /// random four times over, and free memory of [`SPARE_FACTOR`] times their bytes.
    ///
    /// # Errors
    /// The subject's own.
    pub fn new(subject: S, sizes: Sizes, count: usize) -> Result<Live<S>, Cause> {
        let random = XorShift::new(VICTIM_SEED);
        let blocks = Vec::with_capacity(count + 1);
        let mut live = Live { subject, blocks, sizes, turn: 0, random };
        let mut live_bytes = 0;
        for _ in 0..count {
            let bytes = live.next_bytes();
            live_bytes += bytes;
            let block = live.subject.alloc(bytes).map_err(Into::into)?;
            live.blocks.push(block);
        }
        if count > 0 {
            let spare = live.subject.alloc(SPARE_FACTOR * live_bytes).map_err(Into::into)?;
            live.subject.free(spare).map_err(Into::into)?;
            live.replace(4 * count as u64).map_err(Into::into)?;
        } else {
            live.hot(1000).map_err(Into::into)?;
        }
        Ok(live)
    }

    #[inline]
    fn next_bytes(&mut self) -> u64 {
        self.turn += 1;
        self.sizes.at(self.turn)
    }

    /// The subject.
    pub fn subject(&self) -> &S {
        &self.subject
    }

    /// Live blocks (count).
    pub fn count(&self) -> usize {
        self.blocks.len()
    }

    /// Allocates and frees at once, `pairs` times: the case that flatters everybody.
    ///
    /// # Errors
    /// The subject's own.
    #[inline]
    pub fn hot(&mut self, pairs: u64) -> Result<(), S::Error> {
        for _ in 0..pairs {
            let bytes = self.next_bytes();
            let block = black_box(self.subject.alloc(black_box(bytes))?);
            self.subject.free(block)?;
        }
        Ok(())
    }

    /// Frees a random live block and allocates another, `pairs` times.
    ///
    /// # Errors
    /// The subject's own.
    #[inline]
    pub fn replace(&mut self, pairs: u64) -> Result<(), S::Error> {
        for _ in 0..pairs {
            let victim = self.random.below(self.blocks.len());
            let block = self.blocks.swap_remove(victim);
            self.subject.free(block)?;
            let bytes = self.next_bytes();
            self.blocks.push(self.subject.alloc(bytes)?);
        }
        Ok(())
    }

    /// Gives everything back.
    ///
    /// # Errors
    /// The subject's own.
    pub fn end(mut self) -> Result<(), Cause> {
        for block in self.blocks.drain(..) {
            self.subject.free(block).map_err(Into::into)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use vmm_pool::Placement;
    use vmm_sys::sim::Sim;
    use vmm_sys::{DeviceId, Driver};

    use super::*;
    use crate::subject::{BareHeap, Nothing, PoolLane};

    #[test]
    fn the_generator_is_the_well_known_one() {
        let mut random = XorShift::new(1);
        let first: Vec<_> = (0..3).map(|_| random.next_u32()).collect();
        assert_eq!(first, [270_369, 67_634_689, 2_647_435_461]);
        let mut random = XorShift::new(7);
        assert!((0..1000).all(|_| random.below(10) < 10));
    }

    #[test]
    fn mixed_sizes_fill_every_octave_alike() {
        let sizes = Sizes::log_uniform(512, 4 << 20);
        let mut octaves = [0u32; 64];
        for bytes in &sizes.0 {
            assert!((512..=4 << 20).contains(bytes));
            octaves[bytes.ilog2() as usize] += 1;
        }
        let expected = MIXED_SIZES as u32 / 13;
        for (octave, count) in octaves.iter().enumerate().take(22).skip(9) {
            assert!(count.abs_diff(expected) < expected / 10, "2^{octave}: {count} sizes");
        }
    }

    fn pool(driver: &Arc<dyn Driver>, placement: Placement) -> PoolLane {
        PoolLane::new(driver, DeviceId(0), placement).unwrap()
    }

    #[test]
    fn a_prepared_pool_serves_every_load_without_a_driver_call() {
        let loads = [
            (Sizes::one(512), 1000),
            (Sizes::one(64 << 10), 1000),
            (Sizes::one(32 << 20), 0),
            (Sizes::log_uniform(512, 4 << 20), 1000),
        ];
        for placement in [Placement::FirstFit, Placement::Buddy] {
            for (sizes, count) in &loads {
                let driver: Arc<dyn Driver> = Sim::builder().build();
                let mut live = Live::new(pool(&driver, placement), sizes.clone(), *count).unwrap();
                let before = driver.ledger().snapshot();
                match count {
                    0 => live.hot(10_000).unwrap(),
                    _ => live.replace(10_000).unwrap(),
                }
                let calls = driver.ledger().snapshot().since(&before);
                assert_eq!(calls.total(), 0, "{placement:?}, {count} live: {calls}");
                assert_eq!(live.count(), *count);
                live.end().unwrap();
            }
        }
    }

    #[test]
    fn the_bare_heap_and_the_empty_subject_run_the_same_loads() {
        for placement in [Placement::FirstFit, Placement::Buddy] {
            let sizes = Sizes::log_uniform(256, 64 << 20);
            let mut live = Live::new(BareHeap::new(placement), sizes, 200).unwrap();
            let misses = live.subject().misses();
            assert!(misses > 0, "it grew");
            live.replace(1000).unwrap();
            live.hot(100).unwrap();
            assert_eq!(live.count(), 200);
            assert_eq!(live.subject().misses(), misses, "warm");
            live.end().unwrap();
        }
        let mut live = Live::new(Nothing, Sizes::one(512), 10).unwrap();
        let Ok(()) = live.replace(100) else { panic!("numbers do not run out") };
        assert_eq!(live.count(), 10);
    }
}
