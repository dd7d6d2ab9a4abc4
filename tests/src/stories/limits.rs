//! Limits that hold, that can be reached, and shortages that had to be.

use vmm_pool::{Budget, ChunkSize, Error, Pool};
use vmm_sys::sim::FaultPlan;
use vmm_sys::{Call, DeviceId, ResultCode};

use super::{G, Later, MIB, builder, clean, lane, machine, pool, sound, stats, write_on};
use crate::machine::{DriverChoice, Machine, MachineSpec, Skip};
use crate::rng::Rng;

fn limited(machine: &Machine, limit_bytes: u64) -> Pool {
    builder(machine).limit_bytes(limit_bytes).build().expect("a pool is built")
}

pub(super) fn f_b1_a_the_limit_is_reached_beyond_the_first_stock(
    choice: DriverChoice,
) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let builder = builder(&machine).limit_bytes(8 * G).stock_marks(G, u64::MAX);
    let pool = builder.build().expect("a stock below the limit is made");
    let lane = lane(&machine, &pool);
    let buffer = lane.alloc(8 * G).expect("the limit is reached");
    assert_eq!(sound(&pool).held_bytes, 8 * G);
    drop((buffer, lane, pool));
    clean(&machine);
    Ok(())
}

pub(super) fn f_b1_b_a_limit_that_is_no_multiple_is_rounded_down(
    choice: DriverChoice,
) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let odd = 5 * G + 1;
    let builder = builder(&machine).limit_bytes(odd).stock_marks(odd, u64::MAX);
    let pool = builder.build().expect("equal stock and limit are accepted");
    assert_eq!(sound(&pool).held_bytes, 5 * G);
    let lane = lane(&machine, &pool);
    let buffer = lane.alloc(5 * G).expect("the stock serves all of the limit");
    assert!(lane.alloc(G).is_err_and(|error| error.is_out_of_memory()));
    assert_eq!(sound(&pool).held_bytes, 5 * G);
    drop((buffer, lane, pool));
    clean(&machine);
    Ok(())
}

pub(super) fn f_b1_c_an_odd_stock_leaves_the_limit_usable(
    choice: DriverChoice,
) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let builder = builder(&machine).limit_bytes(64 * G).stock_marks(3 * G + 5, u64::MAX);
    let pool = builder.build().expect("an odd stock is made");
    let lane = lane(&machine, &pool);
    let buffers: Vec<_> =
        (0..8).map(|_| lane.alloc(8 * G).expect("an eighth of the limit")).collect();
    assert_eq!(sound(&pool).held_bytes, 64 * G);
    drop((buffers, lane, pool));
    clean(&machine);
    Ok(())
}

pub(super) fn f_b1_d_a_stock_above_the_limit_is_refused(choice: DriverChoice) -> Result<(), Skip> {
    let machine = machine(choice)?;
    match builder(&machine).limit_bytes(4 * G).stock_marks(4 * G + 1, u64::MAX).build() {
        Err(Error::BadSetting { .. }) => {}
        other => panic!("{other:?}"),
    }
    clean(&machine);
    Ok(())
}

pub(super) fn f_b1_e_the_limit_holds_over_many_rounds(choice: DriverChoice) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let builder = builder(&machine).limit_bytes(8 * G).stock_marks(2 * G, u64::MAX);
    let pool = builder.build().expect("a pool is built");
    let lane = lane(&machine, &pool);
    for round in 0..100 {
        // Lengths that do not fit into each other.
        let buffer = lane.alloc(3 * G + (round % 5) * G).expect("below the limit");
        assert!(sound(&pool).held_bytes <= 8 * G);
        drop(buffer);
    }
    assert!(stats(&pool).peak_held_bytes <= 8 * G);
    drop((lane, pool));
    clean(&machine);
    Ok(())
}

pub(super) fn the_low_mark_stays_below_the_high_mark(choice: DriverChoice) -> Result<(), Skip> {
    let machine = machine(choice)?;
    for (low, high) in [(1, 2 * G), (5 * G, 6 * G), (20 * G, 20 * G), (1, 1), (0, 0)] {
        let pool = builder(&machine).stock_marks(low, high).build().expect("a pool is built");
        let held = sound(&pool).held_bytes;
        // One granule is the least there is.
        assert!(held >= low && held <= high.max(G), "{low}..{high}: {held} held");
        drop(pool);
        clean(&machine);
    }
    Ok(())
}

pub(super) fn f_b3_memory_of_other_streams_is_joined(choice: DriverChoice) -> Result<(), Skip> {
    for streams in [2, 3, 4] {
        let machine = machine(choice)?;
        let pool = limited(&machine, 64 * G);
        let lanes: Vec<_> = (0..streams).map(|_| lane(&machine, &pool)).collect();
        let (last, givers) = lanes.split_last().expect("there are two or three");
        let mut buffers = Vec::new();
        for index in 0..64 {
            // Block by block, in turns.
            let lane = &givers[index % givers.len()];
            buffers.push(lane.alloc(G).expect("a block below the limit"));
        }
        let later = Later::release(&machine, givers[0].stream());
        write_on(givers[0].stream(), &buffers[0], 3);
        drop(buffers);
        let all = last.alloc(64 * G).expect("what other streams freed is joined");
        assert!(later.is_released(), "the work was not waited for");
        later.done();
        assert_eq!(sound(&pool).held_bytes, 64 * G);
        drop((all, lanes, pool));
        clean(&machine);
    }
    Ok(())
}

pub(super) fn f_g1_a_a_pending_free_is_waited_for(choice: DriverChoice) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let pool = limited(&machine, 4 * G);
    let (one, two) = (lane(&machine, &pool), lane(&machine, &pool));
    let keep = one.alloc(G).expect("below the limit");
    let mut pending = one.alloc(3 * G).expect("the rest of the limit");
    let hold = machine.hold(two.stream()).expect("the stream is held");
    write_on(two.stream(), &pending, 9);
    pending.record_stream(two.stream()).expect("the stream is recorded");
    drop(pending);
    assert!(two.try_alloc(3 * G).is_err_and(|error| error.is_out_of_memory()));
    let later = Later::of(hold);
    let buffer = two.alloc(3 * G).expect("one call does it all");
    assert!(later.is_released(), "the work was not waited for");
    later.done();
    assert_eq!(sound(&pool).held_bytes, 4 * G);
    drop((keep, buffer, one, two, pool));
    clean(&machine);
    Ok(())
}

pub(super) fn f_g1_b_fragments_are_given_back(choice: DriverChoice) -> Result<(), Skip> {
    for chunk in [ChunkSize::Auto, ChunkSize::Fixed(32 * MIB), ChunkSize::Fixed(2 * MIB)] {
        let machine = machine(choice)?;
        let builder = builder(&machine).limit_bytes(160 * MIB).chunk(chunk);
        let pool = builder.build().expect("a pool is built");
        let lane = lane(&machine, &pool);
        for bytes in [120 * MIB, 140 * MIB, 100 * MIB, 160 * MIB] {
            drop(lane.alloc(bytes).expect("what was freed is found again"));
            assert!(sound(&pool).peak_held_bytes <= 160 * MIB);
        }
        drop((lane, pool));
        clean(&machine);
    }
    Ok(())
}

pub(super) fn f_g1_c_a_true_shortage_ends(choice: DriverChoice) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let pool = limited(&machine, 4 * G);
    let lane = lane(&machine, &pool);
    let other = machine.stream(0);
    let keep = lane.alloc(2 * G).expect("below the limit");
    let mut pending = lane.alloc(G).expect("below the limit");
    let later = Later::release(&machine, &other);
    pending.record_stream(&other).expect("the stream is recorded");
    drop(pending);
    let calls = machine.driver().ledger().snapshot();
    let error = lane.alloc(3 * G).expect_err("more than there can be");
    assert!(error.is_out_of_memory(), "{error}");
    assert!(later.is_released(), "it gave up before the wait");
    let calls = machine.driver().ledger().snapshot().since(&calls);
    // It waits for the recorded stream, and for the lane's own before its chunks are given back.
    assert!(calls.of(Call::EventSynchronize) <= 2, "{calls}");
    assert!(calls.total() < 100, "{calls}");
    later.done();
    drop(lane.alloc(2 * G).expect("what fits is served after all"));
    sound(&pool);
    drop((keep, lane, pool, other));
    clean(&machine);
    Ok(())
}

pub(super) fn f_g1_d_chunks_of_the_wrong_length_are_given_back(
    choice: DriverChoice,
) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let pool = limited(&machine, 96 * MIB);
    pool.prefill(DeviceId(0), 96 * MIB).expect("three long chunks");
    let lane = lane(&machine, &pool);
    let first = lane.alloc(32 * MIB).expect("a chunk");
    let keep = lane.alloc(32 * MIB).expect("a chunk between");
    let last = lane.alloc(32 * MIB).expect("a chunk");
    drop((first, last));
    // The holes are too short, and their chunks too long for the two missing granules.
    let buffer = lane.alloc(40 * MIB).expect("free chunks are given back and made anew");
    assert!(sound(&pool).peak_held_bytes <= 96 * MIB);
    drop((keep, buffer, lane, pool));
    clean(&machine);
    Ok(())
}

pub(super) fn f_g2_idle_memory_does_not_count_against_the_limit(
    choice: DriverChoice,
) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let pool = limited(&machine, 1024 * MIB);
    let lane = lane(&machine, &pool);
    drop(lane.alloc(512 * MIB).expect("half of the limit"));
    let buffer = lane.alloc(768 * MIB).expect("idle memory is used");
    assert!(sound(&pool).peak_held_bytes <= 1024 * MIB);
    drop((buffer, lane, pool));
    clean(&machine);

    // The same with the memory idle in another pool: they share a budget here, and the device below.
    let budget = Budget::new(1024 * MIB);
    let shared = || builder(&machine).budget(DeviceId(0), budget.clone()).build();
    let pools = [(); 2].map(|()| shared().expect("a pool is built"));
    let lanes = pools.each_ref().map(|pool| super::lane(&machine, pool));
    drop(lanes[0].alloc(1024 * MIB).expect("everything"));
    let buffer = lanes[1].alloc(768 * MIB).expect("the other pool's idle memory serves");
    assert!(budget.booked_bytes() <= 1024 * MIB);
    drop((buffer, lanes, pools));
    assert_eq!(budget.booked_bytes(), 0);
    clean(&machine);

    // The device's own limit: 60 units, then 70, of 80.
    let spec = MachineSpec { device_bytes: Some(80 << 30), ..MachineSpec::default() };
    let machine = Machine::new(choice, spec)?;
    let total = machine.driver().mem_info(DeviceId(0)).map_err(Skip::because)?.free_bytes;
    let unit = total / 80;
    let pool = super::pool(&machine);
    let lane = super::lane(&machine, &pool);
    drop(lane.alloc(60 * unit).expect("60 of 80"));
    drop(lane.alloc(70 * unit).expect("70 of 80"));
    let other = super::pool(&machine);
    let other_lane = super::lane(&machine, &other);
    drop(other_lane.alloc(70 * unit).expect("the first pool holds them, idle"));
    drop((other_lane, other, lane, pool));
    clean(&machine);
    Ok(())
}

pub(super) fn f_g3_failures_under_contention_lose_nothing(
    choice: DriverChoice,
) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let sim = machine.sim()?.clone();
    let limit = 64 * G;
    let pool = limited(&machine, limit);
    let code = ResultCode::OUT_OF_MEMORY;
    sim.inject(FaultPlan::fail(code).on(Call::MemCreate).random(200));
    sim.inject(FaultPlan::fail(ResultCode::UNKNOWN).on(Call::MemMap).random(50));
    std::thread::scope(|scope| {
        for seed in 0..32 {
            let (pool, machine) = (&pool, &machine);
            scope.spawn(move || {
                let lane = lane(machine, pool);
                let mut rng = Rng::new(seed);
                let mut kept = Vec::new();
                for _ in 0..12 {
                    match lane.alloc(limit / 8) {
                        Ok(buffer) => kept.push(buffer),
                        Err(error) if error.is_out_of_memory() => kept.clear(),
                        Err(Error::Driver(error)) => {
                            assert_eq!(error.call(), Call::MemMap, "{error}");
                        }
                        Err(error) => panic!("{error}"),
                    }
                    assert!(stats(pool).held_bytes <= limit);
                    if rng.chance(500) {
                        kept.pop();
                    }
                }
            });
        }
    });
    sim.clear_faults();
    let after = sound(&pool);
    assert_eq!((after.live_bytes, after.buffers), (0, 0));
    assert!(after.peak_held_bytes <= limit, "{after:?}");
    let lane = lane(&machine, &pool);
    let all = lane.alloc(limit).expect("the limit is fully usable again");
    drop((all, lane, pool));
    clean(&machine);
    Ok(())
}

pub(super) fn a_failed_request_leaves_nothing_behind(choice: DriverChoice) -> Result<(), Skip> {
    let spec = MachineSpec { device_bytes: Some(256 * MIB), ..MachineSpec::default() };
    let machine = Machine::new(choice, spec)?;
    let pool = pool(&machine);
    let lane = lane(&machine, &pool);
    let keep = lane.alloc(10 * MIB).expect("a small request is served");
    let held = sound(&pool).held_bytes;
    let error = lane.alloc(300 * MIB).expect_err("more than the device has");
    assert!(error.is_out_of_memory(), "{error}");
    assert!(sound(&pool).held_bytes <= held, "{:?}", stats(&pool));
    // Not for want of memory either.
    let sim = machine.sim()?;
    sim.inject(FaultPlan::fail(ResultCode::UNKNOWN).on(Call::MemMap).at(5).once());
    let error = lane.alloc(100 * MIB).expect_err("the fifth map fails");
    assert!(matches!(error, Error::Driver(_)), "{error}");
    assert!(sound(&pool).held_bytes <= held, "{:?}", stats(&pool));
    drop((keep, lane, pool));
    clean(&machine);
    Ok(())
}

pub(super) fn f_x1_growth_backs_off_to_what_is_missing(choice: DriverChoice) -> Result<(), Skip> {
    for granules in [17, 20, 33] {
        let spec = MachineSpec { device_bytes: Some(granules * G), ..MachineSpec::default() };
        let machine = Machine::new(choice, spec)?;
        let builder = builder(&machine).chunk(ChunkSize::Fixed(32 * MIB));
        let pool = builder.build().expect("a pool is built");
        let lane = lane(&machine, &pool);
        let buffer = lane.alloc(granules * G).expect("all that the device has");
        assert_eq!(sound(&pool).held_bytes, granules * G);
        drop((buffer, lane, pool));
        clean(&machine);
    }
    // Two of 8 GiB on 32, by chunks of 16 and as the pool chooses.
    for chunk in [ChunkSize::Fixed(16 << 30), ChunkSize::Auto] {
        let spec = MachineSpec { device_bytes: Some(32 << 30), ..MachineSpec::default() };
        let machine = Machine::new(choice, spec)?;
        let pool = builder(&machine).chunk(chunk).build().expect("a pool is built");
        let lane = lane(&machine, &pool);
        let first = lane.alloc(8 << 30).expect("a quarter of the device");
        let second = lane.alloc(8 << 30).expect("a quarter of the device");
        assert!(sound(&pool).held_bytes <= 32 << 30);
        drop((first, second, lane, pool));
        clean(&machine);
    }
    Ok(())
}
