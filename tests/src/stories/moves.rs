//! Elastic memory that moves, sleeps and wakes under an address that stays.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use vmm_pool::{Buffer, Contents, ElasticBuffer, ElasticError, Error, MigrationState, Move, Place};
use vmm_pool::{Pool, PoolBuilder};
use vmm_sys::object::Stream;
use vmm_sys::{Access, DeviceId, ProbeKernel};

use super::elastic::{capture_fill, elastic, fill, holds, launch, replay, two_devices};
use super::{G, builder, clean, sound};
use crate::machine::{DriverChoice, Machine, MachineSpec, Skip};

const HOME: DeviceId = DeviceId(0);
const AWAY: DeviceId = DeviceId(1);
const HOST: Place = Place::HostNuma(0);
const LONG: Duration = Duration::from_secs(20);
const CHUNKS: u64 = 4;

/// Two devices, and a pool with other settings over both.
pub(super) fn pool_of_two(
    choice: DriverChoice,
    settings: impl FnOnce(PoolBuilder) -> PoolBuilder,
) -> Result<(Machine, Pool), Skip> {
    let machine = Machine::new(choice, MachineSpec { devices: 2, ..MachineSpec::default() })?;
    let builder = builder(&machine).device(HOME).device(AWAY);
    let pool = settings(builder).build().map_err(Skip::because)?;
    Ok((machine, pool))
}

/// A buffer whose chunks are full of words of their own, and which both devices may use.
fn written(pool: &Pool, stream: &Stream) -> Result<ElasticBuffer, Skip> {
    let buffer = elastic(pool, 64 * G);
    buffer.grow_to(CHUNKS * G).expect("it grows");
    buffer.grant(AWAY, Access::ReadWrite).map_err(Skip::because)?;
    for chunk in 0..CHUNKS {
        fill(&buffer, stream, chunk * G, first_word(chunk));
    }
    stream.synchronize().expect("the kernels are done");
    Ok(buffer)
}

fn first_word(chunk: u64) -> u32 {
    0x4000_0000 + 0x0100_0001 * chunk as u32
}

fn is_whole(buffer: &ElasticBuffer) -> bool {
    let right = |device| (0..CHUNKS).all(|it| holds(buffer, device, it * G, first_word(it)));
    right(HOME) && right(AWAY)
}

fn places(buffer: &ElasticBuffer) -> Vec<Place> {
    buffer.pieces().iter().map(|piece| piece.place).collect()
}

/// Physical memory that the driver has given out on a device.
fn taken(machine: &Machine, device: DeviceId) -> u64 {
    let info = machine.driver().mem_info(device).expect("the driver says what is free");
    info.total_bytes - info.free_bytes
}

pub(super) fn a_move_keeps_the_address_and_every_byte(choice: DriverChoice) -> Result<(), Skip> {
    let (machine, pool) = two_devices(choice)?;
    let stream = machine.stream(0);
    let buffer = written(&pool, &stream)?;
    let address = buffer.address();
    for round in 0..4 {
        let to = if round % 2 == 0 { AWAY } else { HOME };
        let moved = buffer.migrate(to).expect("it moves");
        assert_eq!(moved.bytes, CHUNKS * G);
        assert_eq!((buffer.address(), buffer.device()), (address, to));
        assert_eq!(places(&buffer), [Place::Device(to); CHUNKS as usize]);
        assert!(is_whole(&buffer), "round {round}");
        pool.verify().expect("the walker finds nothing");
    }
    // A part, and then the rest.
    buffer.migrate(Move::to(AWAY).range(G..3 * G)).expect("a part moves");
    assert_eq!(places(&buffer), [HOME.into(), AWAY.into(), AWAY.into(), Place::Device(HOME)]);
    assert!(is_whole(&buffer));
    buffer.migrate(HOME).expect("it comes back");
    assert!(is_whole(&buffer));
    drop((buffer, pool, stream));
    clean(&machine);
    Ok(())
}

pub(super) fn a_move_to_the_host_and_back_keeps_every_byte(
    choice: DriverChoice,
) -> Result<(), Skip> {
    let (machine, pool) = pool_of_two(choice, |pool| pool.host_memory(0, 64 * G, 0))?;
    let stream = machine.stream(0);
    let buffer = written(&pool, &stream)?;
    for (to, place) in [(HOST, HOST), (HOME.into(), Place::Device(HOME))] {
        buffer.migrate(to).expect("it moves");
        assert_eq!(places(&buffer), [place; CHUNKS as usize]);
        assert!(is_whole(&buffer), "on {place}");
        // And it can be written there.
        fill(&buffer, &stream, G, first_word(1));
        stream.synchronize().expect("no fault");
        pool.verify().expect("the walker finds nothing");
    }
    assert!(is_whole(&buffer));
    drop((buffer, pool, stream));
    clean(&machine);
    Ok(())
}

pub(super) fn graphs_follow_moves(choice: DriverChoice) -> Result<(), Skip> {
    let (machine, pool) = two_devices(choice)?;
    let stream = machine.stream(0);
    let buffer = written(&pool, &stream)?;
    let graph = capture_fill(&stream, buffer.address() + G, 5);
    for (round, to) in [AWAY, HOME, AWAY].into_iter().enumerate() {
        let migration = buffer.migrate_async(to).expect("it is asked for");
        // Enqueued while the memory is on its way, or before, or after.
        replay(&buffer, &stream, graph);
        let state = migration.wait(LONG);
        assert!(matches!(state, MigrationState::Done(_)), "{state:?}");
        stream.synchronize().expect("no fault");
        assert!(holds(&buffer, HOME, G, 5), "round {round}");
        fill(&buffer, &stream, G, 77);
        replay(&buffer, &stream, graph);
        stream.synchronize().expect("no fault");
        assert!(holds(&buffer, AWAY, G, 5), "round {round}");
        assert!(holds(&buffer, AWAY, 0, first_word(0)), "round {round}");
    }
    // SAFETY: the executable is live, done, and not used afterwards.
    unsafe { machine.driver().graph_exec_destroy(HOME, graph) }.expect("the graph goes");
    drop((buffer, pool, stream));
    clean(&machine);
    Ok(())
}

/// What the threads of the next story do, each with a stream and words of its own.
struct Worker {
    stream: Stream,
    /// Counts words that were not as they should be.
    wrong: Buffer,
    offset: u64,
}

/// Words of each worker.
const WORDS: u64 = 2048;
const WORKERS: u64 = 4;
const MOVES: u32 = 1000;
/// However slow the machine is.
const MOVES_MIN: u32 = 4;
/// Moves go on for so long at most; on the simulated device a copy costs the host's time.
const BUSY: Duration = Duration::from_secs(8);
const BUSY_ON_SIM: Duration = Duration::from_secs(2);

impl Worker {
    /// Looks whether its words of the last time are there, and writes others; again and again.
    fn work(&self, buffer: &ElasticBuffer, over: &AtomicBool) -> u32 {
        let (dst, words) = (buffer.address() + self.offset, WORDS);
        let errors = self.wrong.address();
        let mut value = 0;
        while !over.load(Ordering::Relaxed) {
            {
                let _using = buffer.use_on(&self.stream).expect("it may be used");
                launch(&self.stream, &ProbeKernel::CheckWords { src: dst, words, value, errors });
            }
            value += 1;
            {
                let _using = buffer.use_on(&self.stream).expect("it may be used");
                launch(&self.stream, &ProbeKernel::FillWords { dst, words, value });
            }
            if value % 16 == 0 {
                self.stream.synchronize().expect("no fault");
            }
        }
        self.stream.synchronize().expect("no fault");
        value
    }
}

pub(super) fn many_moves_under_load_lose_nothing(choice: DriverChoice) -> Result<(), Skip> {
    let (machine, pool) = two_devices(choice)?;
    let first = machine.stream(0);
    let buffer = written(&pool, &first)?;
    let worker = |index: u64| {
        let stream = machine.stream((index % 2) as u32);
        let wrong = pool.lane(&stream).and_then(|lane| lane.alloc(4)).expect("memory for a word");
        wrong.write(0, &[0; 4]).expect("live memory can be written");
        // Each in a chunk of its own, at its end.
        Worker { stream, wrong, offset: (index + 1) * G - 4 * WORDS }
    };
    let workers: Vec<Worker> = (0..WORKERS).map(worker).collect();
    for worker in &workers {
        let _using = buffer.use_on(&worker.stream).expect("it may be used");
        let dst = buffer.address() + worker.offset;
        launch(&worker.stream, &ProbeKernel::FillWords { dst, words: WORDS, value: 0 });
    }
    let over = AtomicBool::new(false);
    let busy = if choice == DriverChoice::Sim { BUSY_ON_SIM } else { BUSY };
    let moves = std::thread::scope(|scope| {
        let threads: Vec<_> =
            workers.iter().map(|worker| scope.spawn(|| worker.work(&buffer, &over))).collect();
        let moves = move_about(&buffer, busy);
        over.store(true, Ordering::Relaxed);
        let rounds: Vec<u32> =
            threads.into_iter().map(|thread| thread.join().expect("no worker failed")).collect();
        assert!(rounds.iter().all(|rounds| *rounds > 0), "{rounds:?}");
        moves
    });
    for (index, worker) in workers.iter().enumerate() {
        let mut wrong = [0; 4];
        worker.wrong.read(0, &mut wrong).expect("live memory can be read");
        assert_eq!(u32::from_le_bytes(wrong), 0, "wrong words of worker {index}, {moves} moves");
    }
    // Nobody wrote the beginning of a chunk after the first time.
    let mut found = [0; 4096];
    for chunk in 0..CHUNKS {
        buffer.read(chunk * G, &mut found).expect("committed memory can be read");
        let words =
            found.chunks_exact(4).map(|it| u32::from_le_bytes([it[0], it[1], it[2], it[3]]));
        assert!(words.eq(first_word(chunk)..first_word(chunk) + 1024), "chunk {chunk}");
    }
    pool.verify().expect("the walker finds nothing");
    drop((workers, buffer, pool, first));
    clean(&machine);
    Ok(())
}

/// Moves the buffer to and fro, now and in the background by turns. How often.
fn move_about(buffer: &ElasticBuffer, busy: Duration) -> u32 {
    let begun = Instant::now();
    let mut moves = 0;
    while moves < MOVES && (moves < MOVES_MIN || begun.elapsed() < busy) {
        let to = if moves % 2 == 0 { AWAY } else { HOME };
        let order = Move::to(to).patience(LONG);
        if moves % 3 == 0 {
            let state = buffer.migrate_async(order).expect("it is asked for").wait(LONG);
            assert!(matches!(state, MigrationState::Done(_)), "{state:?}");
        } else {
            buffer.migrate(order).expect("it moves");
        }
        moves += 1;
    }
    moves
}

pub(super) fn a_move_beyond_a_limit_changes_nothing(choice: DriverChoice) -> Result<(), Skip> {
    let (machine, pool) = pool_of_two(choice, |pool| pool.limit_bytes((CHUNKS + 2) * G))?;
    let stream = machine.stream(0);
    let buffer = written(&pool, &stream)?;
    let other = pool.elastic(AWAY).capacity_bytes(8 * G).chunk_bytes(G).quota_bytes(3 * G);
    let other = other.build().expect("addresses are reserved");
    other.grow_to(3 * G).expect("there is room");
    let before = (buffer.pieces(), buffer.generation(), buffer.device());
    let error = buffer.migrate(AWAY).expect_err("there is no room for all of it");
    assert!(error.is_out_of_memory(), "{error}");
    assert_eq!((buffer.pieces(), buffer.generation(), buffer.device()), before);
    assert!(is_whole(&buffer));
    let error = other.grow_to(4 * G).expect_err("that is beyond the quota");
    assert!(matches!(error, Error::Elastic(ElasticError::OverQuota { .. })), "{error}");
    assert_eq!(other.committed_bytes(), 3 * G);
    sound(&pool);
    drop(other);
    buffer.migrate(AWAY).expect("now there is");
    assert!(is_whole(&buffer));
    drop((buffer, pool, stream));
    clean(&machine);
    Ok(())
}

pub(super) fn sleep_gives_memory_back_and_waking_brings_it(
    choice: DriverChoice,
) -> Result<(), Skip> {
    let (machine, pool) = pool_of_two(choice, |pool| pool.host_memory(0, 64 * G, 0))?;
    let stream = machine.stream(0);
    let tagged = pool.elastic(HOME).capacity_bytes(64 * G).chunk_bytes(G).tag("model");
    let buffer = tagged.build().expect("addresses are reserved");
    buffer.grow_to(CHUNKS * G).expect("it grows");
    buffer.grant(AWAY, Access::ReadWrite).map_err(Skip::because)?;
    let address = buffer.address();
    for contents in [Contents::Kept { node: 0 }, Contents::Dropped] {
        for chunk in 0..CHUNKS {
            fill(&buffer, &stream, chunk * G, first_word(chunk));
        }
        let before = taken(&machine, HOME);
        let slept = pool.sleep("model", contents, Duration::ZERO).expect("it falls asleep");
        assert_eq!((slept.buffers, slept.bytes), (1, CHUNKS * G));
        assert!(taken(&machine, HOME) + CHUNKS * G <= before, "{contents:?}");
        let refused = buffer.use_on(&stream);
        assert!(matches!(refused, Err(Error::Elastic(ElasticError::Asleep))), "{refused:?}");
        let woken = pool.wake("model").expect("it wakes");
        assert_eq!((woken.buffers, woken.bytes), (1, CHUNKS * G));
        assert_eq!((buffer.address(), buffer.committed_bytes()), (address, CHUNKS * G));
        assert!(contents == Contents::Dropped || is_whole(&buffer));
        pool.verify().expect("the walker finds nothing");
    }
    fill(&buffer, &stream, 0, 9);
    stream.synchronize().expect("no fault");
    assert!(holds(&buffer, HOME, 0, 9));
    drop((buffer, pool, stream));
    clean(&machine);
    Ok(())
}
