//! D-V7, D-N1, D-N3: which calls wait while one stream is held.

use std::time::{Duration, Instant};

use crate::error::DriverResult;
use crate::types::{
    CaptureMode, ChunkProps, DeviceId, DriverKind, HandleTypes, ProbeKernel, StreamHandle, Transfer,
};

use super::super::bench::Bench;
use super::super::check::{Answers, answer, ensure, same};
use super::super::gate::{Gate, hold_limit};
use super::super::outcome::{Outcome, Step};
use super::super::row::Case;
use super::super::scratch::{Scratch, WORD};

/// How D-V7 holds its stream.
pub(super) const V7_CASES: &[Case] = &[Case::any("wait-value gate"), Case::any("host function")];

/// D-V7: a held stream holds nobody else.
pub(super) fn d_v7(bench: &Bench) -> Outcome {
    bench.check(|s| {
        const STREAMS: usize = 40;
        let (g, device) = (s.g(), s.device());
        let held = s.stream(device)?;
        let streams = (0..STREAMS).map(|_| s.stream(device)).collect::<DriverResult<Vec<_>>>()?;
        let target = s.buffer(STREAMS as u64 * g, device, &[device])?;
        // Both kernels are known to the driver before.
        s.expect_words_by_kernel("before", device, zeroed(s, target, g)?, g / WORD, 0)?;
        let mut gate = if bench.case() == 0 {
            Gate::close(s, device, held, hold_limit(s))?
        } else {
            Gate::close_by_host_function(s, device, held, hold_limit(s))?
        };

        let address = s.range(g)?;
        let chunk = s.chunk(g, device)?;
        s.map_for(address, g, chunk, &[device])?;
        for (place, &stream) in (0..).zip(&streams) {
            let dst = target + place * g;
            let value = place as u32;
            s.launch(device, ProbeKernel::FillWords { dst, words: 1024, value }, stream)?;
            let copy = Transfer::DeviceToDevice { dst: dst + g / 2, src: dst, bytes: 4096 };
            s.transfer_on(device, copy, stream)?;
            let event = s.event(device)?;
            s.record(device, event, stream)?;
            s.wait_event(device, event)?;
        }
        s.stream(device)?;
        s.mem_alloc(device, g)?;
        s.free_bytes()?;
        for place in 0..STREAMS as u64 {
            let what = format!("stream {place}");
            s.expect_words(what, device, target + place * g + g / 2, 1024, place as u32)?;
        }
        s.fill(device, address, 1, 64)?;
        s.unmap(address, g)?;
        s.release(chunk)?;

        ensure(!gate.timed_out(), || "a call waited for the held stream".into())?;
        same("idle, still held", s.is_idle(device, held)?, false)?;
        gate.open();
        s.synchronize(device, held)?;
        Ok(String::new())
    })
}

/// Fills with the words 0, 1, 2, …, and gives the address back.
fn zeroed(s: &Scratch<'_>, address: u64, bytes: u64) -> DriverResult<u64> {
    s.fill_words(s.device(), address, bytes / WORD, 0)?;
    Ok(address)
}

/// How long a stream is held for a call that is expected to wait for it: longer than any call takes
/// by itself. A call that is expected not to wait has [`hold_limit`], so that a busy machine cannot
/// make it look as if it waited.
pub(super) fn short_hold(s: &Scratch<'_>) -> Duration {
    match s.driver().kind() {
        DriverKind::Cuda => Duration::from_millis(400),
        // More than a call waits there for a host function that it starts.
        DriverKind::Sim => Duration::from_millis(200),
    }
}

/// Calls on one device, each beside a stream that is held for it alone.
struct Beside<'s> {
    s: &'s Scratch<'s>,
    held_on: DeviceId,
    held: StreamHandle,
    /// The calls that wait; all others do not.
    waiting: &'static [&'static str],
    answers: Answers,
}

impl Beside<'_> {
    /// One call: whether it waits, its answer, and its time, which is a note.
    fn call(&mut self, name: &str, call: impl FnOnce() -> DriverResult<()>) -> Step<()> {
        let waits = self.waiting.contains(&name);
        let limit = if waits { short_hold(self.s) } else { hold_limit(self.s) };
        let (came, us) = self.ask(limit, call)?;
        let expected = format!("{}, OK", verdict(waits));
        self.answers.expect(format_args!("{name} ({us:.0} us)"), came, &expected);
        Ok(())
    }

    /// One call of which nobody knows whether it waits.
    fn note(&mut self, name: &str, call: impl FnOnce() -> DriverResult<()>) -> Step<()> {
        let (came, us) = self.ask(short_hold(self.s), call)?;
        self.answers.note(format_args!("{name} ({us:.0} us)"), came);
        Ok(())
    }

    fn ask(&self, limit: Duration, call: impl FnOnce() -> DriverResult<()>) -> Step<(String, f64)> {
        let s = self.s;
        let mut gate = Gate::close(s, self.held_on, self.held, limit)?;
        let begin = Instant::now();
        let result = call();
        let us = begin.elapsed().as_secs_f64() * 1e6;
        let waited = gate.timed_out();
        gate.open();
        s.synchronize(self.held_on, self.held)?;
        Ok((format!("{}, {}", verdict(waited), answer(&result)), us))
    }
}

fn verdict(waits: bool) -> &'static str {
    if waits { "waits" } else { "does not wait" }
}

/// Each call of a list, on `device`, while a stream of `held_on` is held.
fn calls_beside(
    s: &Scratch<'_>,
    held_on: DeviceId,
    device: DeviceId,
    waiting: &'static [&'static str],
) -> Step<String> {
    let held = s.stream(held_on)?;
    let mut beside = Beside { s, held_on, held, waiting, answers: Answers::default() };
    memory_beside(s, device, &mut beside)?;
    work_beside(s, device, &mut beside)?;
    beside.answers.told()
}

fn memory_beside(s: &Scratch<'_>, device: DeviceId, beside: &mut Beside<'_>) -> Step<()> {
    let g = s.g();
    let address = s.range(2 * g)?;
    let chunk = s.chunk(g, device)?;
    let open = s.buffer(g, device, &[device])?;
    beside.call("reserve", || s.range(g).map(drop))?;
    beside.call("create", || s.chunk(g, device).map(drop))?;
    beside.call("map", || s.map(address, g, 0, chunk))?;
    beside.call("set access", || s.grant(address, g, &[device]))?;
    beside.call("unmap", || s.unmap(address, g))?;
    beside.call("release", || s.release(chunk))?;
    beside.call("free the range", || s.address_free(address, 2 * g))?;
    let exportable =
        ChunkProps { handle_types: HandleTypes::POSIX_FD, ..ChunkProps::on_device(device) };
    let chunk = s.create(g, &exportable)?;
    beside.call("export", || s.export_fd(chunk).map(drop))?;
    beside.call("free memory query", || s.driver().mem_info(device).map(drop))?;
    beside.call("pointer query", || s.driver().pointer_info(open).map(drop))?;
    let allocation = s.mem_alloc(device, g)?;
    beside.call("cuMemAlloc", || s.mem_alloc(device, g).map(drop))?;
    beside.call("cuMemFree", || s.mem_free(device, allocation))?;
    beside.call("page-locked alloc", || s.pinned_word(device).map(drop))?;
    let freed = || s.pinned_and_freed(device);
    match beside.held_on == device {
        true => beside.call("page-locked free", freed),
        // The memory is there for both devices.
        false => beside.note("page-locked free", freed),
    }
}

fn work_beside(s: &Scratch<'_>, device: DeviceId, beside: &mut Beside<'_>) -> Step<()> {
    let open = s.buffer(s.g(), device, &[device])?;
    let stream = s.stream(device)?;
    let event = s.event(device)?;
    let kernel = ProbeKernel::FillWords { dst: open, words: 16, value: 0 };
    // Its first launch is the business of D-N16.
    s.run_kernel(device, kernel)?;
    beside.call("make a stream", || s.stream(device).map(drop))?;
    let gone = s.stream(device)?;
    beside.call("destroy a stream", || s.destroy_stream(device, gone))?;
    beside.call("make an event", || s.event(device).map(drop))?;
    beside.call("record", || s.record(device, event, stream))?;
    beside.call("event synchronise", || s.wait_event(device, event))?;
    beside.call("launch", || s.launch(device, kernel, stream))?;
    beside.call("stream synchronise, another", || s.synchronize(device, stream))?;
    beside
        .call("launch on the legacy stream", || s.launch(device, kernel, StreamHandle::LEGACY))?;
    beside.call("copy out", || s.read(device, open, 64).map(drop))?;
    beside.call("copy in", || s.write(device, open, &[0; 64]))?;
    beside.call("fill", || s.fill(device, open, 0, 64))?;
    beside.call("capture, instantiate", || {
        s.capture_begin(device, stream, CaptureMode::Relaxed)?;
        s.launch(device, kernel, stream)?;
        let graph = s.capture_end(device, stream)?;
        s.instantiate(device, graph).map(drop)
    })?;
    beside.call("device synchronise", || s.driver().device_synchronize(device))
}

/// D-N1: each call beside a held stream of the same device.
pub(super) fn d_n1(bench: &Bench) -> Outcome {
    const WAITING: &[&str] = &["cuMemFree", "page-locked free", "device synchronise"];
    bench.check(|s| calls_beside(s, s.device(), s.device(), WAITING))
}

/// D-N3: each call beside a held stream of the other device.
pub(super) fn d_n3(bench: &Bench) -> Outcome {
    bench.check(|s| calls_beside(s, s.peer()?, s.device(), &[]))
}
