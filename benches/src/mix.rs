//! The mix of the thread benchmark: 64 to 128 live blocks of seven sizes, in random order.
//!
//! Sizes, counts, seeds and the order in which random numbers are drawn are those that other
//! allocators were measured with, so that a row for one of them can stand beside the pool's.

use vmm_pool_cli::replay::Cause;

use crate::subject::Subject;
use crate::work::XorShift;

/// The sizes, in bytes, each as likely as any other.
const SIZES: [u64; 7] = [512, 2048, 8192, 65_536, 262_144, 1 << 20, 4 << 20];
const LIVE_MIN: usize = 64;
const LIVE_MAX: usize = 128;

/// Steps before the clock starts, and between two clock reads; an operation is an alloc or a free.
pub const WARM_UP_STEPS: u64 = 20_000;
/// Operations of one timed round.
pub const ROUND_STEPS: u64 = 200_000;

/// One thread's live blocks and random numbers.
pub struct Mix<S: Subject> {
    subject: S,
    blocks: Vec<S::Block>,
    random: XorShift,
}

impl<S: Subject> Mix<S> {
    /// The mix of thread number `thread`, nothing allocated yet.
    pub fn new(subject: S, thread: u32) -> Mix<S> {
        let blocks = Vec::with_capacity(LIVE_MAX);
        Mix { subject, blocks, random: XorShift::new(thread * 7919 + 1) }
    }

    /// One allocation or one free.
    #[inline]
    fn step(&mut self) -> Result<(), S::Error> {
        let live = self.blocks.len();
        let grow = live < LIVE_MIN || (self.random.next_u32() & 1 == 1 && live < LIVE_MAX);
        if grow {
            let bytes = SIZES[self.random.next_u32() as usize % SIZES.len()];
            self.blocks.push(self.subject.alloc(bytes)?);
        } else {
            let victim = self.random.next_u32() as usize % live;
            let block = self.blocks.swap_remove(victim);
            self.subject.free(block)?;
        }
        Ok(())
    }

    /// `steps` operations.
    ///
    /// # Errors
    /// The subject's own.
    pub fn steps(&mut self, steps: u64) -> Result<(), Cause> {
        for _ in 0..steps {
            self.step().map_err(Into::into)?;
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
    use super::*;
    use crate::subject::NeverFails;

    /// Keeps a sum of everything asked for, in order.
    #[derive(Default)]
    struct Log {
        allocs: u64,
        frees: u64,
        hash: u64,
    }

    impl Subject for Log {
        type Block = u64;
        type Error = NeverFails;

        fn alloc(&mut self, bytes: u64) -> Result<u64, NeverFails> {
            self.allocs += 1;
            self.hash = self.hash.wrapping_mul(31).wrapping_add(bytes);
            Ok(bytes)
        }

        fn free(&mut self, block: u64) -> Result<(), NeverFails> {
            self.frees += 1;
            self.hash = self.hash.wrapping_mul(37).wrapping_add(block);
            Ok(())
        }
    }

    /// The figures are those of the program in C++ that other allocators were measured with.
    #[test]
    fn the_sequence_is_the_one_that_others_were_measured_with() {
        let mut mix = Mix::new(Log::default(), 3);
        mix.steps(WARM_UP_STEPS).unwrap();
        let Log { allocs, frees, hash } = mix.subject;
        assert_eq!((allocs, frees, hash), (10_039, 9_961, 0x4d82_1ac4_9b7d_5c00));
    }

    #[test]
    fn live_blocks_stay_within_their_bounds() {
        let mut mix = Mix::new(Log::default(), 3);
        for _ in 0..LIVE_MIN {
            mix.steps(1).unwrap();
        }
        assert_eq!(mix.subject.frees, 0, "it fills up first");
        for _ in 0..20_000 {
            mix.steps(1).unwrap();
            assert!((LIVE_MIN - 1..=LIVE_MAX).contains(&mix.blocks.len()));
        }
        assert_eq!(mix.subject.allocs - mix.subject.frees, mix.blocks.len() as u64);
    }
}
