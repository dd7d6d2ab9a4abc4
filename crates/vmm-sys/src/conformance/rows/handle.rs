//! D-H and D-F: how long handles, memory and ranges live.

use crate::error::{DriverResult, ResultCode};
use crate::types::{ChunkHandle, DriverKind};

use super::super::bench::Bench;
use super::super::check::{answer, near, refused, same};
use super::super::outcome::{Outcome, Stop};
use super::super::row::Case;
use super::super::scratch::{Scratch, WORD};

const INVALID: ResultCode = ResultCode::INVALID_VALUE;

/// D-H1: the memory stays, and stays counted, until the last of two mappings is gone.
pub(super) fn d_h1(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let (bytes, device) = (512 * s.g(), s.device());
        let (words, tolerance) = (s.g() / WORD, bytes / 32);
        let before = s.free_bytes()?;
        let held = before.saturating_sub(bytes);
        let chunk = s.chunk(bytes, device)?;
        let left = s.alias(bytes, chunk, &[device])?;
        let right = s.alias(bytes, chunk, &[device])?;
        s.fill_words(device, left, words, 12)?;
        s.release(chunk)?;
        near("free after release", s.free_bytes()?, held, tolerance)?;
        s.expect_words("after release", device, left, words, 12)?;
        s.unmap(left, bytes)?;
        near("free after the first unmap", s.free_bytes()?, held, tolerance)?;
        s.expect_words("after the first unmap", device, right, words, 12)?;
        s.unmap(right, bytes)?;
        near("free after the last unmap", s.free_bytes()?, before, tolerance)?;
        Ok(String::new())
    })
}

/// D-H2: a reference cannot be given back twice; the value still names the memory.
pub(super) fn d_h2(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let (bytes, device) = (s.g(), s.device());
        let words = bytes / WORD;
        let chunk = s.chunk(bytes, device)?;
        let address = s.alias(bytes, chunk, &[device])?;
        s.fill_words(device, address, words, 14)?;
        s.release(chunk)?;
        refused("release again", s.release(chunk), INVALID)?;
        let elsewhere = s.alias(bytes, chunk, &[device])?;
        s.expect_words("mapped by the released value", device, elsewhere, words, 14)?;
        s.expect_words("the first mapping", device, address, words, 14)?;
        Ok(String::new())
    })
}

/// D-H3: an address leads back to the handle, one reference a time.
pub(super) fn d_h3(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let (g, device) = (s.g(), s.device());
        let chunk = s.chunk(2 * g, device)?;
        let address = s.alias(2 * g, chunk, &[device])?;
        let places = [0, g, 2 * g - 1];
        for place in places {
            let retained = s.retain(address + place)?;
            same(format_args!("handle retained at + {place}"), retained, chunk)?;
        }
        // As many references as were taken can be given back, and not one more.
        for _ in 0..=places.len() {
            s.release(chunk)?;
        }
        refused("one release too many", s.release(chunk), INVALID)?;
        s.expect_fill("still mapped", device, address, 2 * g, 0)?;
        Ok(String::new())
    })
}

/// D-F1: a range is freed whole, empty, and once.
pub(super) fn d_f1(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let (g, device) = (s.g(), s.device());
        let bytes = 4 * g;
        let address = s.range(bytes)?;
        let chunk = s.chunk(g, device)?;
        s.map_for(address + g, g, chunk, &[device])?;
        s.fill_words(device, address + g, g / WORD, 21)?;
        refused("with a mapping in it", s.address_free(address, bytes), INVALID)?;
        s.expect_words("the mapping", device, address + g, g / WORD, 21)?;
        s.unmap(address + g, g)?;
        refused("the first half", s.address_free(address, bytes / 2), INVALID)?;
        refused("the second half", s.address_free(address + bytes / 2, bytes / 2), INVALID)?;
        s.map(address + 3 * g, g, 0, chunk)?;
        s.unmap(address + 3 * g, g)?;
        s.address_free(address, bytes)?;
        refused("a second time", s.address_free(address, bytes), INVALID)?;
        Ok(String::new())
    })
}

/// The signal of a process that follows a wild pointer.
const SEGV: i32 = 11;

/// What D-N5 does with a value that no create, retain or import gave out.
pub(super) const N5_CASES: &[Case] = &[
    Case::ends_by("release of a value never given out", SEGV),
    Case::ends_by("map of a value never given out", SEGV),
];

/// D-N5: the driver follows a handle without a look, so a wrong one ends the process; the simulated
/// device follows none, and refuses.
pub(super) fn d_n5(bench: &Bench) -> Outcome {
    bench.check(|s| {
        // A small number: no memory of a process is there.
        let result = use_dead(s, ChunkHandle(0x1234_5670), bench.case() == 0)?;
        match s.driver().kind() {
            DriverKind::Sim => refused("a value never given out", result, INVALID)?,
            DriverKind::Cuda => {
                let came = answer(&result);
                let text = format!("expected the end of the process by signal {SEGV}, got {came}");
                return Err(Stop::Failed(text));
            }
        }
        Ok(String::new())
    })
}

/// What D-N13 does with a handle whose memory is gone.
pub(super) const N13_CASES: &[Case] =
    &[Case::any("released again, nothing mapped"), Case::any("mapped, nothing mapped before")];

/// D-N13: handles whose memory is gone. What comes may depend on what lies there by then.
pub(super) fn d_n13(bench: &Bench) -> Outcome {
    bench.observe(|s| {
        let stale = s.chunk(s.g(), s.device())?;
        s.release(stale)?;
        Ok(answer(&use_dead(s, stale, bench.case() == 0)?))
    })
}

/// Releases or maps a handle that is not live.
fn use_dead(s: &Scratch<'_>, chunk: ChunkHandle, release: bool) -> DriverResult<DriverResult<()>> {
    let address = s.range(s.g())?;
    // SAFETY: the handle is not live, which is the question. The rows that ask run where nothing
    // else does: in a child process, or on a simulated device, which follows no handle.
    Ok(unsafe {
        if release { s.driver().release(chunk) } else { s.driver().map(address, s.g(), 0, chunk) }
    })
}
