//! What is enqueued and not done yet.

use vmm_pool::Place;

use crate::harness::*;

#[test]
fn copies_that_wait_find_their_blocks_whatever_becomes_of_the_memory_meanwhile() {
    let machine =
        Machine::new(|sim| sim.device_bytes_of(0, 64 * G), |pool| pool.host_memory(0, 64 * G, 0));
    let cache = machine.builder().host_blocks(Place::HostNuma(0), 64).build().unwrap();
    let filler = cache.open(16 * 4 + 8).unwrap();
    let mut parent = written(&cache, 10, 100);
    let mut parked = written(&cache, 7, 200);
    let packed = written(&cache, 24, 300);
    let last = cache.open(30).unwrap();
    let held = machine.sim.hold(machine.stream.device(), machine.stream.handle()).unwrap();
    // A copy of the begun block, to the host and back, and packing: one behind the other.
    let mut child = (parent.0.fork().unwrap(), parent.1.clone());
    parent.0.append(1).unwrap();
    child.0.append(1).unwrap();
    parked.0.park().unwrap();
    parked.0.resume().unwrap();
    drop((filler, last));
    assert!(cache.pack(u64::MAX).unwrap().blocks > 0);
    cache.release_idle(0).unwrap();
    drop(parent);
    cache.verify().unwrap();
    machine.sim.release_hold(held);
    child.0.truncate(10);
    check(&cache, &child.0, &child.1);
    check(&cache, &parked.0, &parked.1);
    check(&cache, &packed.0, &packed.1);
    drop((child, parked, packed, cache));
    machine.end();
}
