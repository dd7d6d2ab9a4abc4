//! The books about plain addresses: whose a block is, and when it is taken off. Ids F-… are those of
//! the reports that the stories come from.
use std::sync::atomic::{AtomicU64, Ordering};

use vmm_pool::{ChunkSize, block_of, free_raw};

use super::common::{MIB, Rig};
use super::{Random, turn};

/// Sixteen threads at one size, each address handed on as soon as it is freed.
#[test]
fn f_i1_a_block_is_off_the_books_before_anybody_else_gets_it() {
    const ROUNDS: u64 = 1_000_000;
    const BYTES: u64 = 4096;
    let _turn = turn();
    let rig = Rig::new(|b| b.limit_bytes(4 * MIB).chunk(ChunkSize::Fixed(2 * MIB)));
    let freed = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| {
                for _ in 0..ROUNDS / 16 {
                    let address = rig.lane.alloc_raw(BYTES).unwrap();
                    free_raw(address, BYTES).unwrap();
                }
                freed.fetch_add(ROUNDS / 16, Ordering::Relaxed);
            });
        }
    });
    assert_eq!(freed.load(Ordering::Relaxed), ROUNDS);
    let stats = rig.stats();
    assert_eq!((stats.buffers, stats.live_bytes, stats.limbo_buffers), (0, 0, 0));
    assert!(stats.peak_held_bytes <= 4 * MIB && stats.peak_live_bytes <= 16 * BYTES, "{stats:?}");
    rig.end();
}

/// Where one slab ends another begins: the address belongs to the latter.
#[test]
fn f_x7_an_address_at_the_end_of_a_slab_belongs_to_the_next_one() {
    let _turn = turn();
    let rig = Rig::new(|b| b.chunk(ChunkSize::Fixed(2 * MIB)));
    let sizes = [512, 1024, 4096, 20_480, 65_536, 200_704];
    let mut blocks: Vec<(u64, u64)> = Vec::new();
    for bytes in sizes {
        // More than one slab of each.
        for _ in 0..(600_000 / bytes).max(40) {
            blocks.push((rig.lane.alloc_raw(bytes).unwrap(), bytes));
        }
    }
    blocks.sort_unstable();
    let touching = blocks.windows(2).filter(|two| two[0].0 + two[0].1 == two[1].0);
    let borders = touching.filter(|two| two[0].1 != two[1].1).count();
    assert!(borders >= 3, "{borders} borders of slabs of different sizes");
    let live: u64 = blocks.iter().map(|(_, bytes)| bytes).sum();
    assert_eq!(rig.stats().live_bytes, live);
    // In an order that jumps from slab to slab.
    let mut random = Random(20_261_201);
    let (mut left, mut count) = (live, blocks.len() as u64);
    while !blocks.is_empty() {
        let at = random.below(blocks.len() as u64) as usize;
        let (address, bytes) = blocks.swap_remove(at);
        assert_eq!(block_of(address).unwrap().bytes, bytes, "{address:#x}");
        free_raw(address, bytes).unwrap();
        (left, count) = (left - bytes, count - 1);
        if count.is_multiple_of(200) {
            let stats = rig.stats();
            assert_eq!((stats.live_bytes, stats.buffers), (left, count));
        }
    }
    rig.pool.trim(super::HOME).unwrap();
    assert_eq!(rig.stats().held_bytes, 0);
    rig.end();
}
