//! Memory ahead of need, and what happens when there is none.

use std::sync::Arc;

use parking_lot::Mutex;
use vmm_kv::{KvError, Lending, PagedSequence};
use vmm_pool::Place;
use vmm_sys::DeviceId;

use crate::harness::*;
use crate::waiting::wait_for;

#[test]
fn the_thread_grows_ahead_and_gives_back_and_callers_make_no_driver_call() {
    let machine = Machine::new(|sim| sim, |pool| pool);
    let builder = machine.builder().ahead_blocks(32).keep_idle_bytes(2 * G).background(true);
    let cache = builder.build().unwrap();
    let mut one = written(&cache, 1, 100);
    wait_for(|| cache.stats().idle_bytes >= 32 * G / 4);
    let grown = cache.stats();
    assert_eq!((grown.background_growths, grown.foreground_growths), (1, 1));
    for round in 0..200 {
        extend(&cache, &mut one, 1, 200 + round);
        if round % 32 == 0 {
            wait_for(|| cache.stats().idle_bytes >= 16 * G / 4);
        }
    }
    assert_eq!(cache.stats().foreground_growths, 1, "memory was there in time");
    assert!(cache.stats().background_growths > 1);
    check(&cache, &one.0, &one.1);
    // What the sequence had goes, but for what is kept ahead.
    drop(one);
    wait_for(|| cache.stats().committed_bytes <= 32 * G / 4);
    cache.verify().unwrap();
    assert_eq!(cache.release_idle(0).unwrap(), 32 * G / 4);
    drop(cache);
    machine.end();
}

#[test]
fn what_is_kept_is_as_much_as_was_said() {
    let machine = Machine::small(64);
    let cache = machine.builder().keep_idle_bytes(3 * G).build().unwrap();
    let one = cache.open(16 * 10).unwrap();
    drop(one);
    assert_eq!(cache.stats().committed_bytes, 3 * G);
    let calls = machine.calls();
    let one = cache.open(16 * 3).unwrap();
    assert_eq!(machine.calls(), calls, "it was there");
    drop(one);
    assert_eq!(cache.release_idle(G).unwrap(), 2 * G);
    assert_eq!(cache.release_idle(0).unwrap(), G);
    drop(cache);
    machine.end();
}

#[test]
fn growth_ahead_that_is_refused_is_no_error_and_is_not_tried_again_and_again() {
    let machine = Machine::small(8);
    let tenant = machine.pool.elastic(DeviceId(0)).chunk_bytes(G).build().unwrap();
    tenant.grow_to(7 * G).unwrap();
    let cache = machine.builder().ahead_blocks(64).build().unwrap();
    let mut one = cache.open(4).unwrap();
    let calls = machine.calls();
    one.append(4).unwrap();
    one.append(4).unwrap();
    assert_eq!(machine.calls(), calls, "nobody looks again");
    assert_eq!(cache.stats().background_growths, 0);
    // Something was freed: there may be room elsewhere too.
    tenant.shrink_to(6 * G).unwrap();
    one.truncate(8);
    one.append(4).unwrap();
    assert_eq!((cache.stats().background_growths, cache.stats().committed_bytes), (1, 2 * G));
    drop((one, cache, tenant));
    machine.end();
}

#[test]
fn hooks_evict_and_if_they_have_nothing_left_it_is_an_error() {
    let machine = Machine::small(4);
    let cache = machine.builder().build().unwrap();
    let victims: Arc<Mutex<Vec<PagedSequence>>> = Arc::default();
    let mut asked = Vec::new();
    for _ in 0..3 {
        victims.lock().push(cache.open(16).unwrap());
    }
    let hook = cache.on_shortage({
        let victims = victims.clone();
        move |shortage| {
            assert!(shortage.is_own);
            assert_eq!((shortage.device, shortage.bytes), (DeviceId(0), 12 * G / 4));
            victims.lock().pop().is_some()
        }
    });
    let one = written(&cache, 48, 100);
    assert_eq!((victims.lock().len(), cache.stats().evictions), (1, 2));
    asked.push(one);
    let error = cache.open(48).unwrap_err();
    assert!(matches!(error, KvError::NoMemory { tokens: 48, bytes, .. } if bytes == 12 * G / 4));
    assert!(victims.lock().is_empty(), "it was tried");
    check(&cache, &asked[0].0, &asked[0].1);
    drop(hook);
    cache.verify().unwrap();
    drop((asked, cache));
    machine.end();
}

#[test]
fn a_cache_without_blocks_left_evicts_too() {
    let machine = Machine::small(64);
    let cache = machine.builder().max_blocks(8).build().unwrap();
    let victim = Mutex::new(Some(cache.open(20).unwrap()));
    let mut one = written(&cache, 12, 100);
    let hook = cache.on_shortage(move |_| victim.lock().take().is_some());
    extend(&cache, &mut one, 9, 200);
    check(&cache, &one.0, &one.1);
    assert!(matches!(cache.open(12), Err(KvError::NoMemory { .. })));
    check(&cache, &one.0, &one.1);
    cache.verify().unwrap();
    drop((hook, one, cache));
    machine.end();
}

#[test]
fn a_quota_holds() {
    let machine = Machine::small(64);
    let cache = machine.builder().quota_bytes(3 * G).build().unwrap();
    let one = written(&cache, 40, 100);
    assert!(matches!(cache.open(9), Err(KvError::NoMemory { .. })));
    assert_eq!(cache.open(8).unwrap().tokens(), 8);
    check(&cache, &one.0, &one.1);
    drop((one, cache));
    machine.end();
}

#[test]
fn whoever_is_short_gets_idle_memory_and_then_what_hooks_evict() {
    let machine = Machine::small(8);
    let cache = machine.builder().keep_idle_bytes(8 * G).build().unwrap();
    drop(cache.open(16 * 8).unwrap());
    assert_eq!(cache.stats().idle_bytes, 8 * G);
    let tenant = machine.pool.elastic(DeviceId(0)).chunk_bytes(G).build().unwrap();
    tenant.grow_to(2 * G).unwrap();
    assert!(cache.stats().idle_bytes < 8 * G);
    let lane = machine.pool.lane(&machine.stream).unwrap();
    let buffer = lane.alloc(2 * G).unwrap();
    let victim = Mutex::new(Some(written(&cache, 16 * 4, 100).0));
    let hook = cache.on_shortage(move |shortage| {
        assert!(!shortage.is_own);
        victim.lock().take().is_some()
    });
    tenant.grow_to(6 * G).unwrap();
    let stats = cache.stats();
    assert_eq!((stats.sequences, stats.committed_bytes, stats.evictions), (0, 0, 1));
    assert!(tenant.grow_to(7 * G).is_err(), "nobody has anything left");
    cache.verify().unwrap();
    // A cache that is gone is not asked.
    drop((hook, cache));
    assert!(tenant.grow_to(7 * G).is_err());
    drop((tenant, buffer, lane));
    machine.end();
}

#[test]
fn growth_ahead_presses_nobody() {
    let machine = Machine::small(8);
    let idle = machine.builder().keep_idle_bytes(6 * G).build().unwrap();
    drop(idle.open(16 * 6).unwrap());
    let cache = machine.builder().ahead_blocks(64).build().unwrap();
    let sequence = cache.open(4).unwrap();
    let stats = cache.stats();
    assert_eq!((stats.committed_bytes, stats.background_growths), (2 * G, 1));
    assert_eq!(idle.stats().idle_bytes, 6 * G);
    // What is needed is another matter.
    let more = cache.open(16 * 4).unwrap();
    assert!(idle.stats().idle_bytes < 6 * G);
    cache.verify().unwrap();
    drop((sequence, more, cache, idle));
    machine.end();
}

#[test]
fn there_is_room_for_as_much_as_is_said() {
    let host = Place::HostNuma(0);
    let (neighbour, block) = (DeviceId(1), 4);
    for case in 0..5 {
        let machine = Machine::new(
            |sim| sim.device_bytes_of(0, 8 * G),
            |pool| pool.lend(neighbour, 3 * G).host_memory(0, 5 * G, 0),
        );
        let builder = machine.builder();
        let (builder, expected) = match case {
            0 => (builder, (32, 0, 0)),
            1 => (builder.lenders(Lending::Any), (32, 12, 0)),
            2 => (builder.lenders(Lending::Places(vec![host])), (32, 0, 20)),
            3 => (builder.quota_bytes(5 * G).lenders(Lending::Any), (20, 0, 0)),
            _ => (builder.max_blocks(35).lenders(Lending::Any), (32, 3, 0)),
        };
        let cache = builder.build().unwrap();
        let all = cache.room();
        let found = (all.here_tokens, all.borrowed_tokens, all.host_tokens);
        let (here, borrowed, on_host) = expected;
        assert_eq!(found, (here * block, borrowed * block, on_host * block), "case {case}");
        let _some = cache.open(9).unwrap();
        let left = cache.room();
        let tokens = left.here_tokens + left.borrowed_tokens + left.host_tokens;
        assert_eq!(tokens, (here + borrowed + on_host - 3) * block);
        assert!(cache.open(tokens + 1).is_err());
        assert_eq!(cache.open(tokens).unwrap().tokens(), tokens);
    }
    let machine = Machine::new(|sim| sim, |pool| pool.host_memory(0, 5 * G, 0));
    let cache = machine.builder().host_blocks(host, 12).build().unwrap();
    let room = cache.room();
    assert_eq!((room.sequences, room.host_tokens), (256, 12 * block));
    let mut parked = cache.open(5 * block).unwrap();
    parked.park().unwrap();
    assert_eq!(cache.room().host_tokens, 7 * block);
    assert_eq!(room.mappings - cache.room().mappings, cache.stats().mappings);
    drop((parked, cache));
    machine.end();
}
