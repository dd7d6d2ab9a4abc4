//! Memory ahead of need, and what happens when there is none.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use vmm_kv::{KvError, PagedSequence};
use vmm_sys::DeviceId;

use crate::harness::*;

fn wait_for(condition: impl Fn() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < Duration::from_secs(20), "nothing happens");
        std::thread::sleep(Duration::from_millis(1));
    }
}

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
    let cache = machine.builder().ahead_blocks(64).build().unwrap();
    let mut one = written(&cache, 4, 100);
    let calls = machine.calls();
    extend(&cache, &mut one, 4, 200);
    extend(&cache, &mut one, 4, 300);
    let writes = 2 * 4 * 4;
    assert!(machine.calls() - calls > writes, "the second block was grown for");
    let calls = machine.calls();
    one.0.append(4).unwrap();
    assert_eq!(machine.calls(), calls, "and the last free block of its chunk was not");
    assert_eq!(cache.stats().background_growths, 0);
    one.0.truncate(12);
    check(&cache, &one.0, &one.1);
    drop((one, cache));
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
