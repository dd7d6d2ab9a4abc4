//! What others wrote is zeroed where it is nobody's business.
use std::sync::Arc;

use crate::common::elastic::{G, Machine, machine, on, with_host};
use vmm_pool::{ElasticBuffer, Place, Pool, PoolBuilder};
use vmm_sys::object::{RelaxedCapture, Stream};
use vmm_sys::sim::{FaultPlan, Sim};
use vmm_sys::{Call, CaptureMode, CaptureStatus, DeviceId, ResultCode, StreamHandle};

const HOME: DeviceId = DeviceId(0);
const SECRET: u8 = 0x5E;

/// A buffer of a tag.
fn tagged(machine: &Machine, tag: &str, exportable: bool) -> ElasticBuffer {
    let builder = machine.pool.elastic(HOME).capacity_bytes(64 * G).chunk_bytes(G);
    builder.tag(tag).exportable(exportable).build().unwrap()
}

/// Has memory full of the secret of a tag lie in the stock of a place.
fn leave_secrets(machine: &Machine, tag: &str, exportable: bool, place: Place, chunks: u64) {
    let buffer = tagged(machine, tag, exportable);
    buffer.commit_from(place, 0..chunks * G).unwrap();
    buffer.write(0, &vec![SECRET; (chunks * G) as usize]).unwrap();
    drop(buffer);
}

/// How many bytes of the secret are found in what is committed.
fn secrets(buffer: &ElasticBuffer) -> usize {
    let pieces = buffer.pieces();
    let found = pieces.iter().map(|piece| {
        let mut bytes = vec![0; piece.bytes as usize];
        buffer.read(piece.offset, &mut bytes).unwrap();
        bytes.iter().filter(|byte| **byte == SECRET).count()
    });
    found.sum()
}

fn apart(pool: PoolBuilder) -> PoolBuilder {
    pool.scrub_between_tags(true)
}

#[test]
fn an_exportable_buffer_shows_nothing_of_others() {
    let machine = machine(1, |sim| sim, |pool| pool);
    leave_secrets(&machine, "a", true, on(0), 3);
    let open = machine.pool.elastic(HOME).capacity_bytes(G).chunk_bytes(G);
    let open = open.exportable(true).scrub(false).build().unwrap();
    open.grow_to(G).unwrap();
    assert_eq!(secrets(&open), G as usize, "nobody zeroes it where that is not wanted");
    drop(open);
    let buffer = tagged(&machine, "b", true);
    let before = machine.driver.ledger().snapshot();
    assert_eq!(buffer.grow_to(4 * G).unwrap(), 4 * G);
    let calls = machine.driver.ledger().snapshot().since(&before);
    assert_eq!((calls.of(Call::MemsetD8Async), calls.of(Call::EventRecord)), (3, 1));
    assert_eq!((calls.of(Call::MemMap), calls.of(Call::MemsetD8)), (4, 0), "{calls}");
    assert_eq!(secrets(&buffer), 0);
    let stats = buffer.stats();
    assert_eq!((stats.from_stock_bytes, stats.scrubbed_bytes), (3 * G, 3 * G));
    assert_eq!(machine.stats(0).scrubbed_bytes, 3 * G);
    drop(buffer);
    machine.end();
}

#[test]
fn tags_are_told_apart_where_that_is_asked_for() {
    for (settings, expected) in [(apart as fn(_) -> _, 0), (|pool| pool, 2 * G as usize)] {
        let machine = machine(1, |sim| sim, settings);
        leave_secrets(&machine, "a", false, on(0), 2);
        let same = tagged(&machine, "a", false);
        same.grow_to(2 * G).unwrap();
        assert_eq!(secrets(&same), 2 * G as usize, "its own");
        assert_eq!(same.stats().scrubbed_bytes, 0);
        drop(same);
        let other = tagged(&machine, "b", false);
        other.grow_to(2 * G).unwrap();
        assert_eq!((secrets(&other), other.stats().from_stock_bytes), (expected, 2 * G));
        drop(other);
        machine.end();
    }
}

#[test]
fn lanes_get_nothing_that_a_tag_used_and_are_refused_nothing_for_it() {
    let small = |sim: vmm_sys::sim::SimBuilder| sim.device_bytes(4 * G);
    for settings in [apart as fn(PoolBuilder) -> PoolBuilder, |pool| pool] {
        let machine = machine(1, small, |pool| settings(pool).chunk(vmm_pool::ChunkSize::Fixed(G)));
        leave_secrets(&machine, "a", false, on(0), 2);
        let (stream, mut found) = (machine.stream(0), vec![0; 4 * G as usize]);
        let lane = machine.pool.lane(&stream).unwrap();
        let secrets = |bytes: &[u8]| bytes.contains(&SECRET);
        let (first, length) = (lane.alloc(G).unwrap(), G as usize);
        first.read(0, &mut found[..length]).unwrap();
        let is_apart = !secrets(&found[..length]);
        let stock_bytes = machine.stats(0).stock_bytes;
        assert_eq!(stock_bytes, if is_apart { 2 * G } else { G });
        // Of no use to the lane, it goes back to the driver when memory is short.
        let rest = lane.alloc(3 * G).unwrap();
        rest.read(0, &mut found[..3 * length]).unwrap();
        assert_eq!(!secrets(&found[..3 * length]), is_apart);
        // And the other way round.
        rest.write(0, &vec![SECRET; 3 * length]).unwrap();
        drop((first, rest));
        machine.pool.close_lane(&stream);
        drop(lane);
        let buffer = tagged(&machine, "b", false);
        buffer.grow_to(4 * G).unwrap();
        assert_eq!(buffer.stats().from_stock_bytes, 4 * G);
        assert_eq!(self::secrets(&buffer) == 0, is_apart);
        drop((buffer, stream));
        machine.end();
    }
}

#[test]
fn memory_of_every_place_is_zeroed() {
    let machine = with_host();
    for place in [on(1), Place::HostNuma(0)] {
        leave_secrets(&machine, "a", true, place, 2);
        let buffer = tagged(&machine, "b", true);
        buffer.commit_from(place, 0..2 * G).unwrap();
        assert_eq!((secrets(&buffer), buffer.stats().scrubbed_bytes), (0, 2 * G), "{place}");
        drop(buffer);
    }
    assert_eq!(machine.stats(1).scrubbed_bytes, 2 * G);
    assert_eq!(machine.pool.stats().hosts[0].scrubbed_bytes, 2 * G);
    machine.end();
}

#[test]
fn a_move_writes_over_all_of_its_memory_and_zeroes_none() {
    let machine = machine(2, |sim| sim, apart);
    leave_secrets(&machine, "a", true, on(1), 2);
    let buffer = tagged(&machine, "b", true);
    buffer.grow_to(2 * G).unwrap();
    buffer.write(0, &vec![3; 2 * G as usize]).unwrap();
    buffer.migrate(on(1)).unwrap();
    assert_eq!((secrets(&buffer), buffer.stats().scrubbed_bytes), (0, 0));
    // It is its own by now.
    drop(buffer);
    let buffer = tagged(&machine, "b", true);
    let builder = machine.pool.elastic(HOME).capacity_bytes(2 * G).chunk_bytes(G);
    let lax = builder.tag("b").exportable(true).scrub(false).build().unwrap();
    lax.commit_from(on(1), 0..2 * G).unwrap();
    assert_eq!(lax.stats().scrubbed_bytes, 0);
    drop((buffer, lax));
    machine.end();
}

#[test]
fn what_a_failed_move_mixed_is_nobodys() {
    let machine = machine(2, |sim| sim, apart);
    leave_secrets(&machine, "a", false, on(1), 2);
    let buffer = tagged(&machine, "b", false);
    buffer.grow_to(2 * G).unwrap();
    machine.sim.inject(FaultPlan::fail(ResultCode::UNKNOWN).on(Call::EventRecord).once());
    buffer.migrate(on(1)).unwrap_err();
    machine.sim.clear_faults();
    assert_eq!(machine.stats(1).stock_bytes, 2 * G);
    buffer.commit_from(on(1), 4 * G..6 * G).unwrap();
    assert_eq!((secrets(&buffer), buffer.stats().scrubbed_bytes), (0, 2 * G));
    drop(buffer);
    machine.end();
}

#[test]
fn a_scrub_waits_for_nobodys_work_and_harms_no_capture() {
    let machine = machine(1, |sim| sim, |pool| pool);
    leave_secrets(&machine, "a", true, on(0), 2);
    // A stream that the legacy stream waits for, and one that is captured.
    let blocking = machine.driver.stream_create_blocking(HOME).unwrap();
    let hold = machine.sim.hold(HOME, blocking).unwrap();
    let captured = machine.stream(0);
    begin(&machine.driver, &captured);
    let buffer = tagged(&machine, "b", true);
    buffer.grow_to(2 * G).unwrap();
    assert_eq!(buffer.stats().scrubbed_bytes, 2 * G);
    assert_eq!(captured.capture_info().unwrap().status, CaptureStatus::Active);
    end(&machine.driver, &captured);
    machine.sim.release_hold(hold);
    assert_eq!(secrets(&buffer), 0);
    destroy(&machine.driver, blocking);
    drop((buffer, captured));
    machine.end();
}

fn begin(driver: &Arc<dyn vmm_sys::Driver>, stream: &Stream) {
    // SAFETY: the stream is live.
    unsafe { driver.capture_begin(HOME, stream.handle(), CaptureMode::Global) }.unwrap();
}

fn end(driver: &Arc<dyn vmm_sys::Driver>, stream: &Stream) {
    // SAFETY: stream and graph are live, and the graph is nobody else's.
    unsafe {
        let graph = driver.capture_end(HOME, stream.handle()).unwrap();
        driver.graph_destroy(HOME, graph).unwrap();
    }
}

fn destroy(driver: &Arc<dyn vmm_sys::Driver>, stream: StreamHandle) {
    let _relaxed = RelaxedCapture::enter(driver).unwrap();
    // SAFETY: the stream is live, and used no more.
    unsafe { driver.stream_destroy(HOME, stream) }.unwrap();
}

#[test]
fn what_was_made_ahead_is_zero_and_is_not_zeroed() {
    let driver: Arc<dyn vmm_sys::Driver> = Sim::builder().build();
    let pool = Pool::builder(driver).background(false).scrub_between_tags(true);
    let pool = pool.chunk(vmm_pool::ChunkSize::Fixed(G)).build().unwrap();
    pool.prefill(HOME, 2 * G).unwrap();
    let builder = pool.elastic(HOME).capacity_bytes(2 * G).chunk_bytes(G).tag("a");
    let buffer = builder.build().unwrap();
    buffer.grow_to(2 * G).unwrap();
    let stats = buffer.stats();
    assert_eq!((stats.from_stock_bytes, stats.scrubbed_bytes), (2 * G, 0));
}
