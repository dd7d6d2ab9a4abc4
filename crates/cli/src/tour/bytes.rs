//! Every byte of the buffer: words that count up, written and compared by kernels.

#![allow(unsafe_code)] // the contract's calls for work take handles

use std::time::{Duration, Instant};

use vmm_sys::object::{Event, Stream};
use vmm_sys::{DriverResult, ProbeKernel};

use super::stage::{Actor, Stage};
use super::telling::Trouble;

/// How long work of the tour may take.
pub(super) const LONG: Duration = Duration::from_secs(60);

/// Enqueues a kernel.
pub(super) fn launch(stream: &Stream, kernel: &ProbeKernel) -> DriverResult<()> {
    // SAFETY: the stream owns a live handle. The addresses are memory of the pool that the stream's
    // device may use: of a buffer that is alive, or of the elastic buffer under a guard.
    unsafe { stream.driver().launch(stream.device(), kernel, stream.handle()) }
}

/// Enqueues a kernel that writes words which count up from `value` over `bytes` of the buffer, under
/// a guard.
pub(super) fn write(stage: &Stage, by: &Actor, bytes: u64, value: u32) -> Result<(), Trouble> {
    let _using = stage.buffer.use_on(&by.stream)?;
    let kernel = ProbeKernel::FillWords { dst: stage.address, words: bytes / 4, value };
    Ok(launch(&by.stream, &kernel)?)
}

/// Writes all of the buffer anew, and waits.
pub(super) fn write_all(stage: &mut Stage, by_second: bool) -> Result<(), Trouble> {
    stage.value = stage.value.wrapping_add(0x0100_0193);
    let by = match &stage.second {
        Ok(second) if by_second => second,
        _ => &stage.first,
    };
    write(stage, by, stage.bytes, stage.value)?;
    Ok(by.stream.synchronize()?)
}

/// Compares the first `bytes` of the buffer, as a device reads them, and waits.
pub(super) fn check(stage: &Stage, by: &Actor, bytes: u64) -> Result<(), Trouble> {
    clear(by)?;
    enqueue_check(stage, by, bytes, stage.value)?;
    by.stream.synchronize()?;
    judge(by, bytes / 4)
}

/// Compares all of the buffer, as each device that may reads it.
pub(super) fn check_all(stage: &Stage) -> Result<(), Trouble> {
    let may = |by: &&Actor| stage.buffer.access(by.device) != vmm_sys::Access::None;
    stage.actors().filter(may).try_for_each(|by| check(stage, by, stage.bytes))
}

/// Sets the counter to zero.
pub(super) fn clear(by: &Actor) -> Result<(), Trouble> {
    Ok(by.counter.write(0, &[0; 4])?)
}

/// Enqueues a comparison of the first `bytes`, under a guard.
pub(super) fn enqueue_check(
    stage: &Stage,
    by: &Actor,
    bytes: u64,
    value: u32,
) -> Result<(), Trouble> {
    let _using = stage.buffer.use_on(&by.stream)?;
    let (src, words, errors) = (stage.address, bytes / 4, by.counter.address());
    Ok(launch(&by.stream, &ProbeKernel::CheckWords { src, words, value, errors })?)
}

/// What comparisons have counted. Their stream has done them.
pub(super) fn judge(by: &Actor, words: u64) -> Result<(), Trouble> {
    let mut wrong = [0; 4];
    by.counter.read(0, &mut wrong)?;
    match u32::from_le_bytes(wrong) {
        0 => Ok(()),
        wrong => Err(Trouble::Wrong(format!(
            "expected {words} words as they were written, found {wrong} wrong, as {} reads them",
            by.device
        ))),
    }
}

/// Waits for the events, `LONG` at most. How many have not passed.
pub(super) fn wait_for<'a>(events: impl Iterator<Item = &'a Event>) -> DriverResult<usize> {
    let begun = Instant::now();
    let mut pending: Vec<&Event> = events.collect();
    loop {
        let mut left = Vec::new();
        for event in pending {
            if !event.passed()? {
                left.push(event);
            }
        }
        if left.is_empty() || begun.elapsed() > LONG {
            return Ok(left.len());
        }
        pending = left;
        std::thread::sleep(Duration::from_micros(50));
    }
}
