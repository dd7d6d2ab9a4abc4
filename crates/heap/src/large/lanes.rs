//! Sixteen numbers at a time: the two questions that the max tree asks of a node.

/// The children of one node of the tree: a cache line.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(crate) struct Group(pub(crate) [i32; 16]);

impl Group {
    pub(crate) const EMPTY: Self = Self([0; 16]);
}

/// A way to look at a whole group.
pub(crate) trait Lanes: Copy {
    /// A bit for each lane that is at least `need`.
    fn at_least(self, group: &Group, need: i32) -> u32;

    /// The largest lane, with `value` in place of what `lane` (below 16) holds.
    fn max_with(self, group: &Group, lane: usize, value: i32) -> i32;
}

/// The form for any processor.
#[derive(Clone, Copy)]
pub(crate) struct Plain;

impl Lanes for Plain {
    #[inline(always)]
    fn at_least(self, group: &Group, need: i32) -> u32 {
        let bits = group.0.iter().zip(0..).map(|(&lane, bit)| u32::from(lane >= need) << bit);
        bits.fold(0, |all, bit| all | bit)
    }

    #[inline(always)]
    fn max_with(self, group: &Group, lane: usize, value: i32) -> i32 {
        let others =
            group.0.iter().enumerate().map(|(i, &old)| if i == lane { value } else { old });
        others.fold(value, i32::max)
    }
}
