//! D-S and D-K: the identity of streams, what the legacy stream waits for, and forks.

use std::collections::HashSet;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::thread;

use crate::driver::Driver;
use crate::error::{DriverResult, ResultCode};
use crate::types::{ChunkProps, DeviceId, StreamHandle};

use super::super::bench::Bench;
use super::super::check::{ensure, same};
use super::super::gate::{Gate, hold_limit};
use super::super::outcome::{Outcome, Step};
use super::super::scratch::Scratch;

/// D-S1: handles come back, ids do not.
pub(super) fn d_s1(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let device = s.device();
        let mut ids = HashSet::new();
        let mut came_back = false;
        for turn in 0..8 {
            let gone = s.stream(device)?;
            let gone_id = s.stream_id(device, gone)?;
            same("id asked twice", s.stream_id(device, gone)?, gone_id)?;
            ensure(ids.insert(gone_id), || format!("turn {turn}: id {gone_id} came again"))?;
            s.destroy_stream(device, gone)?;
            for _ in 0..8 {
                let stream = s.stream(device)?;
                let id = s.stream_id(device, stream)?;
                came_back |= stream == gone;
                ensure(ids.insert(id), || format!("turn {turn}: id {id} came again"))?;
            }
        }
        ensure(came_back, || "expected a handle to come back, none of 8 did".into())?;
        let here = |stream| s.stream_id(device, stream);
        let there = |stream| {
            thread::scope(|scope| match scope.spawn(|| s.stream_id(device, stream)).join() {
                Ok(id) => id,
                Err(panic) => std::panic::resume_unwind(panic),
            })
        };
        let (ours, theirs) = (here(StreamHandle::PER_THREAD)?, there(StreamHandle::PER_THREAD)?);
        ensure(ours != theirs, || format!("the per-thread stream is {ours} in two threads"))?;
        same("per-thread, asked again", here(StreamHandle::PER_THREAD)?, ours)?;
        let (ours, theirs) = (here(StreamHandle::LEGACY)?, there(StreamHandle::LEGACY)?);
        same("the legacy stream in another thread", theirs, ours)?;
        Ok(String::new())
    })
}

/// D-S2: the legacy stream comes after per-thread streams, whoever records on it, and not after
/// non-blocking ones.
pub(super) fn d_s2(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let device = s.device();
        let event = s.event(device)?;
        let mut gate = Gate::close(s, device, StreamHandle::PER_THREAD, hold_limit(s))?;
        thread::scope(|scope| {
            let record = || s.record(device, event, StreamHandle::LEGACY);
            match scope.spawn(record).join() {
                Ok(answer) => answer,
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })?;
        same("passed, per-thread stream held", s.has_passed(device, event)?, false)?;
        ensure(!gate.timed_out(), || "a call waited for the held stream".into())?;
        gate.open();
        s.wait_event(device, event)?;
        s.synchronize(device, StreamHandle::PER_THREAD)?;

        let aside = s.stream(device)?;
        let event = s.event(device)?;
        let mut gate = Gate::close(s, device, aside, hold_limit(s))?;
        s.record(device, event, StreamHandle::LEGACY)?;
        s.wait_event(device, event)?;
        ensure(!gate.timed_out(), || "the legacy stream waited for a non-blocking one".into())?;
        same("idle, non-blocking stream held", s.is_idle(device, aside)?, false)?;
        gate.open();
        s.synchronize(device, aside)?;
        Ok(String::new())
    })
}

/// D-K1: a forked child has no driver; its parent keeps one.
pub(super) fn d_k1(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let codes = codes_in_forked_child(s)?;
        let expected = ResultCode::NOT_INITIALIZED;
        for ((what, _), code) in CHILD_CALLS.iter().zip(codes) {
            same(format_args!("{what} in the child"), code, expected)?;
        }
        ensure(!s.driver().is_gone(), || "the parent's driver says it is gone".into())?;
        let address = s.buffer(s.g(), s.device(), &[s.device()])?;
        s.expect_fill("in the parent", s.device(), address, s.g(), 0)?;
        Ok(String::new())
    })
}

type ChildCall = fn(&dyn Driver, DeviceId, u64) -> DriverResult<()>;

const CHILD_CALLS: [(&str, ChildCall); 5] = [
    ("reserve", |driver, _, g| driver.address_reserve(g, 0, 0).map(drop)),
    ("create", |driver, device, g| driver.create(g, &ChunkProps::on_device(device)).map(drop)),
    ("free memory", |driver, device, _| driver.mem_info(device).map(drop)),
    ("make a stream", |driver, device, _| driver.stream_create(device).map(drop)),
    ("count devices", |driver, _, _| driver.device_count().map(drop)),
];

/// Forks, makes the calls in the child, and brings their codes back.
fn codes_in_forked_child(s: &Scratch<'_>) -> Step<Vec<ResultCode>> {
    let (mut reader, writer) = std::io::pipe()?;
    let (driver, device, g) = (s.driver(), s.device(), s.g());
    // SAFETY: the child only makes driver calls, writes to a pipe and leaves by `_exit`: it runs
    // no destructor and no handler of this program. Should a lock be held by a thread that the
    // child does not have, the alarm ends it.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: plain calls of the C library, with a live buffer.
        unsafe { libc::alarm(10) };
        for (_, call) in CHILD_CALLS {
            let code = match call(driver, device, g) {
                Ok(()) => ResultCode::SUCCESS,
                Err(error) => error.code(),
            };
            let bytes = code.0.to_ne_bytes();
            // SAFETY: the buffer is live and four bytes long; the descriptor is open.
            unsafe { libc::write(writer.as_raw_fd(), bytes.as_ptr().cast(), bytes.len()) };
        }
        let gone = driver.is_gone();
        // SAFETY: leaves the child at once.
        unsafe { libc::_exit(if gone { 0 } else { 1 }) };
    }
    if child < 0 {
        return Err(std::io::Error::last_os_error().into());
    }
    drop(writer);
    let mut bytes = Vec::new();
    reader.read_to_end(&mut bytes)?;
    let mut status = 0;
    // SAFETY: the child is ours, and the status is a live integer.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    same("the child waited for", waited, child)?;
    let codes: Vec<_> = bytes
        .chunks_exact(4)
        .map(|word| ResultCode(u32::from_ne_bytes([word[0], word[1], word[2], word[3]])))
        .collect();
    same("answers from the child", codes.len(), CHILD_CALLS.len())?;
    ensure(libc::WIFEXITED(status), || format!("the child was ended by a signal ({status:#x})"))?;
    let says_gone = libc::WEXITSTATUS(status) == 0;
    ensure(says_gone, || "the child's driver does not say that it is gone".into())?;
    Ok(codes)
}
