//! A set of small numbers that finds its lowest member at once.

/// A set of numbers below a length that is fixed: words of 64 bits, and above them words that say
/// which of the words below have a bit.
#[derive(Clone, Debug)]
pub(super) struct Bits {
    /// The lowest level first; the highest is one word.
    levels: Vec<Vec<u64>>,
    count: u64,
}

impl Bits {
    /// The empty set of numbers below `len`.
    pub(super) fn new(len: u32) -> Bits {
        let mut levels = Vec::new();
        let mut words = (len as usize).div_ceil(64).max(1);
        loop {
            levels.push(vec![0; words]);
            if words == 1 {
                return Bits { levels, count: 0 };
            }
            words = words.div_ceil(64);
        }
    }

    /// How many members it has.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    pub(super) fn contains(&self, number: u32) -> bool {
        let word = self.levels[0].get(number as usize / 64);
        word.is_some_and(|word| word >> (number % 64) & 1 == 1)
    }

    /// Puts `number` in or takes it out.
    pub(super) fn set(&mut self, number: u32, member: bool) {
        if self.contains(number) == member {
            return;
        }
        match member {
            true => self.count += 1,
            false => self.count -= 1,
        }
        let mut at = number as usize;
        for level in &mut self.levels {
            let word = &mut level[at / 64];
            let was_empty = *word == 0;
            match member {
                true => *word |= 1 << (at % 64),
                false => *word &= !(1 << (at % 64)),
            }
            // The level above says only whether the word has a bit.
            if was_empty == (*word == 0) {
                return;
            }
            at /= 64;
        }
    }

    /// The lowest member.
    pub(super) fn first(&self) -> Option<u32> {
        self.next(0)
    }

    /// The lowest member that is `from` or more.
    pub(super) fn next(&self, from: u32) -> Option<u32> {
        let mut at = from as usize;
        for (height, level) in self.levels.iter().enumerate() {
            let word = level.get(at / 64)? & (u64::MAX << (at % 64));
            if word != 0 {
                let mut found = at / 64 * 64 + word.trailing_zeros() as usize;
                for below in self.levels[..height].iter().rev() {
                    found = found * 64 + below[found].trailing_zeros() as usize;
                }
                return u32::try_from(found).ok();
            }
            // The words after this one.
            at = at / 64 + 1;
        }
        None
    }

    /// The members, the lowest first.
    pub(super) fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        let after = |number: &u32| self.next(number.checked_add(1)?);
        std::iter::successors(self.first(), after)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_is_the_set_that_an_ordered_tree_is(
            len in prop_oneof![1_u32..200, 4_000_u32..4_200, 262_100_u32..262_200],
            steps in prop::collection::vec((any::<u32>(), any::<bool>()), 0..200),
        ) {
            let (mut bits, mut set) = (Bits::new(len), BTreeSet::new());
            for (number, member) in steps {
                let number = number % len;
                bits.set(number, member);
                match member {
                    true => set.insert(number),
                    false => set.remove(&number),
                };
                prop_assert_eq!(bits.first(), set.first().copied());
                prop_assert_eq!(bits.next(number), set.range(number..).next().copied());
                prop_assert_eq!(bits.contains(number), member);
            }
            prop_assert_eq!(bits.count(), set.len() as u64);
            prop_assert!(bits.iter().eq(set.iter().copied()));
            prop_assert!(!bits.contains(len + 64) && bits.next(len).is_none());
        }
    }
}
