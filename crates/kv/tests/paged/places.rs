//! Memory of neighbours and of the host.

use std::time::Duration;

use vmm_kv::{KvError, Lending, PagedCache};
use vmm_pool::{Contents, Place};
use vmm_sys::DeviceId;

use crate::harness::*;

const HOST: Place = Place::HostNuma(0);

fn with_host(chunks: u64) -> Machine {
    Machine::new(|sim| sim.device_bytes_of(0, chunks * G), |pool| pool.host_memory(0, 8 * G, 0))
}

fn by_place(cache: &PagedCache) -> Vec<(Place, u64)> {
    cache.buffer().stats().by_place
}

#[test]
fn what_the_device_has_not_is_borrowed_of_a_neighbour() {
    let neighbour = DeviceId(1);
    let machine =
        Machine::new(|sim| sim.device_bytes_of(0, 4 * G), |pool| pool.lend(neighbour, 2 * G));
    for lending in [Lending::Any, Lending::Places(vec![neighbour.into()])] {
        let cache = machine.builder().lenders(lending).build().unwrap();
        let mut one = written(&cache, 60, 100);
        extend(&cache, &mut one, 36, 500);
        let expected = [(Place::Device(DeviceId(0)), 4 * G), (neighbour.into(), 2 * G)];
        assert_eq!(by_place(&cache), expected);
        check(&cache, &one.0, &one.1);
        // Copies between the two.
        let mut two = (one.0.fork_at(70).unwrap(), one.1[..70].to_vec());
        one.0.truncate(88);
        one.1.truncate(88);
        extend(&cache, &mut two, 1, 900);
        check(&cache, &two.0, &two.1);
        check(&cache, &one.0, &one.1);
        let error = cache.open(5).unwrap_err();
        assert!(matches!(error, KvError::NoMemory { tokens: 5, .. }), "{error}");
        cache.verify().unwrap();
    }
    let cache = machine.builder().build().unwrap();
    assert!(matches!(cache.open(65), Err(KvError::NoMemory { .. })), "nobody lends to this one");
    drop(cache);
    machine.end();
}

#[test]
fn a_parked_sequence_takes_no_memory_of_the_device_and_comes_back() {
    let machine = with_host(4);
    let cache = machine.builder().host_blocks(HOST, 40).build().unwrap();
    let mut one = written(&cache, 30, 100);
    let two = written(&cache, 20, 200);
    assert_eq!(one.0.park().unwrap(), 8 * G / 4);
    assert!(one.0.is_parked());
    check(&cache, &one.0, &one.1);
    assert_eq!(by_place(&cache), [(Place::Device(DeviceId(0)), 3 * G), (HOST, 2 * G)]);
    let stats = cache.stats();
    assert_eq!((stats.parked_sequences, stats.parked_bytes), (1, 2 * G));
    assert_eq!(one.0.park().unwrap(), 0, "it is there already");
    assert!(matches!(one.0.append(1), Err(KvError::Parked)));
    assert!(matches!(one.0.fork(), Err(KvError::Parked)));
    let mut tables = vmm_kv::BlockTables::new(2, 64);
    assert!(matches!(tables.update(&[&one.0]), Err(KvError::Parked)));
    // Somebody else takes the memory, and it does not come back until he is gone.
    let three = written(&cache, 36, 300);
    let error = one.0.resume().unwrap_err();
    assert!(error.is_shortage() && one.0.is_parked(), "{error}");
    check(&cache, &one.0, &one.1);
    cache.verify().unwrap();
    drop(three);
    one.0.truncate(25);
    one.1.truncate(25);
    assert_eq!(one.0.resume().unwrap(), 7 * G / 4);
    assert_eq!(one.0.resume().unwrap(), 0);
    extend(&cache, &mut one, 10, 400);
    check(&cache, &one.0, &one.1);
    check(&cache, &two.0, &two.1);
    cache.verify().unwrap();
    assert!(by_place(&cache).iter().all(|(place, _)| *place != HOST), "{:?}", by_place(&cache));
    drop((one, two, cache));
    machine.end();
}

#[test]
fn blocks_in_common_stay_on_the_device_while_one_of_their_owners_is_parked() {
    let machine = with_host(16);
    let cache = machine.builder().host_blocks(HOST, 40).build().unwrap();
    let filler = cache.open(16 * 4).unwrap();
    let mut parent = written(&cache, 18, 100);
    let mut child = (parent.0.fork_at(8).unwrap(), parent.1[..8].to_vec());
    extend(&cache, &mut child, 6, 200);
    assert_eq!(child.0.park().unwrap(), 2 * G / 4);
    assert_eq!(parent.0.park().unwrap(), 3 * G / 4);
    check(&cache, &child.0, &child.1);
    // What they have in common moves for both.
    drop(filler);
    assert_eq!(cache.pack(u64::MAX).unwrap().blocks, 2);
    cache.verify().unwrap();
    check(&cache, &parent.0, &parent.1);
    drop(parent);
    check(&cache, &child.0, &child.1);
    child.0.resume().unwrap();
    extend(&cache, &mut child, 1, 300);
    check(&cache, &child.0, &child.1);
    child.0.park().unwrap();
    drop(child);
    assert_eq!(cache.stats().committed_bytes, 0);
    cache.verify().unwrap();
    drop(cache);
    machine.end();
}

#[test]
fn the_host_has_as_much_room_as_was_said() {
    let machine = with_host(64);
    let cache = machine.builder().host_blocks(HOST, 6).build().unwrap();
    let (mut one, mut two) = (written(&cache, 16, 100), written(&cache, 16, 200));
    one.0.park().unwrap();
    let error = two.0.park().unwrap_err();
    assert!(error.is_shortage() && !two.0.is_parked(), "{error}");
    extend(&cache, &mut two, 1, 300);
    check(&cache, &two.0, &two.1);
    // The pool's own limit for the node, eight chunks.
    let large = machine.builder().host_blocks(HOST, 400).build().unwrap();
    let mut three = written(&large, 33 * 4, 400);
    let error = three.0.park().unwrap_err();
    assert!(error.is_shortage() && !three.0.is_parked(), "{error}");
    large.verify().unwrap();
    check(&large, &three.0, &three.1);
    let none = machine.builder().build().unwrap();
    let mut four = none.open(4).unwrap();
    assert!(matches!(four.park(), Err(KvError::BadSetting { setting: "host_blocks", .. })));
    drop((one, two, three, four, cache, large, none));
    machine.end();
}

#[test]
fn a_cache_that_sleeps_wakes_with_its_tokens() {
    let machine = with_host(16);
    let cache = machine.builder().host_blocks(HOST, 8).tag("kv").build().unwrap();
    let (mut one, mut two) = (written(&cache, 30, 100), written(&cache, 9, 200));
    two.0.park().unwrap();
    machine.pool.sleep("kv", Contents::Kept { node: 0 }, Duration::ZERO).unwrap();
    assert_eq!(machine.pool.device_stats(DeviceId(0)).unwrap().elastic_bytes, 0);
    assert!(cache.use_now().is_err());
    assert!(matches!(cache.open(60), Err(KvError::Pool(_))));
    cache.verify().unwrap();
    machine.pool.wake("kv").unwrap();
    cache.verify().unwrap();
    two.0.resume().unwrap();
    for sequence in [&mut one, &mut two] {
        extend(&cache, sequence, 5, 300);
        check(&cache, &sequence.0, &sequence.1);
    }
    drop((one, two, cache));
    machine.end();
}
