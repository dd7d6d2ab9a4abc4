//! Contiguous caches: the thread grows sequences that ask, are cut and go meanwhile.

use std::sync::Arc;

use shuttle::sync::Mutex;
use shuttle::thread::yield_now;
use vmm_kv::{ContiguousBuilder, ContiguousCache, Lending, Sequence};
use vmm_pool::{Budget, Move};

use crate::rig::{AWAY, CHUNK, HOME, LONG, Rig, clean, prove, spawn, wait_for_others};
use crate::{T, shape};

/// Three sequences of four chunks each, with a thread, that keep nothing.
fn builder(rig: &Rig) -> ContiguousBuilder {
    let builder = ContiguousCache::builder(&rig.pool, &rig.stream(), shape());
    builder.max_tokens(4 * T).max_sequences(3).keep_idle_bytes(0).ahead_tokens(0)
}

/// Two threads open sequences ahead, wait for their memory and drop them: it comes to both, in a slot of
/// another's before too, and goes.
///
/// Caught: hands that are let go without a word (`Held::drop`); a sequence that goes and whose length stays
/// (`Core::leave`); an ask without a ring (`Core::open_ahead`).
#[test]
fn memory_that_was_asked_for_ahead_comes() {
    prove("memory_that_was_asked_for_ahead_comes", || {
        let rig = Rig::new(|pool| pool);
        let cache = builder(&rig).build().unwrap();
        let opens = [T, 2 * T].map(|tokens| {
            let cache = cache.clone();
            spawn(move || {
                for _ in 0..2 {
                    let mut sequence = cache.open_ahead(tokens).unwrap();
                    while !sequence.is_ready(tokens) {
                        yield_now();
                    }
                    assert_eq!(sequence.append(tokens).unwrap(), 0);
                }
            })
        });
        opens.into_iter().for_each(|thread| thread.join().unwrap());
        cache.settle().unwrap();
        cache.verify().unwrap();
        let stats = cache.stats();
        assert_eq!((stats.foreground_growths, stats.committed_bytes), (0, 0), "{stats:?}");
        drop(cache);
        rig.nothing_elastic();
        rig.end();
    });
}

/// A sequence wants more while what it asked for before is under way: that comes too.
///
/// Caught: an answer to the earlier wish that ends the later one (`Slot::end_wait`), or after which nobody
/// asks again (`Core::serve_asks`).
#[test]
fn who_wants_more_meanwhile_gets_it() {
    prove("who_wants_more_meanwhile_gets_it", || {
        let rig = Rig::new(|pool| pool);
        let cache = builder(&rig).ahead_tokens(T).build().unwrap();
        let mut sequence = cache.open_ahead(T).unwrap();
        for tokens in [1, T] {
            sequence.append(tokens).unwrap();
        }
        while !sequence.is_ready(T) {
            yield_now();
        }
        cache.verify().unwrap();
        drop((sequence, cache));
        rig.nothing_elastic();
        rig.end();
    });
}

/// Sequences are dropped while memory comes for them: it goes again, beyond what is to be kept.
///
/// Found: such memory stayed until the thread was woken for something else (`Core::do_all`). Caught: a slot
/// that nobody has and that is told of memory (`Core::publish`).
#[test]
fn memory_that_comes_for_who_is_gone_goes() {
    prove("memory_that_comes_for_who_is_gone_goes", || {
        let rig = Rig::new(|pool| pool);
        let cache = builder(&rig).build().unwrap();
        let opens = [0, 1].map(|_| {
            let cache = cache.clone();
            spawn(move || drop(cache.open_ahead(T).unwrap()))
        });
        opens.into_iter().for_each(|thread| thread.join().unwrap());
        // Waits for a growth that is under way. Nobody wakes the thread for this.
        while cache.stats().idle_bytes > 0 {
            yield_now();
        }
        cache.verify().unwrap();
        drop(cache);
        rig.nothing_elastic();
        rig.end();
    });
}

/// The same where the memory is borrowed, in a cache that keeps what idles: a lender's is not kept.
///
/// Found: it was kept, for it came when its sequence had gone already (`Core::grow`).
#[test]
fn what_is_borrowed_for_who_is_gone_is_not_kept() {
    prove("what_is_borrowed_for_who_is_gone_is_not_kept", || {
        let rig = Rig::two(|pool| pool.budget(HOME, Budget::new(0)).lend(AWAY, 4 * CHUNK));
        let cache = builder(&rig).keep_idle_bytes(1 << 40).lenders(Lending::Any).build().unwrap();
        let opens = [0, 1].map(|_| {
            let cache = cache.clone();
            spawn(move || drop(cache.open_ahead(T).unwrap()))
        });
        opens.into_iter().for_each(|thread| thread.join().unwrap());
        cache.settle().unwrap();
        cache.verify().unwrap();
        assert_eq!(rig.pool.device_stats(AWAY).unwrap().lent_bytes, 0);
        drop(cache);
        rig.nothing_elastic();
        rig.end();
    });
}

/// The last handle and the last sequence go in two threads while memory is on its way: whoever comes
/// last ends the cache and its thread, and nothing is left.
///
/// Caught: an end of the thread that is not waited for (`Grower::drop`).
#[test]
fn a_cache_ends_while_its_thread_works() {
    prove("a_cache_ends_while_its_thread_works", || {
        let rig = Rig::new(|pool| pool);
        let cache = builder(&rig).build().unwrap();
        let sequence = cache.open_ahead(2 * T).unwrap();
        let drops = [spawn(move || drop(cache)), spawn(move || drop(sequence))];
        drops.into_iter().for_each(|thread| thread.join().unwrap());
        rig.nothing_elastic();
        rig.end();
    });
}

/// What a hook drops when it is called first.
type Last = Arc<Mutex<Option<(ContiguousCache, Sequence)>>>;

/// The last handles of a cache go in a hook for changed backing, in the thread of moves, while the
/// cache's own waits for that change: nobody waits for it in turn.
///
/// Found: threads that waited for each other for ever (`Grower::drop`).
#[test]
fn the_last_handles_of_a_cache_may_go_in_a_hook() {
    prove("the_last_handles_of_a_cache_may_go_in_a_hook", || {
        let rig = Rig::two(|pool| pool);
        let cache = builder(&rig).build().unwrap();
        let sequence = cache.open(T).unwrap();
        let last = Last::default();
        let hook = {
            let last = last.clone();
            cache.buffer().on_backing_change(move |_| {
                let handles = last.lock().unwrap().take();
                drop(handles);
            })
        };
        let migration = cache.buffer().migrate_async(Move::to(AWAY).patience(LONG)).unwrap();
        drop(cache.open_ahead(T).unwrap());
        *last.lock().unwrap() = Some((cache, sequence));
        let Rig { sim, driver, pool } = rig;
        drop((pool, migration.wait(LONG)));
        // They are there still if the move was over before.
        drop((last, hook));
        wait_for_others(&driver);
        clean(&sim, driver);
    });
}
