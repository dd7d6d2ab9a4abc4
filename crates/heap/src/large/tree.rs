//! A max tree over cells: "the lowest cell that holds at least this much" in a few steps.
//!
//! Each node has sixteen children and knows the largest value below each. The lowest three levels
//! belong to a region of 4096 cells and are made when space appears there; the levels above span
//! all regions and gain one when there are sixteen times as many. So the tree grows with the
//! addresses in use, and a gap of many TiB costs four bytes for each 4 GiB.
//!
//! ```text
//! upper[1]    |root|                       one lane: 64 GiB
//! upper[0]    |..16 regions..| ...         one lane: a region, 4 GiB
//! region top, middle, cells                one lane: 256 MiB, 16 MiB, a cell of 1 MiB
//! ```
//!
//! A search goes down from the root: at each level the lowest lane that is large enough. A change
//! goes up from a cell, and only as far as it changes a maximum, which is rarely to the root.
//!
//! Values are lengths in granules, cut off at `i32::MAX` (1 TiB): a search for more finds cells
//! that may hold enough, and the caller looks.

use super::lanes::{FANOUT, Group, Lanes};
use crate::GRANULE_SHIFT;

/// `log2` of the cells of a region, which is 4 GiB.
const REGION_SHIFT: u32 = 12;
const REGION_CELLS: usize = 1 << REGION_SHIFT;

/// `log2` of the children of a node.
const FANOUT_SHIFT: u32 = FANOUT.trailing_zeros();
/// Levels inside a region.
const REGION_LEVELS: u32 = REGION_SHIFT / FANOUT_SHIFT;

/// The three lowest levels below one lane of `MaxTree::upper`.
struct Region {
    cells: [Group; REGION_CELLS / FANOUT],
    middle: [Group; REGION_CELLS / FANOUT / FANOUT],
    top: Group,
}

const _: () = assert!(REGION_LEVELS == 3);

/// Regions that a search looks at one by one: 16 GiB.
const FEW_REGIONS: usize = 4;

/// The tree.
pub(crate) struct MaxTree {
    regions: Vec<Option<Box<Region>>>,
    /// Levels above the regions, lowest first: a lane of the first is a region. The last level is
    /// one group.
    upper: Vec<Vec<Group>>,
}

/// The value for a length in bytes.
#[inline(always)]
pub(crate) fn value_of(bytes: u64) -> i32 {
    (bytes >> GRANULE_SHIFT).min(i32::MAX as u64) as i32
}

/// Puts `value` into a lane. Returns what its parent must hold instead of `parent`, if that
/// changes. The new maximum is worked out before the store: a wide load right behind a narrow
/// store into the same line would stall.
#[inline(always)]
fn put<L: Lanes>(lanes: L, group: &mut Group, lane: usize, value: i32, parent: i32) -> Option<i32> {
    let lane = lane % FANOUT;
    let old = group.0[lane];
    if value >= old {
        group.0[lane] = value;
        return (value > parent).then_some(value);
    }
    // Another lane is the largest, and still is.
    if old < parent {
        group.0[lane] = value;
        return None;
    }
    // The largest lane, or one of several, gets smaller.
    let max = lanes.max_with(group, lane, value);
    group.0[lane] = value;
    (max != parent).then_some(max)
}

impl MaxTree {
    pub(crate) fn new() -> Self {
        Self { regions: Vec::new(), upper: vec![vec![Group::EMPTY]] }
    }

    /// Makes the tree hold the cells from `first` to `last`.
    pub(crate) fn cover(&mut self, first: usize, last: usize) {
        let (first, last) = (first >> REGION_SHIFT, last >> REGION_SHIFT);
        if self.regions.len() <= last {
            self.regions.resize_with(last + 1, || None);
            self.grow_upper();
        }
        for region in &mut self.regions[first..=last] {
            region.get_or_insert_with(|| {
                Box::new(Region {
                    cells: [Group::EMPTY; REGION_CELLS / FANOUT],
                    middle: [Group::EMPTY; REGION_CELLS / FANOUT / FANOUT],
                    top: Group::EMPTY,
                })
            });
        }
    }

    /// Makes the upper levels as long as the regions ask for.
    fn grow_upper(&mut self) {
        let mut lanes = self.regions.len();
        let mut level = 0;
        loop {
            let groups = lanes.div_ceil(FANOUT);
            if level == self.upper.len() {
                // The former root becomes the first group of its level; its maximum moves up.
                let below = self.upper[level - 1][0].0;
                let mut root = Group::EMPTY;
                root.0[0] = below.into_iter().fold(0, i32::max);
                self.upper.push(vec![root]);
            }
            // Regions are never given up, so no level gets shorter.
            self.upper[level].resize(groups, Group::EMPTY);
            if groups == 1 {
                return;
            }
            lanes = groups;
            level += 1;
        }
    }

    /// Sets the value of a cell that is covered.
    #[inline(always)]
    pub(crate) fn set<L: Lanes>(&mut self, lanes: L, cell: usize, value: i32) {
        let index = cell >> REGION_SHIFT;
        // A cell that is not covered holds nothing, and nothing can start in it.
        let Some(Some(region)) = self.regions.get_mut(index) else { return };
        let cell = cell % REGION_CELLS;
        let (middle, top) = (cell / FANOUT, cell / FANOUT / FANOUT);
        let up = region.middle[top].0[middle % FANOUT];
        let Some(value) = put(lanes, &mut region.cells[middle], cell, value, up) else { return };
        let up = region.top.0[top];
        let Some(value) = put(lanes, &mut region.middle[top], middle, value, up) else { return };
        let up = self.upper[0][index / FANOUT].0[index % FANOUT];
        let Some(value) = put(lanes, &mut region.top, top, value, up) else { return };
        self.set_region(lanes, index, value);
    }

    /// Carries the value of a region up.
    #[inline(always)]
    fn set_region<L: Lanes>(&mut self, lanes: L, mut lane: usize, mut value: i32) {
        let mut level = 0;
        while level + 1 < self.upper.len() {
            let (group, parent) = (lane / FANOUT, lane / FANOUT / FANOUT);
            let up = self.upper[level + 1][parent].0[group % FANOUT];
            match put(lanes, &mut self.upper[level][group], lane, value, up) {
                Some(raised) => value = raised,
                None => return,
            }
            lane = group;
            level += 1;
        }
        self.upper[level][0].0[lane % FANOUT] = value;
    }

    /// The lowest cell whose value is at least `need`, which is above 0.
    #[inline(always)]
    pub(crate) fn first<L: Lanes>(&self, lanes: L, need: i32) -> Option<usize> {
        let (at, region, top) = self.first_in_top(lanes, need)?;
        // A parent tells the truth, so from here on a lane is found.
        let middle = lanes.first_at_least(&region.middle[top], 0, need) % FANOUT;
        let group = top * FANOUT + middle;
        let cell = lanes.first_at_least(&region.cells[group], 0, need) % FANOUT;
        Some(at * REGION_CELLS + group * FANOUT + cell)
    }

    /// The lowest region that holds `need`, and the lane of its top that does.
    #[inline(always)]
    fn first_in_top<L: Lanes>(&self, lanes: L, need: i32) -> Option<(usize, &Region, usize)> {
        // A few regions are looked at one by one: which of them it is, is mostly the same as last
        // time, so the processor guesses and need not wait for a level of the tree.
        for (at, region) in self.regions.iter().take(FEW_REGIONS).enumerate() {
            if let Some(region) = region {
                let top = lanes.first_at_least(&region.top, 0, need);
                if top < FANOUT {
                    return Some((at, region, top));
                }
            }
        }
        if self.regions.len() <= FEW_REGIONS {
            return None;
        }
        let mut at = 0usize;
        for level in self.upper.iter().rev() {
            let found = lanes.first_at_least(level.get(at)?, 0, need);
            if found == FANOUT {
                return None;
            }
            at = at * FANOUT + found;
        }
        let region = self.regions.get(at)?.as_ref()?;
        Some((at, region, lanes.first_at_least(&region.top, 0, need) % FANOUT))
    }

    /// The lowest cell from `from` on whose value is at least `need`, which is above 0. Climbs
    /// from the cell and goes down again.
    pub(crate) fn first_from<L: Lanes>(&self, lanes: L, from: usize, need: i32) -> Option<usize> {
        let levels = REGION_LEVELS + self.upper.len() as u32;
        let mut lane = from;
        for level in 0..levels {
            if let Some(group) = self.group(level, lane / FANOUT) {
                let found = lanes.first_at_least(group, lane % FANOUT, need);
                if found < FANOUT {
                    let lane = lane / FANOUT * FANOUT + found;
                    return self.descend(lanes, level, lane, need);
                }
            }
            // The next group of this level is a lane of the level above.
            lane = lane / FANOUT + 1;
        }
        None
    }

    /// The lowest cell that holds `need` below a lane that does.
    fn descend<L: Lanes>(&self, lanes: L, level: u32, lane: usize, need: i32) -> Option<usize> {
        let mut lane = lane;
        for below in (0..level).rev() {
            let found = lanes.first_at_least(self.group(below, lane)?, 0, need);
            lane = lane * FANOUT + found;
        }
        Some(lane)
    }

    /// A group by its level, 0 being the cells, and its place there.
    fn group(&self, level: u32, index: usize) -> Option<&Group> {
        if level >= REGION_LEVELS {
            return self.upper.get((level - REGION_LEVELS) as usize)?.get(index);
        }
        // Groups of this level in one region.
        let groups = REGION_CELLS >> (FANOUT_SHIFT * (level + 1));
        let region = self.regions.get(index / groups)?.as_ref()?;
        match level {
            0 => region.cells.get(index % groups),
            1 => region.middle.get(index % groups),
            _ => Some(&region.top),
        }
    }

    pub(crate) fn metadata_bytes(&self) -> u64 {
        let regions = self.regions.iter().flatten().count() * size_of::<Region>();
        let upper: usize = self.upper.iter().map(|level| level.capacity() * 64).sum();
        (regions + upper + self.regions.capacity() * size_of::<usize>()) as u64
    }

    /// Checks that every node holds the maximum of its children, and that the cells hold what
    /// `expected` gives, `(cell, value)` once each, and 0 elsewhere.
    pub(crate) fn verify(
        &self,
        expected: impl Iterator<Item = (usize, i32)>,
    ) -> Result<(), String> {
        let mut count = 0;
        for (cell, value) in expected {
            count += 1;
            let held = self.lane(0, cell);
            if held != value || held == 0 {
                return Err(format!("cell {cell} holds {held}, not {value}"));
            }
        }
        let present = || self.regions.iter().zip(0..).filter_map(|(r, i)| Some((i, r.as_ref()?)));
        let lanes = present().flat_map(|(_, r)| &r.cells).flat_map(|group| &group.0);
        let held = lanes.filter(|&&value| value != 0).count();
        if held != count {
            return Err(format!("{held} cells hold something, {count} should"));
        }
        for level in 1..REGION_LEVELS {
            let lanes = REGION_CELLS >> (FANOUT_SHIFT * level);
            for (index, _) in present() {
                self.verify_lanes(level, index * lanes..(index + 1) * lanes)?;
            }
        }
        let mut lanes = self.regions.len();
        for level in REGION_LEVELS..REGION_LEVELS + self.upper.len() as u32 {
            self.verify_lanes(level, 0..lanes)?;
            lanes = lanes.div_ceil(FANOUT);
        }
        Ok(())
    }

    /// Checks that lanes of a level hold the maximum of the groups below them.
    fn verify_lanes(&self, level: u32, lanes: std::ops::Range<usize>) -> Result<(), String> {
        for lane in lanes {
            let below = self.group(level - 1, lane);
            let max = below.map_or(0, |group| group.0.into_iter().fold(0, i32::max));
            let held = self.lane(level, lane);
            if held != max {
                return Err(format!("level {level} lane {lane} holds {held}, not {max}"));
            }
        }
        Ok(())
    }

    fn lane(&self, level: u32, lane: usize) -> i32 {
        self.group(level, lane / FANOUT).map_or(0, |group| group.0[lane % FANOUT])
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::large::lanes::Plain;

    /// Cells in several regions, near and far, so that all levels matter.
    fn cells() -> impl Strategy<Value = usize> {
        prop_oneof![0..40usize, 4000..4200usize, Just(70_000), (0..300usize).prop_map(|r| r << 12)]
    }

    fn values() -> impl Strategy<Value = i32> {
        prop_oneof![0..6, Just(i32::MAX)]
    }

    /// Sets cells and asks for them; the map says what is right.
    fn agrees<L: Lanes>(lanes: L, steps: &[(usize, i32, i32)]) -> Result<(), TestCaseError> {
        let mut tree = MaxTree::new();
        let mut model = BTreeMap::new();
        for &(cell, value, need) in steps {
            tree.cover(cell, cell);
            tree.set(lanes, cell, value);
            if value == 0 {
                model.remove(&cell);
            } else {
                model.insert(cell, value);
            }
            tree.verify(model.iter().map(|(&cell, &value)| (cell, value)))
                .map_err(TestCaseError::fail)?;
            let first_from = |from: usize| {
                model.range(from..).find(|&(_, &value)| value >= need).map(|(&cell, _)| cell)
            };
            prop_assert_eq!(tree.first(lanes, need), first_from(0));
            for from in [0, 1, cell, cell + 1, cell / 2, 1 << 20, usize::MAX] {
                prop_assert_eq!(tree.first_from(lanes, from, need), first_from(from));
            }
        }
        Ok(())
    }

    proptest! {
        #![proptest_config(crate::test_config())]

        #[test]
        fn both_forms_find_the_lowest_cell(
            steps in prop::collection::vec((cells(), values(), 1..7), 1..60)
        ) {
            agrees(Plain, &steps)?;
            #[cfg(target_arch = "x86_64")]
            if let Some(lanes) = crate::large::lanes::Avx2::detect() {
                agrees(lanes, &steps)?;
            }
        }
    }

    #[test]
    fn an_empty_tree_holds_nothing() {
        let tree = MaxTree::new();
        assert_eq!(tree.first(Plain, 1), None);
        assert_eq!(tree.first_from(Plain, 12345, 1), None);
    }
}
