//! The granules of every slab: which block starts and which ends in each.
//!
//! A block writes its length at both ends, so both neighbours are found by arithmetic, and its
//! state in its first granule, so an offset that is no start of a block is noticed. A block is
//! known by a handle, the number of its slab and of its first granule in one integer.
//!
//! ```text
//! granule   0         1         2         3         4         5
//! head      used 1    free 3    -         -         used 2    -
//! tail      1         -         -         3         -         2
//! ```
//!
//! That is twelve bytes for each 512, kept when a slab is given back and used for the next one.

use crate::{GRANULE_BYTES, GRANULE_SHIFT, NIL};

/// What starts in a granule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// No block: the inside of one.
    None,
    /// A free block, in the list of its size.
    Free,
    /// A block handed out.
    Used,
    /// A freed block held back in a magazine.
    Cached,
}

/// Bits of `Granule::head` that hold the length.
const UNITS_MASK: u16 = (1 << 14) - 1;

/// One granule of a slab.
#[derive(Clone, Copy)]
pub(crate) struct Granule {
    /// Neighbours in the list of a size, for a free block; `next` also links a magazine.
    pub(crate) prev: u32,
    pub(crate) next: u32,
    /// State and length, in granules, of the block that starts here.
    head: u16,
    /// Length of the block that ends here; otherwise stale.
    tail: u16,
}

impl Granule {
    const EMPTY: Self = Self { prev: NIL, next: NIL, head: 0, tail: 0 };

    #[inline(always)]
    pub(crate) fn state(&self) -> State {
        match self.head >> 14 {
            0 => State::None,
            1 => State::Free,
            2 => State::Used,
            _ => State::Cached,
        }
    }

    /// Length in granules of the block that starts here.
    #[inline(always)]
    pub(crate) fn units(&self) -> u32 {
        u32::from(self.head & UNITS_MASK)
    }

    /// Length in bytes of the block handed out that starts at `offset`, which lies in this granule.
    #[inline(always)]
    pub(crate) fn block_bytes_at(&self, offset: u64) -> Option<u64> {
        let starts_here = self.state() == State::Used && offset.is_multiple_of(GRANULE_BYTES);
        starts_here.then(|| u64::from(self.units()) << GRANULE_SHIFT)
    }

    /// Changes the state of the block that starts here, not its length.
    #[inline(always)]
    pub(crate) fn set_state(&mut self, state: State) {
        self.head = (self.head & UNITS_MASK) | (state as u16) << 14;
    }
}

/// A slab: its place and its granules.
pub(crate) struct Slab {
    /// Offset of its first byte; `VACANT` while the slot holds no slab.
    pub(crate) base: u64,
    /// Blocks that are not free, those in magazines included.
    pub(crate) live: u32,
    granules: Box<[Granule]>,
}

const VACANT: u64 = u64::MAX;

impl Slab {
    pub(crate) fn is_vacant(&self) -> bool {
        self.base == VACANT
    }
}

/// All slabs, by number.
pub(crate) struct Table {
    slabs: Vec<Slab>,
    /// Numbers without a slab; their granules are kept for the next one.
    vacant: Vec<u32>,
    /// `log2` of the granules of a slab.
    shift: u32,
}

impl Table {
    pub(crate) fn new(slab_bytes: u64) -> Self {
        let shift = slab_bytes.trailing_zeros() - GRANULE_SHIFT;
        Self { slabs: Vec::new(), vacant: Vec::new(), shift }
    }

    /// Granules of a slab.
    pub(crate) fn slab_units(&self) -> u32 {
        1 << self.shift
    }

    /// Number of the slab that holds a block.
    #[inline(always)]
    pub(crate) fn slab_of(&self, handle: u32) -> u32 {
        handle >> self.shift
    }

    /// First granule of a block within its slab.
    #[inline(always)]
    pub(crate) fn unit_of(&self, handle: u32) -> u32 {
        handle & (self.slab_units() - 1)
    }

    #[inline(always)]
    pub(crate) fn handle(&self, slab: u32, unit: u32) -> u32 {
        slab << self.shift | unit
    }

    #[inline(always)]
    pub(crate) fn slab(&self, number: u32) -> &Slab {
        &self.slabs[number as usize]
    }

    #[inline(always)]
    pub(crate) fn slab_mut(&mut self, number: u32) -> &mut Slab {
        &mut self.slabs[number as usize]
    }

    #[inline(always)]
    pub(crate) fn granule(&self, handle: u32) -> &Granule {
        &self.slabs[self.slab_of(handle) as usize].granules[self.unit_of(handle) as usize]
    }

    #[inline(always)]
    pub(crate) fn granule_mut(&mut self, handle: u32) -> &mut Granule {
        let (slab, unit) = (self.slab_of(handle), self.unit_of(handle));
        &mut self.slabs[slab as usize].granules[unit as usize]
    }

    /// Offset and first granule of a block.
    #[inline(always)]
    pub(crate) fn block_mut(&mut self, handle: u32) -> (u64, &mut Granule) {
        let (slab, unit) = (self.slab_of(handle), self.unit_of(handle));
        let slab = &mut self.slabs[slab as usize];
        (slab.base + (u64::from(unit) << GRANULE_SHIFT), &mut slab.granules[unit as usize])
    }

    /// The granule that an offset of a slab lies in.
    #[inline(always)]
    pub(crate) fn find(&self, number: u32, offset: u64) -> &Granule {
        let slab = &self.slabs[number as usize];
        &slab.granules[((offset - slab.base) >> GRANULE_SHIFT) as usize]
    }

    /// The same, to be changed, and the handle of a block that starts there.
    #[inline(always)]
    pub(crate) fn find_mut(&mut self, number: u32, offset: u64) -> (u32, &mut Granule) {
        let shift = self.shift;
        let slab = &mut self.slabs[number as usize];
        let unit = ((offset - slab.base) >> GRANULE_SHIFT) as u32;
        (number << shift | unit, &mut slab.granules[unit as usize])
    }

    /// Offset of a block.
    #[inline(always)]
    pub(crate) fn offset(&self, handle: u32) -> u64 {
        let unit = u64::from(self.unit_of(handle));
        self.slab(self.slab_of(handle)).base + (unit << GRANULE_SHIFT)
    }

    /// Writes both ends of a block.
    #[inline(always)]
    pub(crate) fn set_block(&mut self, handle: u32, units: u32, state: State) {
        // A slab has at most 2^13 granules, see `HeapConfig`.
        let first = self.granule_mut(handle);
        first.head = units as u16;
        first.set_state(state);
        self.granule_mut(handle + units - 1).tail = units as u16;
    }

    /// The free block that starts where this one ends, in the same slab.
    #[inline(always)]
    pub(crate) fn free_behind(&self, handle: u32, units: u32) -> Option<u32> {
        if self.unit_of(handle) + units == self.slab_units() {
            return None;
        }
        let behind = handle + units;
        (self.granule(behind).state() == State::Free).then_some(behind)
    }

    /// The free block that ends where this one starts, in the same slab.
    #[inline(always)]
    pub(crate) fn free_before(&self, handle: u32) -> Option<u32> {
        // What lies below a slab is not its own, even if it is a slab too.
        if self.unit_of(handle) == 0 {
            return None;
        }
        // Some block ends in the granule before, so its tail is not stale.
        let before = handle - u32::from(self.granule(handle - 1).tail);
        (self.granule(before).state() == State::Free).then_some(before)
    }

    /// A number for a slab at `base`; its granules hold no block yet.
    pub(crate) fn add(&mut self, base: u64) -> u32 {
        if let Some(number) = self.vacant.pop() {
            self.slab_mut(number).base = base;
            return number;
        }
        // A handle has 32 bits: enough for slabs of 2 TiB in all.
        let granules = vec![Granule::EMPTY; self.slab_units() as usize].into_boxed_slice();
        self.slabs.push(Slab { base, live: 0, granules });
        // So that giving every slab back never allocates.
        self.vacant.reserve(self.slabs.len());
        (self.slabs.len() - 1) as u32
    }

    /// Gives the number of an empty slab back. The last block's head is wiped, as those of all
    /// others were when they merged, so the granules are ready for the next slab.
    pub(crate) fn remove(&mut self, number: u32) {
        let slab = self.slab_mut(number);
        slab.base = VACANT;
        self.vacant.push(number);
    }

    /// Slabs with their numbers, vacant slots included.
    pub(crate) fn slabs(&self) -> impl Iterator<Item = (u32, &Slab)> {
        self.slabs.iter().enumerate().map(|(number, slab)| (number as u32, slab))
    }

    pub(crate) fn count(&self) -> u64 {
        (self.slabs.len() - self.vacant.len()) as u64
    }

    pub(crate) fn metadata_bytes(&self) -> u64 {
        let granules = self.slabs.len() << self.shift;
        let slots = self.slabs.capacity() * size_of::<Slab>() + self.vacant.capacity() * 4;
        (granules * size_of::<Granule>() + slots) as u64
    }

    /// Walks the blocks of a slab, `(handle, units, state)`, and checks that they tile it.
    pub(crate) fn walk(
        &self,
        number: u32,
        visit: &mut dyn FnMut(u32, u32, State) -> Result<(), String>,
    ) -> Result<(), String> {
        let granules = &self.slab(number).granules;
        let mut unit = 0;
        let mut last = State::None;
        while unit < granules.len() {
            let granule = &granules[unit];
            let (units, state) = (granule.units() as usize, granule.state());
            let end = unit + units;
            let tiles = state != State::None && units > 0 && end <= granules.len();
            if !tiles || granules[end - 1].tail as usize != units {
                return Err(format!("slab {number}: no whole block at granule {unit}"));
            }
            if granules[unit + 1..end].iter().any(|inner| inner.state() != State::None) {
                return Err(format!("slab {number}: a block starts inside the one at {unit}"));
            }
            if state == State::Free && last == State::Free {
                return Err(format!("slab {number}: free neighbours not merged at {unit}"));
            }
            visit(self.handle(number, unit as u32), units as u32, state)?;
            last = state;
            unit = end;
        }
        Ok(())
    }
}
