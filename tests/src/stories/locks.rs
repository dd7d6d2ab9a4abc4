//! No lock is held while a thread is at the driver: the lane goes on, and the figures can be read.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use vmm_pool::{Lane, Pool};
use vmm_sys::object::Stream;
use vmm_sys::sim::FaultPlan;
use vmm_sys::{Call, DeviceId};

use super::{G, MIB, builder, clean, lane, machine, stats};
use crate::hold::keep_busy;
use crate::machine::{DriverChoice, Skip};

/// Makes the pool make a call.
type Work = fn(&Pool, &Lane, &Stream);

fn grow(_: &Pool, lane: &Lane, _: &Stream) {
    drop(lane.alloc(40 * MIB).expect("a large request is served"));
}

fn trim(pool: &Pool, _: &Lane, _: &Stream) {
    pool.trim(DeviceId(0)).expect("the device is trimmed");
}

fn trim_behind_work(pool: &Pool, lane: &Lane, other: &Stream) {
    keep_busy(lane.stream(), 1000).expect("the stream is busy");
    trim(pool, lane, other);
}

fn free_crossed(_: &Pool, lane: &Lane, other: &Stream) {
    let mut buffer = lane.alloc(G).expect("a block is served");
    buffer.record_stream(other).expect("the stream is recorded");
    drop(buffer);
}

fn grow_over_limbo(pool: &Pool, lane: &Lane, other: &Stream) {
    free_crossed(pool, lane, other);
    grow(pool, lane, other);
}

const CASES: &[(Call, Work)] = &[
    (Call::MemCreate, grow),
    (Call::MemMap, grow),
    (Call::MemSetAccess, grow),
    (Call::MemUnmap, trim),
    (Call::MemRelease, trim),
    (Call::EventSynchronize, trim_behind_work),
    (Call::EventCreate, free_crossed),
    (Call::EventRecord, free_crossed),
    (Call::StreamGetCaptureInfo, free_crossed),
    (Call::EventQuery, grow_over_limbo),
    (Call::ThreadExchangeStreamCaptureMode, grow_over_limbo),
];

pub(super) fn no_lock_is_held_at_the_driver(choice: DriverChoice) -> Result<(), Skip> {
    for (call, work) in CASES {
        // A busy machine may keep this thread from running for a while: then with more patience.
        let passed = [20, 200, 2000].into_iter().try_fold(false, |passed, delay_ms| {
            Ok(passed || goes_on_during(choice, *call, *work, delay_ms)?)
        })?;
        assert!(passed, "a lock was held during {call}");
    }
    Ok(())
}

/// Whether a lane could be used while another thread's call of it was delayed.
fn goes_on_during(
    choice: DriverChoice,
    call: Call,
    work: Work,
    delay_ms: u64,
) -> Result<bool, Skip> {
    let machine = machine(choice)?;
    let sim = machine.sim()?.clone();
    let pool = builder(&machine).soft_limit(None).build().expect("a pool is built");
    let (lane, other) = (lane(&machine, &pool), machine.stream(0));
    // A block that stays, a warm hole beside it, and a chunk that trim can take.
    let keep = lane.alloc(1000).expect("a small request is served");
    drop(lane.alloc(1000).expect("a small request is served"));
    drop(lane.alloc(4 * G).expect("a block is served"));
    sim.inject(FaultPlan::delay_real(Duration::from_millis(delay_ms)).on(call).once());
    let ended = AtomicBool::new(false);
    let went_on = std::thread::scope(|scope| {
        scope.spawn(|| {
            work(&pool, &lane, &other);
            ended.store(true, Ordering::SeqCst);
        });
        while sim.faults_fired() == 0 && !ended.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        assert_eq!(sim.faults_fired(), 1, "{call} was not made");
        drop(lane.alloc(1000).expect("a warm request is served"));
        assert!(stats(&pool).adds_up());
        !ended.load(Ordering::SeqCst)
    });
    drop((keep, lane, pool, other));
    clean(&machine);
    Ok(went_on)
}
