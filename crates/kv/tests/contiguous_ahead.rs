//! Contiguous caches: sequences whose memory comes ahead of their tokens.
#![allow(clippy::unwrap_used, reason = "a failure ends the story")]

mod common;

use std::sync::{Arc, Mutex};

use common::waiting::wait_for;
use common::{G, ORDERS, T, append, check, one, read, write};
use vmm_pool::Cause;

#[test]
fn memory_comes_without_a_call_of_who_opens() {
    for order in ORDERS {
        let machine = one(4096);
        let cache = machine.builder().order(order).background(true).build().unwrap();
        let threads = Arc::new(Mutex::new(Vec::new()));
        let list = threads.clone();
        let _hook = cache.buffer().on_backing_change(move |change| {
            let name = std::thread::current().name().map(str::to_owned);
            list.lock().unwrap().push((change.cause, name));
        });
        let mut sequence = cache.open_ahead(100).unwrap();
        assert_eq!(sequence.tokens(), 0);
        wait_for(|| sequence.is_ready(100));
        assert!(sequence.committed_tokens() >= 100 && !sequence.is_ready(257));
        // What waits for its tokens is not idle, and is nobody's to take.
        cache.release_idle(0).unwrap();
        sequence.truncate(0);
        cache.settle().unwrap();
        assert!(sequence.is_ready(100));
        let stats = cache.stats();
        assert_eq!((stats.idle_bytes, stats.live_bytes), (0, 0));
        assert_eq!(stats.slack_bytes, stats.committed_bytes);
        check(&cache);
        let calls = machine.calls(|| append(&machine, &cache, &mut sequence, 100, 1));
        assert_eq!(calls.total(), 0, "{calls:?}");
        read(&machine, &cache, &sequence, 0..100, 1);
        let stats = cache.stats();
        assert_eq!((stats.foreground_growths, stats.background_growths), (0, 1));
        let threads = std::mem::take(&mut *threads.lock().unwrap());
        let is_growers = |(cause, name): &(Cause, Option<String>)| {
            *cause == Cause::Commit && name.as_deref() == Some("vmm-kv-grow")
        };
        assert!(!threads.is_empty() && threads.iter().all(is_growers), "{threads:?}");
        drop((sequence, cache));
        machine.end();
    }
}

#[test]
fn memory_that_idles_is_ready_at_once() {
    let machine = one(64);
    let cache = machine.builder().keep_idle_bytes(10 * G).background(true).build().unwrap();
    let one = cache.open(6 * T).unwrap();
    let address = one.address();
    drop(one);
    let calls = machine.calls(|| {
        let sequence = cache.open_ahead(5 * T).unwrap();
        assert_eq!(sequence.address(), address);
        assert!(sequence.is_ready(5 * T));
    });
    assert_eq!(calls.total(), 0, "{calls:?}");
    check(&cache);
    drop(cache);
    machine.end();
}

#[test]
fn idle_memory_of_other_slots_goes_for_it_and_hooks_are_not_asked() {
    let machine = one(24);
    let cache = machine.builder().keep_idle_bytes(100 * G).build().unwrap();
    let _hook = cache.on_shortage(|_| panic!("nobody is pressed"));
    let (one, other) = (cache.open(10 * T).unwrap(), cache.open(12 * T).unwrap());
    drop((one, other));
    assert_eq!(cache.stats().idle_bytes, 22 * G);
    let sequence = cache.open_ahead(20 * T).unwrap();
    assert!(sequence.is_ready(20 * T), "{:?}", cache.stats());
    assert!(cache.stats().committed_bytes <= 24 * G);
    check(&cache);
    drop((sequence, _hook, cache));
    machine.end();
}

#[test]
fn short_memory_is_nobodys_trouble_until_the_append() {
    for background in [false, true] {
        let machine = one(16);
        let cache = machine.builder().background(background).build().unwrap();
        let victims = Arc::new(Mutex::new(vec![cache.open(10 * T).unwrap()]));
        let list = victims.clone();
        let hook = cache.on_shortage(move |_| list.lock().unwrap().pop().is_some());
        let mut sequence = cache.open_ahead(8 * T).unwrap();
        cache.settle().unwrap();
        assert!(!sequence.is_ready(8 * T) && victims.lock().unwrap().len() == 1);
        assert_eq!(cache.stats().committed_bytes, 10 * G, "all or nothing");
        check(&cache);
        append(&machine, &cache, &mut sequence, 8 * T, 1);
        assert!(victims.lock().unwrap().is_empty(), "the append evicts");
        assert_eq!(cache.stats().evictions, 1);
        read(&machine, &cache, &sequence, 0..8 * T, 1);
        // One that is asked for when there is nothing finds room later by its append.
        let mut other = cache.open_ahead(9 * T).unwrap();
        cache.settle().unwrap();
        assert!(!other.is_ready(9 * T));
        assert!(other.append(9 * T).unwrap_err().is_shortage());
        drop(sequence);
        assert_eq!(other.append(9 * T).unwrap(), 0);
        check(&cache);
        drop((other, hook, cache));
        machine.end();
    }
}

#[test]
fn who_is_dropped_while_it_waits_gives_it_back() {
    for background in [false, true] {
        let machine = one(4096);
        let cache = machine.builder().background(background).build().unwrap();
        for round in 0..50 {
            let sequence = cache.open_ahead(20 * T).unwrap();
            if round % 3 == 0 {
                wait_for(|| sequence.is_ready(20 * T));
            }
            drop(sequence);
            // Its slot's next is served whatever became of the last.
            let mut next = cache.open_ahead(5 * T).unwrap();
            append(&machine, &cache, &mut next, T, 1);
            read(&machine, &cache, &next, 0..T, 1);
        }
        cache.settle().unwrap();
        check(&cache);
        assert_eq!(cache.stats().committed_bytes, 0);
        drop(cache);
        machine.end();
    }
}

#[test]
fn what_cannot_be_opened_ahead_is_refused() {
    let machine = one(64);
    let cache = machine.builder().max_sequences(1).build().unwrap();
    let long = cache.open_ahead(257).unwrap_err();
    assert!(matches!(long, vmm_kv::KvError::TooLong { tokens: 257, max_tokens: 256 }), "{long}");
    let _one = cache.open_ahead(1).unwrap();
    assert!(cache.open_ahead(1).unwrap_err().is_shortage());
    drop((_one, cache));
    machine.end();
}

#[test]
fn a_short_sequence_does_not_keep_what_a_long_one_left() {
    for ahead in [false, true] {
        let machine = one(4096);
        let cache = machine.builder().keep_idle_bytes(30 * G).build().unwrap();
        drop(cache.open(30 * T).unwrap());
        let sequence = match ahead {
            true => cache.open_ahead(2 * T).unwrap(),
            false => cache.open(2 * T).unwrap(),
        };
        assert!(sequence.is_ready(T));
        assert_eq!(cache.stats().committed_bytes, 10 * G, "its two chunks, and eight");
        write(&machine, &cache, &sequence, 0..sequence.tokens(), 1);
        check(&cache);
        drop(sequence);
        drop(cache);
        // Where all is to be kept, all is.
        let cache = machine.builder().keep_idle_bytes(u64::MAX).build().unwrap();
        drop(cache.open(30 * T).unwrap());
        let sequence = cache.open(2 * T).unwrap();
        assert_eq!(cache.stats().committed_bytes, 30 * G);
        drop((sequence, cache));
        machine.end();
    }
}
