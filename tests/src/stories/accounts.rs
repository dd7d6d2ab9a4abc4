//! Figures that stay true in rare states.

use std::time::Duration;

use vmm_pool::{ChunkSize, Error, GraphMemory, Hint, Lane};
use vmm_sys::sim::FaultPlan;
use vmm_sys::{Call, CaptureMode, DeviceId, ResultCode};

use super::{G, MIB, builder, clean, lane, machine, pool, sound, stats, write_on};
use crate::machine::{DriverChoice, Skip};

pub(super) fn a_closed_lane_counts_until_its_last_buffer(choice: DriverChoice) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let pool = pool(&machine);
    let stream = machine.stream(0);
    let old = pool.lane(&stream).expect("a lane is opened");
    let buffer = old.alloc(1000).expect("a block is served");
    pool.close_lane(&stream);
    assert!(matches!(old.alloc(1), Err(Error::LaneClosed)));
    // The same stream, a new lane: the old one still has a buffer.
    let new = pool.lane(&stream).expect("a new lane is opened");
    let other = new.alloc(500).expect("a block is served");
    let both = sound(&pool);
    assert_eq!((both.live_bytes, both.buffers, both.lanes), (1500, 2, 2), "{both:?}");
    buffer.write(0, &[1; 1000]).expect("it can still be written");
    drop(buffer);
    let one = sound(&pool);
    assert_eq!((one.live_bytes, one.buffers, one.lanes), (500, 1, 1), "{one:?}");
    assert!(matches!(old.alloc(1), Err(Error::LaneClosed)));
    drop((other, old, new, pool, stream));
    clean(&machine);
    Ok(())
}

pub(super) fn a_chunk_that_was_moved_twice_is_counted_once(
    choice: DriverChoice,
) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let pool = builder(&machine)
        .limit_bytes(3 * G)
        .chunk(ChunkSize::Fixed(G))
        .soft_limit(Some(0.0))
        .build()
        .expect("a pool is built");
    let (one, two) = (lane(&machine, &pool), lane(&machine, &pool));
    let hole = one.alloc(G).expect("a chunk");
    let keep = one.alloc(G).expect("a chunk");
    let hold = machine.hold(one.stream()).expect("the stream is held");
    write_on(one.stream(), &hole, 1);
    drop(hole);
    // The free chunk moves behind the other one: its first place retires.
    let moved = one.alloc(2 * G).expect("a free chunk and a new one");
    assert_eq!(sound(&pool).retired_mappings, 1);
    drop(moved);
    // Its second place retires too, and neither can go yet.
    assert!(two.try_alloc(2 * G).is_err_and(|error| error.is_out_of_memory()));
    let after = sound(&pool);
    assert_eq!((after.held_bytes, after.retired_mappings), (3 * G, 3), "{after:?}");
    hold.release().expect("the held work went well");
    drop(two.alloc(2 * G).expect("once the work is done it can be had"));
    sound(&pool);
    drop((keep, one, two, pool));
    clean(&machine);
    Ok(())
}

pub(super) fn a_lane_that_is_closed_during_a_failure_ends(
    choice: DriverChoice,
) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let sim = machine.sim()?.clone();
    let pool = pool(&machine);
    let lane = lane(&machine, &pool);
    let stream = lane.stream().clone();
    sim.inject(FaultPlan::delay_real(Duration::from_millis(200)).on(Call::MemCreate).once());
    sim.inject(FaultPlan::fail(ResultCode::UNKNOWN).on(Call::MemCreate).once());
    std::thread::scope(|scope| {
        let asking = scope.spawn(move || lane.alloc(1000).map(|_| ()));
        // The thread is inside of the call from when the plans have fired.
        while sim.faults_fired() < 2 {
            std::thread::yield_now();
        }
        pool.close_lane(&stream);
        let answer = asking.join().expect("the asking thread ends");
        assert!(matches!(answer, Err(Error::Driver(_))), "{answer:?}");
    });
    assert_eq!(sound(&pool).lanes, 0, "nobody is left who would end it");
    drop((pool, stream));
    clean(&machine);
    Ok(())
}

/// A free chunk was to move; before its turn another step fails, and its old place is gone by then.
pub(super) fn a_chunk_whose_move_fails_is_not_lost(choice: DriverChoice) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let sim = machine.sim()?.clone();
    let pool = builder(&machine).chunk(ChunkSize::Fixed(G)).soft_limit(Some(0.0));
    let pool = pool.build().expect("a pool is built");
    let lane = lane(&machine, &pool);
    let hole = lane.alloc(G).expect("a chunk");
    let keep = lane.alloc(G).expect("a chunk");
    drop(hole);
    sim.inject(FaultPlan::delay_real(Duration::from_millis(200)).on(Call::MemCreate).once());
    sim.inject(FaultPlan::fail(ResultCode::UNKNOWN).on(Call::MemMap).once());
    std::thread::scope(|scope| {
        // A new chunk, whose mapping fails, and then the free one.
        let asking = scope.spawn(|| lane.alloc(2 * G).map(drop));
        while sim.faults_fired() == 0 {
            std::thread::yield_now();
        }
        // Takes what has passed its gate, the old place, away: its turn at the driver comes between
        // the creation and the mapping.
        pool.trim(DeviceId(0)).expect("the device is trimmed");
        let answer = asking.join().expect("the asking thread ends");
        assert!(matches!(answer, Err(Error::Driver(_))), "{answer:?}");
    });
    sound(&pool);
    pool.trim(DeviceId(0)).expect("the device is trimmed");
    assert_eq!(sound(&pool).held_bytes, G);
    drop((keep, lane, pool));
    clean(&machine);
    Ok(())
}

pub(super) fn stock_that_cannot_be_warmed_is_no_endless_loop(
    choice: DriverChoice,
) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let sim = machine.sim()?.clone();
    let pool = pool(&machine);
    sim.inject(FaultPlan::fail(ResultCode::UNKNOWN).on(Call::MemUnmap));
    let calls = machine.driver().ledger().snapshot();
    let error = pool.prefill(DeviceId(0), 64 * MIB).expect_err("its chunks cannot be used");
    assert!(matches!(error, Error::Driver(_)), "{error}");
    let calls = machine.driver().ledger().snapshot().since(&calls);
    assert!(calls.of(Call::MemCreate) <= 2, "{calls}");
    sound(&pool);
    sim.clear_faults();
    pool.trim(DeviceId(0)).expect("the device is trimmed");
    assert_eq!(sound(&pool).held_bytes, 0);
    // Without its warming a chunk is as good.
    sim.inject(FaultPlan::fail(ResultCode::UNKNOWN).on(Call::MemSetAccess));
    pool.prefill(DeviceId(0), 64 * MIB).expect("stock is made all the same");
    sim.clear_faults();
    assert_eq!(sound(&pool).stock_bytes, 64 * MIB);
    drop(pool);
    clean(&machine);
    Ok(())
}

/// Live 3, idle 2 in two holes of 1, pending 1, kept for a graph 2. Chunks are of two units, so that
/// none is wholly free and could be moved or given back.
pub(super) fn f_k1_the_figures_of_a_shortage_are_exact(choice: DriverChoice) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let pool = builder(&machine)
        .limit_bytes(8 * G)
        .chunk(ChunkSize::Fixed(2 * G))
        .build()
        .expect("a pool is built");
    let lane = lane(&machine, &pool);
    let slow = machine.stream(0);
    let memory = captured(&lane, 2);
    let mut buffers: Vec<_> = (0..6).map(|_| lane.alloc(G).expect("a block is served")).collect();
    let hold = machine.hold(&slow).expect("the stream is held");
    let mut pending = buffers.remove(5);
    pending.record_stream(&slow).expect("the stream is recorded");
    drop(pending);
    drop((buffers.remove(3), buffers.remove(1)));
    let known = sound(&pool);
    assert_eq!((known.live_bytes, known.rounding_bytes, known.idle_bytes), (3 * G, 0, 2 * G));
    assert_eq!((known.limbo_bytes, known.private_bytes), (G, 2 * G));
    assert_eq!((known.held_bytes, known.stock_bytes), (8 * G, 0));

    let free_bytes = || machine.driver().mem_info(DeviceId(0)).map(|info| info.free_bytes);
    let free_before = free_bytes().expect("the device says what is free");
    let error = lane.try_alloc(3 * G).expect_err("two are free, and one pending");
    let free_after = free_bytes().expect("the device says what is free");
    assert!(free_after >= free_before, "the report takes no device memory");
    let text = error.to_string();
    let Error::OutOfMemory(facts) = error else { panic!("{error}") };
    assert_eq!((facts.asked_bytes, facts.rounded_bytes), (3 * G, 3 * G));
    // All but what was tried meanwhile.
    let mut state = known;
    state.ladder = facts.stats.ladder;
    assert_eq!(facts.stats, state, "the figures are those of the state");
    assert!(facts.device_free_bytes.is_some() && facts.device_total_bytes.is_some());
    for number in [facts.asked_bytes, facts.stats.live_bytes, facts.stats.held_bytes, G] {
        assert!(text.contains(&number.to_string()), "{number} is missing in: {text}");
    }
    // What may help here, and nothing that cannot.
    let hints = [
        Hint::RaiseLimit { limit_bytes: 8 * G },
        Hint::SmallerChunks { chunk_bytes: 2 * G },
        Hint::Wait { limbo_bytes: G },
        Hint::DropGraphs { private_bytes: 2 * G },
    ];
    assert_eq!(facts.hints, hints);

    assert_eq!(facts.largest_bytes, Some(G), "{facts}");
    assert!(lane.try_alloc(G + 1).is_err_and(|error| error.is_out_of_memory()));
    drop(lane.try_alloc(G).expect("the largest piece can be had"));
    assert_eq!(stats(&pool).live_bytes, 3 * G);
    hold.release().expect("the held work went well");
    drop([(); 3].map(|()| lane.alloc(G).expect("and the rest once the work is done")));
    drop(memory);
    drop(lane.alloc(2 * G).expect("and what was kept for the graph"));
    sound(&pool);
    drop((buffers, lane, pool, slow));
    clean(&machine);
    Ok(())
}

/// Memory kept for a graph: so many units, given out and taken back while it was captured.
fn captured(lane: &Lane, units: u64) -> GraphMemory {
    let (driver, stream) = (lane.stream().driver(), lane.stream());
    let scope = lane.capture().expect("a scope is opened");
    // SAFETY: the stream is live; the graph is not used afterwards.
    unsafe {
        let mode = CaptureMode::ThreadLocal;
        driver.capture_begin(DeviceId(0), stream.handle(), mode).expect("the capture begins");
        let scratch: Vec<_> =
            (0..units).map(|_| lane.alloc(G).expect("a block is served")).collect();
        drop(scratch);
        let graph = driver.capture_end(DeviceId(0), stream.handle()).expect("it ends well");
        driver.graph_destroy(DeviceId(0), graph).expect("the graph goes");
    }
    scope.finish()
}
