//! D-V7 and D-N1 to D-N3: which calls wait while one stream is held.

use std::time::{Duration, Instant};

use crate::error::DriverResult;
use crate::types::{CaptureMode, DeviceId, HandleTypes, ProbeKernel, StreamHandle};
use crate::types::{ChunkProps, Transfer};

use super::super::bench::Bench;
use super::super::check::{answer, ensure, same};
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

/// Long enough that no call takes it by itself, short enough for a list of calls that do wait.
const SHORT_HOLD: Duration = Duration::from_millis(400);

/// Times one call while a stream of `held_on` is held; the stream is let go afterwards.
fn timed<T>(
    s: &Scratch<'_>,
    held_on: DeviceId,
    name: &str,
    call: impl FnOnce() -> DriverResult<T>,
) -> Step<String> {
    let stream = s.stream(held_on)?;
    let mut gate = Gate::close(s, held_on, stream, SHORT_HOLD)?;
    let begin = Instant::now();
    let result = call();
    let us = begin.elapsed().as_secs_f64() * 1e6;
    let waits = gate.timed_out();
    gate.open();
    s.synchronize(held_on, stream)?;
    let verdict = if waits { "WAITS" } else { "does not wait" };
    Ok(format!("{name}: {verdict}, {us:.0} us, {}", answer(&result)))
}

/// Each call of a list, on `device`, while a stream of `held_on` is held.
fn calls_while_held(s: &Scratch<'_>, held_on: DeviceId, device: DeviceId) -> Step<Vec<String>> {
    let g = s.g();
    let time = |lines: &mut Vec<String>, name: &str, call: &dyn Fn() -> DriverResult<()>| {
        lines.push(timed(s, held_on, name, call)?);
        Ok::<(), super::super::outcome::Stop>(())
    };
    let mut lines = Vec::new();
    let address = s.range(2 * g)?;
    let chunk = s.chunk(g, device)?;
    let open = s.buffer(g, device, &[device])?;
    let stream = s.stream(device)?;
    let event = s.event(device)?;
    s.run_kernel(device, ProbeKernel::FillWords { dst: open, words: 16, value: 0 })?;

    time(&mut lines, "reserve", &|| s.range(g).map(drop))?;
    time(&mut lines, "create", &|| s.chunk(g, device).map(drop))?;
    time(&mut lines, "map", &|| s.map(address, g, 0, chunk))?;
    time(&mut lines, "set access", &|| s.grant(address, g, &[device]))?;
    time(&mut lines, "unmap", &|| s.unmap(address, g))?;
    time(&mut lines, "release", &|| s.release(chunk))?;
    time(&mut lines, "free the range", &|| s.address_free(address, 2 * g))?;
    let exportable =
        ChunkProps { handle_types: HandleTypes::POSIX_FD, ..ChunkProps::on_device(device) };
    let chunk = s.create(g, &exportable)?;
    time(&mut lines, "export", &|| s.export_fd(chunk).map(drop))?;
    time(&mut lines, "free memory query", &|| s.driver().mem_info(device).map(drop))?;
    time(&mut lines, "pointer query", &|| s.driver().pointer_info(open).map(drop))?;
    let allocation = s.mem_alloc(device, g)?;
    time(&mut lines, "cuMemAlloc", &|| s.mem_alloc(device, g).map(drop))?;
    time(&mut lines, "cuMemFree", &|| s.mem_free(device, allocation))?;
    time(&mut lines, "page-locked alloc", &|| s.pinned_word(device).map(drop))?;
    time(&mut lines, "make a stream", &|| s.stream(device).map(drop))?;
    let gone = s.stream(device)?;
    time(&mut lines, "destroy a stream", &|| s.destroy_stream(device, gone))?;
    time(&mut lines, "make an event", &|| s.event(device).map(drop))?;
    time(&mut lines, "record", &|| s.record(device, event, stream))?;
    time(&mut lines, "event synchronise", &|| s.wait_event(device, event))?;
    let kernel = ProbeKernel::FillWords { dst: open, words: 16, value: 0 };
    time(&mut lines, "launch", &|| s.launch(device, kernel, stream))?;
    time(&mut lines, "stream synchronise, another", &|| s.synchronize(device, stream))?;
    time(&mut lines, "launch on the legacy stream", &|| {
        s.launch(device, kernel, StreamHandle::LEGACY)
    })?;
    time(&mut lines, "copy out", &|| s.read(device, open, 64).map(drop))?;
    time(&mut lines, "copy in", &|| s.write(device, open, &[0; 64]))?;
    time(&mut lines, "fill", &|| s.fill(device, open, 0, 64))?;
    time(&mut lines, "capture, instantiate", &|| {
        s.capture_begin(device, stream, CaptureMode::Relaxed)?;
        s.launch(device, kernel, stream)?;
        let graph = s.capture_end(device, stream)?;
        s.instantiate(device, graph).map(drop)
    })?;
    time(&mut lines, "device synchronise", &|| s.driver().device_synchronize(device))?;
    Ok(lines)
}

/// D-N1: each call beside a held stream of the same device.
pub(super) fn d_n1(bench: &Bench) -> Outcome {
    bench.observe(|s| Ok(calls_while_held(s, s.device(), s.device())?.join("\n")))
}

/// D-N3: each call beside a held stream of the other device.
pub(super) fn d_n3(bench: &Bench) -> Outcome {
    bench.observe(|s| Ok(calls_while_held(s, s.peer()?, s.device())?.join("\n")))
}

/// Where D-N2 holds its stream, each in a place of its own.
pub(super) const N2_CASES: &[Case] = &[Case::any("same device"), Case::any("other device")];

/// D-N2: streams are made and used for the first time while one is held. A program that did so
/// hung once; this row runs where a hang ends with its process.
pub(super) fn d_n2(bench: &Bench) -> Outcome {
    bench.observe(|s| {
        const STREAMS: u32 = 40;
        let (g, device) = (s.g(), s.device());
        let held_on = if bench.case() == 0 { device } else { s.peer()? };
        let target = s.buffer(g, device, &[device])?;
        s.fill_words(device, target, 16, 0)?;
        let held = s.stream(held_on)?;
        let mut gate = Gate::close(s, held_on, held, hold_limit(s))?;
        let begin = Instant::now();
        let mut first_wait = None;
        for index in 0..STREAMS {
            bench.say(&format!("making stream {index}"));
            let stream = s.stream(device)?;
            if gate.timed_out() {
                first_wait = first_wait.or(Some(format!("making stream {index}")));
            }
            bench.say(&format!("launching on stream {index}"));
            let kernel = ProbeKernel::FillWords { dst: target, words: 16, value: index };
            s.launch(device, kernel, stream)?;
            if gate.timed_out() {
                first_wait = first_wait.or(Some(format!("the launch on stream {index}")));
            }
        }
        let us = begin.elapsed().as_secs_f64() * 1e6;
        bench.say("opening the gate");
        gate.open();
        s.synchronize(held_on, held)?;
        let verdict = first_wait.map_or("none waited".to_owned(), |call| call + " waited");
        Ok(format!("{STREAMS} streams made and launched on: {verdict}, {us:.0} us in all"))
    })
}
