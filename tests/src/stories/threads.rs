//! Many host threads: one lane, many lanes, buffers that travel, limits under contention.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, mpsc};
use std::time::{Duration, Instant};

use vmm_pool::{Buffer, Lane, Pool, Request};
use vmm_sys::object::Stream;
use vmm_sys::sim::FaultPlan;
use vmm_sys::{Call, DeviceId};

use super::{G, MIB, builder, clean, lane, machine, sound, stats};
use crate::contents::Contents;
use crate::hold::keep_busy;
use crate::machine::{DriverChoice, Machine, Skip};
use crate::memory::Memory;
use crate::rng::Rng;
use crate::shadow::{Owner, Shadow};

const THREADS: u64 = 8;

/// What threads have in hand, all of them together, and the contents of it.
#[derive(Default)]
struct Ledger(Mutex<(Shadow, u64)>);

impl Ledger {
    /// Notes a buffer, and writes its contents.
    fn note(&self, buffer: Buffer) -> Held {
        let bytes = buffer.bytes();
        let number = {
            let mut ledger = self.0.lock().expect("no thread panicked");
            ledger.1 += 1;
            let owner = Owner::Live(ledger.1 as u32);
            ledger.0.insert(buffer.address(), bytes, owner).expect("no two overlap");
            ledger.1
        };
        let contents = Contents { number, bytes };
        let memory = Memory::Buffer(buffer);
        contents.write(&memory).expect("live memory can be written");
        Held { memory, contents }
    }

    /// Checks the contents and drops the buffer.
    fn give_back(&self, held: Held) {
        held.contents.check(&held.memory).expect("contents stay");
        // Before the drop: another thread may have the memory the next moment.
        let mut ledger = self.0.lock().expect("no thread panicked");
        ledger.0.remove(held.memory.address()).expect("it was noted");
        drop(ledger);
        drop(held.memory);
    }
}

struct Held {
    memory: Memory,
    contents: Contents,
}

fn random_bytes(rng: &mut Rng) -> u64 {
    1 + match rng.below(10) {
        0..6 => rng.below(64 << 10),
        6..9 => rng.below(3 * MIB),
        _ => rng.below(20 * MIB),
    }
}

/// A thread's part: asks and frees at random, and is content with a refusal for want of memory.
/// Now and then a second stream uses the memory, and is not done when it is freed.
fn churn(lane: &Lane, ledger: &Ledger, seed: u64, steps: u64, wait: bool) -> u64 {
    let mut rng = Rng::new(seed);
    let driver = lane.stream().driver();
    let other = Stream::create(driver, lane.device()).expect("a stream is made");
    let mut kept: Vec<Held> = Vec::new();
    let mut served = 0;
    for _ in 0..steps {
        if kept.len() > 20 || rng.chance(400) {
            if !kept.is_empty() {
                let index = rng.below(kept.len() as u64) as usize;
                ledger.give_back(kept.swap_remove(index));
            }
            continue;
        }
        let request = Request::new(random_bytes(&mut rng));
        match lane.alloc_with(&if wait { request } else { request.no_wait() }) {
            Ok(buffer) => {
                served += 1;
                let mut held = ledger.note(buffer);
                if rng.chance(200) {
                    keep_busy(&other, 1 + rng.below(100)).expect("the stream is busy");
                    held.contents.enqueue(&held.memory, &other).expect("work is enqueued");
                    held.memory.record_stream(&other).expect("the stream is recorded");
                }
                kept.push(held);
            }
            Err(error) if error.is_out_of_memory() => {
                if let Some(held) = kept.pop() {
                    ledger.give_back(held);
                }
            }
            Err(error) => panic!("seed {seed}: {error}"),
        }
    }
    kept.into_iter().for_each(|held| ledger.give_back(held));
    // A fault of its work would show here.
    other.synchronize().expect("no work met memory that was gone");
    served
}

fn threaded(machine: &Machine) -> Pool {
    builder(machine).background(true).build().expect("a pool is built")
}

fn ended(machine: &Machine, pool: Pool, lanes: Vec<Lane>) {
    let after = sound(&pool);
    assert_eq!((after.live_bytes, after.buffers), (0, 0), "{after:?}");
    drop(lanes);
    drop(pool);
    clean(machine);
}

pub(super) fn many_threads_share_a_lane(choice: DriverChoice) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let pool = threaded(&machine);
    let lane = lane(&machine, &pool);
    let ledger = Ledger::default();
    std::thread::scope(|scope| {
        for seed in 0..THREADS {
            let (lane, ledger) = (&lane, &ledger);
            scope.spawn(move || assert!(churn(lane, ledger, seed, 400, true) > 100));
        }
    });
    ended(&machine, pool, vec![lane]);
    Ok(())
}

pub(super) fn many_lanes_grow_at_once(choice: DriverChoice) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let pool = threaded(&machine);
    let lanes: Vec<_> = (0..THREADS).map(|_| lane(&machine, &pool)).collect();
    let ledger = Ledger::default();
    std::thread::scope(|scope| {
        for (seed, lane) in (100..).zip(&lanes) {
            let ledger = &ledger;
            scope.spawn(move || assert!(churn(lane, ledger, seed, 400, true) > 100));
        }
    });
    ended(&machine, pool, lanes);
    Ok(())
}

pub(super) fn buffers_travel_to_other_threads(choice: DriverChoice) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let pool = threaded(&machine);
    let lanes: Vec<_> = (0..3).map(|_| lane(&machine, &pool)).collect();
    let ledger = Ledger::default();
    let (send, receive) = mpsc::sync_channel::<Held>(64);
    let receive = Mutex::new(receive);
    std::thread::scope(|scope| {
        for (seed, lane) in (0..).zip(&lanes) {
            let (send, ledger) = (send.clone(), &ledger);
            scope.spawn(move || {
                let mut rng = Rng::new(seed);
                for _ in 0..300 {
                    let buffer = lane.alloc(random_bytes(&mut rng)).expect("memory is not short");
                    send.send(ledger.note(buffer)).expect("somebody receives");
                }
            });
        }
        drop(send);
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let next = receive.lock().expect("no thread panicked").recv();
                    match next {
                        Ok(held) => ledger.give_back(held),
                        Err(_) => return,
                    }
                }
            });
        }
    });
    ended(&machine, pool, lanes);
    Ok(())
}

pub(super) fn limits_hold_under_contention(choice: DriverChoice) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let limit = 32 * G + 1;
    for wait in [true, false] {
        let pool = builder(&machine).limit_bytes(limit).build().expect("a pool is built");
        let lanes: Vec<_> = (0..THREADS).map(|_| lane(&machine, &pool)).collect();
        let ledger = Ledger::default();
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let sampler = scope.spawn(|| {
                let mut samples = 0_u64;
                while !done.load(Ordering::Relaxed) {
                    let now = stats(&pool);
                    assert!(now.held_bytes <= limit && now.adds_up(), "{now:?}");
                    samples += 1;
                }
                samples
            });
            let churning: Vec<_> = (200..)
                .zip(&lanes)
                .map(|(seed, lane)| {
                    let ledger = &ledger;
                    scope.spawn(move || churn(lane, ledger, seed, 300, wait))
                })
                .collect();
            let ends: Vec<_> = churning.into_iter().map(|thread| thread.join()).collect();
            done.store(true, Ordering::Relaxed);
            assert!(sampler.join().expect("no sample was wrong") > 0);
            let served: u64 = ends.into_iter().map(|end| end.expect("no thread failed")).sum();
            assert!(served > 100, "{served} served");
        });
        // All of it can be had by one.
        let all = lanes[0].alloc(32 * G).expect("the limit is fully usable again");
        drop(all);
        ended(&machine, pool, lanes);
    }
    Ok(())
}

pub(super) fn lanes_open_and_close_under_way(choice: DriverChoice) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let pool = threaded(&machine);
    let ledger = Ledger::default();
    std::thread::scope(|scope| {
        for seed in 300..300 + THREADS {
            let (machine, pool, ledger) = (&machine, &pool, &ledger);
            scope.spawn(move || {
                let mut rng = Rng::new(seed);
                for _ in 0..25 {
                    let lane = lane(machine, pool);
                    let mut kept = Vec::new();
                    for _ in 0..rng.below(8) {
                        let buffer = lane.alloc(random_bytes(&mut rng));
                        kept.push(ledger.note(buffer.expect("memory is not short")));
                    }
                    match rng.below(4) {
                        0 => assert!(pool.close_lane(lane.stream()), "it is owned"),
                        1 => drop(pool.trim(DeviceId(0)).expect("the device is trimmed")),
                        2 => pool.verify().expect("the walker finds nothing"),
                        _ => {}
                    }
                    kept.into_iter().for_each(|held| ledger.give_back(held));
                    pool.close_lane(lane.stream());
                }
            });
        }
    });
    assert_eq!(sound(&pool).lanes, 0);
    ended(&machine, pool, Vec::new());
    Ok(())
}

pub(super) fn figures_and_walker_hold_under_way(choice: DriverChoice) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let pool = builder(&machine)
        .background(true)
        .soft_limit(Some(0.0))
        .stock_marks(40 * MIB, 80 * MIB)
        .build()
        .expect("a pool is built");
    let lanes: Vec<_> = (0..3).map(|_| lane(&machine, &pool)).collect();
    let ledger = Ledger::default();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let walker = scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                pool.verify().expect("the walker finds nothing");
                assert!(stats(&pool).adds_up());
                pool.trim(DeviceId(0)).expect("the device is trimmed");
            }
        });
        let churning: Vec<_> = (400..)
            .zip(&lanes)
            .map(|(seed, lane)| {
                let ledger = &ledger;
                scope.spawn(move || churn(lane, ledger, seed, 300, true))
            })
            .collect();
        let ends: Vec<_> = churning.into_iter().map(|thread| thread.join()).collect();
        done.store(true, Ordering::Relaxed);
        walker.join().expect("the walker found nothing");
        ends.into_iter().for_each(|end| assert!(end.expect("no thread failed") > 50));
    });
    ended(&machine, pool, lanes);
    Ok(())
}

/// The background thread is stopped inside of each call that it makes, and the walker looks.
pub(super) fn the_walker_is_right_at_every_call_of_the_thread(
    choice: DriverChoice,
) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let sim = machine.sim()?.clone();
    let calls = [
        Call::MemCreate,
        Call::MemAddressReserve,
        Call::MemMap,
        Call::MemSetAccess,
        Call::MemUnmap,
        Call::MemAddressFree,
        Call::MemRelease,
        Call::EventRecord,
        Call::EventQuery,
    ];
    for call in calls {
        let pool = builder(&machine)
            .background(true)
            .soft_limit(Some(0.0))
            .stock_marks(6 * MIB, 6 * MIB)
            .build()
            .expect("a pool is built");
        let (one, two) = (lane(&machine, &pool), lane(&machine, &pool));
        let before = sim.faults_fired();
        let delay = Duration::from_millis(4);
        sim.inject(FaultPlan::delay_real(delay).on(call).times(5));
        let begun = Instant::now();
        while sim.faults_fired() < before + 5 && begun.elapsed() < Duration::from_secs(10) {
            // Work for the thread: memory that waits, old places, more than the shelf may hold.
            let mut crossed = one.alloc(3 * MIB).expect("memory is served");
            crossed.record_stream(two.stream()).expect("the stream is recorded");
            let pair = (one.alloc(2 * MIB), one.alloc(2 * MIB));
            drop(pair.0.expect("memory is served"));
            drop(one.alloc(5 * MIB).expect("memory is served"));
            drop((crossed, pair.1));
            let walking = Instant::now();
            while walking.elapsed() < Duration::from_millis(3) {
                pool.verify().unwrap_or_else(|text| panic!("{call}: {text}"));
                assert!(stats(&pool).adds_up());
            }
            pool.trim(DeviceId(0)).expect("the device is trimmed");
        }
        assert_eq!(sim.faults_fired(), before + 5, "{call} is hardly made");
        drop((one, two, pool));
        clean(&machine);
    }
    Ok(())
}
