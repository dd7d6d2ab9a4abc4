//! Sequences with tokens in common: in the same chunks, until one of them writes there.
#![allow(clippy::unwrap_used, reason = "a failure ends the story")]

mod common;

use std::time::Duration;

use common::{G, ORDERS, T, append, check, machine, one, read, write};
use vmm_kv::{KvError, Order};
use vmm_pool::{ElasticError, Error};

#[test]
fn a_fork_shares_memory_until_it_writes() {
    for order in ORDERS {
        let machine = one(4096);
        let cache = machine.builder().order(order).build().unwrap();
        let mut parent = cache.open(0).unwrap();
        append(&machine, &cache, &mut parent, 100, 1);
        let before = cache.stats();
        let mut child = parent.fork().unwrap();
        let after = cache.stats();
        assert_eq!(after.committed_bytes, before.committed_bytes, "no memory is taken");
        assert_eq!(after.shared_bytes, before.committed_bytes);
        assert_eq!((after.tokens, after.sequences), (200, 2));
        assert_eq!(machine.stats(0).elastic_bytes, before.committed_bytes);
        check(&cache);
        assert_eq!((child.tokens(), child.address() == parent.address()), (100, false));
        read(&machine, &cache, &child, 0..100, 1);
        // The parent goes on in the last chunk; the child takes one of its own.
        append(&machine, &cache, &mut parent, 1, 2);
        let shared = cache.stats().shared_bytes;
        assert_eq!(shared, before.committed_bytes, "the parent's append copies nothing");
        append(&machine, &cache, &mut child, 2, 3);
        let parts = if order == Order::TokenMajor { 1 } else { 4 };
        assert_eq!(cache.stats().shared_bytes, shared - parts * G);
        check(&cache);
        append(&machine, &cache, &mut parent, 50, 4);
        append(&machine, &cache, &mut child, 60, 5);
        for (sequence, seeds) in [(&parent, [2, 4]), (&child, [3, 5])] {
            read(&machine, &cache, sequence, 0..100, 1);
            read(&machine, &cache, sequence, 100..101, seeds[0]);
            read(&machine, &cache, sequence, 102..sequence.tokens(), seeds[1]);
        }
        check(&cache);
        // Who stays has what was common for itself.
        drop(parent);
        check(&cache);
        assert_eq!(cache.stats().shared_bytes, 0);
        read(&machine, &cache, &child, 0..100, 1);
        drop(child);
        check(&cache);
        assert_eq!(cache.stats().committed_bytes, 0);
        drop(cache);
        machine.end();
    }
}

#[test]
fn forks_of_forks_go_their_own_ways() {
    let machine = one(4096);
    let cache = machine.cache();
    let mut root = cache.open(0).unwrap();
    append(&machine, &cache, &mut root, 3 * T + 3, 1);
    let mut forks: Vec<_> = (0..5).map(|_| root.fork().unwrap()).collect();
    let mut deeper = forks[0].fork_at(T + 1).unwrap();
    assert_eq!(cache.stats().shared_bytes, (5 * 4 + 2) * G);
    drop(root);
    for (seed, fork) in (10..).zip(&mut forks) {
        append(&machine, &cache, fork, 7, seed);
        check(&cache);
    }
    append(&machine, &cache, &mut deeper, 9, 30);
    check(&cache);
    for (seed, fork) in (10..).zip(&forks) {
        read(&machine, &cache, fork, 0..3 * T + 3, 1);
        read(&machine, &cache, fork, 3 * T + 3..fork.tokens(), seed);
    }
    read(&machine, &cache, &deeper, 0..T + 1, 1);
    read(&machine, &cache, &deeper, T + 1..deeper.tokens(), 30);
    drop((forks, cache));
    read_alone(&machine, &mut deeper);
    drop(deeper);
    machine.end();
}

/// A sequence keeps its cache open.
fn read_alone(machine: &common::Machine, sequence: &mut vmm_kv::Sequence) {
    assert!(sequence.append(1).is_ok());
    assert!(machine.sim.peek(sequence.address(), 16).is_some());
}

#[test]
fn who_is_cut_below_what_is_common_writes_into_a_chunk_of_its_own() {
    let machine = one(4096);
    let cache = machine.cache();
    let mut parent = cache.open(0).unwrap();
    append(&machine, &cache, &mut parent, 5 * T + 4, 1);
    let mut child = parent.fork().unwrap();
    let common = 6 * G;
    assert_eq!(child.append(0).unwrap(), 5 * T + 4);
    assert_eq!(cache.stats().shared_bytes, common, "nothing is written");
    assert_eq!(cache.stats().shared_bytes, common);
    // In the last chunk, and in one before: what is behind it is not its own to write.
    parent.truncate(5 * T + 2);
    append(&machine, &cache, &mut parent, 1, 2);
    assert_eq!(cache.stats().shared_bytes, common - G);
    read(&machine, &cache, &child, 0..5 * T + 4, 1);
    parent.truncate(2 * T + 1);
    check(&cache);
    append(&machine, &cache, &mut parent, 6 * T, 3);
    check(&cache);
    read(&machine, &cache, &child, 0..5 * T + 4, 1);
    read(&machine, &cache, &parent, 0..2 * T + 1, 1);
    read(&machine, &cache, &parent, 2 * T + 1..8 * T + 1, 3);
    assert_eq!(cache.stats().shared_bytes, 2 * G);
    // At a chunk's end nothing has to be copied.
    child.truncate(2 * T);
    let copied = cache.buffer().stats().moved_bytes;
    append(&machine, &cache, &mut child, 5, 4);
    assert_eq!(cache.buffer().stats().moved_bytes, copied);
    read(&machine, &cache, &parent, 2 * T + 1..8 * T + 1, 3);
    // Alone with a chunk, nobody copies either.
    drop(parent);
    child.truncate(T + 3);
    append(&machine, &cache, &mut child, 1, 5);
    assert_eq!(cache.buffer().stats().moved_bytes, copied);
    read(&machine, &cache, &child, 0..T + 3, 1);
    check(&cache);
    drop((child, cache));
    machine.end();
}

#[test]
fn a_slot_that_shared_is_not_kept_for_the_next() {
    let machine = one(4096);
    let cache = machine.builder().keep_idle_bytes(1 << 20).max_sequences(3).build().unwrap();
    let mut parent = cache.open(0).unwrap();
    append(&machine, &cache, &mut parent, 4 * T, 1);
    let child = parent.fork().unwrap();
    drop(parent);
    assert_eq!(cache.stats().idle_bytes, 0, "what was common is not idle");
    let mut other = cache.open(4 * T).unwrap();
    write(&machine, &cache, &other, 0..4 * T, 2);
    read(&machine, &cache, &child, 0..4 * T, 1);
    // Alone with its memory, a sequence leaves it to the next.
    drop(child);
    assert_eq!(cache.stats().idle_bytes, 4 * G);
    drop(cache.open(T).unwrap());
    // A fork needs addresses with nothing behind them: one that is kept is emptied for it.
    let one = cache.open(T).unwrap();
    drop((cache.open(2 * T).unwrap(), one));
    assert!(cache.stats().idle_bytes > 0);
    let forks: Vec<_> = (0..2).map(|_| other.fork().unwrap()).collect();
    let error = other.fork().unwrap_err();
    assert!(matches!(error, KvError::TooManySequences { max_sequences: 3 }), "{error}");
    check(&cache);
    drop((forks, other));
    check(&cache);
    drop(cache);
    machine.end();
}

#[test]
fn a_fork_of_nothing_and_of_too_much() {
    let machine = one(64);
    let cache = machine.cache();
    let mut parent = cache.open_ahead(4 * T).unwrap();
    let mut empty = parent.fork().unwrap();
    assert_eq!((empty.tokens(), empty.committed_tokens()), (0, 0));
    empty.append(3).unwrap();
    let error = parent.fork_at(1).unwrap_err();
    assert!(matches!(error, KvError::BeyondEnd { tokens: 1, has_tokens: 0 }), "{error}");
    assert_eq!(cache.stats().sequences, 2);
    check(&cache);
    drop((parent, empty, cache));
    machine.end();
}

#[test]
fn a_chunk_of_its_own_cannot_be_had_under_a_guard_of_the_thread() {
    let machine = one(64);
    let cache = machine.cache();
    let mut parent = cache.open(0).unwrap();
    append(&machine, &cache, &mut parent, T + 1, 1);
    let mut child = parent.fork().unwrap();
    let using = cache.use_now().unwrap();
    let error = child.append(1).unwrap_err();
    assert!(matches!(error, KvError::Pool(Error::Elastic(ElasticError::InUse { .. }))), "{error}");
    assert_eq!(child.tokens(), T + 1);
    check(&cache);
    drop(using);
    append(&machine, &cache, &mut child, 1, 2);
    read(&machine, &cache, &child, 0..T + 1, 1);
    drop((parent, child, cache));
    machine.end();
}

#[test]
fn forks_come_to_addresses_that_a_step_still_uses() {
    let machine = one(4096);
    let cache = machine.builder().max_sequences(3).build().unwrap();
    let mut parent = cache.open(0).unwrap();
    append(&machine, &cache, &mut parent, 2 * T, 1);
    let (child, other) = (parent.fork().unwrap(), cache.open(T).unwrap());
    {
        let _using = cache.use_now().unwrap();
        machine.sim.busy(common::HOME, machine.stream.handle(), 100).unwrap();
    }
    let address = child.address();
    drop((child, other));
    // Both free slots are still mapped for the step; the fork waits for it.
    let again = parent.fork().unwrap();
    assert_eq!(again.address(), address, "free for longest");
    read(&machine, &cache, &again, 0..2 * T, 1);
    check(&cache);
    // A sequence that comes where shared chunks are leaving has none of them.
    {
        let _using = cache.use_now().unwrap();
        machine.sim.busy(common::HOME, machine.stream.handle(), 100).unwrap();
    }
    let held = common::hold(&machine, &machine.stream);
    drop(again);
    let mut two: Vec<_> = (0..2).map(|_| cache.open(0).unwrap()).collect();
    for sequence in &mut two {
        let appended = sequence.append(2 * T);
        if appended.is_ok() {
            write(&machine, &cache, sequence, 0..2 * T, 9);
        }
        check(&cache);
    }
    read(&machine, &cache, &parent, 0..2 * T, 1);
    drop((held, two, parent, cache));
    machine.end();
}

#[test]
fn what_is_common_survives_moves_and_sleep() {
    let machine = machine(1, |sim| sim, |pool| pool.host_memory(0, 1 << 20, 0));
    let cache = machine.builder().tag("model").build().unwrap();
    let mut parent = cache.open(0).unwrap();
    append(&machine, &cache, &mut parent, 2 * T + 2, 1);
    let mut child = parent.fork().unwrap();
    let contents = vmm_pool::Contents::Kept { node: 0 };
    machine.pool.sleep("model", contents, Duration::ZERO).unwrap();
    machine.pool.wake("model").unwrap();
    check(&cache);
    assert_eq!(cache.stats().shared_bytes, 0, "each has it for itself now");
    append(&machine, &cache, &mut parent, T, 2);
    append(&machine, &cache, &mut child, T, 3);
    for (sequence, seed) in [(&parent, 2), (&child, 3)] {
        read(&machine, &cache, sequence, 0..2 * T + 2, 1);
        read(&machine, &cache, sequence, 2 * T + 2..3 * T + 2, seed);
    }
    check(&cache);
    drop((parent, child));
    check(&cache);
    drop(cache);
    machine.end();
}

#[test]
fn forks_grow_end_and_are_evicted_in_many_threads() {
    let machine = one(160);
    for background in [false, true] {
        let builder = machine.builder().keep_idle_bytes(20 * G).ahead_tokens(T);
        let cache = builder.background(background).build().unwrap();
        let other = machine.builder().keep_idle_bytes(20 * G).build().unwrap();
        let victims = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
        let list = victims.clone();
        let hook = cache.on_shortage(move |_| list.lock().is_ok_and(|mut it| it.pop().is_some()));
        let served = std::sync::atomic::AtomicU64::new(0);
        std::thread::scope(|scope| {
            for thread in 0..4u64 {
                let (machine, cache, other, served) = (&machine, &cache, &other, &served);
                let victims = &victims;
                scope.spawn(move || {
                    let mut rng = common::rng::Rng::new(thread);
                    for round in 0..40 {
                        let seed = thread * 1000 + round * 10;
                        let made = turn(machine, cache, &mut rng, seed);
                        match made {
                            Ok(sequences) if rng.chance(300) => {
                                victims.lock().unwrap().extend(sequences);
                            }
                            Ok(_) => {
                                served.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                            }
                            Err(error) => assert!(is_allowed(&error), "{error}"),
                        }
                        // Another tenant presses.
                        drop(other.open(rng.below(200)));
                        let stats = cache.stats();
                        assert!(stats.adds_up(), "{stats:?}");
                    }
                });
            }
        });
        assert!(served.into_inner() > 40, "most turns succeed");
        drop(hook);
        victims.lock().unwrap().clear();
        for cache in [&cache, &other] {
            cache.settle().unwrap();
            check(cache);
            assert_eq!((cache.stats().sequences, cache.stats().shared_bytes), (0, 0));
        }
        drop((cache, other));
    }
    machine.end();
}

fn is_allowed(error: &KvError) -> bool {
    error.is_shortage()
        || matches!(error, KvError::Pool(Error::Elastic(ElasticError::StillUsed { .. })))
}

/// A sequence and a fork of it, which go their own ways.
fn turn(
    machine: &common::Machine,
    cache: &vmm_kv::ContiguousCache,
    rng: &mut common::rng::Rng,
    seed: u64,
) -> Result<Vec<vmm_kv::Sequence>, KvError> {
    let mut parent = cache.open_ahead(rng.below(60))?;
    let common = rng.below(60);
    parent.append(common)?;
    write(machine, cache, &parent, 0..common, seed);
    let mut child = parent.fork()?;
    for (sequence, seed) in [(&mut parent, seed + 1), (&mut child, seed + 2)] {
        let more = rng.below(30);
        sequence.append(more)?;
        write(machine, cache, sequence, common..common + more, seed);
    }
    for (sequence, seed) in [(&parent, seed + 1), (&child, seed + 2)] {
        read(machine, cache, sequence, 0..common, seed / 10 * 10);
        read(machine, cache, sequence, common..sequence.tokens(), seed);
    }
    let kept = rng.below(common + 1);
    parent.truncate(kept);
    parent.append(3)?;
    write(machine, cache, &parent, kept..kept + 3, seed + 3);
    read(machine, cache, &child, 0..common, seed);
    Ok(vec![parent, child])
}
