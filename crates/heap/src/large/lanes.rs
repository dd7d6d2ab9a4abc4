//! Sixteen numbers at a time: the two questions that the max tree asks of a node.
//!
//! There is a plain form, and one in AVX2, which answers each question in a few instructions. A
//! vector instruction is only fast where the surrounding function is compiled for it too, so the
//! form is not chosen here, question by question, but once an operation, in
//! [`vector`](super::vector): everything between is generic over [`Lanes`] and inlined.
//!
//! This module and that one hold all unsafe code of the crate.
#![allow(unsafe_code)]

/// Children of a node.
pub(crate) const FANOUT: usize = 16;

/// The children of one node of the tree: a cache line.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(crate) struct Group(pub(crate) [i32; FANOUT]);

impl Group {
    pub(crate) const EMPTY: Self = Self([0; FANOUT]);
}

/// A way to look at a whole group.
pub(crate) trait Lanes: Copy {
    /// The first lane from `from` (at most 16) on that is at least `need`, which is above 0; 16 if
    /// there is none.
    fn first_at_least(self, group: &Group, from: usize, need: i32) -> usize;

    /// The largest lane, with `value` in place of what `lane` (below 16) holds.
    fn max_with(self, group: &Group, lane: usize, value: i32) -> i32;
}

/// The form for any processor.
#[derive(Clone, Copy)]
pub(crate) struct Plain;

impl Lanes for Plain {
    #[inline(always)]
    fn first_at_least(self, group: &Group, from: usize, need: i32) -> usize {
        let bits = group.0.iter().zip(0..).map(|(&lane, bit)| u32::from(lane >= need) << bit);
        let bits = bits.fold(1 << FANOUT, |all, bit| all | bit);
        (bits >> from << from).trailing_zeros() as usize
    }

    #[inline(always)]
    fn max_with(self, group: &Group, lane: usize, value: i32) -> i32 {
        let others =
            group.0.iter().enumerate().map(|(i, &old)| if i == lane { value } else { old });
        others.fold(value, i32::max)
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2;

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::*;

    use super::{Group, Lanes};

    /// The form in AVX2. A value of this type is the proof that the processor has it.
    #[derive(Clone, Copy)]
    pub(crate) struct Avx2(());

    impl Avx2 {
        /// The proof, on a processor that has AVX2.
        pub(crate) fn detect() -> Option<Self> {
            is_x86_feature_detected!("avx2").then_some(Self(()))
        }

        /// The two halves of a group.
        #[inline(always)]
        fn load(self, group: &Group) -> (__m256i, __m256i) {
            let halves: *const __m256i = std::ptr::from_ref(group).cast();
            // SAFETY: `self` proves AVX2. A group is 64 bytes, initialised and aligned to 64, so
            // both aligned loads of 32 bytes stay inside it.
            unsafe { (_mm256_load_si256(halves), _mm256_load_si256(halves.add(1))) }
        }
    }

    impl Lanes for Avx2 {
        #[inline(always)]
        fn first_at_least(self, group: &Group, from: usize, need: i32) -> usize {
            let (low, high) = self.load(group);
            // SAFETY: `self` proves AVX2, and these read only their operands.
            unsafe {
                let below = _mm256_set1_epi32(need - 1);
                // Four bits a lane: a search waits for one group to know the next, and packing them
                // to one bit a lane first takes longer.
                let bits =
                    |half| _mm256_movemask_epi8(_mm256_cmpgt_epi32(half, below)) as u32 as u64;
                let bits = bits(low) | bits(high) << 32;
                let behind = bits.unbounded_shr(4 * from as u32).unbounded_shl(4 * from as u32);
                behind.trailing_zeros() as usize / 4
            }
        }

        #[inline(always)]
        fn max_with(self, group: &Group, lane: usize, value: i32) -> i32 {
            let (low, high) = self.load(group);
            // SAFETY: `self` proves AVX2, and these read only their operands.
            unsafe {
                let here = _mm256_set1_epi32(lane as i32);
                let value = _mm256_set1_epi32(value);
                let low_lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
                let high_lanes = _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15);
                let low = _mm256_blendv_epi8(low, value, _mm256_cmpeq_epi32(here, low_lanes));
                let high = _mm256_blendv_epi8(high, value, _mm256_cmpeq_epi32(here, high_lanes));
                let eight = _mm256_max_epi32(low, high);
                let four = _mm_max_epi32(
                    _mm256_castsi256_si128(eight),
                    _mm256_extracti128_si256(eight, 1),
                );
                let two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0b01_00_11_10));
                let one = _mm_max_epi32(two, _mm_shuffle_epi32(two, 0b10_11_00_01));
                _mm_cvtsi128_si32(one)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What the questions mean, in other words than the plain form.
    fn agrees<L: Lanes>(lanes: L, values: [i32; 16], need: i32, lane: usize, value: i32) {
        let group = Group(values);
        for from in 0..=FANOUT {
            let first = (from..FANOUT).find(|&lane| values[lane] >= need).unwrap_or(FANOUT);
            let found = lanes.first_at_least(&group, from, need);
            assert_eq!(found, first, "{values:?} from {from}");
        }
        let mut replaced = values;
        replaced[lane] = value;
        replaced.sort_unstable();
        assert_eq!(lanes.max_with(&group, lane, value), replaced[15], "{values:?}");
    }

    proptest! {
        #![proptest_config(crate::test_config())]

        #[test]
        fn both_forms_answer_alike(
            values in prop::array::uniform16(prop_oneof![0..4, Just(i32::MAX), 0..i32::MAX]),
            need in prop_oneof![1..4, Just(i32::MAX), 1..i32::MAX],
            lane in 0..16usize,
            value in prop_oneof![0..4, Just(i32::MAX), 0..i32::MAX],
        ) {
            agrees(Plain, values, need, lane, value);
            #[cfg(target_arch = "x86_64")]
            if let Some(avx2) = Avx2::detect() {
                agrees(avx2, values, need, lane, value);
            }
        }
    }
}
