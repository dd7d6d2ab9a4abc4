//! A small seeded generator of random numbers: the same seed is the same run, on every machine.

/// The splitmix64 sequence.
#[derive(Clone, Debug)]
pub(crate) struct Rng(u64);

impl Rng {
    /// The sequence of `seed`.
    pub(crate) fn new(seed: u64) -> Rng {
        // Neighbouring seeds must not give neighbouring sequences.
        let mut rng = Rng(seed ^ 0x5851_F42D_4C95_7F2D);
        rng.next_u64();
        rng
    }

    /// The next 64 random bits.
    pub(crate) fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `end`; 0 if `end` is 0.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        // The bias is below 2^-40 for every `end` that a test uses.
        self.next_u64().checked_rem(end).unwrap_or(0)
    }

    /// True in `per_mille` of 1000 cases.
    pub(crate) fn chance(&mut self, per_mille: u64) -> bool {
        self.below(1000) < per_mille
    }
}
