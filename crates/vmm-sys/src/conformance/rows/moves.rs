//! D-V1 to D-V5: memory that changes behind an address while work goes on.

use std::thread;

use crate::error::DriverResult;
use crate::types::{
    CaptureMode, ChunkHandle, ChunkProps, DeviceId, GraphExecHandle, Location, ProbeKernel,
    Transfer,
};

use super::super::bench::Bench;
use super::super::check::{ensure, same};
use super::super::gate::{Gate, hold_limit};
use super::super::outcome::{Outcome, Step, Stop};
use super::super::row::Needs;
use super::super::scratch::{Scratch, WORD};

/// Three nodes over one address: a kernel and a copy out of its first half, a fill of its second.
struct Replay {
    address: u64,
    half: u64,
    by_kernel: u64,
    by_copy: u64,
    exec: GraphExecHandle,
}

const FILLED: u8 = 0x5a;

impl Replay {
    /// Captures the graph over what is mapped at `address` now.
    fn capture(s: &Scratch<'_>, address: u64, bytes: u64) -> Step<Replay> {
        let (device, half) = (s.device(), bytes / 2);
        let by_kernel = s.buffer(half, device, &[device])?;
        let by_copy = s.buffer(half, device, &[device])?;
        let stream = s.stream(device)?;
        s.capture_begin(device, stream, CaptureMode::Relaxed)?;
        let words = half / WORD;
        s.launch(device, ProbeKernel::CopyWords { dst: by_kernel, src: address, words }, stream)?;
        let copy = Transfer::DeviceToDevice { dst: by_copy, src: address, bytes: half };
        s.transfer_on(device, copy, stream)?;
        let fill = Transfer::Fill8 { dst: address + half, value: FILLED, bytes: half };
        s.transfer_on(device, fill, stream)?;
        let graph = s.capture_end(device, stream)?;
        let exec = s.instantiate(device, graph)?;
        Ok(Replay { address, half, by_kernel, by_copy, exec })
    }

    /// Replays over new content, and looks at what each node did.
    fn must_follow(&self, s: &Scratch<'_>, home: Location, value: u32) -> Step<()> {
        let (device, words) = (s.device(), self.half / WORD);
        s.fill_words(device, self.address, words, value)?;
        let stream = s.stream(device)?;
        s.replay(device, self.exec, stream)?;
        let what = |node| format!("{node} node, chunk on {home}");
        s.expect_words(what("kernel"), device, self.by_kernel, words, value)?;
        s.expect_words(what("copy"), device, self.by_copy, words, value)?;
        let filled = self.address + self.half;
        s.expect_fill(what("fill"), device, filled, self.half, FILLED)
    }
}

/// D-V1: graphs keep the address, not the chunk.
pub(super) fn d_v1(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let (device, peer) = (s.device(), s.peer()?);
        let bytes = 4 * s.g();
        let address = s.range(bytes)?;
        let mut homes = vec![Location::Device(device), Location::Device(peer)];
        let note = match Needs::HOST_NUMA.met_by(bench) {
            Ok(()) => String::new(),
            Err(Stop::Skipped(why)) => format!("host memory left out: {why}"),
            Err(failed) => return Err(failed),
        };
        if note.is_empty() {
            homes.push(Location::HostNuma(0));
        }
        let mut replay = None;
        let mut left_behind = None;
        for (turn, home) in (1_u32..).zip(homes) {
            let chunk = s.create(bytes, &ChunkProps { location: home, ..s.props() })?;
            s.map_for(address, bytes, chunk, &[device])?;
            if let Location::Device(owner) = home {
                let ordinal = s.driver().pointer_info(address)?.device;
                same("ordinal of the pointer", ordinal, owner)?;
            }
            if replay.is_none() {
                replay = Some(Replay::capture(s, address, bytes)?);
            }
            if let Some(replay) = &replay {
                replay.must_follow(s, home, turn * 1000)?;
            }
            // Later replays must not reach the chunks that were here before.
            if let Some(old) = left_behind {
                s.expect_fill("a chunk that was replaced", device, old, bytes, 0x11)?;
            }
            let old = s.alias(bytes, chunk, &[device])?;
            s.fill(device, old, 0x11, bytes)?;
            left_behind = Some(old);
            s.unmap(address, bytes)?;
        }
        Ok(note)
    })
}

/// D-V2: two addresses of one chunk are in stream order like one.
pub(super) fn d_v2(bench: &Bench) -> Outcome {
    bench.check(|s| {
        const TURNS: u32 = 2000;
        let (bytes, device) = (s.g(), s.device());
        let words = 2048.min(bytes / WORD);
        let chunk = s.chunk(bytes, device)?;
        let left = s.alias(bytes, chunk, &[device])?;
        let right = s.alias(bytes, chunk, &[device])?;
        let errors = s.buffer(bytes, device, &[device])?;
        let stream = s.stream(device)?;
        for turn in 0..TURNS {
            let (dst, src) = if turn % 2 == 0 { (left, right) } else { (right, left) };
            let value = turn.wrapping_mul(0x9e37_79b9);
            s.launch(device, ProbeKernel::FillWords { dst, words, value }, stream)?;
            s.launch(device, ProbeKernel::CheckWords { src, words, value, errors }, stream)?;
        }
        s.synchronize(device, stream)?;
        same("wrong words", s.word(device, errors)?, 0)?;
        s.expect_words_by_kernel("the last turn", device, left, words, last_value(TURNS))?;
        Ok(format!("{TURNS} of {TURNS}"))
    })
}

fn last_value(turns: u32) -> u32 {
    (turns - 1).wrapping_mul(0x9e37_79b9)
}

/// D-V3: the new address is good at once, the old one goes after its event.
pub(super) fn d_v3(bench: &Bench) -> Outcome {
    bench.check(|s| {
        const TURNS: u32 = 50;
        let (bytes, device) = (s.g(), s.device());
        let words = bytes / WORD;
        let chunk = s.chunk(bytes, device)?;
        let errors = s.buffer(bytes, device, &[device])?;
        let stream = s.stream(device)?;
        let mut old = s.alias(bytes, chunk, &[device])?;
        let mut overlapped = 0;
        for turn in 0..TURNS {
            let value = turn * 7919;
            let passed = s.event(device)?;
            // Every other turn the kernel waits in the queue; in the rest it may be at work.
            let mut gate = None;
            if turn % 2 == 0 {
                gate = Some(Gate::close(s, device, stream, hold_limit(s))?);
            }
            s.launch(device, ProbeKernel::Spin { busy_us: 300, done: 0 }, stream)?;
            s.launch(device, ProbeKernel::FillWords { dst: old, words, value }, stream)?;
            s.record(device, passed, stream)?;
            let new = s.alias(bytes, chunk, &[device])?;
            overlapped += u32::from(!s.is_idle(device, stream)?);
            let check = ProbeKernel::CheckWords { src: new, words, value, errors };
            s.launch(device, check, stream)?;
            if let Some(gate) = &mut gate {
                gate.open();
            }
            s.wait_event(device, passed)?;
            s.unmap(old, bytes)?;
            s.address_free(old, bytes)?;
            old = new;
        }
        s.synchronize(device, stream)?;
        same("wrong words", s.word(device, errors)?, 0)?;
        ensure(overlapped >= TURNS / 2, || format!("only {overlapped} turns met a busy stream"))?;
        s.expect_words_by_kernel("the last turn", device, old, words, (TURNS - 1) * 7919)?;
        Ok(format!("{TURNS} of {TURNS}, {overlapped} beside a kernel"))
    })
}

/// D-V4: kernels beside a thread that maps and unmaps. That they do not slow down is a time, which
/// the note gives; that they compute right is what can fail.
pub(super) fn d_v4(bench: &Bench) -> Outcome {
    bench.check(|s| {
        const TURNS: u32 = 200;
        let bytes = s.g();
        let mut notes = Vec::new();
        for device in s.devices() {
            let alone = kernels(s, device, TURNS)?;
            let (beside, remaps) = thread::scope(|scope| {
                let (stop, stopped) = std::sync::mpsc::channel::<()>();
                let mapper = scope.spawn(move || remap_until(s, bytes, &stopped));
                let beside = kernels(s, device, TURNS);
                drop(stop);
                match mapper.join() {
                    Ok(remaps) => (beside, remaps),
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            });
            let (beside, remaps) = (beside?, remaps?);
            ensure(remaps > 0, || "no remap was made beside the kernels".into())?;
            notes.push(format!(
                "{device}: {alone:.1} us a pair of kernels, {beside:.1} beside {remaps} remaps"
            ));
        }
        Ok(notes.join("; "))
    })
}

/// Maps and unmaps on the device under test until the channel closes; at least once.
fn remap_until(
    s: &Scratch<'_>,
    bytes: u64,
    stopped: &std::sync::mpsc::Receiver<()>,
) -> DriverResult<u32> {
    let address = s.range(bytes)?;
    let chunk = s.chunk(bytes, s.device())?;
    let mut remaps = 0;
    loop {
        s.map_for(address, bytes, chunk, &[s.device()])?;
        s.unmap(address, bytes)?;
        remaps += 1;
        if stopped.try_recv() == Err(std::sync::mpsc::TryRecvError::Disconnected) {
            return Ok(remaps);
        }
    }
}

/// Microseconds for a pair of kernels, one that writes and one that checks.
fn kernels(s: &Scratch<'_>, device: DeviceId, turns: u32) -> Step<f64> {
    let bytes = s.g();
    let words = 4096.min(bytes / WORD);
    let target = s.buffer(bytes, device, &[device])?;
    let errors = s.buffer(bytes, device, &[device])?;
    let stream = s.stream(device)?;
    let begin = std::time::Instant::now();
    for value in 0..turns {
        s.launch(device, ProbeKernel::FillWords { dst: target, words, value }, stream)?;
        let check = ProbeKernel::CheckWords { src: target, words, value, errors };
        s.launch(device, check, stream)?;
    }
    s.synchronize(device, stream)?;
    let us = begin.elapsed().as_secs_f64() * 1e6 / f64::from(turns);
    same("wrong words", s.word(device, errors)?, 0)?;
    Ok(us)
}

/// D-V5: the chunk behind an address is swapped while its stream is held.
pub(super) fn d_v5(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let (bytes, device) = (16 * s.g(), s.device());
        let words = bytes / WORD;
        let address = s.range(bytes)?;
        let errors = s.buffer(s.g(), device, &[device])?;
        let first = s.chunk(bytes, device)?;
        s.map_for(address, bytes, first, &[device])?;
        s.fill_words(device, address, words, 1)?;
        for (turn, home) in (2_u32..).zip(s.devices()) {
            // The next chunk is filled ahead, at an address of its own.
            let next = s.chunk(bytes, home)?;
            let ahead = s.alias(bytes, next, &[device])?;
            s.fill_words(device, ahead, words, turn * 1000)?;
            let stream = s.stream(device)?;
            let mut gate = Gate::close(s, device, stream, hold_limit(s))?;
            let check = |value| ProbeKernel::CheckWords { src: address, words, value, errors };
            s.launch(device, check(turn * 1000), stream)?;
            thread::scope(|scope| match scope.spawn(|| swap(s, address, bytes, next)).join() {
                Ok(swapped) => swapped,
                Err(panic) => std::panic::resume_unwind(panic),
            })?;
            ensure(!gate.timed_out(), || "the swap waited for the held stream".into())?;
            same("idle after the swap", s.is_idle(device, stream)?, false)?;
            gate.open();
            s.synchronize(device, stream)?;
            let wrong = s.word(device, errors)?;
            same(format_args!("wrong words, chunk on {home}"), wrong, 0)?;
            // That the kernel can tell the two chunks apart.
            let old = s.wrong_words(device, address, words, 1, errors)?;
            same("words that are not the old ones", u64::from(old), words)?;
            s.fill(device, errors, 0, WORD)?;
            s.unmap(ahead, bytes)?;
        }
        Ok(format!("{words} words a turn"))
    })
}

fn swap(s: &Scratch<'_>, address: u64, bytes: u64, next: ChunkHandle) -> DriverResult<()> {
    s.unmap(address, bytes)?;
    s.map_for(address, bytes, next, &[s.device()])
}
