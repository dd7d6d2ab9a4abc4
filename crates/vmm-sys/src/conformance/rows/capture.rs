//! D-G: stream capture, and what may be called during one.

use std::thread;

use crate::driver::Driver;
use crate::error::{DriverResult, ResultCode};
use crate::types::{CaptureMode, CaptureStatus, EventHandle, ProbeKernel, StreamHandle};

use super::super::bench::Bench;
use super::super::check::{granted, refused, same};
use super::super::outcome::{Outcome, Step};
use super::super::scratch::{Scratch, WORD};

const MODES: [CaptureMode; 3] =
    [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed];

/// Calls that a capture can forbid.
#[derive(Clone, Copy, Debug)]
enum Unsafe {
    Query,
    Synchronize,
    Alloc,
}

const UNSAFE: [Unsafe; 3] = [Unsafe::Query, Unsafe::Synchronize, Unsafe::Alloc];

/// A stream to capture, and an event that another stream has passed: asking it needs no waiting,
/// so a refusal is the capture's alone.
struct Stage {
    captured: StreamHandle,
    other: StreamHandle,
    event: EventHandle,
}

impl Stage {
    fn set(s: &Scratch<'_>) -> Step<Stage> {
        let device = s.device();
        let (captured, other) = (s.stream(device)?, s.stream(device)?);
        let event = s.event(device)?;
        s.record(device, event, other)?;
        s.synchronize(device, other)?;
        Ok(Stage { captured, other, event })
    }

    fn call(&self, s: &Scratch<'_>, call: Unsafe) -> DriverResult<()> {
        match call {
            Unsafe::Query => s.has_passed(s.device(), self.event).map(drop),
            Unsafe::Synchronize => s.wait_event(s.device(), self.event),
            Unsafe::Alloc => s.mem_alloc(s.device(), 4096).map(drop),
        }
    }

    /// The capture must be as good as new, and end in a graph.
    fn must_be_valid(&self, s: &Scratch<'_>, what: &str) -> Step<()> {
        let status = s.capture_status(s.device(), self.captured)?;
        same(format_args!("{what}: capture"), status, CaptureStatus::Active)?;
        granted(format_args!("{what}: end"), s.capture_end(s.device(), self.captured))?;
        Ok(())
    }

    /// The capture must be lost, and its end must say so.
    fn must_be_lost(&self, s: &Scratch<'_>, what: &str) -> Step<()> {
        let status = s.capture_status(s.device(), self.captured)?;
        same(format_args!("{what}: capture"), status, CaptureStatus::Invalidated)?;
        let end = s.capture_end(s.device(), self.captured);
        refused(format_args!("{what}: end"), end, ResultCode::STREAM_CAPTURE_INVALIDATED)
    }
}

/// D-G1: the VMM calls do not disturb a capture, and the graph works.
pub(super) fn d_g1(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let (g, device) = (s.g(), s.device());
        let target = s.buffer(g, device, &[device])?;
        let stream = s.stream(device)?;
        for (turn, mode) in (0_u32..).zip(MODES) {
            s.capture_begin(device, stream, mode)?;
            let kernel = ProbeKernel::FillWords { dst: target, words: g / WORD, value: turn + 1 };
            s.launch(device, kernel, stream)?;
            let address = s.range(2 * g)?;
            let chunk = s.chunk(2 * g, device)?;
            s.map_for(address, 2 * g, chunk, &[device])?;
            s.unmap(address, 2 * g)?;
            s.release(chunk)?;
            s.address_free(address, 2 * g)?;
            let status = s.capture_status(device, stream)?;
            same(format_args!("{mode:?}: capture"), status, CaptureStatus::Active)?;
            let graph = granted(format_args!("{mode:?}: end"), s.capture_end(device, stream))?;
            s.fill(device, target, 0, g)?;
            let exec = s.instantiate(device, graph)?;
            s.replay(device, exec, stream)?;
            s.expect_words(format_args!("{mode:?}: graph"), device, target, g / WORD, turn + 1)?;
        }
        Ok(String::new())
    })
}

/// D-G2: the capturing thread's own unsafe calls end its capture, unless it is relaxed.
pub(super) fn d_g2(bench: &Bench) -> Outcome {
    bench.check(|s| {
        for mode in [CaptureMode::Global, CaptureMode::ThreadLocal] {
            for call in [Unsafe::Alloc, Unsafe::Query] {
                let what = format!("{mode:?}, {call:?}");
                let stage = Stage::set(s)?;
                s.capture_begin(s.device(), stage.captured, mode)?;
                let answer = stage.call(s, call);
                refused(&what, answer, ResultCode::STREAM_CAPTURE_UNSUPPORTED)?;
                stage.must_be_lost(s, &what)?;
            }
        }
        Ok(String::new())
    })
}

/// Runs a call in another thread, to its end.
fn elsewhere<T: Send>(call: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| match scope.spawn(call).join() {
        Ok(answer) => answer,
        Err(panic) => std::panic::resume_unwind(panic),
    })
}

/// D-G3: what another thread may do depends on the mode of the capture.
pub(super) fn d_g3(bench: &Bench) -> Outcome {
    bench.check(|s| {
        for mode in MODES {
            for call in UNSAFE {
                let what = format!("{mode:?}, {call:?} in another thread");
                let stage = Stage::set(s)?;
                s.capture_begin(s.device(), stage.captured, mode)?;
                let answer = elsewhere(|| stage.call(s, call));
                if mode == CaptureMode::Global {
                    refused(&what, answer, ResultCode::STREAM_CAPTURE_UNSUPPORTED)?;
                    stage.must_be_lost(s, &what)?;
                } else {
                    granted(&what, answer)?;
                    stage.must_be_valid(s, &what)?;
                }
            }
            let what = format!("{mode:?}, record in another thread");
            let stage = Stage::set(s)?;
            s.capture_begin(s.device(), stage.captured, mode)?;
            let answer = elsewhere(|| s.record(s.device(), stage.event, stage.other));
            granted(&what, answer)?;
            stage.must_be_valid(s, &what)?;
        }
        Ok(String::new())
    })
}

/// D-G4: a relaxed thread harms no capture, its own included.
pub(super) fn d_g4(bench: &Bench) -> Outcome {
    bench.check(|s| {
        for mode in MODES {
            for call in UNSAFE {
                for own_thread in [true, false] {
                    let place = if own_thread { "in the same thread" } else { "in another thread" };
                    let what = format!("{mode:?}, relaxed {call:?} {place}");
                    let stage = Stage::set(s)?;
                    s.capture_begin(s.device(), stage.captured, mode)?;
                    let relaxed = || {
                        let mode = Relaxed::enter(s.driver())?;
                        stage.call(s, call)?;
                        mode.leave()
                    };
                    let answer = if own_thread { relaxed() } else { elsewhere(relaxed) };
                    granted(&what, answer)?;
                    stage.must_be_valid(s, &what)?;
                }
            }
        }
        Ok(String::new())
    })
}

/// D-N20: a stream that is captured does not tell its identity, nor does the legacy stream beside one that
/// it is ordered with. The question spoils the capture, in every mode, in a relaxed thread too.
pub(super) fn d_n20(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let device = s.device();
        for (mode, relaxed) in MODES.into_iter().flat_map(|mode| [(mode, false), (mode, true)]) {
            let ask = |stream| -> DriverResult<u64> {
                let within = relaxed.then(|| Relaxed::enter(s.driver())).transpose()?;
                let answer = s.stream_id(device, stream);
                within.map_or(Ok(()), Relaxed::leave)?;
                answer
            };
            let what = format!("{mode:?}, relaxed {relaxed}");
            let stage = Stage::set(s)?;
            s.capture_begin(device, stage.captured, mode)?;
            for stream in [stage.other, StreamHandle::PER_THREAD, StreamHandle::LEGACY] {
                granted(format_args!("{what}: {stream:?}"), ask(stream))?;
            }
            stage.must_be_valid(s, &what)?;
            s.capture_begin(device, stage.captured, mode)?;
            let code = ResultCode::STREAM_CAPTURE_UNSUPPORTED;
            refused(format_args!("{what}: the captured stream"), ask(stage.captured), code)?;
            stage.must_be_lost(s, &what)?;
            let blocking = Stage { captured: s.blocking_stream(device)?, ..stage };
            s.capture_begin(device, blocking.captured, mode)?;
            let code = ResultCode::STREAM_CAPTURE_IMPLICIT;
            refused(format_args!("{what}: the legacy stream"), ask(StreamHandle::LEGACY), code)?;
            blocking.must_be_lost(s, &what)?;
        }
        Ok("six ways each, as expected".to_owned())
    })
}

/// The calling thread in relaxed mode, until it leaves or this is dropped.
struct Relaxed<'d> {
    driver: &'d dyn Driver,
    before: Option<CaptureMode>,
}

impl<'d> Relaxed<'d> {
    fn enter(driver: &'d dyn Driver) -> DriverResult<Relaxed<'d>> {
        let before = driver.exchange_capture_mode(CaptureMode::Relaxed)?;
        Ok(Relaxed { driver, before: Some(before) })
    }

    fn leave(mut self) -> DriverResult<()> {
        self.before.take().map_or(Ok(()), |mode| self.driver.exchange_capture_mode(mode).map(drop))
    }
}

impl Drop for Relaxed<'_> {
    fn drop(&mut self) {
        if let Some(mode) = self.before {
            // The row has failed already: its own text matters more.
            let _ = self.driver.exchange_capture_mode(mode);
        }
    }
}
