//! Long loops: what is held, reserved and called stays the same.

use vmm_sys::{Call, CallCounts, DeviceId};

use super::{G, MIB, builder, clean, lane, machine, pool, sound, stats};
use crate::machine::{DriverChoice, Skip};

pub(super) fn f_b5_a_loop_reaches_a_plateau(choice: DriverChoice) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let pool = pool(&machine);
    let lane = lane(&machine, &pool);
    let mut held_early = 0;
    let mut work: Vec<CallCounts> = Vec::new();
    let mut calls = machine.driver().ledger().snapshot();
    // 7 x 1430 rounds, trimmed every 7th.
    for round in 1..=10_010 {
        let buffer = lane.alloc(3_612_672).expect("the same request is served");
        buffer.write(0, &[7; 4096]).expect("bytes are copied in");
        drop(buffer);
        if round == 10_000 {
            assert_eq!(stats(&pool).held_bytes, held_early, "round {round}");
        }
        if round == 10 {
            held_early = stats(&pool).held_bytes;
        }
        if round % 7 == 0 {
            pool.trim(DeviceId(0)).expect("the device is trimmed");
        }
        if round % 1001 == 0 {
            let now = machine.driver().ledger().snapshot();
            work.push(now.since(&calls));
            calls = now;
        }
        // As after round 10, three after a trim.
        if round % 7 == 3 && round > 10 {
            assert_eq!(stats(&pool).held_bytes, held_early, "round {round}");
        }
    }
    let later: Vec<u64> = work.iter().skip(1).map(CallCounts::total).collect();
    assert!(later.windows(2).all(|two| two[0] == two[1]), "calls a thousand rounds: {later:?}");
    pool.trim(DeviceId(0)).expect("the device is trimmed");
    assert_eq!(sound(&pool).held_bytes, 0);
    drop((lane, pool));
    clean(&machine);
    Ok(())
}

pub(super) fn f_e3_everything_comes_back(choice: DriverChoice) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let pool = pool(&machine);
    let lane = lane(&machine, &pool);
    // What the driver keeps for itself after a first mapping is not the pool's.
    drop(lane.alloc(64 * MIB).expect("a first one"));
    pool.trim(DeviceId(0)).expect("the device is trimmed");
    let free_bytes = || machine.driver().mem_info(DeviceId(0)).map(|info| info.free_bytes);
    let free_before = free_bytes().expect("the device says what is free");
    for _ in 0..64 {
        drop(lane.alloc(64 * MIB).expect("one after another"));
    }
    let all: Vec<_> =
        (0..64).map(|_| lane.alloc(64 * MIB).expect("all at the same time")).collect();
    drop(all);
    pool.trim(DeviceId(0)).expect("the device is trimmed");
    let after = sound(&pool);
    assert_eq!((after.held_bytes, after.live_bytes, after.retired_mappings), (0, 0, 0));
    let free_after = free_bytes().expect("the device says what is free");
    assert!(free_after + G > free_before, "free {free_before} before, {free_after} after");
    if let Ok(sim) = machine.sim() {
        let left = sim.ledger_summary();
        assert_eq!((left.handles, left.handle_references, left.mappings), (0, 0, 0), "{left:?}");
    }
    // The lane keeps its addresses, which cost nothing, until it goes.
    drop((lane, pool));
    if let Ok(sim) = machine.sim() {
        assert_eq!(sim.ledger_summary().ranges, 0);
    }
    clean(&machine);
    Ok(())
}

pub(super) fn f_x12_addresses_do_not_creep(choice: DriverChoice) -> Result<(), Skip> {
    let machine = machine(choice)?;
    // Chunks move at each growth, so addresses are used up and given back all the time.
    let pool = builder(&machine).soft_limit(Some(0.0)).build().expect("a pool is built");
    let lane = lane(&machine, &pool);
    let mut reserved = 0;
    for round in 0..creep_rounds() {
        let keep = lane.alloc(G + round % 7).expect("a block is served");
        let first = lane.alloc((1 + round % 5) * G).expect("a block is served");
        let second = lane.alloc((2 + round % 3) * G).expect("a block is served");
        drop(first);
        let larger = lane.alloc((6 + round % 4) * G).expect("a larger block is served");
        drop((keep, second, larger));
        if round % 50 == 49 {
            pool.trim(DeviceId(0)).expect("the device is trimmed");
        }
        match round {
            100 => reserved = stats(&pool).reserved_bytes,
            101.. => assert_eq!(stats(&pool).reserved_bytes, reserved, "round {round}"),
            _ => {}
        }
    }
    sound(&pool);
    drop((lane, pool));
    clean(&machine);
    Ok(())
}

/// Rounds of growing and trimming: `VMM_TEST_CREEP_ROUNDS`, for a long run.
fn creep_rounds() -> u64 {
    match std::env::var("VMM_TEST_CREEP_ROUNDS") {
        Ok(text) => text.parse().expect("VMM_TEST_CREEP_ROUNDS is a number"),
        Err(_) => 20_000,
    }
}

/// Tensors that grow a little each step, as a context does: the old one goes before the new one
/// comes, or after.
pub(super) fn f_x10_sizes_that_creep_up_hold_the_largest_and_not_the_sum(
    choice: DriverChoice,
) -> Result<(), Skip> {
    for overlapping in [false, true] {
        let machine = machine(choice)?;
        let pool = pool(&machine);
        let lane = lane(&machine, &pool);
        let mut old = None;
        for step in 0..400_u64 {
            let bytes = 8 * MIB + step * 96 * 1024 + step % 7;
            if !overlapping {
                old = None;
            }
            let new = lane.alloc(bytes).expect("a little more than before");
            drop(old.replace(new));
            // Both are alive for a moment if they overlap; chunks are at most 32 MiB.
            let most = if overlapping { 2 * bytes } else { bytes };
            let held = stats(&pool).held_bytes;
            assert!(held <= most + most / 50 + 32 * MIB, "step {step}: {held} held for {bytes}");
        }
        sound(&pool);
        drop((old, lane, pool));
        clean(&machine);
    }
    Ok(())
}

pub(super) fn f_x15_trim_and_ask_again_makes_no_more_than_was_given(
    choice: DriverChoice,
) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let pool = pool(&machine);
    let lane = lane(&machine, &pool);
    let mut made = Vec::new();
    for _ in 0..50 {
        let calls = machine.driver().ledger().snapshot();
        drop(lane.alloc(10 * MIB).expect("the same request is served"));
        pool.trim(DeviceId(0)).expect("the device is trimmed");
        let calls = machine.driver().ledger().snapshot().since(&calls);
        assert_eq!(calls.of(Call::MemCreate), calls.of(Call::MemRelease), "{calls}");
        made.push(calls.of(Call::MemCreate));
    }
    assert!(made.windows(2).all(|two| two[0] == two[1]), "creates a round: {made:?}");
    drop((lane, pool));
    clean(&machine);
    Ok(())
}
