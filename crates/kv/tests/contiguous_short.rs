//! When memory is short: idle memory goes, hooks evict, sequences are parked, neighbours lend.
#![allow(clippy::unwrap_used, reason = "a failure ends the story")]

mod common;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use common::{G, HOME, NEIGHBOUR, ORDERS, T, append, check, machine, one, read, write};
use vmm_kv::{ContiguousCache, KvError, KvShortage, Lending, Sequence};
use vmm_pool::{ChunkSize, Place};

const HOST: Place = Place::HostNuma(0);

#[test]
fn a_shortage_is_told_after_idle_memory_and_hooks_and_nothing_is_lost() {
    let machine = one(20);
    let cache = machine.builder().keep_idle_bytes(100 * G).build().unwrap();
    let mut first = cache.open(0).unwrap();
    append(&machine, &cache, &mut first, 10 * T, 1);
    drop(cache.open(8 * T).unwrap());
    assert_eq!(cache.room().here_tokens, 10 * T);
    append(&machine, &cache, &mut first, 9 * T, 2);
    assert_eq!(cache.stats().idle_bytes, 0, "what idled went for it");
    assert_eq!((cache.room().here_tokens, cache.room().sequences), (T, 63));
    let before = cache.stats();
    let error = first.append(2 * T + 1).unwrap_err();
    let KvError::NoMemory { tokens, bytes, cause } = &error else { panic!("{error}") };
    assert_eq!((*tokens, *bytes), (2 * T + 1, 3 * G));
    assert!(error.is_shortage() && cause.is_out_of_memory(), "{cause}");
    assert!(cache.open(2 * T).unwrap_err().is_shortage());
    assert_eq!(cache.stats(), before);
    read(&machine, &cache, &first, 0..10 * T, 1);
    read(&machine, &cache, &first, 10 * T..19 * T, 2);
    append(&machine, &cache, &mut first, T, 3);
    check(&cache);
    drop((first, cache));
    machine.end();
}

#[test]
fn hooks_evict_in_rounds_until_there_is_room() {
    let machine = one(16);
    let cache = machine.cache();
    let others: Vec<_> = (0..5).map(|_| cache.open(2 * T).unwrap()).collect();
    let others = Arc::new(Mutex::new(others));
    let (list, asked) = (others.clone(), Arc::new(Mutex::new(Vec::new())));
    let told = asked.clone();
    let hook = cache.on_shortage(move |shortage: &KvShortage| {
        told.lock().unwrap().push(*shortage);
        let evicted = list.lock().unwrap().pop();
        evicted.is_some()
    });
    let mut sequence = cache.open(6 * T).unwrap();
    assert!(asked.lock().unwrap().is_empty(), "there is room");
    sequence.append(5 * T).unwrap();
    let (rounds, left) = (asked.lock().unwrap().len(), others.lock().unwrap().len());
    assert_eq!((rounds, left), (3, 2), "three sequences of two chunks make room for five");
    assert!(asked.lock().unwrap().iter().all(|it| it.is_own && it.device == HOME));
    assert_eq!(cache.stats().evictions, 3);
    let error = sequence.append(6 * T).unwrap_err();
    assert!(error.is_shortage(), "{error}");
    assert_eq!(others.lock().unwrap().len(), 0);
    check(&cache);
    drop(hook);
    let asked_then = asked.lock().unwrap().len();
    assert!(sequence.append(20 * T).unwrap_err().is_shortage());
    assert_eq!(asked.lock().unwrap().len(), asked_then, "it was taken back");
    drop((sequence, cache));
    machine.end();
}

#[test]
fn a_hook_that_frees_nothing_is_asked_a_few_times_only() {
    let machine = one(4);
    let cache = machine.cache();
    let rounds = Arc::new(AtomicU64::new(0));
    let count = rounds.clone();
    let _hook = cache.on_shortage(move |_| {
        count.fetch_add(1, Ordering::SeqCst);
        true
    });
    assert!(cache.open(5 * T).unwrap_err().is_shortage());
    assert_eq!(rounds.load(Ordering::SeqCst), 8);
    check(&cache);
    drop(cache);
    machine.end();
}

#[test]
fn others_in_the_pool_get_idle_memory_and_then_what_is_evicted() {
    let machine =
        machine(1, |sim| sim.device_bytes(100 * G), |pool| pool.chunk(ChunkSize::Fixed(G)));
    let cache = machine.builder().keep_idle_bytes(100 * G).build().unwrap();
    let other = machine.builder().build().unwrap();
    let sequences = Arc::new(Mutex::new(vec![cache.open(20 * T).unwrap()]));
    drop(cache.open(16 * T).unwrap());
    let list = sequences.clone();
    let hook = cache.on_shortage(move |shortage| {
        assert!(!shortage.is_own);
        list.lock().unwrap().pop().is_some()
    });
    // Another cache: idle memory suffices.
    let mut long: Vec<_> =
        [32 * T, 32 * T, 10 * T].map(|tokens| other.open(tokens).unwrap()).into();
    assert_eq!((cache.stats().idle_bytes, sequences.lock().unwrap().len()), (0, 1));
    // A lane: the sequence goes.
    long.drain(..2);
    let lane = machine.pool.lane(&machine.stream).unwrap();
    // Beyond the length of slabs, so that it takes what it asks for.
    let buffer = lane.alloc(80 * G).unwrap();
    assert!(sequences.lock().unwrap().is_empty());
    assert_eq!((cache.stats().committed_bytes, cache.stats().evictions), (0, 1));
    for cache in [&cache, &other] {
        check(cache);
    }
    drop((buffer, lane, long, hook, cache, other));
    machine.end();
}

#[test]
fn growth_ahead_presses_nobody() {
    let machine = one(16);
    let other = machine.cache();
    let cache = machine.builder().ahead_tokens(8 * T).keep_idle_bytes(100 * G).build().unwrap();
    let asked = Arc::new(AtomicU64::new(0));
    let count = asked.clone();
    let _hook = cache.on_shortage(move |_| {
        count.fetch_add(1, Ordering::SeqCst);
        false
    });
    let held = other.open(4 * T).unwrap();
    let mut sequence = cache.open(T).unwrap();
    for _ in 0..11 * T {
        sequence.append(1).unwrap();
    }
    assert_eq!(asked.load(Ordering::SeqCst), 0, "what is ahead is worth no eviction");
    assert!(sequence.append(1).unwrap_err().is_shortage());
    assert_eq!(asked.load(Ordering::SeqCst), 1);
    check(&cache);
    drop((held, other, sequence, cache));
    machine.end();
}

/// A home of 16 chunks, a neighbour that lends 8, and a node of the host.
fn three_places() -> common::Machine {
    machine(
        2,
        |sim| sim.device_bytes_of(0, 16 * G).device_bytes_of(1, 64 * G),
        |pool| pool.lend(NEIGHBOUR, 8 * G).host_memory(0, 32 * G, 0),
    )
}

#[test]
fn sequences_are_parked_and_come_back_under_pressure() {
    for order in ORDERS {
        let machine = three_places();
        let cache: ContiguousCache = machine.builder().order(order).build().unwrap();
        let mut one = cache.open(0).unwrap();
        append(&machine, &cache, &mut one, 8 * T, 1);
        let mut other = cache.open(8 * T).unwrap();
        write(&machine, &cache, &other, 0..8 * T, 2);
        let (address, bytes) = (one.address(), 8 * G);
        assert!(other.append(4 * T + 1).unwrap_err().is_shortage());
        assert_eq!(one.park(HOST).unwrap(), bytes);
        assert!(one.is_parked());
        assert_eq!(one.places(), [(HOST, bytes)]);
        let stats = cache.stats();
        assert_eq!((stats.parked_sequences, stats.parked_bytes), (1, bytes));
        assert!(matches!(one.append(1), Err(KvError::Parked)));
        assert!(matches!(one.fork(), Err(KvError::Parked)));
        assert!(matches!(one.migrate(HOME), Err(KvError::Parked)));
        append(&machine, &cache, &mut other, 8 * T, 3);
        check(&cache);
        assert!(one.resume().unwrap_err().is_shortage());
        assert!(one.is_parked());
        read(&machine, &cache, &one, 0..8 * T, 1);
        one.truncate(7 * T);
        other.truncate(0);
        assert!(one.resume().unwrap() <= bytes);
        assert_eq!(one.resume().unwrap(), 0);
        assert_eq!((one.address(), one.places().len()), (address, 1));
        append(&machine, &cache, &mut one, 1, 4);
        read(&machine, &cache, &one, 0..7 * T, 1);
        check(&cache);
        drop((one, other));
        assert_eq!(cache.stats().committed_bytes, 0);
        drop(cache);
        machine.end();
    }
}

#[test]
fn a_hook_may_park_whom_it_chooses() {
    let machine = three_places();
    let cache = machine.cache();
    let mut victim = cache.open(0).unwrap();
    append(&machine, &cache, &mut victim, 10 * T, 1);
    let victim = Arc::new(Mutex::new(victim));
    let parked = victim.clone();
    let hook = cache.on_shortage(move |_| {
        let mut victim = parked.lock().unwrap();
        !victim.is_parked() && victim.park(HOST).is_ok()
    });
    let mut sequence = cache.open(12 * T).unwrap();
    assert!(victim.lock().unwrap().is_parked());
    write(&machine, &cache, &sequence, 0..12 * T, 2);
    assert!(sequence.append(5 * T).unwrap_err().is_shortage());
    read(&machine, &cache, &victim.lock().unwrap(), 0..10 * T, 1);
    check(&cache);
    drop((hook, victim, sequence, cache));
    machine.end();
}

#[test]
fn what_is_shared_is_everyones_own_once_it_is_parked() {
    let machine = three_places();
    let cache = machine.cache();
    let mut parent = cache.open(0).unwrap();
    append(&machine, &cache, &mut parent, 2 * T + 3, 1);
    let mut child = parent.fork().unwrap();
    parent.park(HOST).unwrap();
    check(&cache);
    assert_eq!(cache.stats().shared_bytes, 0);
    append(&machine, &cache, &mut child, T, 2);
    parent.resume().unwrap();
    append(&machine, &cache, &mut parent, T, 3);
    for (sequence, seed) in [(&parent, 3), (&child, 2)] {
        read(&machine, &cache, sequence, 0..2 * T + 3, 1);
        read(&machine, &cache, sequence, 2 * T + 3..3 * T + 3, seed);
    }
    // Moved to a neighbour it is used there, and forked; whoever comes next finds memory at home.
    child.migrate(NEIGHBOUR).unwrap();
    let twin = child.fork().unwrap();
    assert_eq!(twin.places(), [(NEIGHBOUR.into(), 4 * G)]);
    check(&cache);
    drop((parent, child, twin));
    assert_eq!(cache.stats().idle_bytes, 0);
    check(&cache);
    drop(cache);
    machine.end();
}

#[test]
fn neighbours_lend_to_who_names_them() {
    for (lending, tokens, host_tokens) in [
        (Lending::Nobody, 16 * T, 0),
        (Lending::Any, 23 * T, 0),
        (Lending::Places(vec![NEIGHBOUR.into(), HOST]), 23 * T, 9 * T),
    ] {
        let machine = three_places();
        let builder = machine.builder().lenders(lending.clone()).keep_idle_bytes(100 * G);
        let cache = builder.build().unwrap();
        let room = cache.room();
        assert_eq!((room.here_tokens, room.host_tokens), (16 * T, 32 * T));
        let is_lent = lending != Lending::Nobody;
        assert_eq!(room.borrowed_tokens, if is_lent { 8 * T } else { 0 });
        let mut one = cache.open(0).unwrap();
        append(&machine, &cache, &mut one, tokens, 1);
        let other = cache.open(host_tokens).unwrap();
        write(&machine, &cache, &other, 0..host_tokens, 2);
        read(&machine, &cache, &one, 0..tokens, 1);
        read(&machine, &cache, &other, 0..host_tokens, 2);
        let borrowed: u64 = cache.buffer().stats().borrowed.iter().map(|it| it.1).sum();
        assert_eq!(borrowed, (tokens + host_tokens) / T * G - 16 * G);
        if lending == Lending::Nobody {
            assert!(one.append(1).unwrap_err().is_shortage());
        }
        check(&cache);
        drop((one, other));
        check(&cache);
        let idle = cache.stats().idle_bytes;
        assert_eq!(idle, if is_lent { 0 } else { 16 * G }, "what is borrowed goes back");
        drop(cache);
        machine.end();
    }
}

#[test]
fn as_many_sequences_fit_as_the_figures_say() {
    let machine = machine(1, |sim| sim.granularity(2 << 20, 2 << 20), |pool| pool);
    let shape = vmm_kv::KvShape::new(32, 8, 128, vmm_kv::Dtype::Bf16).unwrap();
    let builder = ContiguousCache::builder(&machine.pool, &machine.stream, shape);
    let builder = builder.max_tokens(131_072).max_sequences(256).chunk_bytes(2 << 20);
    let cache = builder.background(false).build().unwrap();
    let capacity = cache.capacity(8192);
    // 16 GiB of addresses each; 128 KiB a token, and so 16 tokens a chunk.
    assert_eq!((capacity.by_addresses, capacity.by_mappings), (8192, 520_000 / 512));
    assert_eq!(capacity.sequences(), 1015);
    assert_eq!(cache.room().mappings, 520_000);
    let other = machine.builder().build().unwrap();
    let _sequence: Sequence = other.open(8 * T).unwrap();
    assert_eq!(cache.room().mappings, 520_000 - 1);
    assert_eq!(cache.capacity(8192).by_addresses, 8191, "others reserve addresses too");
    drop((_sequence, other, cache));
    machine.end();
}
