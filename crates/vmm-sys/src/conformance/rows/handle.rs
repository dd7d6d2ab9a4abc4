//! D-H and D-F: how long handles, memory and ranges live.

use crate::error::ResultCode;

use super::super::bench::Bench;
use super::super::check::{near, refused, same};
use super::super::outcome::Outcome;
use super::super::scratch::WORD;

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
