//! The check that makes a replay a test: where every block was put, against an interval map.

use std::collections::BTreeMap;

use super::{ALIGN_BYTES, BlockAt, Extent, ReplayError};
use crate::trace::{Op, Trace};

/// Checks the extents that one pass gave out, in the order of its allocations: aligned, long
/// enough, and apart from every block that was live at that moment.
///
/// # Errors
/// The first block that breaks a rule, and the block that it collides with.
pub(super) fn check(trace: &Trace, extents: &[Extent], pass: u32) -> Result<(), ReplayError> {
    let mut live = LiveMap::default();
    let mut slots = vec![None; trace.slots];
    let mut given = trace.blocks.iter().zip(extents);
    for (index, op) in trace.ops.iter().enumerate() {
        let op_number = index + 1;
        match *op {
            Op::Free { slot } => {
                if let Some(address) = slots[slot as usize].take() {
                    live.remove(address);
                }
            }
            Op::Alloc { slot } => {
                let (block, extent) =
                    given.next().expect("a finished pass has an extent for each of its allocs");
                let fresh = BlockAt { id: block.id, address: extent.address, bytes: block.bytes };
                if block.bytes == 0 {
                    continue; // nothing to overlap with, and any address is right
                }
                if let Some(wrong) = promise_broken(extent, block.bytes) {
                    return Err(ReplayError::BadBlock { pass, op: op_number, block: fresh, wrong });
                }
                if let Some(live) = live.insert(fresh) {
                    return Err(ReplayError::Overlap { pass, op: op_number, fresh, live });
                }
                slots[slot as usize] = Some(extent.address);
            }
        }
    }
    Ok(())
}

fn promise_broken(extent: &Extent, asked_bytes: u64) -> Option<String> {
    if extent.address == 0 {
        return Some("has no address".to_owned());
    }
    if !extent.address.is_multiple_of(ALIGN_BYTES) {
        return Some(format!("is not aligned to {ALIGN_BYTES} bytes"));
    }
    if extent.bytes < asked_bytes {
        return Some(format!("is too short: the allocator says it has {} bytes", extent.bytes));
    }
    if extent.address.checked_add(extent.bytes).is_none() {
        return Some(format!("passes the end of the address space with {} bytes", extent.bytes));
    }
    None
}

/// Live blocks by address. No two overlap.
#[derive(Default)]
struct LiveMap(BTreeMap<u64, BlockAt>);

impl LiveMap {
    /// Adds a block of at least one byte, or says which live block it overlaps.
    fn insert(&mut self, fresh: BlockAt) -> Option<BlockAt> {
        // Only the last block that starts before the fresh one ends can reach into it: those
        // before that one end before it starts.
        let before_end = self.0.range(..fresh.address + fresh.bytes).next_back();
        if let Some((_, last)) = before_end
            && last.address + last.bytes > fresh.address
        {
            return Some(*last);
        }
        self.0.insert(fresh.address, fresh);
        None
    }

    fn remove(&mut self, address: u64) {
        self.0.remove(&address);
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn trace(text: &str) -> Trace {
        Trace::read(text.as_bytes(), Path::new("t")).unwrap()
    }

    fn extents(list: &[(u64, u64)]) -> Vec<Extent> {
        list.iter().map(|(address, bytes)| Extent { address: *address, bytes: *bytes }).collect()
    }

    const PAIR: &str = "a 10 512 0 0\na 11 1024 0 1\n";

    #[test]
    fn neighbours_may_touch_and_freed_places_may_be_used_again() {
        let trace = trace("a 1 512 0 0\na 2 512 0 0\nf 1 0\na 3 512 0 0\nf 2 0\na 1 1024 0 0");
        let given = [(4096, 512), (4608, 512), (4096, 512), (8192, 1024)];
        check(&trace, &extents(&given), 1).unwrap();
    }

    #[test]
    fn every_way_to_overlap_is_found_and_names_both_blocks() {
        let trace = trace(PAIR);
        for (first, second) in [
            ((4096, 512), (4096, 1024)), // same start
            ((4096, 512), (3328, 1024)), // reaches into it from below
            ((4096, 512), (4352, 1024)), // starts inside it
            ((4352, 512), (4096, 1024)), // swallows it
        ] {
            let error = check(&trace, &extents(&[first, second]), 3).unwrap_err();
            let ReplayError::Overlap { pass, op, fresh, live } = &error else { panic!("{error}") };
            assert_eq!((*pass, *op, fresh.id, live.id), (3, 2, 11, 10));
            let text = error.to_string();
            assert!(text.contains("block 11 (1024 bytes"), "{text}");
            assert!(text.contains("block 10 (512 bytes"), "{text}");
        }
    }

    #[test]
    fn empty_blocks_may_be_anywhere_and_hide_nothing() {
        let trace = trace("a 1 512 0 0\na 2 0 0 0\nf 2 0\na 3 512 0 0");
        let error = check(&trace, &extents(&[(4096, 512), (4096, 0), (4096, 512)]), 1).unwrap_err();
        assert!(matches!(error, ReplayError::Overlap { op: 4, .. }), "{error}");
        check(&trace, &extents(&[(4096, 512), (0, 0), (8192, 512)]), 1).unwrap();
    }

    #[test]
    fn a_swallowed_block_is_found_behind_a_longer_neighbour() {
        let trace = trace("a 1 8192 0 0\na 2 256 0 0\na 3 512 0 0\n");
        let given = [(0x10000, 8192), (0x20000, 256), (0x11000, 512)];
        let error = check(&trace, &extents(&given), 1).unwrap_err();
        assert!(matches!(error, ReplayError::Overlap { op: 3, .. }), "{error}");
    }

    #[test]
    fn a_block_must_be_aligned_long_enough_and_somewhere() {
        let trace = trace(PAIR);
        for (bad, wrong) in [
            ((0, 512), "no address"),
            ((4097, 512), "not aligned to 256"),
            ((4096 + 128, 512), "not aligned to 256"),
            ((4096, 511), "too short: the allocator says it has 511 bytes"),
            ((u64::MAX - 255, 512), "end of the address space"),
        ] {
            let error = check(&trace, &extents(&[bad, (1 << 20, 1024)]), 1).unwrap_err();
            assert!(matches!(error, ReplayError::BadBlock { op: 1, .. }), "{error}");
            assert!(error.to_string().contains(wrong), "{error}");
        }
    }
}
