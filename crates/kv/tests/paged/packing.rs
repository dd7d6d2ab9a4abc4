//! Blocks move so that chunks become empty.

use vmm_kv::{BlockTables, Packed, PagedCache, PagedSequence, Part};

use crate::harness::*;

type Written = (PagedSequence, Vec<u64>);

/// Sequences of mixed lengths come and go, and then most of them end.
fn churned(cache: &PagedCache, rounds: u64) -> Vec<Written> {
    let mut sequences: Vec<Written> = Vec::new();
    for round in 0..rounds {
        sequences.push(written(cache, 1 + round * 7 % 23, 1000 * round));
        let grows = (round * 5 % sequences.len() as u64) as usize;
        extend(cache, &mut sequences[grows], 3, 1000 * round + 500);
        if round % 3 == 2 {
            sequences.swap_remove((round * 11 % sequences.len() as u64) as usize);
        }
    }
    let mut n = 0;
    sequences.retain(|_| {
        n += 1;
        n % 5 == 0
    });
    sequences
}

fn need_bytes(cache: &PagedCache) -> u64 {
    let stats = cache.stats();
    stats.live_bytes + stats.slack_bytes - stats.shared_bytes
}

#[test]
fn after_packing_a_cache_takes_what_its_blocks_need_and_less_than_a_chunk() {
    let machine = Machine::small(256);
    for keep_chunks in [0, 2] {
        let builder = machine.builder().keep_idle_bytes(keep_chunks * G);
        let cache = builder.build().unwrap();
        let sequences = churned(&cache, 60);
        let before = cache.stats();
        assert!(before.committed_bytes > need_bytes(&cache) + 6 * G, "{before:?}");
        let packed = cache.pack(u64::MAX).unwrap();
        assert_eq!(packed.bytes, packed.blocks * cache.layout().block_bytes());
        assert!(packed.emptied_bytes >= 6 * G, "{packed:?}");
        let after = cache.stats();
        let need = need_bytes(&cache);
        assert!(after.committed_bytes < need + G + keep_chunks * G, "{after:?} of {need}");
        assert_eq!(cache.pack(u64::MAX).unwrap(), Packed::default(), "it is packed");
        cache.verify().unwrap();
        machine.pool.verify().unwrap();
        sequences.iter().for_each(|(sequence, stamps)| check(&cache, sequence, stamps));
    }
    machine.end();
}

#[test]
fn blocks_that_lie_across_chunks_are_packed_too() {
    let machine = Machine::small(256);
    // Blocks of 3 x 128 KiB: five and a third to a chunk.
    let cache = machine.builder().block_tokens(3).chunk_bytes(G).build().unwrap();
    let sequences = churned(&cache, 60);
    let before = cache.stats().committed_bytes;
    while cache.pack(8).unwrap().blocks > 0 {
        cache.verify().unwrap();
    }
    let after = cache.stats().committed_bytes;
    // A block at either end of each run of chunks may lack its other half.
    let mut runs = 0;
    let mut end = u64::MAX;
    for piece in cache.buffer().pieces() {
        runs += u64::from(piece.offset != end);
        end = piece.offset + piece.bytes;
    }
    let edges = 2 * runs * cache.layout().block_bytes();
    assert!(after < need_bytes(&cache) + G + edges, "{before} to {after}, {runs} runs");
    sequences.iter().for_each(|(sequence, stamps)| check(&cache, sequence, stamps));
    drop((sequences, cache));
    machine.end();
}

#[test]
fn tables_right_after_packing_lead_to_every_token() {
    let machine = Machine::small(256);
    let cache = machine.builder().build().unwrap();
    let mut sequences = churned(&cache, 40);
    let child = (sequences[0].0.fork().unwrap(), sequences[0].1.clone());
    sequences.push(child);
    let mut tables = BlockTables::new(sequences.len(), 64);
    let show = |tables: &mut BlockTables, sequences: &[Written]| {
        let shown: Vec<&PagedSequence> = sequences.iter().map(|it| &it.0).collect();
        tables.update(&shown).unwrap().to_vec()
    };
    show(&mut tables, &sequences);
    let before: Vec<Vec<u32>> = sequences.iter().map(|it| it.0.blocks()).collect();
    let packed = cache.pack(3).unwrap();
    assert_eq!(packed.blocks, 3);
    let changed = show(&mut tables, &sequences);
    for (row, (sequence, stamps)) in sequences.iter().enumerate() {
        assert_eq!(changed.contains(&row), sequence.blocks() != before[row], "row {row}");
        for (token, stamp) in stamps.iter().enumerate() {
            // As a kernel finds it.
            let (at, in_block) = cache.layout().locate(token as u64);
            let block = tables.row(row)[at as usize] as u64;
            let offset = cache.layout().offset_in_block(1, Part::Value, in_block, 1);
            let mut found = [0; 8];
            let at = block * cache.layout().block_bytes() + offset;
            cache.buffer().read(at, &mut found).unwrap();
            assert_eq!(u64::from_le_bytes(found), *stamp);
        }
    }
    drop((sequences, cache));
    machine.end();
}

#[test]
fn a_block_that_several_have_moves_once_and_for_all() {
    let machine = Machine::small(64);
    let cache = machine.builder().build().unwrap();
    let filler = cache.open(15 * 4).unwrap();
    let mut parent = written(&cache, 4, 100);
    let children: Vec<_> = (0..4).map(|_| parent.0.fork().unwrap()).collect();
    let shared = parent.0.blocks();
    let tail = written(&cache, 4, 200);
    assert_eq!((shared.clone(), tail.0.blocks()), (vec![15], vec![16]));
    drop(filler);
    let packed = cache.pack(u64::MAX).unwrap();
    // Two chunks have one block each; the first chunk stays in any case.
    assert_eq!(packed.blocks, 2);
    for child in &children {
        assert_eq!(child.blocks(), parent.0.blocks());
        check(&cache, child, &parent.1);
    }
    check(&cache, &tail.0, &tail.1);
    assert_eq!(cache.stats().committed_bytes, G);
    cache.verify().unwrap();
    drop((parent, children, tail, cache));
    machine.end();
}

#[test]
fn no_more_blocks_move_than_were_allowed() {
    let machine = Machine::small(256);
    let cache = machine.builder().build().unwrap();
    let sequences = churned(&cache, 50);
    assert_eq!(cache.pack(0).unwrap(), Packed::default());
    let mut passes = 0;
    loop {
        let packed = cache.pack(2).unwrap();
        assert!(packed.blocks <= 2);
        if packed.blocks == 0 {
            break;
        }
        passes += 1;
        cache.verify().unwrap();
    }
    assert!(passes > 1);
    assert!(cache.stats().committed_bytes < need_bytes(&cache) + G);
    sequences.iter().for_each(|(sequence, stamps)| check(&cache, sequence, stamps));
    drop((sequences, cache));
    machine.end();
}
