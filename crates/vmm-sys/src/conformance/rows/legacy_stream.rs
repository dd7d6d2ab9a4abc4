//! D-G5 and D-S3: the legacy stream beside captures, and after threads that ended.
//!
//! A pool that gates memory of another thread's stream on the legacy stream depends on both.

use std::thread;
use std::time::Instant;

use crate::error::{DriverResult, ResultCode};
use crate::types::{CaptureMode, CaptureStatus, EventHandle, ProbeKernel, StreamHandle};

use super::super::bench::Bench;
use super::super::check::{Answers, answer};
use super::super::gate::{Gate, hold_limit};
use super::super::outcome::{Outcome, Step};
use super::super::row::Case;
use super::super::scratch::{Scratch, WORD};

/// Runs a call in another thread, to its end.
fn elsewhere<T: Send>(call: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| match scope.spawn(call).join() {
        Ok(answer) => answer,
        Err(panic) => std::panic::resume_unwind(panic),
    })
}

/// Which stream is captured in D-G5.
pub(super) const G5_CASES: &[Case] =
    &[Case::any("per-thread"), Case::any("blocking"), Case::any("non-blocking")];

/// What is known of a captured stream, in the words of a report.
fn status_in_words(status: DriverResult<CaptureStatus>) -> String {
    match status {
        Ok(status) => format!("{status:?}"),
        Err(error) => error.code().to_string(),
    }
}

/// D-G5: what the legacy stream says, and does, while another stream is captured.
pub(super) fn d_g5(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let is_ordered = bench.case() != 2;
        let mut answers = Answers::default();
        for mode in [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed] {
            for relaxed in [false, true] {
                let stream = match bench.case() {
                    0 => StreamHandle::PER_THREAD,
                    1 => s.blocking_stream(s.device())?,
                    _ => s.stream(s.device())?,
                };
                let caller = if relaxed { "a relaxed thread" } else { "a thread" };
                let what = format!("{mode:?} capture, {caller}");
                bench.say(&what);
                // Made before, so that nothing but the questions happens beside the capture.
                let event = s.event(s.device())?;
                s.capture_begin(s.device(), stream, mode)?;
                beside_capture(s, &mut answers, &what, (stream, event), (relaxed, is_ordered))?;
            }
        }
        // One in a line would be many; those that are wrong are told.
        answers.told().map(|told| format!("{} answers as expected", told.lines().count()))
    })
}

/// Asks another thread in turn, the most harmless question first, and looks at the capture after
/// each; then ends it.
fn beside_capture(
    s: &Scratch<'_>,
    answers: &mut Answers,
    what: &str,
    (captured, event): (StreamHandle, EventHandle),
    (relaxed, is_ordered): (bool, bool),
) -> Step<()> {
    let device = s.device();
    let status = |stream| status_in_words(s.capture_status(device, stream));
    let (own, legacy) = (StreamHandle::PER_THREAD, StreamHandle::LEGACY);
    let thread = |call: &(dyn Fn() -> String + Sync)| {
        elsewhere(|| {
            // The thread ends with this call, and its mode with it.
            let set = if relaxed { CaptureMode::Relaxed } else { CaptureMode::Global };
            s.driver().exchange_capture_mode(set)?;
            DriverResult::Ok(call())
        })
    };
    answers.expect(format!("{what}: its own stream"), thread(&|| status(own))?, "None");
    let came = thread(&|| answer(&s.record(device, event, own)))?;
    answers.expect(format!("{what}: a record on its own stream"), came, "OK");
    answers.expect(format!("{what}: the capture then"), status(captured), "Active");
    let came = thread(&|| status(legacy))?;
    let implicit = ResultCode::STREAM_CAPTURE_IMPLICIT.to_string();
    let expected = if is_ordered { &implicit } else { "None" };
    answers.expect(format!("{what}: the legacy stream"), came, expected);
    answers.expect(format!("{what}: the capture then"), status(captured), "Active");
    let came = thread(&|| answer(&s.record(device, event, legacy)))?;
    let expected = if is_ordered { &implicit } else { "OK" };
    answers.expect(format!("{what}: a record on the legacy stream"), came, expected);
    let expected = if is_ordered { "Invalidated" } else { "Active" };
    answers.expect(format!("{what}: the capture then"), status(captured), expected);
    let ended = s.capture_end(device, captured);
    let lost = ResultCode::STREAM_CAPTURE_INVALIDATED.to_string();
    let expected = if is_ordered { &lost } else { "OK" };
    answers.expect(format!("{what}: its end"), answer(&ended), expected);
    Ok(())
}

/// D-S3: a thread leaves held work on its own stream and ends. Does its end wait, and does an event
/// on the legacy stream come after the work?
pub(super) fn d_s3(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let device = s.device();
        let target = s.buffer(s.g(), device, &[device])?;
        let copy = ProbeKernel::CopyWords { dst: target + WORD, src: target, words: 1 };
        // The first launch of all waits for every held stream (row D-N16), and would pass for the
        // thread's end.
        s.run_kernel(device, ProbeKernel::Spin { busy_us: 0, done: target })?;
        s.run_kernel(device, copy)?;
        s.fill(device, target, 0, 2 * WORD)?;
        let (event, own) = (s.event(device)?, s.event(device)?);
        let mut answers = Answers::default();
        let mut hold = elsewhere(|| leave_held_work(s, bench, target, own, &mut answers))?;
        hold.step(&mut answers, "the end of the thread");
        let passed = |passed| if passed { "has passed" } else { "has not passed" };
        let came = passed(s.has_passed(device, own)?);
        answers.expect("an event behind the work, once the thread has ended", came, PENDING);
        hold.step(&mut answers, "the question");
        bench.say("an event on the legacy stream");
        s.record(device, event, StreamHandle::LEGACY)?;
        hold.step(&mut answers, "a record on the legacy stream");
        let came = passed(s.has_passed(device, event)?);
        answers.expect("that event, asked while the work is held", came, PENDING);
        hold.step(&mut answers, "the question about it");
        hold.gate.open();
        s.wait_event(device, event)?;
        // On a stream that waits for nobody: a synchronous copy would wait with the legacy stream.
        let aside = s.stream(device)?;
        s.launch(device, copy, aside)?;
        s.synchronize(device, aside)?;
        s.driver().device_synchronize(device)?;
        let came = s.word(device, target + WORD)?;
        answers.expect("the work, once the event has passed", done(came), "done");
        answers.expect("the work, at the end", done(s.word(device, target)?), "done");
        answers.told_in_full()
    })
}

const PENDING: &str = "has not passed";

/// What the thread of D-S3 does: holds its own stream, and leaves work and an event behind it.
fn leave_held_work(
    s: &Scratch<'_>,
    bench: &Bench,
    target: u64,
    own: EventHandle,
    answers: &mut Answers,
) -> DriverResult<Hold> {
    let (device, stream) = (s.device(), StreamHandle::PER_THREAD);
    bench.say("a thread holds its own stream");
    let gate = Gate::close(s, device, stream, hold_limit(s))?;
    let mut hold = Hold { gate, since: Instant::now(), is_over: false };
    // Long enough that what does not wait for it is seen to come too early.
    s.launch(device, ProbeKernel::Spin { busy_us: 100_000, done: target }, stream)?;
    hold.step(answers, "the launch in the thread");
    s.record(device, own, stream)?;
    hold.step(answers, "a record in the thread");
    bench.say("the thread ends");
    Ok(hold)
}

/// A held stream, and whether the steps beside it wait, one by one.
struct Hold {
    gate: Gate,
    /// When the last step was over.
    since: Instant,
    is_over: bool,
}

impl Hold {
    /// A step is over. Its time is told, as only one step can be seen to wait.
    fn step(&mut self, answers: &mut Answers, what: &str) {
        let us = self.since.elapsed().as_secs_f64() * 1e6;
        let was_over = std::mem::replace(&mut self.is_over, self.gate.timed_out());
        let came = match (was_over, self.is_over) {
            (true, _) => "not asked, as the hold was over",
            (false, true) => "waits",
            (false, false) => "does not wait",
        };
        answers.expect(format_args!("{what} ({us:.0} us)"), came, "does not wait");
        self.since = Instant::now();
    }
}

fn done(word: u32) -> &'static str {
    if word == 1 { "done" } else { "not done" }
}
