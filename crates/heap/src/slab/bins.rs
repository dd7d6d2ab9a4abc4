//! Free blocks inside slabs, in a list for each exact length.
//!
//! A bit for each list that is not empty makes best fit a search over a few words. The last list
//! takes every length that is longer than any request.

use super::table::{State, Table};
use crate::NIL;

/// Lists of free blocks by length.
pub(crate) struct Bins {
    /// By length in granules; the last holds all longer ones.
    heads: Vec<u32>,
    occupied: Vec<u64>,
}

impl Bins {
    /// Lists for requests of up to `units_max` granules.
    pub(crate) fn new(units_max: u32) -> Self {
        let lists = units_max as usize + 2;
        Self { heads: vec![NIL; lists], occupied: vec![0; lists.div_ceil(64)] }
    }

    #[inline(always)]
    fn bin(&self, units: u32) -> usize {
        (units as usize).min(self.heads.len() - 1)
    }

    /// Adds a free block.
    #[inline(always)]
    pub(crate) fn insert(&mut self, table: &mut Table, handle: u32) {
        let bin = self.bin(table.granule(handle).units());
        let next = self.heads[bin];
        let granule = table.granule_mut(handle);
        granule.prev = NIL;
        granule.next = next;
        if next != NIL {
            table.granule_mut(next).prev = handle;
        }
        self.heads[bin] = handle;
        self.occupied[bin / 64] |= 1 << (bin % 64);
    }

    /// Takes a free block out.
    #[inline(always)]
    pub(crate) fn remove(&mut self, table: &mut Table, handle: u32) {
        let granule = table.granule(handle);
        let (prev, next, bin) = (granule.prev, granule.next, self.bin(granule.units()));
        if next != NIL {
            table.granule_mut(next).prev = prev;
        }
        if prev != NIL {
            table.granule_mut(prev).next = next;
            return;
        }
        self.heads[bin] = next;
        if next == NIL {
            self.occupied[bin / 64] &= !(1 << (bin % 64));
        }
    }

    /// A free block of the shortest length that fits.
    #[inline(always)]
    pub(crate) fn best_fit(&self, units: u32) -> Option<u32> {
        let bin = self.bin(units);
        let mut word = bin / 64;
        let mut bits = self.occupied[word] & (u64::MAX << (bin % 64));
        // Eight words at the default settings, and the first is usually enough.
        while bits == 0 {
            word += 1;
            bits = *self.occupied.get(word)?;
        }
        Some(self.heads[word * 64 + bits.trailing_zeros() as usize])
    }

    pub(crate) fn metadata_bytes(&self) -> u64 {
        (self.heads.capacity() * 4 + self.occupied.capacity() * 8) as u64
    }

    /// Checks the lists and returns how many blocks they hold.
    pub(crate) fn verify(&self, table: &Table) -> Result<u64, String> {
        let mut count = 0;
        for (bin, &head) in self.heads.iter().enumerate() {
            if (head != NIL) != (self.occupied[bin / 64] >> (bin % 64) & 1 == 1) {
                return Err(format!("bin {bin}: the bit disagrees with the list"));
            }
            let (mut prev, mut handle) = (NIL, head);
            while handle != NIL {
                let granule = table.granule(handle);
                if granule.state() != State::Free || self.bin(granule.units()) != bin {
                    return Err(format!("bin {bin} lists a block that does not belong there"));
                }
                if granule.prev != prev {
                    return Err(format!("bin {bin}: a block does not point back"));
                }
                (prev, handle) = (handle, granule.next);
                count += 1;
            }
        }
        Ok(count)
    }
}
