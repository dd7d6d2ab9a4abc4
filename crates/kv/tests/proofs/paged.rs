//! Paged caches: the thread holds blocks for those who ask ahead, and gives back what is left.

use shuttle::thread::yield_now;
use vmm_kv::{PagedBuilder, PagedCache};

use crate::rig::{CHUNK, HOME, Rig, prove, spawn};
use crate::{T, shape};

/// Tokens of a block: two lie in a chunk.
const BLOCK: u64 = T / 2;

/// Eight blocks, with a thread, of which none is kept.
fn builder(rig: &Rig) -> PagedBuilder {
    let builder = PagedCache::builder(&rig.pool, &rig.stream(), shape());
    builder.block_tokens(BLOCK as u32).chunk_bytes(CHUNK).max_blocks(8).ahead_blocks(0)
}

/// Two threads open sequences ahead, wait for their blocks and drop them, while a third takes blocks as
/// they come: each gets its own.
///
/// Caught: blocks ahead that are taken and not held (`State::serve`). Meant to catch: growth that others
/// took, after which nobody grows again (`Shared::grow_for`).
#[test]
fn blocks_that_were_asked_for_ahead_come() {
    prove("blocks_that_were_asked_for_ahead_come", || {
        let rig = Rig::new(|pool| pool);
        let cache = builder(&rig).build().unwrap();
        let opens = [BLOCK, 3 * BLOCK].map(|tokens| {
            let cache = cache.clone();
            spawn(move || {
                let mut sequence = cache.open_ahead(tokens).unwrap();
                while !sequence.is_ready(tokens) {
                    yield_now();
                }
                assert_eq!(sequence.append(tokens).unwrap(), 0);
                sequence
            })
        });
        for _ in 0..3 {
            drop(cache.open(BLOCK).unwrap());
        }
        let sequences = opens.map(|thread| thread.join().unwrap());
        cache.verify().unwrap();
        assert_eq!(cache.stats().tokens, 4 * BLOCK);
        drop((sequences, cache));
        rig.nothing_elastic();
        rig.end();
    });
}

/// A sequence that waits for blocks is dropped, and another one takes its place in the list of those
/// who wait: that one gets its blocks.
///
/// Found: it was taken for the one before, and waited for ever (`State::end_ask`). Caught: that again; blocks
/// that stay held for who is gone (`State::close`).
#[test]
fn who_takes_the_place_of_one_that_waited_is_served() {
    prove("who_takes_the_place_of_one_that_waited_is_served", || {
        let rig = Rig::new(|pool| pool);
        let cache = builder(&rig).build().unwrap();
        for tokens in [2 * BLOCK, 4 * BLOCK] {
            drop(cache.open_ahead(tokens).unwrap());
        }
        let sequence = cache.open_ahead(4 * BLOCK).unwrap();
        while !sequence.is_ready(4 * BLOCK) {
            yield_now();
        }
        cache.verify().unwrap();
        drop((sequence, cache));
        rig.nothing_elastic();
        rig.end();
    });
}

/// The last handle of a cache goes while sequences do: what they leave is given back, though nobody
/// asks for it afterwards, and the one that stays keeps its own.
///
/// Found: memory of who left while the thread was on its way out, which nobody gave back (`Bell::wait`,
/// `Bell::ring`).
#[test]
fn what_is_left_while_a_cache_ends_is_given_back() {
    prove("what_is_left_while_a_cache_ends_is_given_back", || {
        let rig = Rig::new(|pool| pool);
        let cache = builder(&rig).build().unwrap();
        let (stays, goes) = (cache.open(BLOCK).unwrap(), cache.open(2 * BLOCK).unwrap());
        let drops = [spawn(move || drop(cache)), spawn(move || drop(goes))];
        drops.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(rig.pool.device_stats(HOME).unwrap().elastic_bytes, CHUNK);
        drop(stays);
        rig.nothing_elastic();
        rig.end();
    });
}
