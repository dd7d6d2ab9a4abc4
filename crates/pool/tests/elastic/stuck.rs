//! A move whose swap the driver refuses, and whose way back too, while users are held.
use std::time::{Duration, Instant};

use crate::common::elastic::{G, Machine, check_bytes, count, hold, with_host, written};
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
    // It says what the driver refuses.
    let Error::Elastic(ElasticError::Stuck { refused, .. }) = &stuck else { panic!("{stuck}") };
    assert_eq!((refused.call(), refused.code()), (Call::MemMap, ResultCode::UNKNOWN), "{stuck}");
    assert!(stuck.to_string().contains("cuMemMap"), "{stuck}");
    // The contents are kept, and come back when the driver lets them.
    machine.sim.clear_faults();
    check_bytes(&buffer, 2);
    drop((buffer, early, late));
    machine.end();
}

/// A swap fails, and the driver does not even unmap what it brought: those chunks stay where they came
/// to, counted there and nowhere else, and their contents with them. A buffer with chunks of its own, and
/// one whose chunks stand at second addresses too.
#[test]
fn what_the_driver_does_not_take_back_stays_where_it_came_to() {
    let mut stayed = [0; 2];
    let plan = |call, at, times| FaultPlan::fail(ResultCode::UNKNOWN).on(call).at(at).times(times);
    let faults = (4..6).flat_map(|granted| (2..5).map(move |unmapped| (granted, unmapped)));
    for (granted, unmapped) in faults {
        for shared in [false, true] {
            for times in [1, 40] {
                let machine = with_host();
                let stream = machine.stream(0);
                let buffer = written(&machine, 3);
                // So that the pair of devices was tried before.
                buffer.migrate(AWAY).unwrap();
                buffer.migrate(DeviceId(0)).unwrap();
                if shared {
                    buffer.share(G..2 * G, 8 * G).unwrap();
                }
                machine.sim.inject(plan(Call::MemSetAccess, granted, times));
                machine.sim.inject(plan(Call::MemUnmap, unmapped, times));
                let moved = buffer.migrate(AWAY);
                machine.pool.verify().unwrap();
                machine.sim.clear_faults();
                drop(buffer.use_on(&stream).unwrap());
                check_bytes(&buffer, 3);
                let away = count(&buffer, AWAY);
                let all = buffer.pieces().len();
                if moved.is_err() && away > 0 {
                    stayed[usize::from(shared)] += 1;
                }
                let physical = |device| machine.stats(device).elastic_bytes;
                let counted = physical(0) + physical(1);
                let what = format!("{granted} {unmapped} {shared} {times}: {away} of {all}");
                assert_eq!(counted, buffer.stats().physical_bytes, "{what}");
                buffer.migrate(AWAY).unwrap();
                check_bytes(&buffer, 3);
                assert_eq!(count(&buffer, AWAY), all, "{what}");
                drop((buffer, stream));
                for device in [DeviceId(0), AWAY] {
                    machine.pool.trim(device).unwrap();
                    let stats = machine.stats(device.0);
                    assert_eq!(stats.held_bytes, stats.anchor_bytes, "{what}");
                }
                machine.end();
            }
        }
    }
    assert!(stayed[0] > 0 && stayed[1] > 0, "nothing ever stayed: {stayed:?}");
}
