//! D-N18: which calls go on while another thread waits in the driver for a held stream.
//!
//! Three threads meet: one opens the gate and makes no call, one waits in a call that a held stream
//! keeps from returning, and this one makes the calls that a move of memory consists of. Where they
//! wait too, a move that holds a stream stands still until the gate opens by itself, should another
//! part of the program free memory at the wrong moment.

use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::DriverResult;
use crate::types::{ProbeKernel, StreamHandle, Transfer};

use super::super::bench::Bench;
use super::super::check::{Answers, answer};
use super::super::gate::{Gate, hold_limit};
use super::super::outcome::{Outcome, Step};
use super::super::row::Case;
use super::super::scratch::Scratch;
use super::held::short_hold;

/// What the other thread waits in.
pub(super) const N18_CASES: &[Case] = &[
    Case::any("cuMemFree"),
    Case::any("device synchronise"),
    Case::any("cuMemFreeHost"),
    Case::any("making a stream"),
];

/// The case of [`N18_CASES`] beside which no call waits.
const SYNCHRONISE: usize = 1;

/// More than a context makes between two waits: 43 on a GPU (rows D-N2, D-N15).
const STREAMS_MAX: u32 = 48;
/// For so long the other thread must not have moved before it counts as waiting.
const SETTLED: Duration = Duration::from_millis(20);

/// D-N18: the calls of a move, each beside a thread that waits for a held stream.
pub(super) fn d_n18(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let device = s.device();
        let held = s.stream(device)?;
        // Known to the driver before: first launches are the business of D-N16.
        let target = s.buffer(2 * s.g(), device, &[device])?;
        s.fill_words(device, target, 16, 0)?;
        let mut behind = Behind { s, bench, held, answers: Answers::default() };
        memory_behind(&mut behind)?;
        work_behind(&mut behind, target)?;
        on_the_other_device(&mut behind)?;
        behind.answers.told_in_full()
    })
}

/// What is known of a call beside a thread that waits alone, which one in [`SYNCHRONISE`] does not.
#[derive(Clone, Copy)]
enum Known {
    Waits,
    Passes,
    /// The answer is a note.
    Nothing,
}

fn memory_behind(behind: &mut Behind<'_>) -> Step<()> {
    use Known::Passes;
    let s = behind.s;
    let (g, device) = (s.g(), s.device());
    let address = s.range(g)?;
    let chunk = s.chunk(g, device)?;
    behind.call(Passes, "reserve", || s.range(g).map(drop))?;
    behind.call(Passes, "create", || s.chunk(g, device).map(drop))?;
    behind.call(Passes, "map", || s.map(address, g, 0, chunk))?;
    behind.call(Passes, "set access", || s.grant(address, g, &[device]))?;
    behind.call(Passes, "unmap", || s.unmap(address, g))?;
    behind.call(Passes, "release", || s.release(chunk))?;
    behind.call(Known::Nothing, "free memory query", || s.free_bytes().map(drop))
}

fn work_behind(behind: &mut Behind<'_>, target: u64) -> Step<()> {
    use Known::{Nothing, Passes, Waits};
    let s = behind.s;
    let (g, device) = (s.g(), s.device());
    let stream = s.stream(device)?;
    let event = s.event(device)?;
    let word = s.pinned_word(device)?;
    let copy = Transfer::DeviceToDevice { dst: target + g, src: target, bytes: g };
    let kernel = ProbeKernel::FillWords { dst: target, words: 16, value: 0 };
    behind.call(Waits, "copy on another stream", || s.transfer_on(device, copy, stream))?;
    behind.call(Waits, "launch on another stream", || s.launch(device, kernel, stream))?;
    behind.call(Waits, "make an event", || s.event(device).map(drop))?;
    behind.call(Waits, "record", || s.record(device, event, stream))?;
    behind.call(Passes, "event query", || s.has_passed(device, event).map(drop))?;
    behind.call(Nothing, "event synchronise", || s.wait_event(device, event))?;
    behind.call(Nothing, "stream query", || s.is_idle(device, stream).map(drop))?;
    behind.call(Nothing, "stream synchronise", || s.synchronize(device, stream))?;
    behind.call(Nothing, "a wait for an event", || s.follow(device, stream, event))?;
    behind.call(Waits, "a copy, and its event's synchronise", || {
        s.transfer_on(device, copy, stream)?;
        s.record(device, event, stream)?;
        s.wait_event(device, event)
    })?;
    // The word is there already: the stream passes.
    behind.call(Passes, "a wait for a value", || s.wait_value(device, stream, word, 0))
}

/// Whether those that wait also do on another device, where there is one.
fn on_the_other_device(behind: &mut Behind<'_>) -> Step<()> {
    let s = behind.s;
    let (g, device) = (s.g(), s.device());
    let Some(other) = s.devices().into_iter().find(|&other| other != device) else { return Ok(()) };
    let target = s.buffer(g, other, &[other])?;
    // This launch is the first there (row D-N16).
    s.fill_words(other, target, 16, 0)?;
    let stream = s.stream(other)?;
    let kernel = ProbeKernel::FillWords { dst: target, words: 16, value: 0 };
    behind
        .call(Known::Nothing, "make an event, on the other device", || s.event(other).map(drop))?;
    let launch = || s.launch(other, kernel, stream);
    behind.call(Known::Nothing, "launch, on the other device", launch)
}

/// Calls, each beside a thread that waits in the driver for a stream that is held for it alone.
struct Behind<'s> {
    s: &'s Scratch<'s>,
    bench: &'s Bench,
    held: StreamHandle,
    answers: Answers,
}

impl Behind<'_> {
    /// One call: whether it waits too, its answer, and its time, which is a note.
    fn call(
        &mut self,
        known: Known,
        name: &str,
        call: impl FnOnce() -> DriverResult<()>,
    ) -> Step<()> {
        let (s, device) = (self.s, self.s.device());
        self.bench.say(name);
        let case = self.bench.case();
        let allocation = if case == 0 { Some(s.mem_alloc(device, s.g())?) } else { None };
        let waits = matches!(known, Known::Waits) && case != SYNCHRONISE;
        let mut gate = Gate::close(s, device, self.held, hold_limit(s))?;
        let steps = AtomicU32::new(0);
        let (came, us, other) = thread::scope(|scope| {
            let other = scope.spawn(|| wait_in(s, case, allocation, &steps));
            while !other.is_finished() && !settled(&steps) {}
            let begins_behind = !other.is_finished();
            if waits || matches!(known, Known::Nothing) {
                gate.open_in(short_hold(s));
            }
            let begin = Instant::now();
            let result = call();
            let us = begin.elapsed().as_secs_f64() * 1e6;
            // Read before the gate is opened, which is what lets everybody go.
            let waited = gate.timed_out();
            gate.open();
            let came = match (begins_behind, waited) {
                (false, _) => "not asked, as the other thread does not wait".to_owned(),
                (true, true) => format!("waits, {}", answer(&result)),
                (true, false) => format!("does not wait, {}", answer(&result)),
            };
            (came, us, other.join())
        });
        match other {
            Ok(result) => result?,
            Err(panic) => std::panic::resume_unwind(panic),
        }
        s.synchronize(device, self.held)?;
        let name = format!("{name} ({us:.0} us)");
        match (known, waits) {
            (Known::Nothing, _) => self.answers.note(name, came),
            (_, true) => self.answers.expect(name, came, "waits, OK"),
            (_, false) => self.answers.expect(name, came, "does not wait, OK"),
        }
        Ok(())
    }
}

/// Whether the other thread has begun and then stood still for a while.
fn settled(steps: &AtomicU32) -> bool {
    let before = steps.load(Ordering::Acquire);
    thread::sleep(SETTLED);
    before > 0 && steps.load(Ordering::Acquire) == before
}

/// The other thread: counts each call before it makes it. It frees `allocation`, where there is one.
fn wait_in(
    s: &Scratch<'_>,
    case: usize,
    allocation: Option<u64>,
    steps: &AtomicU32,
) -> DriverResult<()> {
    let device = s.device();
    let step = || steps.fetch_add(1, Ordering::Release);
    step();
    if let Some(address) = allocation {
        return s.mem_free(device, address);
    }
    match case {
        1 => s.driver().device_synchronize(device),
        2 => s.pinned_and_freed(device),
        _ => (0..STREAMS_MAX).try_for_each(|_| {
            s.stream(device)?;
            step();
            Ok(())
        }),
    }
}
