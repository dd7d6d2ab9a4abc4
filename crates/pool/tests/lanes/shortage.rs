//! The facts of an out-of-memory error: exact, complete, and true.

use crate::common::{HOME, MIB, Rig};
use vmm_pool::{Budget, Buffer, ChunkSize, Error, Hint, Lane, OutOfMemory, Request};
use vmm_sys::object::Stream;
use vmm_sys::sim::{FaultPlan, Sim};
use vmm_sys::{Call, MemInfo, ResultCode};

const GRANULE_BYTES: u64 = 512;

fn facts(result: Result<Buffer, Error>) -> OutOfMemory {
    match result.unwrap_err() {
        Error::OutOfMemory(facts) => *facts,
        error => panic!("{error}"),
    }
}

/// The largest piece can be had, and a granule more can not.
fn check_largest(lane: &Lane, request: Request, facts: &OutOfMemory) {
    let largest = facts.largest_bytes.unwrap();
    assert!(largest < facts.asked_bytes, "{facts}");
    let like = |bytes| {
        let like = Request::new(bytes).align(request.align_bytes());
        if request.may_wait() { like } else { like.no_wait() }
    };
    let more = facts_of_like(lane, like(largest + GRANULE_BYTES));
    assert_eq!(more.largest_bytes, Some(largest), "{more}");
    if largest > 0 {
        drop(lane.alloc_with(&like(largest)).unwrap_or_else(|error| panic!("{facts}\n{error}")));
    }
}

fn facts_of_like(lane: &Lane, request: Request) -> OutOfMemory {
    let result = lane.alloc_with(&request);
    assert!(result.is_err(), "{} bytes can be had", request.bytes());
    facts(result)
}

#[test]
fn every_figure_of_a_known_state_is_exact() {
    // Six units in three chunks: three live, two free in two holes of one, one pending. No chunk is
    // wholly free, so none can be moved or given back.
    const UNIT: u64 = 4 * MIB;
    let rig = Rig::new(|b| b.limit_bytes(6 * UNIT).chunk(ChunkSize::Fixed(2 * UNIT)));
    let other = Stream::create(&rig.driver, HOME).unwrap();
    let mut blocks: Vec<_> = (0..6).map(|_| rig.lane.alloc(UNIT - 100).unwrap()).collect();
    let hold = rig.sim.hold(HOME, other.handle()).unwrap();
    let mut pending = blocks.remove(5);
    pending.record_stream(&other).unwrap();
    drop(pending);
    drop((blocks.remove(3), blocks.remove(1)));
    let before = rig.sim.ledger_summary();
    let facts = facts(rig.lane.try_alloc(3 * UNIT - 1));
    let after = rig.sim.ledger_summary();
    assert_eq!(before.devices, after.devices, "no device memory, no context");
    assert_eq!((facts.asked_bytes, facts.rounded_bytes), (3 * UNIT - 1, 3 * UNIT));
    let s = &facts.stats;
    assert_eq!((s.live_bytes, s.rounding_bytes), (3 * (UNIT - 100), 300));
    assert_eq!((s.idle_bytes, s.limbo_bytes), (2 * UNIT, UNIT));
    assert_eq!((s.private_bytes, s.stock_bytes), (0, 0));
    assert_eq!((s.held_bytes, s.limit_bytes, facts.room_bytes), (6 * UNIT, 6 * UNIT, 0));
    assert!(s.adds_up());
    assert_eq!(facts.largest_bytes, Some(UNIT));
    let info = rig.driver.mem_info(HOME).unwrap();
    assert_eq!(facts.device_free_bytes, Some(info.free_bytes));
    assert_eq!(facts.device_total_bytes, Some(info.total_bytes));
    assert_eq!(facts.cause, None);
    assert!(facts.is_scattered(), "two free and one pending are three");
    let hints = [
        Hint::RaiseLimit { limit_bytes: 6 * UNIT },
        Hint::SmallerChunks { chunk_bytes: 2 * UNIT },
        Hint::Wait { limbo_bytes: UNIT },
    ];
    assert_eq!(facts.hints, hints);
    let text = facts.to_string();
    for part in [
        "asked 12582911 bytes (rounded 12582912)",
        "held 25165824 = live 12582612 + rounding 300 + idle 8388608 + limbo 4194304 + private 0 + elastic 0 + \
         anchor 0 + stock 0",
        "limit 25165824",
        "largest piece that would succeed 4194304",
        &format!("device free {} of {}", info.free_bytes, info.total_bytes),
        "too scattered",
        "what may help: raise the pool's limit of 25165824 (VMM_POOL_LIMIT), or set chunks shorter",
    ] {
        assert!(text.contains(part), "{part} is missing in: {text}");
    }
    check_largest(&rig.lane, Request::new(3 * UNIT).no_wait(), &facts);
    rig.sim.release_hold(hold);
    drop((blocks, other));
    rig.end();
}

#[test]
fn the_largest_piece_is_true_in_many_states() {
    for seed in 1..=300_u64 {
        println!("seed {seed}");
        many_states(seed);
    }
}

fn many_states(seed: u64) {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mut random = move |below: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) % below
    };
    let chunk = [ChunkSize::Auto, ChunkSize::Fixed(2 * MIB), ChunkSize::Fixed(16 * MIB)];
    let chunk = chunk[random(3) as usize];
    let limited = random(2) == 0;
    let soft = [None, Some(0.01), Some(0.5)][random(3) as usize];
    // Either the pool's limit ends the memory, or the device.
    let device_bytes = if limited { 1 << 30 } else { 100 * MIB };
    let rig = Rig::on(Sim::builder().device_bytes(device_bytes).build(), |b| {
        let b = b.chunk(chunk).soft_limit(soft);
        if limited { b.limit_bytes(100 * MIB + 3) } else { b }
    });
    let other = Stream::create(&rig.driver, HOME).unwrap();
    let other_lane = rig.pool.lane(&other).unwrap();
    let mut live: Vec<Buffer> = Vec::new();
    let mut short = 0;
    for _ in 0..150 {
        let lane = if random(5) == 0 { &other_lane } else { &rig.lane };
        let most = 1 << (9 + random(17));
        let bytes = 1 + random(most);
        let request = Request::new(bytes).align(256 << random(3));
        match lane.alloc_with(&request) {
            Ok(buffer) => live.push(buffer),
            Err(error) => {
                let Error::OutOfMemory(facts) = error else { panic!("{error}") };
                short += 1;
                check_largest(lane, request, &facts);
                assert!(rig.stats().adds_up());
                live.truncate(live.len() / 2);
            }
        }
        while live.len() > 60 || (!live.is_empty() && random(6) == 0) {
            let index = random(live.len() as u64) as usize;
            live.swap_remove(index);
        }
    }
    // One request that cannot be served, whatever came before.
    let request = Request::new(101 * MIB);
    check_largest(&rig.lane, request, &facts(rig.lane.alloc_with(&request)));
    println!("{short} shortages on the way");
    drop((live, other_lane, other));
    rig.end();
}

#[test]
fn small_requests_that_need_a_slab_do_not_hide_larger_ones() {
    let rig = Rig::new(|b| b.limit_bytes(8 * MIB).chunk(ChunkSize::Fixed(2 * MIB)));
    // One MiB is left: too short for a slab, long enough for a block.
    let most = rig.lane.alloc(7 * MIB).unwrap();
    let facts = facts(rig.lane.alloc(3 * MIB));
    assert_eq!(facts.largest_bytes, Some(MIB));
    assert!(rig.lane.alloc(1000).unwrap_err().is_out_of_memory());
    drop((rig.lane.alloc(MIB).unwrap(), most));
    rig.end();
}

#[test]
fn hints_fit_the_configuration() {
    // Full, at the granularity, with a limit above the device: nothing to set.
    let sim = Sim::builder().device_bytes(64 * MIB).build();
    let rig = Rig::on(sim, |b| b.limit_bytes(1 << 40).chunk(ChunkSize::Fixed(2 * MIB)));
    let full = rig.lane.alloc(64 * MIB).unwrap();
    let short = facts(rig.lane.alloc(MIB));
    assert_eq!((short.hints.as_slice(), short.is_scattered()), (&[][..], false));
    assert_eq!(short.cause.as_ref().map(|cause| cause.code()), Some(ResultCode::OUT_OF_MEMORY));
    assert!(short.to_string().contains("too full") && !short.to_string().contains("help"));
    drop(full);
    rig.end();

    // A budget that pools share.
    let budget = Budget::new(32 * MIB);
    let rig = Rig::new(|b| b.budget(HOME, budget.clone()).limit_bytes(1 << 30));
    let short = facts(rig.lane.alloc(64 * MIB));
    assert_eq!(short.hints, [Hint::RaiseBudget { limit_bytes: 32 * MIB }]);
    rig.end();

    // Memory that somebody else holds.
    let sim = Sim::builder().device_bytes(64 * MIB).build();
    let rig = Rig::on(sim, |b| b);
    let foreign = rig.driver.mem_alloc(HOME, 48 * MIB).unwrap();
    let short = facts(rig.lane.alloc(32 * MIB));
    assert_eq!(short.hints, [Hint::OthersHold { bytes: 48 * MIB }]);
    assert_eq!(short.largest_bytes, Some(16 * MIB));
    rig.driver.mem_free(HOME, foreign).unwrap();
    rig.end();
}

#[test]
fn a_limit_above_what_the_device_has_makes_no_promises() {
    // The limit refuses at once what the device could not give anyway.
    let sim = Sim::builder().device_bytes(64 * MIB).build();
    let rig = Rig::on(sim, |b| b.limit_bytes(100 * MIB).chunk(ChunkSize::Fixed(2 * MIB)));
    let foreign = rig.driver.mem_alloc(HOME, 16 * MIB).unwrap();
    let live = rig.lane.alloc(8 * MIB).unwrap();
    let request = Request::new(101 * MIB);
    let short = facts(rig.lane.alloc_with(&request));
    assert_eq!((short.cause.clone(), short.room_bytes), (None, 40 * MIB), "{short}");
    assert_eq!(short.largest_bytes, Some(40 * MIB), "{short}");
    assert_eq!(short.hints, [Hint::OthersHold { bytes: 16 * MIB }], "a higher limit is no help");
    check_largest(&rig.lane, request, &short);
    drop(live);
    rig.driver.mem_free(HOME, foreign).unwrap();
    rig.end();
}

#[test]
fn f_h5_a_device_that_cannot_say_what_is_free_is_reported_as_unknown() {
    let rig = Rig::new(|b| b.limit_bytes(8 * MIB));
    rig.sim.inject(FaultPlan::fail(ResultCode::UNKNOWN).on(Call::MemGetInfo));
    drop(rig.lane.alloc(4 * MIB).unwrap());
    let facts = facts(rig.lane.alloc(9 * MIB));
    assert_eq!((facts.device_free_bytes, facts.device_total_bytes), (None, None));
    assert!(facts.to_string().contains("device free unknown of unknown"), "{facts}");
    assert_eq!(facts.largest_bytes, Some(8 * MIB));
    rig.end();
}

/// Whatever the device says of its memory is advice: nothing is refused for it alone.
#[test]
fn f_h5_a_device_that_says_nonsense_is_used_all_the_same() {
    let told = |free_bytes, total_bytes| MemInfo { free_bytes, total_bytes };
    for info in [told(0, 1 << 30), told(0, 0), told(1 << 30, 1 << 20), told(u64::MAX, u64::MAX)] {
        let sim = Sim::builder().device_bytes(256 * MIB).tells_memory(info).build();
        let rig = Rig::on(sim, |b| b.lend(HOME, 64 * MIB));
        let live = rig.lane.alloc(100 * MIB).unwrap();
        let elastic = rig.pool.elastic(HOME).capacity_bytes(64 * MIB).build().unwrap();
        let grown = elastic.grow(vmm_pool::Growth::to(32 * MIB)).unwrap();
        assert_eq!((grown.bytes, grown.borrowed.len()), (32 * MIB, 0), "{info:?}");
        rig.pool.prefill(HOME, 32 * MIB).unwrap();
        // The report is complete, whatever the numbers are.
        let facts = facts(rig.lane.alloc(200 * MIB));
        let said = (facts.device_free_bytes, facts.device_total_bytes);
        let believed = info.free_bytes <= info.total_bytes;
        let wanted = (believed.then_some(info.free_bytes), believed.then_some(info.total_bytes));
        assert_eq!(said, wanted, "{info:?}");
        assert!(facts.stats.adds_up() && facts.cause.is_some(), "{facts}");
        assert!(facts.to_string().contains("live 104857600"), "{facts}");
        assert_eq!(facts.to_string().contains("free unknown of unknown"), !believed, "{facts}");
        drop((live, elastic));
        rig.end();
    }
}

/// A ceiling below what the device says is free, as under WSL2: out of memory, and no more than that.
#[test]
fn f_x16_a_ceiling_below_what_is_said_to_be_free_is_a_clean_shortage() {
    let rig = Rig::new(|b| b.chunk(ChunkSize::Fixed(32 * MIB)));
    let ceiling =
        rig.sim.inject(FaultPlan::fail(ResultCode::OUT_OF_MEMORY).on(Call::MemCreate).at(9));
    let live = rig.lane.alloc(8 * 32 * MIB).unwrap();
    for _ in 0..3 {
        let facts = facts(rig.lane.alloc(32 * MIB));
        assert!(facts.device_free_bytes > Some(64 << 30), "it says that there is plenty: {facts}");
        let cause = facts.cause.as_ref().unwrap();
        assert_eq!((cause.call(), cause.code()), (Call::MemCreate, ResultCode::OUT_OF_MEMORY));
        assert_eq!((facts.stats.held_bytes, facts.stats.live_bytes), (256 * MIB, 256 * MIB));
    }
    drop(live);
    drop(rig.lane.alloc(8 * 32 * MIB).unwrap());
    rig.sim.clear_fault(ceiling);
    rig.end();
}

/// "Device not ready" from any call is that call's failure: the next one is made all the same.
#[test]
fn f_x16_device_not_ready_is_not_the_end() {
    let calls = [
        Call::MemAddressReserve,
        Call::MemCreate,
        Call::MemMap,
        Call::MemSetAccess,
        Call::MemUnmap,
        Call::MemRelease,
        Call::EventCreate,
        Call::EventRecord,
        Call::MemGetInfo,
    ];
    for call in calls {
        let rig = Rig::new(|b| b.soft_limit(Some(0.0)).limit_bytes(64 * MIB));
        let other = Stream::create(&rig.driver, HOME).unwrap();
        rig.sim.inject(FaultPlan::fail(ResultCode::NOT_READY).on(call).times(2));
        for _ in 0..4 {
            match rig.lane.alloc(20 * MIB) {
                Ok(mut crossed) => crossed.record_stream(&other).unwrap(),
                Err(error) => {
                    assert!(matches!(error, Error::Driver(_)), "{call}: {error}");
                    assert!(!error.is_out_of_memory(), "{call}: {error}");
                }
            }
            // A shortage, which waits and looks everywhere.
            assert!(rig.lane.alloc(65 * MIB).is_err());
            let _given_or_refused = rig.pool.trim(HOME);
        }
        assert_eq!(rig.sim.faults_fired(), 2, "{call}");
        drop(rig.lane.alloc(64 * MIB).unwrap());
        drop(other);
        vmm_sys::object::retry_failed_drops(&rig.driver);
        rig.end();
    }
}

/// What a second try cures leaves nothing behind that a later caller would be told of.
#[test]
fn f_x5_a_failure_that_was_cured_leaves_no_trace() {
    let mut cured = 0;
    for k in 1.. {
        let rig = Rig::new(|b| b.limit_bytes(64 * MIB).chunk(ChunkSize::Fixed(2 * MIB)));
        let other = Stream::create(&rig.driver, HOME).unwrap();
        let other_lane = rig.pool.lane(&other).unwrap();
        drop(other_lane.alloc(60 * MIB).unwrap());
        let fired = rig.sim.faults_fired();
        rig.sim.inject(FaultPlan::fail(ResultCode::OUT_OF_MEMORY).at(k).once());
        let served = rig.lane.alloc(30 * MIB);
        rig.sim.clear_faults();
        let was_needed = rig.sim.faults_fired() > fired;
        let is_cured = served.is_ok();
        drop(served);
        cured += u32::from(was_needed && is_cured);
        if is_cured {
            let kept = vmm_sys::object::failed_drops(&rig.driver);
            assert!(kept.is_empty(), "call {k}: {kept:?}");
        }
        // Unrelated callers hear nothing of it.
        let calls = rig.calls(|| drop(rig.lane.alloc(30 * MIB).unwrap()));
        assert!(!is_cured || calls.total() == 0, "call {k}: {calls}");
        other.synchronize().unwrap();
        drop(other_lane.alloc(2 * MIB).unwrap());
        rig.stats();
        drop((other_lane, other));
        vmm_sys::object::retry_failed_drops(&rig.driver);
        rig.end();
        if !was_needed {
            break;
        }
    }
    assert!(cured > 5, "{cured} were cured");
}

#[test]
fn a_prefill_that_falls_short_says_so_and_makes_no_context() {
    let sim = Sim::builder().build();
    let driver: std::sync::Arc<dyn vmm_sys::Driver> = sim.clone();
    let pool = vmm_pool::Pool::builder(driver).limit_bytes(8 * MIB).background(false);
    let pool = pool.build().unwrap();
    let Err(Error::OutOfMemory(facts)) = pool.prefill(HOME, 9 * MIB) else { panic!("made") };
    assert_eq!((facts.asked_bytes, facts.rounded_bytes), (9 * MIB, 10 * MIB));
    assert_eq!((facts.largest_bytes, facts.stats.stock_bytes), (None, 8 * MIB));
    assert_eq!(sim.ledger_summary().devices[0].contexts_made, 0);
    drop(pool);
    sim.check_clean().unwrap();
}
