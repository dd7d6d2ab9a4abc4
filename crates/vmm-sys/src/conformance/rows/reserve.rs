//! D-R: address ranges.

use crate::error::{DriverResult, ResultCode};

use super::super::bench::Bench;
use super::super::check::{Answers, ensure, granted, refused, same, skip};
use super::super::outcome::{Outcome, Step};
use super::super::scratch::{Scratch, WORD};

const INVALID: ResultCode = ResultCode::INVALID_VALUE;

/// D-R1: sizes that are no multiple of the granularity, and zero.
pub(super) fn d_r1(bench: &Bench) -> Outcome {
    bench.check(|s| {
        for bytes in [s.g() / 512, s.g() / 32, s.g() + s.g() / 2, 0] {
            refused(format_args!("reserve {bytes}"), s.range(bytes), INVALID)?;
        }
        Ok(String::new())
    })
}

/// D-R2: an alignment that is no power of two.
pub(super) fn d_r2(bench: &Bench) -> Outcome {
    bench.check(|s| {
        refused("reserve with alignment 3", s.address_reserve(s.g(), 3, 0), INVALID)?;
        Ok(String::new())
    })
}

/// D-R3: an alignment far above the granularity is kept.
pub(super) fn d_r3(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let align = 512 * s.g();
        // Several, so that no single lucky address passes.
        for turn in 0..4 {
            let address = s.address_reserve(s.g(), align, 0)?;
            same(format_args!("range {turn}: {address:#x} modulo {align}"), address % align, 0)?;
        }
        Ok(String::new())
    })
}

/// D-R4: a hint that is taken is no error; one off the granularity is.
pub(super) fn d_r4(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let bytes = 4 * s.g();
        let taken = s.range(bytes)?;
        for hint in [taken, taken + s.g(), taken + bytes - s.g()] {
            let other = granted(format_args!("hint {hint:#x}"), s.address_reserve(bytes, 0, hint))?;
            ensure(other.abs_diff(taken) >= bytes, || {
                format!("hint {hint:#x}: {other:#x} overlaps the range at {taken:#x}")
            })?;
            same(format_args!("{other:#x} modulo the granularity"), other % s.g(), 0)?;
        }
        let off = s.address_reserve(bytes, 0, taken + s.g() / 512);
        refused("a hint 4 KiB off the granularity", off, INVALID)?;
        Ok(String::new())
    })
}

/// D-R5: a range can be extended by a hint, and the seam does not show.
pub(super) fn d_r5(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let bytes = 4 * s.g();
        // A neighbour may be taken by somebody else; that all are is no "usually".
        for _ in 0..8 {
            let first = s.range(bytes)?;
            let second = s.address_reserve(bytes, 0, first + bytes)?;
            if second == first + bytes {
                across_the_seam(s, second)?;
                return Ok(String::new());
            }
        }
        skip("none of 8 ranges could be extended in place")
    })
}

/// One chunk, half of it on either side of `seam`.
fn across_the_seam(s: &Scratch<'_>, seam: u64) -> Step<()> {
    let (start, bytes) = (seam - s.g(), 2 * s.g());
    let chunk = s.chunk(bytes, s.device())?;
    s.map_for(start, bytes, chunk, &[s.device()])?;
    s.fill_words(s.device(), start, bytes / WORD, 17)?;
    s.expect_words("across the seam", s.device(), start, bytes / WORD, 17)?;
    s.unmap(start, bytes)?;
    Ok(())
}

/// D-R6: a range far larger than any memory.
pub(super) fn d_r6(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let bytes = 16 << 40;
        let address = s.range(bytes)?;
        // Its far end is as good as its start.
        let chunk = s.chunk(s.g(), s.device())?;
        s.map_for(address + bytes - s.g(), s.g(), chunk, &[s.device()])?;
        s.fill_words(s.device(), address + bytes - s.g(), s.g() / WORD, 5)?;
        s.expect_words("at the far end", s.device(), address + bytes - s.g(), s.g() / WORD, 5)?;
        Ok(String::new())
    })
}

/// D-R7: addresses run out after about 128 TiB, and come back.
pub(super) fn d_r7(bench: &Bench) -> Outcome {
    bench.check(|s| {
        const BYTES: u64 = 4 << 40;
        let mut ranges = Vec::new();
        let end: DriverResult<u64> = loop {
            match s.range(BYTES) {
                Ok(address) if ranges.len() < 64 => ranges.push(address),
                end => break end,
            }
        };
        let count = ranges.len();
        let out_of_addresses = end.as_ref().is_err_and(|error| error.is_out_of_addresses());
        refused(format_args!("range {count} of 4 TiB"), end, ResultCode::OUT_OF_MEMORY)?;
        ensure(out_of_addresses, || "the error is not told from a shortage of memory".into())?;
        // Others in the process may hold a slice of the address space.
        ensure((24..=32).contains(&count), || format!("expected about 31 ranges, got {count}"))?;
        for address in ranges {
            s.address_free(address, BYTES)?;
        }
        granted("a range after all were freed", s.range(BYTES))?;
        Ok(format!("{count} ranges of 4 TiB"))
    })
}

/// What came of a hint, in words; the range is freed again.
pub(super) fn try_hint(
    s: &Scratch<'_>,
    bytes: u64,
    align: u64,
    hint: u64,
) -> DriverResult<&'static str> {
    match s.address_reserve(bytes, align, hint) {
        Ok(address) => {
            s.address_free(address, bytes)?;
            Ok(if address == hint { "kept" } else { "moved" })
        }
        Err(error) if error.code() == INVALID => Ok("INVALID_VALUE"),
        Err(error) if error.code() == ResultCode::OUT_OF_MEMORY => Ok("OUT_OF_MEMORY"),
        Err(error) => Err(error),
    }
}

/// D-N11: which hints are kept, which are moved, and which are refused.
pub(super) fn d_n11(bench: &Bench) -> Outcome {
    bench.observe(|s| {
        let g = s.g();
        let taken = s.range(4 * g)?;
        let large = s.range(64 * g)?;
        s.address_free(large, 64 * g)?;
        // In the middle of addresses that were free a moment ago.
        let free = large + 16 * g;
        let host = Box::new(0_u8);
        let on_host = std::ptr::from_ref(&*host).addr() as u64 / g * g;
        let mut answers = Answers::default();
        for (what, align, hint) in [
            ("free", 0, free),
            ("free, 1 byte off", 0, free + 1),
            ("free, 4 KiB off", 0, free + (4 << 10)),
            ("free, 64 KiB off", 0, free + (64 << 10)),
            ("free, half a granule off", 0, free + g / 2),
            ("free, on the granularity, off an alignment of 512 granules", 512 * g, {
                free.next_multiple_of(512 * g) + g
            }),
            ("taken, 64 KiB off", 0, taken + (64 << 10)),
            ("taken, half a granule off", 0, taken + g / 2),
            ("the end of a range", 0, taken + 4 * g),
            ("half in a range", 0, taken - g),
            ("the first pages", 0, 4 * g),
            ("4 KiB", 0, 4 << 10),
            ("host memory", 0, on_host),
            ("2^46", 0, 1 << 46),
            ("2^47", 0, 1 << 47),
            ("2^56", 0, 1 << 56),
            ("2^64 - a granule", 0, u64::MAX - g + 1),
        ] {
            answers.note(what, try_hint(s, 2 * g, align, hint)?);
        }
        answers.told()
    })
}
