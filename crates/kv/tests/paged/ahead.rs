//! Sequences whose blocks come ahead of their tokens.

use std::sync::Arc;

use parking_lot::Mutex;
use vmm_kv::{BlockTables, KvError};

use crate::harness::*;
use crate::waiting::wait_for;

#[test]
fn blocks_come_without_a_call_of_who_opens_and_are_kept_for_it() {
    let machine = Machine::small(64);
    let cache = machine.builder().background(true).build().unwrap();
    let threads = Arc::new(Mutex::new(Vec::new()));
    let list = threads.clone();
    let _hook = cache.buffer().on_backing_change(move |_| {
        list.lock().push(std::thread::current().name().map(str::to_owned));
    });
    let mut sequence = cache.open_ahead(30).unwrap();
    assert_eq!((sequence.tokens(), sequence.blocks().len()), (0, 0));
    wait_for(|| sequence.is_ready(30));
    assert_eq!(sequence.committed_tokens(), 32);
    assert!(threads.lock().iter().all(|name| name.as_deref() == Some("vmm-kv-grow")));
    // Nobody else gets them, and they do not go.
    let other = cache.open(16).unwrap();
    cache.release_idle(0).unwrap();
    sequence.truncate(0);
    assert!(sequence.is_ready(32));
    let stats = cache.stats();
    assert_eq!(stats.slack_bytes, 8 * cache.layout().block_bytes());
    cache.verify().unwrap();
    let growths = cache.stats().foreground_growths;
    let calls = machine.calls();
    assert_eq!(sequence.append(30).unwrap(), 0);
    assert_eq!((machine.calls(), cache.stats().foreground_growths), (calls, growths));
    let blocks = sequence.blocks();
    assert!(blocks.len() == 8 && other.blocks().iter().all(|block| !blocks.contains(block)));
    cache.verify().unwrap();
    drop((sequence, other, _hook, cache));
    machine.end();
}

#[test]
fn free_blocks_are_kept_at_once_and_shown_once_they_have_tokens() {
    let machine = Machine::small(64);
    let cache = machine.builder().keep_idle_bytes(u64::MAX).build().unwrap();
    drop(cache.open(64).unwrap());
    let calls = machine.calls();
    let mut sequence = cache.open_ahead(64).unwrap();
    assert!(sequence.is_ready(64) && machine.calls() == calls);
    let mut tables = BlockTables::new(1, 16);
    for blocks in 1..=16 {
        sequence.append(4).unwrap();
        tables.update(&[&sequence]).unwrap();
        assert_eq!(tables.blocks_in_rows(), [blocks], "what has no token is not shown");
        assert_eq!(sequence.blocks().len(), blocks);
        cache.verify().unwrap();
    }
    assert_eq!(machine.calls(), calls);
    // A fork has what has tokens; packing leaves what is ahead alone.
    let mut ahead = cache.open_ahead(40).unwrap();
    ahead.append(6).unwrap();
    let child = ahead.fork().unwrap();
    assert_eq!((child.blocks(), child.committed_tokens()), (ahead.blocks(), 8));
    assert!(!ahead.is_ready(1), "the last block is the fork's too");
    drop(sequence);
    cache.pack(u64::MAX).unwrap();
    ahead.append(34).unwrap();
    assert_eq!(ahead.committed_tokens(), 40);
    cache.verify().unwrap();
    drop((ahead, child, cache));
    machine.end();
}

#[test]
fn short_memory_is_nobodys_trouble_until_the_append() {
    for background in [false, true] {
        let machine = Machine::small(4);
        let cache = machine.builder().background(background).build().unwrap();
        let victims = Arc::new(Mutex::new(vec![cache.open(48).unwrap()]));
        let list = victims.clone();
        let hook = cache.on_shortage(move |_| list.lock().pop().is_some());
        let mut sequence = cache.open_ahead(40).unwrap();
        // Whoever changes the memory is waited for.
        cache.verify().unwrap();
        assert!(!sequence.is_ready(40) && victims.lock().len() == 1);
        assert_eq!(cache.stats().idle_bytes, 0, "all or nothing");
        assert_eq!(sequence.append(40).unwrap(), 0);
        assert!(victims.lock().is_empty(), "the append evicts");
        cache.verify().unwrap();
        let mut other = cache.open_ahead(40).unwrap();
        assert!(matches!(other.append(40), Err(KvError::NoMemory { .. })));
        drop(sequence);
        assert_eq!(other.append(40).unwrap(), 0);
        cache.verify().unwrap();
        drop((other, hook, cache));
        machine.end();
    }
}

#[test]
fn who_is_dropped_while_it_waits_gives_them_back() {
    for background in [false, true] {
        let machine = Machine::small(64);
        let cache = machine.builder().background(background).build().unwrap();
        for round in 0..50 {
            let sequence = cache.open_ahead(60).unwrap();
            if round % 3 == 0 {
                wait_for(|| sequence.is_ready(60));
            }
            drop(sequence);
            let mut next = cache.open_ahead(20).unwrap();
            assert_eq!(next.append(5).unwrap(), 0);
            cache.verify().unwrap();
        }
        cache.release_idle(0).unwrap();
        assert_eq!(cache.stats().committed_bytes, 0);
        cache.verify().unwrap();
        drop(cache);
        machine.end();
    }
}

#[test]
fn a_parked_sequence_keeps_nothing_ahead() {
    let machine = Machine::new(|sim| sim, |pool| pool.host_memory(0, 64 * G, 0));
    let builder = machine.builder().host_blocks(vmm_pool::Place::HostNuma(0), 16);
    let cache = builder.build().unwrap();
    let mut sequence = cache.open_ahead(40).unwrap();
    sequence.append(6).unwrap();
    sequence.park().unwrap();
    assert!(!sequence.is_ready(1) && sequence.committed_tokens() == 8);
    cache.verify().unwrap();
    sequence.resume().unwrap();
    sequence.append(34).unwrap();
    cache.verify().unwrap();
    assert!(matches!(cache.open_ahead(4 * 256 + 1), Err(KvError::TooLong { .. })));
    drop((sequence, cache));
    machine.end();
}
