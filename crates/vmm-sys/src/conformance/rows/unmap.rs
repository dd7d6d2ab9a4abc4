//! D-U: taking mappings away.

use std::time::Duration;

use crate::error::ResultCode;
use crate::types::ProbeKernel;

use super::super::bench::Bench;
use super::super::check::{refused, same};
use super::super::gate::{Gate, hold_limit};
use super::super::outcome::Outcome;
use super::super::row::Case;
use super::super::scratch::WORD;
use super::map::broken;

const INVALID: ResultCode = ResultCode::INVALID_VALUE;

/// D-U1: parts of a mapping, and sizes that end inside one.
pub(super) fn d_u1(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let (g, device) = (s.g(), s.device());
        let address = s.buffer(2 * g, device, &[device])?;
        s.fill_words(device, address, 2 * g / WORD, 3)?;
        for (what, place, bytes) in [
            ("the first half", 0, g),
            ("the second half", g, g),
            ("a size between two multiples", 0, g + g / 2),
        ] {
            refused(what, s.unmap(address + place, bytes), INVALID)?;
        }
        s.expect_words("still mapped", device, address, 2 * g / WORD, 3)?;
        s.unmap(address, 2 * g)?;
        Ok(String::new())
    })
}

/// D-U2: holes are no matter, and neither is what is unmapped already.
pub(super) fn d_u2(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let (g, device) = (s.g(), s.device());
        let bytes = 8 * g;
        let address = s.range(bytes)?;
        for place in [g, 4 * g] {
            let chunk = s.chunk(2 * g, device)?;
            s.map_for(address + place, 2 * g, chunk, &[device])?;
        }
        s.unmap(address, bytes)?;
        s.unmap(address, bytes)?;
        // What is unmapped can be mapped, and the range can be freed.
        let chunk = s.chunk(2 * g, device)?;
        s.map(address + g, 2 * g, 0, chunk)?;
        s.unmap(address + g, 2 * g)?;
        s.address_free(address, bytes)?;
        Ok(String::new())
    })
}

/// D-U3: several mappings in one call; the chunks are as they were.
pub(super) fn d_u3(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let (g, device) = (s.g(), s.device());
        let bytes = 4 * g;
        let address = s.range(bytes)?;
        let mut chunks = Vec::new();
        for (place, length) in [(0, g), (g, 2 * g), (3 * g, g)] {
            let chunk = s.chunk(length, device)?;
            s.map(address + place, length, 0, chunk)?;
            chunks.push((place, length, chunk));
        }
        s.grant(address, bytes, &[device])?;
        s.fill_words(device, address, bytes / WORD, 6)?;
        s.unmap(address, bytes)?;
        for (place, length, chunk) in chunks {
            s.map(address + place, length, 0, chunk)?;
        }
        s.grant(address, bytes, &[device])?;
        s.expect_words("mapped again", device, address, bytes / WORD, 6)?;
        Ok(String::new())
    })
}

/// The states of D-U4: a kernel in the queue, and one that is really at work.
pub(super) const U4_CASES: &[Case] = &[Case::any("queued"), Case::gpu("running")];

/// D-U4: unmap asks nobody; the kernel finds out.
pub(super) fn d_u4(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let (bytes, device) = (s.g(), s.device());
        let good = s.buffer(bytes, device, &[device])?;
        let address = s.buffer(bytes, device, &[device])?;
        let stream = s.stream(device)?;
        // The kernel is known to the driver before: its first launch may wait for other reasons.
        s.run_kernel(device, ProbeKernel::Spin { busy_us: 1, done: address })?;
        same("the word it writes", s.word(device, address)?, 1)?;
        let mut gate = None;
        if bench.case() == 0 {
            gate = Some(Gate::close(s, device, stream, hold_limit(s))?);
        }
        let busy_us = if gate.is_some() { 1 } else { 500_000 };
        s.launch(device, ProbeKernel::Spin { busy_us, done: address }, stream)?;
        if gate.is_none() {
            // Time for it to begin.
            std::thread::sleep(Duration::from_millis(20));
        }
        s.unmap(address, bytes)?;
        same("idle right after the unmap", s.is_idle(device, stream)?, false)?;
        if let Some(gate) = &mut gate {
            gate.open();
        }
        let answer = s.synchronize(device, stream);
        refused("synchronise after the kernel", answer, ResultCode::ILLEGAL_ADDRESS)?;
        broken(s, good)
    })
}
