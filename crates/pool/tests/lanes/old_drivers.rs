//! Drivers that lack calls which came later: what needs them is missing, and nothing else. What the
//! library itself lacks is tried with stub libraries (`crates/standin/tests/lacking.rs`). Ids F-…
//! are those of the reports that the stories come from.
use std::sync::Arc;

use crate::common::{HOME, MIB};
use vmm_pool::{ChunkSize, Error, Pool};
use vmm_sys::object::Stream;
use vmm_sys::sim::{FaultPlan, Sim};
use vmm_sys::{Call, Driver, ResultCode};

/// Calls that a driver with the VMM calls may lack; but for those by which streams are told apart.
/// `cuThreadExchangeStreamCaptureMode` is older than the VMM calls.
const LATER: &[Call] = &[
    Call::DeviceGetUuid,
    Call::DeviceCanAccessPeer,
    Call::DeviceGetP2pAttribute,
    Call::MemRetainAllocationHandle,
    Call::MemGetAllocationProperties,
    Call::MemGetAccess,
    Call::MemExportToShareableHandle,
    Call::MemImportFromShareableHandle,
    Call::MemGetAddressRange,
    Call::PointerGetAttributes,
    Call::IpcGetMemHandle,
    Call::MemGetHandleForAddressRange,
    Call::IpcGetEventHandle,
    Call::IpcOpenEventHandle,
    Call::StreamWaitValue32,
    Call::StreamBeginCapture,
    Call::StreamEndCapture,
    Call::LaunchHostFunc,
    Call::LaunchKernel,
    Call::ModuleLoadData,
    Call::MemHostAlloc,
    Call::MemAllocAsync,
    Call::GraphInstantiate,
    Call::GraphLaunch,
];

/// Growth, warm requests, memory that crosses streams, shortage, elastic memory, trim, and the end.
fn full_use(sim: &Arc<Sim>, what: &str) {
    let driver: Arc<dyn Driver> = sim.clone();
    let builder = Pool::builder(driver.clone()).background(false).limit_bytes(64 * MIB);
    let pool = builder.chunk(ChunkSize::Fixed(2 * MIB)).build().unwrap();
    let streams: Vec<_> = (0..2)
        .map(|_| Stream::create(&driver, HOME))
        .chain([Stream::legacy(&driver, HOME), Stream::per_thread(&driver, HOME)])
        .map(|stream| stream.unwrap_or_else(|error| panic!("{what}: {error}")))
        .collect();
    let lanes: Vec<_> = streams.iter().map(|stream| pool.lane(stream).unwrap()).collect();
    for lane in &lanes {
        for other in &streams {
            let mut crossed = lane.alloc(3 * MIB).unwrap_or_else(|error| panic!("{what}: {error}"));
            crossed.write(5, b"bytes").unwrap();
            crossed.record_stream(other).unwrap();
            drop(crossed);
        }
        drop(lane.alloc(64 * MIB).unwrap_or_else(|error| panic!("{what}: {error}")));
    }
    assert_eq!(pool.device_stats(HOME).unwrap().lanes, 4, "{what}: streams are told apart");
    let again = Stream::legacy(&driver, HOME).unwrap();
    assert_eq!(again.id(), streams[2].id(), "{what}: one legacy stream");
    let mine = Stream::per_thread(&driver, HOME).unwrap();
    let theirs = std::thread::scope(|scope| {
        scope.spawn(|| Stream::per_thread(&driver, HOME).unwrap().id()).join().unwrap()
    });
    assert!(mine.id() == streams[3].id() && theirs != mine.id(), "{what}: one a thread");
    let elastic = pool.elastic(HOME).capacity_bytes(16 * MIB).build().unwrap();
    elastic.grow_to(8 * MIB).unwrap();
    elastic.write(7 * MIB, b"bytes").unwrap();
    elastic.shrink_to(2 * MIB).unwrap();
    pool.trim(HOME).unwrap();
    pool.verify().unwrap();
    drop((elastic, lanes, streams, again, mine, pool, driver));
    sim.clear_faults();
    sim.check_clean().unwrap_or_else(|left| panic!("{what}: {left}"));
}

#[test]
fn f_h3_a_pool_works_on_a_driver_that_lacks_a_later_call() {
    for lacking in LATER {
        let sim = Sim::builder().build();
        sim.inject(FaultPlan::fail(ResultCode::NOT_FOUND).on(*lacking));
        full_use(&sim, lacking.name());
    }
    let sim = Sim::builder().build();
    for lacking in LATER {
        sim.inject(FaultPlan::fail(ResultCode::NOT_FOUND).on(*lacking));
    }
    full_use(&sim, "all of them");
}

/// Memory is freed in the order of streams, so they have to be told apart: found out at once.
#[test]
fn f_h3_a_driver_that_cannot_tell_streams_apart_is_refused_when_the_pool_is_built() {
    let sim = Sim::builder().driver_version(11_080).build();
    let driver: Arc<dyn Driver> = sim.clone();
    assert!(driver.missing_calls().contains(&Call::StreamGetId));
    let refused = Pool::builder(driver.clone()).background(false).build().unwrap_err();
    let Error::Unsupported { step, cause, .. } = &refused else { panic!("{refused}") };
    assert_eq!((*step, cause.code()), (Call::StreamGetId, ResultCode::NOT_FOUND), "{refused}");
    drop(driver);
    sim.check_clean().unwrap();
}
