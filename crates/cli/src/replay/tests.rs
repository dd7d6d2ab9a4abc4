//! The engine over an allocator of the tests' own, with a clock of the tests' own.

use std::cell::{Cell, RefCell};
use std::path::Path;
use std::rc::Rc;

use vmm_sys::{Call, CallCounts, CallLedger};

use super::*;
use crate::trace::Trace;

/// What happened, shared with the test.
#[derive(Default)]
struct World {
    now_ns: Cell<u64>,
    log: RefCell<Vec<String>>,
    made: Cell<u32>,
    live: Cell<i64>,
    /// Live bytes at each sample.
    sampled: RefCell<Vec<u64>>,
}

struct TestClock(Rc<World>);

impl Clock for TestClock {
    fn now_ns(&self) -> u64 {
        self.0.now_ns.get()
    }
}

/// A bump allocator. Each alloc takes 100 ns of its own and makes one driver call that takes
/// 1000 ns of host time and is charged with 7; each free takes 40 ns.
struct Fake {
    world: Rc<World>,
    ledger: CallLedger,
    time: Cell<DriverTime>,
    next: Cell<u64>,
    live_bytes: Cell<u64>,
    peak_bytes: Cell<u64>,
    fault: Fault,
}

#[derive(Clone, Copy, PartialEq)]
enum Fault {
    None,
    /// The n-th alloc fails.
    Alloc(u64),
    /// All blocks at one place.
    Overlap,
    /// Blocks 64 bytes off.
    Misalign,
    Sample,
}

const PAGE: u64 = 4096;

impl Fake {
    fn new(world: &Rc<World>, fault: Fault) -> Fake {
        world.made.set(world.made.get() + 1);
        world.log.borrow_mut().push("make".into());
        Fake {
            world: world.clone(),
            ledger: CallLedger::default(),
            time: Cell::default(),
            next: Cell::new(0),
            live_bytes: Cell::new(0),
            peak_bytes: Cell::new(0),
            fault,
        }
    }

    fn pass_time(&self, ns: u64) {
        self.world.now_ns.set(self.world.now_ns.get() + ns);
    }

    fn log(&self, what: impl Into<String>) {
        self.world.log.borrow_mut().push(what.into());
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.log("drop");
    }
}

impl Target for Fake {
    type Block = Extent;
    const IS_DRIVER: bool = false;

    fn alloc(&self, bytes: u64, stream: usize) -> Result<Extent, Cause> {
        let number = self.next.get() + 1;
        self.next.set(number);
        if self.fault == Fault::Alloc(number) {
            return Err("the fake is full".into());
        }
        self.pass_time(100 + 1000);
        let time = self.time.get();
        self.time
            .set(DriverTime { spent_ns: time.spent_ns + 1000, charged_ns: time.charged_ns + 7 });
        self.ledger.book(Call::MemMap, 7);
        self.live_bytes.set(self.live_bytes.get() + bytes);
        self.peak_bytes.set(self.peak_bytes.get().max(self.live_bytes.get()));
        self.world.live.set(self.world.live.get() + 1);
        self.log(format!("alloc {bytes} on {stream}"));
        let address = match self.fault {
            Fault::Overlap => PAGE,
            Fault::Misalign => number * PAGE + 64,
            _ => number * PAGE,
        };
        Ok(Extent { address, bytes })
    }

    fn cross(&self, block: &mut Extent, stream: usize) -> Result<(), Cause> {
        self.pass_time(500);
        self.log(format!("cross {} to {stream}", block.bytes));
        Ok(())
    }

    fn free(&self, block: Extent) -> Result<(), Cause> {
        self.pass_time(40);
        self.live_bytes.set(self.live_bytes.get() - block.bytes);
        self.world.live.set(self.world.live.get() - 1);
        self.log(format!("free {}", block.bytes));
        Ok(())
    }

    fn extent(&self, block: &Extent) -> Extent {
        *block
    }

    fn begin_pass(&self) -> Result<(), Cause> {
        self.peak_bytes.set(self.live_bytes.get());
        self.log("begin");
        Ok(())
    }

    fn sample(&self) -> Result<(), Cause> {
        self.pass_time(1_000_000); // must show in no figure
        self.world.sampled.borrow_mut().push(self.live_bytes.get());
        if self.fault == Fault::Sample { Err("no figures".into()) } else { Ok(()) }
    }

    fn peak_held_bytes(&self) -> Result<u64, Cause> {
        Ok(self.peak_bytes.get() + 10)
    }

    fn settle(&self) -> Result<(), Cause> {
        self.log("settle");
        Ok(())
    }

    fn driver_calls(&self) -> CallCounts {
        self.ledger.snapshot()
    }

    fn driver_time(&self) -> DriverTime {
        self.time.get()
    }
}

const TEXT: &str = "a 10 1000 0 0\na 11 500 1 1\nf 10 2\na 12 256 0 3\n";

fn trace() -> Trace {
    Trace::read(TEXT.as_bytes(), Path::new("t.trace")).unwrap()
}

fn run(plan: &Plan<'_>, passes: u32, fault: Fault) -> (Rc<World>, Vec<String>, Outcome) {
    let world = Rc::new(World::default());
    let clock = TestClock(world.clone());
    let mut passed = 0;
    let result = replay(plan, passes, &clock, || Ok(Fake::new(&world, fault)), || passed += 1);
    if result.is_ok() {
        assert_eq!(passed, 2 * passes);
    }
    assert_eq!(world.live.get(), 0, "every block is freed, whatever happened");
    let log = world.log.take();
    (world, log, result)
}

type Outcome = Result<Vec<PassFigures>, ReplayError>;

#[test]
fn a_pass_runs_the_trace_in_order_and_ends_with_nothing_live() {
    let trace = trace();
    let (world, log, result) = run(&Plan::new(&trace, None), 1, Fault::None);
    result.unwrap();
    let pass = [
        "make",
        "begin",
        "alloc 1000 on 0",
        "alloc 500 on 1",
        "free 1000",
        "alloc 256 on 0",
        // Left live by the trace: slots in order, so the later block of slot 0 first.
        "free 256",
        "free 500",
        "settle",
        "drop",
    ];
    assert_eq!(log, [pass, pass].concat(), "a counted run, then a timed run, each from nothing");
    assert_eq!(world.made.get(), 2);
    assert_eq!(world.sampled.take(), [1000, 1500], "at the start and at the peak");
}

#[test]
fn figures_keep_host_time_and_driver_time_apart() {
    let trace = trace();
    let (_, _, result) = run(&Plan::new(&trace, None), 3, Fault::None);
    let figures = result.unwrap();
    assert_eq!(figures.len(), 3);
    for (index, pass) in figures.iter().enumerate() {
        assert_eq!(pass.pass as usize, index + 1);
        assert_eq!(pass.ops, 4);
        // 3 allocs of 100 and one free of 40; the frees of what is left live are not in it.
        assert_eq!(pass.mean_ns, 340.0 / 4.0);
        assert_eq!(pass.calls.of(Call::MemMap), 3, "only this pass, and only the counted one");
        assert_eq!(pass.calls.total(), 3);
        assert_eq!(pass.driver_ns, 21);
        assert_eq!(pass.peak_held_bytes, 1510);
        // An alloc costs its own 100 ns and the 7 that its call is charged with.
        assert_eq!(pass.latency, Latency { median_ns: 107, p99_ns: 107, max_ns: 107 });
    }
}

#[test]
fn a_crossing_counts_into_its_allocation_and_is_no_operation() {
    let text: String = (0..64).map(|id| format!("a {id} 512 0 0\n")).collect();
    let trace = Trace::read(text.as_bytes(), Path::new("t")).unwrap();
    let streams = std::num::NonZeroU16::new(2).unwrap();
    let plan = Plan::new(&trace, Some(Spread { streams, seed: 3 }));
    let crossings = plan.steps.iter().filter(|step| matches!(step, Step::Cross { .. })).count();
    assert!(crossings > 0);
    let (_, log, result) = run(&plan, 1, Fault::None);
    let pass = &result.unwrap()[0];
    assert_eq!(pass.ops, 64);
    assert_eq!(pass.latency, Latency { median_ns: 107, p99_ns: 607, max_ns: 607 });
    assert_eq!(pass.mean_ns, (64 * 100 + crossings * 500) as f64 / 64.0);
    let logged = log.iter().filter(|line| line.starts_with("cross")).count();
    assert_eq!(logged, 2 * crossings);
}

#[test]
fn a_failed_operation_is_named_in_the_words_of_the_trace() {
    let trace = trace();
    let (_, _, result) = run(&Plan::new(&trace, None), 2, Fault::Alloc(3));
    let text = result.unwrap_err().to_string();
    assert_eq!(text, "pass 1, operation 4: alloc of block 12 (256 bytes) failed: the fake is full");
    // The fifth alloc is the second one of the second pass.
    let (_, _, result) = run(&Plan::new(&trace, None), 2, Fault::Alloc(5));
    let text = result.unwrap_err().to_string();
    assert!(text.starts_with("pass 2, operation 2: alloc of block 11 (500 bytes)"), "{text}");
}

#[test]
fn a_wrong_block_stops_the_replay() {
    let trace = trace();
    let plan = Plan::new(&trace, None);
    let (_, _, result) = run(&plan, 1, Fault::Overlap);
    let error = result.unwrap_err();
    assert!(matches!(error, ReplayError::Overlap { pass: 1, op: 2, .. }), "{error}");
    let (_, _, result) = run(&plan, 1, Fault::Misalign);
    let error = result.unwrap_err();
    assert!(matches!(error, ReplayError::BadBlock { pass: 1, op: 1, .. }), "{error}");
}

#[test]
fn a_failure_between_operations_stops_the_replay_with_nothing_live() {
    let trace = trace();
    let (_, log, result) = run(&Plan::new(&trace, None), 1, Fault::Sample);
    let text = result.unwrap_err().to_string();
    assert_eq!(text, "pass 1: asking for held memory failed: no figures");
    assert_eq!(log.last().map(String::as_str), Some("drop"));
}

#[test]
fn an_allocator_that_cannot_be_made_is_an_error() {
    let trace = trace();
    let clock = TestClock(Rc::default());
    let make = || -> Result<Fake, Cause> { Err("no device".into()) };
    let error = replay(&Plan::new(&trace, None), 1, &clock, make, || ()).unwrap_err();
    assert_eq!(error.to_string(), "cannot start the allocator: no device");
}

#[test]
fn the_host_clock_does_not_run_backwards() {
    let clock = HostClock::default();
    let first = clock.now_ns();
    assert!(clock.now_ns() >= first);
}
