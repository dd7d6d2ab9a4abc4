use super::*;
use crate::Placement;

const MIB: u64 = 1 << 20;

fn heap(placement: Placement) -> Heap {
    Heap::new(HeapConfig { placement, ..HeapConfig::default() })
}

#[test]
fn a_miss_says_what_would_have_helped() {
    for (placement, natural) in [(Placement::FirstFit, 512), (Placement::Buddy, 4 * MIB)] {
        let mut heap = heap(placement);
        let small = heap.alloc(1, 1).unwrap_err();
        assert_eq!(small, Miss { bytes: 2 * MIB, align: 2 * MIB });
        let large = heap.alloc(3 * MIB - 1, 256).unwrap_err();
        assert_eq!(large, Miss { bytes: 3 * MIB, align: natural });
        let aligned = heap.alloc(1000, 8 * MIB).unwrap_err();
        assert_eq!(aligned, Miss { bytes: 1024, align: 8 * MIB });
        let endless = heap.alloc(u64::MAX, u64::MAX).unwrap_err();
        assert_eq!(endless, Miss { bytes: u64::MAX - 511, align: 1 << 63 });
    }
}

#[test]
fn the_border_between_small_and_large() {
    for placement in [Placement::FirstFit, Placement::Buddy] {
        let mut heap = heap(placement);
        heap.insert_free(0, 8 * MIB);
        let large = heap.alloc(256 * 1024 + 1, 256).unwrap();
        assert_eq!((large.offset, large.bytes, heap.stats().slab_count), (0, 262_656, 0));
        let small = heap.alloc(256 * 1024, 256).unwrap();
        assert_eq!((small.offset % (2 * MIB), small.bytes), (0, 262_144));
        assert_eq!(heap.stats().slab_count, 1);
        // A small one with an alignment of its own does not come from the slab.
        let aligned = heap.alloc(512, 4096).unwrap();
        assert_eq!((aligned.offset % 4096, heap.block_bytes(aligned.offset)), (0, Some(512)));
        assert_eq!(heap.stats().slab_free_bytes, 2 * MIB - 262_144);
        assert_eq!(heap.verify(), Ok(()));
    }
}

#[test]
fn nothing_is_a_block_and_odd_alignments_are_rounded_up() {
    let mut heap = heap(Placement::FirstFit);
    heap.insert_free(512, 8 * MIB);
    let nothing = heap.alloc(0, 0).unwrap();
    assert_eq!(nothing.bytes, 512);
    let odd = heap.alloc(MIB, 3000).unwrap();
    assert_eq!(odd.offset % 4096, 0);
    assert_eq!(heap.free(odd.offset), Ok(MIB));
}

#[test]
fn the_coldest_run_is_the_one_freed_longest_ago() {
    let mut heap = heap(Placement::FirstFit);
    heap.insert_free(0, 7 * MIB);
    let blocks: Vec<Block> = (0..7).map(|_| heap.alloc(MIB, 256).unwrap()).collect();
    // Alone: 5, then 1; then 3 and its neighbour 2, which makes the pair as warm as 2.
    for nth in [5, 3, 1, 2] {
        heap.free(blocks[nth].offset).unwrap();
    }
    let mut runs = Vec::new();
    heap.free_runs(&mut |run| runs.push(run));
    let runs: Vec<_> = runs.iter().map(|r| (r.offset / MIB, r.last_freed_tick)).collect();
    assert_eq!(runs, [(1, 11), (5, 8)]);
    // What is left of a run that is cut stays as cold as it was.
    heap.alloc(512 * 1024, 256).unwrap();
    heap.alloc_at(5 * MIB, 512).unwrap();
    heap.free_runs(&mut |run| assert!(run.last_freed_tick <= 11, "{run:?}"));
    assert_eq!(heap.stats().tick, 13);
}

#[test]
fn exact_ranges_must_be_whole_granules_of_free_space() {
    let mut heap = heap(Placement::Buddy);
    heap.insert_free(MIB, MIB);
    for (offset, bytes) in
        [(0, 512), (MIB, 0), (MIB + 1, 512), (MIB, 100), (MIB, MIB + 512), (u64::MAX, u64::MAX)]
    {
        let error = NotFree { offset, bytes };
        assert_eq!(heap.alloc_at(offset, bytes), Err(error));
        assert_eq!(heap.remove_free(offset, bytes), Err(error));
    }
    assert_eq!(heap.remove_free(MIB, MIB), Ok(()));
    assert_eq!(heap.stats().mapped_bytes, 0);
}

#[test]
#[should_panic(expected = "overlaps a range that was inserted before")]
fn mapping_twice_is_a_bug_of_the_caller() {
    let mut heap = heap(Placement::FirstFit);
    heap.insert_free(0, MIB);
    heap.insert_free(MIB - 512, MIB);
}

#[test]
#[should_panic(expected = "not a range of whole granules")]
fn mapping_half_a_granule_is_a_bug_of_the_caller() {
    heap(Placement::FirstFit).insert_free(0, 256);
}

#[test]
fn a_block_is_freed_by_its_length_only_if_it_has_that_length() {
    let mut heap = heap(Placement::FirstFit);
    heap.insert_free(0, 8 * MIB);
    for bytes in [1000, 5 * MIB + 3] {
        let block = heap.alloc(bytes, 1).unwrap();
        let (before, refused) = (heap.stats(), NotAllocated { offset: block.offset });
        for wrong in [0, 1, block.bytes + 1, block.bytes - 512, block.bytes * 2, u64::MAX] {
            assert_eq!(heap.free_exact(block.offset, wrong), Err(refused), "{wrong}");
        }
        assert_eq!(heap.free_exact(block.offset + 512, bytes).ok(), None);
        assert_eq!(heap.stats(), before);
        assert_eq!(heap.free_exact(block.offset, bytes), Ok(block.bytes));
        assert_eq!(heap.free_exact(block.offset, bytes), Err(refused));
    }
    heap.verify().unwrap();
}

#[test]
fn a_space_of_many_tebibytes_costs_what_is_used_of_it() {
    for placement in [Placement::FirstFit, Placement::Buddy] {
        let mut heap = heap(placement);
        heap.insert_free(0, 64 * MIB);
        heap.insert_free(SPACE_BYTES - 64 * MIB, 64 * MIB);
        heap.alloc_at(0, 64 * MIB).unwrap();
        let small = heap.alloc(512, 256).unwrap();
        assert!(small.offset >= SPACE_BYTES - 64 * MIB);
        assert_eq!(heap.free(small.offset), Ok(512));
        let metadata_bytes = heap.stats().metadata_bytes;
        assert!(metadata_bytes < 4 * MIB, "{placement:?}: {metadata_bytes}");
    }
}
