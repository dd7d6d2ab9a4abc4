//! Elastic buffers: memory comes and goes behind an address that stays, all or nothing.
use crate::common::elastic::{G, machine};
use vmm_pool::{Budget, ElasticError, Error, Growth};
use vmm_sys::sim::FaultPlan;
use vmm_sys::{Call, DeviceId, ResultCode};

#[test]
fn tebibytes_of_capacity_cost_no_memory() {
    let machine = machine(1, |sim| sim, |pool| pool);
    let before = machine.sim.ledger_summary();
    let buffer = machine.pool.elastic(DeviceId(0)).capacity_bytes(16 << 40).build().unwrap();
    let after = machine.sim.ledger_summary();
    assert_eq!(after.chunks, before.chunks);
    assert_eq!(after.reserved_bytes, before.reserved_bytes + (16 << 40));
    let stats = machine.stats(0);
    assert_eq!((stats.held_bytes, stats.elastic_bytes), (0, 0));
    assert_eq!((stats.reserved_bytes, stats.elastic_buffers), (16 << 40, 1));
    drop(buffer);
    assert_eq!(machine.stats(0).reserved_bytes, 0);
    machine.end();
}

#[test]
fn memory_comes_and_goes_in_place() {
    let machine = machine(1, |sim| sim, |pool| pool);
    let buffer = machine.buffer(0, 64 * G);
    let address = buffer.address();
    assert_eq!(buffer.grow_to(3 * G + 1).unwrap(), 4 * G);
    buffer.write(3 * G + 5, b"hello").unwrap();
    assert_eq!(buffer.grow_to(2 * G).unwrap(), 0, "it is there already");
    assert_eq!(buffer.commit(9 * G..10 * G + 1).unwrap(), 2 * G);
    let offsets: Vec<u64> = buffer.pieces().iter().map(|piece| piece.offset / G).collect();
    assert_eq!(offsets, [0, 1, 2, 3, 9, 10]);
    assert_eq!(machine.stats(0).elastic_bytes, 6 * G);
    assert_eq!(buffer.decommit(G / 2..2 * G).unwrap(), G, "only whole chunks go");
    assert_eq!(buffer.shrink_to(4 * G).unwrap(), 2 * G);
    assert_eq!((buffer.committed_bytes(), buffer.address()), (3 * G, address));
    let mut read = [0; 5];
    buffer.read(3 * G + 5, &mut read).unwrap();
    assert_eq!(&read, b"hello");
    assert_eq!(buffer.grow_to(4 * G).unwrap(), G);
    let stats = buffer.stats();
    assert_eq!((stats.created_bytes, stats.from_stock_bytes), (6 * G, G));
    let stats = machine.stats(0);
    assert_eq!((stats.held_bytes, stats.elastic_bytes, stats.stock_bytes), (6 * G, 4 * G, 2 * G));
    drop(buffer);
    assert_eq!(machine.stats(0).stock_bytes, 6 * G);
    machine.end();
}

#[test]
fn several_ranges_grow_together_or_not_at_all() {
    let machine = machine(1, |sim| sim.device_bytes(8 * G), |pool| pool);
    let buffer = machine.buffer(0, 64 * G);
    buffer.commit(5 * G..6 * G).unwrap();
    let generation = buffer.generation();
    // They touch, overlap, come in any order, and one is empty.
    let ranges = [40 * G..41 * G, 4 * G..6 * G + 1, 4 * G..5 * G, 9 * G..9 * G];
    let grown = buffer.grow(Growth::ranges(ranges.clone())).unwrap();
    assert_eq!((grown.bytes, buffer.generation()), (3 * G, generation + 1));
    let offsets = || buffer.pieces().iter().map(|it| it.offset / G).collect::<Vec<u64>>();
    assert_eq!(offsets(), [4, 5, 6, 40]);
    assert_eq!(buffer.grow(Growth::ranges(ranges)).unwrap().bytes, 0);
    assert_eq!(buffer.grow(Growth::ranges([])).unwrap().bytes, 0);
    let before = machine.picture(&buffer);
    // The last of them does not fit: into the device, into the capacity.
    let short = buffer.grow(Growth::ranges([0..2 * G, 20 * G..23 * G])).unwrap_err();
    assert!(short.is_out_of_memory(), "{short}");
    let beyond = buffer.grow(Growth::ranges([0..2 * G, 63 * G..65 * G])).unwrap_err();
    assert!(matches!(beyond, Error::Elastic(ElasticError::BeyondCapacity { .. })), "{beyond}");
    assert_eq!(machine.picture(&buffer), before);
    drop(buffer);
    machine.end();
}

#[test]
fn what_cannot_be_is_refused_before_any_call() {
    let machine = machine(1, |sim| sim, |pool| pool);
    let pool = &machine.pool;
    let capacity = |bytes| pool.elastic(DeviceId(0)).capacity_bytes(bytes);
    let beyond = capacity((1 << 47) + 1);
    for wrong in [capacity(0), capacity(u64::MAX), beyond, capacity(G).chunk_bytes(G + 1)] {
        assert!(matches!(wrong.build(), Err(Error::BadSetting { .. })));
    }
    assert!(matches!(pool.elastic(DeviceId(7)).build(), Err(Error::UnknownDevice { .. })));
    let buffer = machine.buffer(0, 4 * G);
    let calls = machine.driver.ledger().snapshot();
    let beyond = |result: Result<u64, Error>| {
        matches!(result, Err(Error::Elastic(ElasticError::BeyondCapacity { .. })))
    };
    assert!(beyond(buffer.grow_to(4 * G + 1)));
    assert!(beyond(buffer.grow_to(u64::MAX)));
    assert!(beyond(buffer.commit(u64::MAX - 1..u64::MAX)));
    assert_eq!(buffer.commit(5..5).unwrap(), 0, "no bytes touch no chunk");
    let backwards = std::ops::Range { start: 5, end: 3 };
    assert_eq!(buffer.commit(backwards.clone()).unwrap(), 0);
    assert_eq!(buffer.decommit(backwards).unwrap(), 0);
    let missing = buffer.read(0, &mut [0; 1]);
    assert!(matches!(missing, Err(Error::Elastic(ElasticError::NotCommitted { offset: 0 }))));
    assert!(matches!(buffer.write(4 * G, &[1]), Err(Error::OutOfBounds { .. })));
    assert_eq!(buffer.shrink_to(u64::MAX).unwrap(), 0);
    assert_eq!(machine.driver.ledger().snapshot().since(&calls).total(), 0);
    drop(buffer);
    machine.end();
}

/// Each kind of memory has a granularity of its own, and the recommended one is another.
#[test]
fn f_a4_every_kind_of_memory_goes_by_its_own_granularity() {
    for plain in [4 << 10, 64 << 10, G, 512 << 20] {
        let kinds = |sim: vmm_sys::sim::SimBuilder| {
            sim.granularity(plain, 4 * plain)
                .granularity_exportable(2 * plain, 8 * plain)
                .granularity_rdma(8 * plain, 8 * plain)
                .granularity_host(4 * plain, 4 * plain)
        };
        let machine = machine(1, kinds, |pool| pool.host_memory(0, 64 * plain, 0));
        let stream = machine.stream(0);
        let lane = machine.pool.lane(&stream).unwrap();
        // The simulated device refuses every length and address that is no multiple.
        let asked = [1, 128, 6912, plain - 1, plain, plain + 1];
        let blocks: Vec<_> = asked.iter().map(|bytes| lane.alloc(*bytes).unwrap()).collect();
        let stats = machine.stats(0);
        assert_eq!(stats.live_bytes, asked.iter().sum::<u64>());
        assert_eq!(stats.held_bytes % plain, 0, "{stats:?}");
        for (exportable, granularity) in [(false, plain), (true, 2 * plain)] {
            let builder = machine.pool.elastic(DeviceId(0)).exportable(exportable);
            let builder = builder.capacity_bytes(6 * granularity + 1).chunk_bytes(granularity);
            let buffer = builder.build().unwrap();
            for (bytes, committed) in [(1, 1), (6912, 6912), (granularity + 1, 2 * granularity)] {
                buffer.grow_to(bytes).unwrap();
                let committed = u64::next_multiple_of(committed, granularity);
                assert_eq!(buffer.committed_bytes(), committed.max(buffer.committed_bytes()));
            }
            assert!(buffer.pieces().iter().all(|piece| piece.bytes == granularity));
            if exportable {
                assert_eq!(buffer.export_pieces().unwrap().len(), buffer.pieces().len());
            }
        }
        let crooked = machine.pool.elastic(DeviceId(0)).exportable(true).chunk_bytes(plain);
        let refused = crooked.capacity_bytes(plain).build().unwrap_err();
        assert!(matches!(refused, Error::BadSetting { .. }), "{refused}");
        let host = machine.pool.elastic(DeviceId(0)).capacity_bytes(8 * plain);
        let host = host.chunk_bytes(4 * plain).build().unwrap();
        host.commit_from(vmm_pool::Place::HostNuma(0), 0..1).unwrap();
        assert_eq!(host.committed_bytes(), 4 * plain);
        drop((blocks, lane, stream, host));
        machine.end();
    }
}

#[test]
fn growth_that_failed_for_want_of_memory_leaves_everything_as_it_was() {
    let machine = machine(1, |sim| sim.device_bytes(16 * G), |pool| pool);
    let buffer = machine.buffer(0, 64 * G);
    buffer.grow_to(4 * G).unwrap();
    let before = machine.picture(&buffer);
    let error = buffer.grow_to(20 * G).unwrap_err();
    let Error::OutOfMemory(facts) = &error else { panic!("{error}") };
    assert_eq!(facts.asked_bytes, 16 * G, "all that was missing");
    assert_eq!(machine.picture(&buffer), before);
    assert_eq!(buffer.grow_to(16 * G).unwrap(), 12 * G);
    drop(buffer);
    machine.end();
}

#[test]
fn growth_takes_what_idles_elsewhere_on_the_device() {
    let machine = machine(1, |sim| sim.device_bytes(16 * G), |pool| pool);
    let stream = machine.stream(0);
    let lane = machine.pool.lane(&stream).unwrap();
    drop(lane.alloc(12 * G).unwrap());
    let buffer = machine.buffer(0, 64 * G);
    assert_eq!(buffer.grow_to(16 * G).unwrap(), 16 * G);
    assert_eq!(machine.stats(0).held_bytes, 16 * G);
    drop((buffer, lane, stream));
    machine.end();
}

#[test]
fn a_quota_holds_for_all_who_share_it() {
    let machine = machine(1, |sim| sim, |pool| pool);
    let quota = Budget::new(6 * G);
    let build = || {
        let builder = machine.pool.elastic(DeviceId(0)).capacity_bytes(64 * G).chunk_bytes(G);
        builder.tag("tenant").quota(quota.clone()).build().unwrap()
    };
    let (one, other) = (build(), build());
    one.grow_to(4 * G).unwrap();
    let before = machine.picture(&other);
    let error = other.grow_to(3 * G).unwrap_err();
    let Error::Elastic(ElasticError::OverQuota { bytes, booked_bytes, quota_bytes }) = error else {
        panic!("{error}")
    };
    assert_eq!((bytes, booked_bytes, quota_bytes), (3 * G, 4 * G, 6 * G));
    assert_eq!(machine.picture(&other), before);
    other.grow_to(2 * G).unwrap();
    one.shrink_to(G).unwrap();
    other.grow_to(5 * G).unwrap();
    machine.sim.inject(FaultPlan::fail(ResultCode::UNKNOWN).on(Call::MemMap).once());
    one.shrink_to(0).unwrap();
    one.grow_to(G).unwrap_err();
    assert_eq!(quota.booked_bytes(), 5 * G, "a failure books nothing");
    drop((one, other));
    assert_eq!(quota.booked_bytes(), 0);
    machine.end();
}

#[test]
fn f_k2_a_single_piece_is_one_chunk() {
    let machine = machine(1, |sim| sim, |pool| pool);
    let builder = machine.pool.elastic(DeviceId(0)).capacity_bytes(5 * G + 1);
    let buffer = builder.single_piece().build().unwrap();
    assert_eq!(buffer.grow_to(1).unwrap(), 6 * G);
    let pieces = buffer.pieces();
    assert_eq!((pieces.len(), pieces[0].offset, pieces[0].bytes), (1, 0, 6 * G));
    assert_eq!(
        machine.driver.address_range(DeviceId(0), buffer.address() + 3 * G).unwrap().1,
        6 * G
    );
    assert_eq!(buffer.shrink_to(1).unwrap(), 0);
    assert_eq!(buffer.shrink_to(0).unwrap(), 6 * G);
    drop(buffer);
    machine.end();
}

#[test]
fn chunks_are_exportable_only_where_that_was_asked_for() {
    let machine = machine(1, |sim| sim, |pool| pool.chunk(vmm_pool::ChunkSize::Fixed(G)));
    machine.pool.prefill(DeviceId(0), 4 * G).unwrap();
    let plain = machine.buffer(0, 4 * G);
    plain.grow_to(G).unwrap();
    let refused = plain.export_pieces().unwrap_err();
    assert!(matches!(refused, Error::Elastic(ElasticError::NotExportable)), "{refused}");
    let builder = machine.pool.elastic(DeviceId(0)).capacity_bytes(4 * G).chunk_bytes(G);
    let shared = builder.exportable(true).build().unwrap();
    shared.grow_to(2 * G).unwrap();
    assert_eq!(shared.stats().from_stock_bytes, 0, "the stock holds plain chunks");
    assert!(shared.pieces().iter().all(|piece| piece.exportable));
    shared.shrink_to(0).unwrap();
    shared.grow_to(2 * G).unwrap();
    assert_eq!(shared.stats().from_stock_bytes, 2 * G, "its own kind came back");
    assert_eq!(shared.export_pieces().unwrap().len(), 2);
    let part = shared.export_pieces_in(1..u64::MAX).unwrap();
    assert_eq!(part.iter().map(|(piece, _)| piece.offset).collect::<Vec<_>>(), [G]);
    assert!(shared.is_exportable() && !plain.is_exportable());
    drop((plain, shared, part));
    machine.end();
}
