//! How much is asked for, and how aligned: the common, the edges, and the absurd.

use super::{Generator, KIB, MIB};

/// How large the requests of one run are, mostly.
#[derive(Clone, Copy, Debug)]
pub(super) enum Sizes {
    Small,
    Large,
    Mixed,
}

impl Generator {
    pub(super) fn bytes(&mut self) -> u64 {
        let rng = &mut self.rng;
        let odd = rng.below(1000);
        let (small, edge, large, absurd) = match self.sizes {
            Sizes::Small => (800, 150, 45, 5),
            Sizes::Large => (100, 100, 795, 5),
            Sizes::Mixed => (400, 200, 395, 5),
        };
        match rng.weighted(&[(small, 0), (edge, 1), (large, 2), (absurd, 3)]) {
            0 => 1 + rng.below(64 * KIB),
            1 => rng.pick(&[
                0,
                1,
                255,
                256,
                257,
                511,
                512,
                513,
                4096,
                256 * KIB - 1,
                256 * KIB,
                256 * KIB + 1,
                2 * MIB - 1,
                2 * MIB,
                2 * MIB + 1,
                6912,
                3_612_672,
            ]),
            2 => {
                // Small ones of the large more often: like a product of two.
                let share = 1 + rng.below(1000);
                (self.large_max_bytes / 1000 * share * (1 + rng.below(1000)) / 1000).max(1) + odd
            }
            _ => rng.pick(&[
                u64::MAX,
                u64::MAX - 1,
                u64::MAX - 255,
                u64::MAX - (2 * MIB - 1),
                1 << 63,
                (1 << 63) - 1,
                (1 << 46) + 1,
                1 << 40,
            ]),
        }
    }

    pub(super) fn align(&mut self) -> u64 {
        let rng = &mut self.rng;
        match rng.below(100) {
            0..80 => 256,
            80..98 => rng.pick(&[1, 32, 512, 1024, 4096, 64 * KIB, 2 * MIB, 32 * MIB]),
            _ => rng.pick(&[0, 3, 1 << 63, 1 << 35, 768]),
        }
    }
}
