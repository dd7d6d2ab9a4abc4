//! The walker: checks everything that must hold, and says what does not.

use std::collections::BTreeSet;

use crate::Heap;

impl Heap {
    /// Walks all tables, in time linear in their size, and checks that
    ///
    /// - spans are in address order, do not overlap, are made of whole granules, and free
    ///   neighbours are merged;
    /// - the placement's index holds each free span, as it is, and nothing else;
    /// - the blocks of each slab tile it, and each free or cached one is in its list;
    /// - each slab is one used span of the large placement, and no slab is empty;
    /// - the sums in the statistics are those of the tables.
    ///
    /// # Errors
    ///
    /// The first contradiction found. It is a bug of this crate.
    pub fn verify(&self) -> Result<(), String> {
        self.large.verify()?;
        self.slabs.verify()?;
        let mut slabs: BTreeSet<u64> = self.slabs.bases().collect();
        let mut blocks = 0;
        let mut wrong_length = None;
        self.large.used_spans(&mut |offset, bytes| {
            if !slabs.remove(&offset) {
                blocks += 1;
            } else if bytes != self.config.slab_bytes {
                wrong_length = Some((offset, bytes));
            }
        });
        if let Some((offset, bytes)) = wrong_length {
            return Err(format!("the slab at {offset:#x} is a span of {bytes} bytes"));
        }
        if let Some(offset) = slabs.first() {
            return Err(format!("the slab at {offset:#x} is no used span"));
        }
        if blocks != self.large_blocks() {
            return Err(format!("{blocks} large blocks, counted {}", self.large_blocks()));
        }
        Ok(())
    }
}
