//! A move whose swap the driver refuses, and whose way back too, while users are held.
use std::time::{Duration, Instant};

use crate::common::elastic::{G, Machine, hold, with_host, written};
use vmm_pool::{ElasticBuffer, ElasticError, Error, Migration, MigrationState};
use vmm_sys::object::Stream;
use vmm_sys::sim::FaultPlan;
use vmm_sys::{Call, DeviceId, ProbeKernel, ResultCode};

const LONG: Duration = Duration::from_secs(20);
const AWAY: DeviceId = DeviceId(1);

fn fill(machine: &Machine, stream: &Stream, address: u64, value: u32) {
    let kernel = ProbeKernel::FillWords { dst: address, words: 4, value };
    // SAFETY: a live stream, and an address of the pool.
    unsafe { machine.driver.launch(stream.device(), &kernel, stream.handle()) }.unwrap();
}

/// A move that waits for `early`, with the door held: from then on uses are let in.
fn begin(machine: &Machine, buffer: &ElasticBuffer, early: &Stream) -> Migration {
    drop(buffer.use_on(early).unwrap());
    let waits = || machine.driver.ledger().snapshot().of(Call::StreamWaitEvent);
    let before = waits();
    let migration = buffer.migrate_async(AWAY).unwrap();
    while waits() == before {
        std::thread::yield_now();
    }
    migration
}

#[test]
fn what_is_held_goes_on_only_when_the_memory_is_back() {
    for (call, times) in [(Call::MemMap, 4), (Call::MemSetAccess, 3)] {
        let machine = with_host();
        let (early, late) = (machine.stream(0), machine.stream(0));
        let buffer = written(&machine, 2);
        buffer.migrate(AWAY).unwrap();
        buffer.migrate(DeviceId(0)).unwrap();
        let held = hold(&machine, &early);
        let migration = begin(&machine, &buffer, &early);
        {
            let _using = buffer.use_on(&late).unwrap();
            fill(&machine, &late, buffer.address() + G, 7);
        }
        // The swap, and the first ways back.
        machine.sim.inject(FaultPlan::fail(ResultCode::UNKNOWN).on(call).times(times));
        drop(held);
        assert!(matches!(migration.wait(LONG), MigrationState::Failed(_)));
        late.synchronize().unwrap();
        let mut found = [0; 4];
        buffer.read(G, &mut found).unwrap();
        assert_eq!(u32::from_le_bytes(found), 7, "{call:?}");
        machine.sim.clear_faults();
        buffer.migrate(AWAY).unwrap();
        drop((buffer, early, late));
        machine.end();
    }
}

#[test]
fn the_latch_opens_in_bounded_time_whatever_the_driver_refuses() {
    let machine = with_host();
    let (early, late) = (machine.stream(0), machine.stream(0));
    let buffer = written(&machine, 2);
    buffer.migrate(AWAY).unwrap();
    buffer.migrate(DeviceId(0)).unwrap();
    let held = hold(&machine, &early);
    let migration = begin(&machine, &buffer, &early);
    // Held, though it enqueues nothing.
    drop(buffer.use_on(&late).unwrap());
    machine.sim.inject(FaultPlan::fail(ResultCode::UNKNOWN).on(Call::MemMap));
    let begun = Instant::now();
    drop(held);
    assert!(matches!(migration.wait(LONG), MigrationState::Failed(_)));
    late.synchronize().unwrap();
    assert!(begun.elapsed() < LONG / 4, "{:?}", begun.elapsed());
    let stuck = buffer.use_on(&late).unwrap_err();
    assert!(matches!(stuck, Error::Elastic(ElasticError::Stuck { .. })), "{stuck}");
    // The contents are kept, and come back when the driver lets them.
    machine.sim.clear_faults();
    crate::common::elastic::check_bytes(&buffer, 2);
    drop((buffer, early, late));
    machine.end();
}
