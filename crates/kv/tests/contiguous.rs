//! Contiguous caches: sequences come, grow, are cut and go, and memory follows them.
#![allow(clippy::unwrap_used, reason = "a failure ends the story")]

mod common;

use std::sync::{Arc, Mutex};

use common::waiting::wait_for;
use common::{G, HOME, ORDERS, T, append, check, machine, one, read, shape, write};
use vmm_kv::{ContiguousCache, KvError, Order, Part, Sequence};
use vmm_pool::{Cause, ElasticError, Error};

#[test]
fn sequences_have_addresses_of_their_own_for_their_whole_life() {
    for order in ORDERS {
        let machine = one(4096);
        let cache = machine.builder().order(order).build().unwrap();
        let mut sequences: Vec<Sequence> = (0..8).map(|_| cache.open(0).unwrap()).collect();
        let addresses: Vec<u64> = sequences.iter().map(Sequence::address).collect();
        let span = cache.layout().span_bytes();
        for (index, address) in addresses.iter().enumerate() {
            assert_eq!((address - cache.address()) % span, 0);
            assert!(addresses[..index].iter().all(|other| other.abs_diff(*address) >= span));
        }
        for round in 0..100 {
            for (seed, sequence) in (0..).zip(&mut sequences) {
                append(&machine, &cache, sequence, 1 + seed % 3 * (round % 2), seed);
            }
        }
        check(&cache);
        for (seed, sequence) in (0..).zip(&sequences) {
            assert_eq!(sequence.address(), addresses[seed as usize]);
            assert_eq!(sequence.tokens(), 100 + 50 * (seed % 3));
            assert!(sequence.committed_tokens() >= sequence.tokens());
            read(&machine, &cache, sequence, 0..sequence.tokens(), seed);
            let value = sequence.layer_address(1, Part::Value);
            assert_eq!(value - sequence.address(), cache.layout().layer_offset(1, Part::Value));
        }
        let tokens: u64 = sequences.iter().map(Sequence::tokens).sum();
        let stats = cache.stats();
        assert_eq!((stats.sequences, stats.tokens, stats.parked_sequences), (8, tokens, 0));
        assert_eq!(stats.live_bytes, tokens * shape().token_bytes());
        drop(sequences);
        check(&cache);
        assert_eq!(cache.stats().committed_bytes, 0);
        drop(cache);
        machine.end();
    }
}

#[test]
fn a_step_of_256_sequences_makes_no_driver_call() {
    let machine = one(4096);
    let cache = machine.builder().max_sequences(256).ahead_tokens(2 * T).build().unwrap();
    let mut sequences: Vec<Sequence> = (0..256).map(|_| cache.open(1).unwrap()).collect();
    // The first finds out what there is.
    cache.append_all(&mut sequences, 1).unwrap();
    let calls = machine.calls(|| cache.append_all(&mut sequences, 1).unwrap());
    assert_eq!(calls.total(), 0, "{calls:?}");
    let before = cache.stats();
    for _ in 0..20 {
        cache.append_all(&mut sequences, 1).unwrap();
    }
    let after = cache.stats();
    assert_eq!(after.foreground_growths, before.foreground_growths, "memory was there ahead");
    let grown = after.background_growths - before.background_growths;
    assert!((1..=3).contains(&grown), "all together, a chunk at a time: {grown}");
    assert!(sequences.iter().all(|it| it.tokens() == 23));
    check(&cache);
    drop((sequences, cache));
    machine.end();
}

#[test]
fn the_thread_grows_ahead_and_takes_memory_away() {
    let machine = one(4096);
    let cache = machine.builder().ahead_tokens(4 * T).background(true).build().unwrap();
    // Who makes the driver's calls.
    let threads = Arc::new(Mutex::new(Vec::new()));
    let list = threads.clone();
    let _hook = cache.buffer().on_backing_change(move |change| {
        let name = std::thread::current().name().map(str::to_owned);
        list.lock().unwrap().push((change.cause, name));
    });
    let mut sequence = cache.open(1).unwrap();
    threads.lock().unwrap().clear();
    for _ in 0..7 {
        sequence.append(T / 2).unwrap();
        wait_for(|| sequence.committed_tokens() >= sequence.tokens() + 2 * T);
    }
    sequence.truncate(1);
    wait_for(|| cache.stats().committed_bytes <= 10 * G);
    drop(sequence);
    wait_for(|| cache.stats().committed_bytes == 0);
    let stats = cache.stats();
    assert!(stats.background_growths >= 2 && stats.foreground_growths == 1, "{stats:?}");
    let threads = std::mem::take(&mut *threads.lock().unwrap());
    let is_seen = |cause| threads.iter().any(|(seen, _)| *seen == cause);
    assert!(is_seen(Cause::Commit) && is_seen(Cause::Decommit), "{threads:?}");
    assert!(threads.iter().all(|(_, name)| name.as_deref() == Some("vmm-kv-grow")), "{threads:?}");
    check(&cache);
    drop(cache);
    machine.end();
}

#[test]
fn a_sequence_that_ends_leaves_its_memory_to_the_next() {
    let machine = one(4096);
    let cache = machine.builder().keep_idle_bytes(12 * G).build().unwrap();
    let one = cache.open(10 * T).unwrap();
    let other = cache.open(2 * T).unwrap();
    let (first, second) = (one.address(), other.address());
    let calls = machine.calls(|| drop((one, other)));
    assert_eq!(calls.total(), 0, "{calls:?}");
    assert_eq!(cache.stats().idle_bytes, 12 * G);
    let calls = machine.calls(|| {
        let short = cache.open(T).unwrap();
        let long = cache.open(5 * T).unwrap();
        assert_eq!((short.address(), long.address()), (second, first), "the shortest that fits");
        assert_eq!(cache.stats().idle_bytes, 0);
    });
    assert_eq!(calls.total(), 0, "{calls:?}");
    let longer = cache.open(11 * T).unwrap();
    assert_eq!(longer.address(), first, "the longest is grown");
    let more = cache.open(4 * T).unwrap();
    drop((more, longer));
    check(&cache);
    assert_eq!(cache.stats().idle_bytes, 12 * G, "no more than is to be kept");
    assert_eq!(cache.release_idle(5 * G).unwrap(), 7 * G);
    assert_eq!(cache.release_idle(5 * G).unwrap(), 0);
    check(&cache);
    assert_eq!(cache.stats().committed_bytes, 5 * G);
    drop(cache);
    machine.end();
}

#[test]
fn what_is_cut_off_is_given_back_and_can_come_again() {
    for order in ORDERS {
        let machine = one(4096);
        let cache = machine.builder().order(order).build().unwrap();
        let mut sequence = cache.open(256).unwrap();
        assert_eq!((sequence.tokens(), sequence.committed_tokens()), (256, 256));
        write(&machine, &cache, &sequence, 0..256, 7);
        let whole = cache.stats().committed_bytes;
        assert_eq!(whole, cache.layout().span_bytes());
        sequence.truncate(250);
        assert_eq!(cache.stats().committed_bytes, whole, "a few tokens are no reason");
        sequence.truncate(33);
        sequence.truncate(40);
        assert_eq!(sequence.tokens(), 33);
        let chunks = cache.stats().committed_bytes / G;
        let expected = if order == Order::TokenMajor { 6 } else { 4 * 3 };
        assert_eq!(chunks, expected);
        check(&cache);
        append(&machine, &cache, &mut sequence, 100, 8);
        read(&machine, &cache, &sequence, 0..33, 7);
        read(&machine, &cache, &sequence, 33..133, 8);
        sequence.truncate(0);
        assert_eq!(sequence.append(1).unwrap(), 0);
        check(&cache);
        drop((sequence, cache));
        machine.end();
    }
}

#[test]
fn what_cannot_be_is_refused_and_changes_nothing() {
    let machine = one(64);
    let cache = machine.builder().max_sequences(2).build().unwrap();
    let long = |error| match error {
        KvError::TooLong { tokens, max_tokens } => (tokens, max_tokens),
        other => panic!("{other}"),
    };
    assert_eq!(long(cache.open(257).unwrap_err()), (257, 256));
    let mut one = cache.open(0).unwrap();
    one.append(256).unwrap();
    assert_eq!(long(one.append(1).unwrap_err()), (257, 256));
    assert_eq!(long(one.append(u64::MAX).unwrap_err()), (u64::MAX, 256));
    assert_eq!((one.tokens(), one.append(0).unwrap()), (256, 256));
    let mut other = cache.open(0).unwrap();
    let error = cache.open(0).unwrap_err();
    assert!(matches!(error, KvError::TooManySequences { max_sequences: 2 }), "{error}");
    assert!(error.is_shortage());
    let stranger = machine.cache();
    let (index, error) = stranger.append_all([&mut other], 1).unwrap_err();
    assert!(matches!((index, error), (0, KvError::OtherCache)));
    let (index, error) = cache.append_all([&mut other, &mut one], 1).unwrap_err();
    assert!(matches!((index, error), (1, KvError::TooLong { .. })));
    assert_eq!((other.tokens(), one.tokens()), (1, 256));
    for builder in [
        machine.builder().max_sequences(0),
        machine.builder().chunk_bytes(0),
        machine.builder().chunk_bytes(G + 1),
        machine.builder().max_tokens(0),
        machine.builder().max_tokens(u64::MAX / 512).max_sequences(u32::MAX),
    ] {
        let error = builder.build().unwrap_err();
        let is_known = matches!(
            error,
            KvError::BadSetting { .. }
                | KvError::Layout(_)
                | KvError::Pool(Error::BadSetting { .. } | Error::OutOfAddresses { .. })
        );
        assert!(is_known, "{error}");
    }
    check(&cache);
    drop((one, other, cache, stranger));
    machine.end();
}

#[test]
fn a_guard_of_a_step_keeps_memory_that_sequences_leave() {
    let machine = one(64);
    let cache = machine.cache();
    let sequence = cache.open(8 * T).unwrap();
    let address = sequence.address();
    let held = common::hold(&machine, &machine.stream);
    let using = cache.use_now().unwrap();
    drop(sequence);
    drop(using);
    assert_eq!(cache.stats().committed_bytes, 0);
    assert!(machine.sim.peek(address, 16).is_some(), "the stream is not done");
    // Another sequence that comes there takes it back as it is.
    let again = cache.open(8 * T).unwrap();
    drop(held);
    drop(again);
    drop(cache);
    machine.end();
}

#[test]
fn what_a_quota_refuses_is_a_shortage() {
    let machine = one(4096);
    let builder = machine.builder().quota_bytes(10 * G).keep_idle_bytes(100 * G);
    let cache = builder.build().unwrap();
    let mut one = cache.open(6 * T).unwrap();
    drop(cache.open(4 * T).unwrap());
    // What is idle counts, and goes for it.
    one.append(2 * T).unwrap();
    let error = one.append(3 * T).unwrap_err();
    let KvError::NoMemory { tokens, bytes, cause } = error else { panic!("{error}") };
    assert_eq!((tokens, bytes), (3 * T, 3 * G));
    assert!(matches!(cause, Error::Elastic(ElasticError::OverQuota { .. })), "{cause}");
    assert_eq!(one.tokens(), 8 * T);
    one.append(2 * T).unwrap();
    check(&cache);
    drop((one, cache));
    machine.end();
}

#[test]
fn a_cache_sleeps_and_wakes_by_its_tag_with_sequences_open() {
    for order in ORDERS {
        let machine = machine(1, |sim| sim, |pool| pool.host_memory(0, 1 << 20, 0));
        let builder = machine.builder().tag("model").order(order).keep_idle_bytes(8 * G);
        let cache: ContiguousCache = builder.build().unwrap();
        let mut sequence = cache.open(0).unwrap();
        append(&machine, &cache, &mut sequence, 100, 3);
        drop(cache.open(T).unwrap());
        let contents = vmm_pool::Contents::Kept { node: 0 };
        machine.pool.sleep("model", contents, std::time::Duration::ZERO).unwrap();
        assert_eq!(machine.stats(0).elastic_bytes, 0);
        let error = sequence.append(100).unwrap_err();
        assert!(
            matches!(error, KvError::Pool(Error::Elastic(ElasticError::Asleep))),
            "memory is needed: {error}"
        );
        assert!(cache.use_now().is_err());
        // What ends meanwhile is taken away after the waking.
        sequence.truncate(40);
        check(&cache);
        machine.pool.wake("model").unwrap();
        read(&machine, &cache, &sequence, 0..40, 3);
        append(&machine, &cache, &mut sequence, 100, 4);
        read(&machine, &cache, &sequence, 0..40, 3);
        check(&cache);
        machine
            .pool
            .sleep("model", vmm_pool::Contents::Dropped, std::time::Duration::ZERO)
            .unwrap();
        machine.pool.wake("model").unwrap();
        write(&machine, &cache, &sequence, 0..140, 5);
        check(&cache);
        drop(sequence);
        check(&cache);
        assert!(cache.stats().idle_bytes <= 8 * G);
        drop(cache);
        machine.end();
    }
}

#[test]
fn sequences_grow_and_end_in_many_threads() {
    let machine = one(4096);
    for background in [false, true] {
        let builder = machine.builder().keep_idle_bytes(20 * G).ahead_tokens(T);
        let cache = builder.background(background).build().unwrap();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (cache, machine) = (&cache, &machine);
                scope.spawn(move || {
                    let mut rng = common::rng::Rng::new(thread);
                    for round in 0..30 {
                        let seed = thread * 1000 + round;
                        let mut sequence = cache.open(rng.below(40)).unwrap();
                        write(machine, cache, &sequence, 0..sequence.tokens(), seed);
                        for _ in 0..rng.below(8) {
                            append(machine, cache, &mut sequence, rng.below(30), seed);
                            if rng.chance(200) {
                                sequence.truncate(rng.below(100));
                            }
                        }
                        read(machine, cache, &sequence, 0..sequence.tokens(), seed);
                        let stats = cache.stats();
                        assert!(stats.adds_up(), "{stats:?}");
                    }
                });
            }
        });
        cache.settle().unwrap();
        check(&cache);
        assert_eq!(cache.stats().sequences, 0);
        assert!(cache.stats().committed_bytes <= 20 * G);
        drop(cache);
    }
    assert_eq!(machine.stats(HOME.0).elastic_bytes, 0);
    machine.end();
}
