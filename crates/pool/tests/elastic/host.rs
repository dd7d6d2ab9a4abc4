//! Chunks of elastic buffers in the memory of the host, and accounts by place.
use std::time::{Duration, Instant};

use crate::common::elastic::{G, Machine, machine};
use vmm_pool::{ElasticError, Error, HostStats, Place, Pool};
use vmm_sys::sim::FaultPlan;
use vmm_sys::{Call, DeviceId, ResultCode};

const HOST: Place = Place::HostNuma(1);

fn host(machine: &Machine) -> HostStats {
    machine.pool.verify().unwrap();
    let stats = machine.pool.stats().hosts.remove(0);
    assert!(stats.adds_up(), "{stats:?}");
    stats
}

#[test]
fn chunks_of_one_buffer_lie_in_different_places() {
    let machine = machine(2, |sim| sim, |pool| pool.host_memory(1, 64 * G, 0));
    let buffer = machine.buffer(0, 64 * G);
    buffer.commit(0..G).unwrap();
    buffer.commit_from(Place::Device(DeviceId(1)), G..2 * G).unwrap();
    buffer.commit_from(HOST, 2 * G..4 * G).unwrap();
    let places: Vec<Place> = buffer.pieces().iter().map(|piece| piece.place).collect();
    let far = Place::Device(DeviceId(1));
    assert_eq!(places, [Place::Device(DeviceId(0)), far, HOST, HOST]);
    let by_place = buffer.stats().by_place;
    assert_eq!(by_place, [(Place::Device(DeviceId(0)), G), (far, G), (HOST, 2 * G)]);
    assert_eq!((machine.stats(0).elastic_bytes, machine.stats(1).elastic_bytes), (G, G));
    assert_eq!((host(&machine).elastic_bytes, host(&machine).held_bytes), (2 * G, 2 * G));
    // One copy over all of it.
    let bytes: Vec<u8> = (0..4 * G).map(|at| (at / 4096) as u8).collect();
    buffer.write(0, &bytes).unwrap();
    let mut read = vec![0; bytes.len()];
    buffer.read(0, &mut read).unwrap();
    assert!(read == bytes);
    buffer.shrink_to(0).unwrap();
    assert_eq!(host(&machine).stock_bytes, 2 * G, "each chunk goes to the stock of its place");
    assert_eq!((machine.stats(0).stock_bytes, machine.stats(1).stock_bytes), (G, G));
    drop(buffer);
    assert_eq!(machine.sim.ledger_summary().host_used_bytes, 2 * G);
    machine.end();
}

#[test]
fn the_limit_of_host_memory_holds_and_names_the_node() {
    let machine = machine(1, |sim| sim, |pool| pool.host_memory(1, 3 * G + 1, 0));
    let buffer = machine.buffer(0, 64 * G);
    let refused = buffer.commit_from(HOST, 0..4 * G).unwrap_err();
    let Error::Elastic(ElasticError::HostShort { node: 1, cause: None, .. }) = refused else {
        panic!("{refused}")
    };
    assert!(refused.is_out_of_memory() && refused.to_string().contains("node 1"), "{refused}");
    assert_eq!(host(&machine).held_bytes, 0);
    buffer.commit_from(HOST, 0..3 * G).unwrap();
    buffer.shrink_to(0).unwrap();
    // The stock has the wrong length for the next, and gives way.
    let builder = machine.pool.elastic(DeviceId(0)).capacity_bytes(4 * G).chunk_bytes(2 * G);
    let other = builder.build().unwrap();
    other.commit_from(HOST, 0..2 * G).unwrap();
    assert_eq!((host(&machine).elastic_bytes, host(&machine).held_bytes), (2 * G, 2 * G));
    let unknown = buffer.commit_from(Place::HostNuma(0), 0..G).unwrap_err();
    assert!(matches!(unknown, Error::Elastic(ElasticError::UnknownPlace { .. })), "{unknown}");
    drop((buffer, other));
    machine.end();
}

#[test]
fn host_memory_is_made_ahead_in_the_background() {
    let chunk = vmm_pool::ChunkSize::Fixed(2 * G);
    let settings = |pool: vmm_pool::PoolBuilder| {
        pool.chunk(chunk).background(true).host_memory(1, 64 * G, 8 * G)
    };
    let machine = machine(1, |sim| sim, settings);
    let deadline = Instant::now() + Duration::from_secs(20);
    while host(&machine).stock_bytes < 8 * G {
        assert!(Instant::now() < deadline, "{:?}", host(&machine));
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(host(&machine).stock_bytes, 8 * G);
    let builder = machine.pool.elastic(DeviceId(0)).capacity_bytes(64 * G);
    let buffer = builder.build().unwrap();
    assert_eq!(buffer.chunk_bytes(), 2 * G);
    buffer.commit_from(HOST, 0..6 * G).unwrap();
    assert_eq!(buffer.stats().from_stock_bytes, 6 * G);
    drop(buffer);
    machine.end();
}

#[test]
fn a_place_with_longer_chunks_refuses_shorter_ones() {
    let machine =
        machine(1, |sim| sim.granularity_host(4 * G, 4 * G), |pool| pool.host_memory(1, 64 * G, 0));
    let buffer = machine.buffer(0, 64 * G);
    let calls = machine.driver.ledger().snapshot();
    let refused = buffer.commit_from(HOST, 0..G).unwrap_err();
    let Error::Elastic(ElasticError::ChunkTooFine { granularity_bytes, .. }) = refused else {
        panic!("{refused}")
    };
    assert_eq!(granularity_bytes, 4 * G);
    assert_eq!(machine.driver.ledger().snapshot().since(&calls).total(), 0);
    let builder = machine.pool.elastic(DeviceId(0)).capacity_bytes(64 * G).chunk_bytes(8 * G);
    let long = builder.build().unwrap();
    long.commit_from(HOST, 0..16 * G).unwrap();
    drop((buffer, long));
    machine.end();
}

#[test]
fn host_memory_is_prefilled_on_request() {
    let machine = machine(1, |sim| sim, |pool| pool.host_memory(1, 8 * G, 0));
    let chunk = machine.pool.prefill(HOST, 5 * G).unwrap();
    assert!(chunk >= 5 * G);
    assert_eq!(host(&machine).stock_bytes, chunk);
    let refused = machine.pool.prefill(HOST, 9 * G).unwrap_err();
    assert!(refused.is_out_of_memory(), "{refused}");
    machine.end();
}

#[test]
fn f_x8_a_node_that_cannot_give_memory_is_refused_when_the_pool_is_built() {
    let machine = machine(2, |sim| sim.host_numa_nodes(2, 64 * G), |pool| pool);
    let builder = || Pool::builder(machine.driver.clone()).background(false);
    let refused = builder().host_memory(7, G, 0).build().unwrap_err();
    let named = matches!(refused, Error::Elastic(ElasticError::NoHostMemory { node: 7, .. }));
    assert!(named, "{refused}");
    for (limit, stock) in [(1, 0), (4 * G, 5 * G)] {
        let refused = builder().host_memory(1, limit, stock).build().unwrap_err();
        assert!(matches!(refused, Error::BadSetting { .. }), "{refused}");
    }
    // Whatever call refuses, it is found out now, and nothing is left.
    let before = machine.sim.ledger_summary();
    for call in [Call::MemCreate, Call::MemMap, Call::MemSetAccess] {
        // The tries of the device itself come first.
        machine.sim.inject(FaultPlan::fail(ResultCode::NOT_SUPPORTED).on(call).at(2).once());
        let refused = builder().host_memory(1, 4 * G, 0).build().unwrap_err();
        let named = matches!(refused, Error::Elastic(ElasticError::NoHostMemory { node: 1, .. }));
        assert!(named, "{call}: {refused}");
        machine.sim.clear_faults();
    }
    let after = machine.sim.ledger_summary();
    assert_eq!((after.chunks, after.ranges), (before.chunks, before.ranges));
    drop(builder().host_memory(1, 4 * G, 0).build().unwrap());
    machine.end();
}
