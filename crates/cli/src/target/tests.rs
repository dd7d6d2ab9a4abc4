//! The three allocators under the engine, on the simulated device.

use std::num::NonZeroU16;
use std::path::Path;

use vmm_sys::Call;
use vmm_sys::sim::Sim;

use super::*;
use crate::replay::{
    Cause, HostClock, PassFigures, Plan, ReplayError, Spread, Step, Target, replay,
};
use crate::trace::Trace;

const DEVICE: DeviceId = DeviceId(0);

fn sim() -> Arc<dyn Driver> {
    let driver: Arc<dyn Driver> = Sim::builder().device_bytes(1 << 30).build();
    // The context, whatever it takes, is there before free memory is compared.
    driver.device_synchronize(DEVICE).unwrap();
    driver
}

fn trace(text: &str) -> Trace {
    Trace::read(text.as_bytes(), Path::new("t")).unwrap()
}

type Outcome = Result<Vec<PassFigures>, ReplayError>;

fn run<T: Target>(plan: &Plan<'_>, make: impl Fn() -> Result<T, Cause>) -> Outcome {
    replay(plan, 2, &HostClock::new(), make, || ())
}

/// Replays on each allocator, on a device of its own; nothing may be left on it.
fn run_all(plan: &Plan<'_>) -> [(&'static str, Outcome); 3] {
    let on = |name, run: &dyn Fn(&Arc<dyn Driver>) -> Outcome| {
        let driver = sim();
        let before = free_bytes(&driver);
        let outcome = run(&driver);
        assert_eq!(free_bytes(&driver), before, "{name} left something behind");
        (name, outcome)
    };
    [
        on("pool", &|driver| {
            run(plan, || PoolTarget::new(driver, DEVICE, &PoolOptions::default(), plan.streams))
        }),
        on("cudaMalloc", &|driver| run(plan, || CudaMalloc::new(driver, DEVICE))),
        on("cudaMallocAsync", &|driver| {
            run(plan, || CudaMallocAsync::new(driver, DEVICE, plan.streams))
        }),
    ]
}

fn free_bytes(driver: &Arc<dyn Driver>) -> u64 {
    driver.mem_info(DEVICE).unwrap().free_bytes
}

#[test]
fn every_allocator_holds_what_lives_and_gives_all_back() {
    let trace = trace("a 1 90000000 0 0\na 2 700 1 0\nf 1 0\na 3 40000000 0 0\nf 3 0\n");
    for (name, figures) in run_all(&Plan::new(&trace, None)) {
        for pass in figures.unwrap() {
            assert!(pass.peak_held_bytes >= trace.peak_live_bytes, "{name}: {pass:?}");
            assert_eq!(pass.ops, 5, "{name}");
        }
    }
}

#[test]
fn empty_blocks_are_nothing_to_any_allocator() {
    let trace = trace("a 1 0 0 0\na 2 512 0 0\na 3 0 0 0\nf 1 0\nf 2 0\n");
    for (name, figures) in run_all(&Plan::new(&trace, None)) {
        let figures = figures.unwrap_or_else(|error| panic!("{name}: {error}"));
        let counted: u64 =
            [Call::MemAlloc, Call::MemAllocAsync].iter().map(|c| figures[1].calls.of(*c)).sum();
        assert_eq!(counted, u64::from(name != "pool"), "{name}: one block has bytes");
    }
}

#[test]
fn running_out_of_memory_is_reported_and_leaves_nothing_behind() {
    let trace = trace("a 1 600000000 0 0\na 2 500 0 0\na 3 600000000 0 0\n");
    for (name, figures) in run_all(&Plan::new(&trace, None)) {
        let error = figures.unwrap_err().to_string();
        let start = "pass 1, operation 3: alloc of block 3 (600000000 bytes) failed: ";
        assert!(error.starts_with(start), "{name}: {error}");
        assert!(error.to_lowercase().replace('_', " ").contains("out of memory"), "{error}");
    }
}

#[test]
fn a_free_waits_for_the_other_stream_that_used_the_block() {
    let text: String =
        (0..200).map(|id| format!("a {id} 4096 0 0\n")).chain((0..200).map(free)).collect();
    let trace = trace(&text);
    let streams = NonZeroU16::new(3).unwrap();
    let plan = Plan::new(&trace, Some(Spread { streams, seed: 5 }));
    let crossings =
        plan.steps.iter().filter(|step| matches!(step, Step::Cross { .. })).count() as u64;
    assert!(crossings > 10);
    let [(_, pool), (_, malloc), (_, malloc_async)] = run_all(&plan);
    let calls = &malloc_async.unwrap()[0].calls;
    assert_eq!(calls.of(Call::EventRecord), crossings);
    assert_eq!(calls.of(Call::StreamWaitEvent), crossings);
    // A free of cudaMalloc waits for the whole device anyway.
    assert_eq!(malloc.unwrap()[0].calls.of(Call::EventRecord), 0);
    assert!(pool.unwrap()[0].calls.of(Call::EventRecord) > 0);
}

fn free(id: u64) -> String {
    format!("f {id} 0\n")
}

#[test]
fn a_warm_pass_of_the_pool_makes_no_driver_call() {
    let driver = sim();
    let text: String = (0..50)
        .map(|id| format!("a {id} {} 0 0\n", 4096 * (id + 1)))
        .chain((0..50).map(free))
        .collect();
    let trace = trace(&text);
    let options = PoolOptions { soft_limit: None, ..PoolOptions::default() };
    let plan = Plan::new(&trace, None);
    let figures = run(&plan, || PoolTarget::new(&driver, DEVICE, &options, 1)).unwrap();
    assert!(figures[0].calls.of(Call::MemCreate) > 0);
    assert_eq!(figures[1].calls.total(), 0, "{}", figures[1].calls);
    assert_eq!(figures[1].driver_ns, 0);
}

/// Work behind the frees, by either way to make it: memory that two streams use is not there for a
/// while, and comes back; nothing waits but the end of the pass.
#[test]
fn work_behind_the_frees_ends_late_and_leaves_nothing() {
    let text: String = (0..40).map(|id| format!("a {id} 3000000 0 0\nf {id} 0\n")).collect();
    let trace = trace(&text);
    let streams = NonZeroU16::new(2).unwrap();
    let plan = Plan::new(&trace, Some(Spread { streams, seed: 1 }));
    let waits = |figures: &[PassFigures]| -> u64 {
        let waits = [Call::EventSynchronize, Call::StreamSynchronize, Call::CtxSynchronize];
        figures.iter().flat_map(|pass| waits.map(|call| pass.calls.of(call))).sum()
    };
    let held = |figures: &[PassFigures]| figures.iter().map(|pass| pass.peak_held_bytes).max();
    let driver = sim();
    let before = free_bytes(&driver);
    let idle = run(&plan, || PoolTarget::new(&driver, DEVICE, &PoolOptions::default(), 2)).unwrap();

    let machine = Sim::builder().device_bytes(1 << 30).build();
    let on = LateDriver::Sim(machine);
    let late = run(&plan, || Late::new(&on, DEVICE, &PoolOptions::default(), 2, 2000)).unwrap();
    assert!(held(&late) > held(&idle), "blocks that cross are held up");
    assert_eq!((waits(&idle), waits(&late)), (0, 0));

    // As on a GPU: the streams wait for words of host memory, in real time.
    let on = LateDriver::Gpu(driver.clone());
    let gated = run(&plan, || Late::new(&on, DEVICE, &PoolOptions::default(), 2, 20_000)).unwrap();
    assert!(gated[0].calls.of(Call::StreamWaitValue32) > 0);
    assert_eq!(waits(&gated), 0);
    drop(on);
    assert_eq!(free_bytes(&driver), before);
}

#[test]
fn the_threads_own_context_comes_back_after_a_replay() {
    let driver = sim();
    assert_eq!(driver.context_current().unwrap(), None);
    let outer = CudaMalloc::new(&driver, DEVICE).unwrap();
    let current = driver.context_current().unwrap();
    assert!(current.is_some(), "no call has to switch contexts");
    drop(PoolTarget::new(&driver, DEVICE, &PoolOptions::default(), 1).unwrap());
    assert_eq!(driver.context_current().unwrap(), current);
    drop(outer);
    assert_eq!(driver.context_current().unwrap(), None);
}

/// Whether a lane that is left alone is emptied by the misses of another one.
fn empties_an_idle_lane(idle_lanes: IdleLanes) -> bool {
    let driver = sim();
    // Within a soft limit the misses would take what the lane has free before.
    let options = PoolOptions { idle_lanes, soft_limit: None, ..PoolOptions::default() };
    let pool = options.build(&driver, DEVICE).unwrap();
    let streams = create_streams(&driver, DEVICE, 2).unwrap();
    let lanes = [0, 1].map(|nth: usize| pool.lane(&streams[nth]).unwrap());
    drop(lanes[0].alloc(20 << 20).unwrap());
    let emptied = || pool.device_stats(DEVICE).unwrap().idle_lanes_emptied > 0;
    let mut held = Vec::new();
    (0..20).any(|_| {
        std::thread::sleep(std::time::Duration::from_millis(2));
        held.push(lanes[1].alloc(30 << 20).unwrap());
        emptied()
    })
}

#[test]
fn on_the_simulated_device_idle_lanes_are_emptied_only_if_that_is_asked_for() {
    assert!(empties_an_idle_lane(IdleLanes::After(Some(1))));
    assert!(!empties_an_idle_lane(IdleLanes::Auto));
    assert!(!empties_an_idle_lane(IdleLanes::After(None)));
}
