//! Magazines: for each exact small size, a short stack of freed blocks.
//!
//! A block in a magazine still counts as taken in its slab, so handing it out again touches only
//! its first granule. The price is that it can serve no other size and pins its slab; so magazines
//! are short, and drained before anything grows.

use super::table::{Granule, State, Table};
use crate::{GRANULE_BYTES, NIL};

/// A stack linked through the first granules of its blocks.
#[derive(Clone, Copy)]
struct Magazine {
    top: u32,
    count: u32,
}

/// One magazine for each length in granules.
pub(crate) struct Magazines {
    by_units: Vec<Magazine>,
    depth: u32,
}

impl Magazines {
    /// Magazines of `depth` blocks for lengths of up to `units_max` granules.
    pub(crate) fn new(units_max: u32, depth: u32) -> Self {
        let empty = Magazine { top: NIL, count: 0 };
        Self { by_units: vec![empty; units_max as usize + 1], depth }
    }

    /// The block of this length that was freed last, or `NIL`.
    #[inline(always)]
    pub(crate) fn top(&self, units: u32) -> u32 {
        self.by_units[units as usize].top
    }

    /// Hands out the top of the stack of this length, whose first granule is given.
    #[inline(always)]
    pub(crate) fn pop(&mut self, granule: &mut Granule, units: u32) {
        let magazine = &mut self.by_units[units as usize];
        granule.set_state(State::Used);
        magazine.top = granule.next;
        magazine.count -= 1;
    }

    /// Holds a freed block back, whose first granule is given; false if the magazine is full.
    #[inline(always)]
    pub(crate) fn push(&mut self, granule: &mut Granule, handle: u32, units: u32) -> bool {
        let magazine = &mut self.by_units[units as usize];
        if magazine.count >= self.depth {
            return false;
        }
        granule.set_state(State::Cached);
        granule.next = magazine.top;
        magazine.top = handle;
        magazine.count += 1;
        true
    }

    /// Lengths up to which there is a magazine.
    pub(crate) fn units_max(&self) -> u32 {
        (self.by_units.len() - 1) as u32
    }

    /// Bytes held back.
    pub(crate) fn bytes(&self) -> u64 {
        let units: u64 =
            self.by_units.iter().zip(0u64..).map(|(m, units)| u64::from(m.count) * units).sum();
        units * GRANULE_BYTES
    }

    pub(crate) fn metadata_bytes(&self) -> u64 {
        (self.by_units.capacity() * size_of::<Magazine>()) as u64
    }

    /// Checks the stacks and returns how many blocks they hold.
    pub(crate) fn verify(&self, table: &Table) -> Result<u64, String> {
        let mut total = 0;
        for (magazine, units) in self.by_units.iter().zip(0u32..) {
            let mut count = 0;
            let mut handle = magazine.top;
            while handle != NIL && count <= magazine.count {
                let granule = table.granule(handle);
                if granule.state() != State::Cached || granule.units() != units {
                    return Err(format!("magazine {units} holds a block that is not cached"));
                }
                handle = granule.next;
                count += 1;
            }
            if count != magazine.count || count > self.depth {
                return Err(format!("magazine {units} holds {count}, says {}", magazine.count));
            }
            total += u64::from(count);
        }
        Ok(total)
    }
}
