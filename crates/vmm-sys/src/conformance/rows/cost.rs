//! D-N7: what the clock says. It cannot fail: times are notes.

use std::time::Instant;

use crate::error::DriverResult;

use super::super::bench::Bench;
use super::super::outcome::Outcome;

/// D-N7: one set-access call over many chunks against a call a chunk.
pub(super) fn d_n7(bench: &Bench) -> Outcome {
    bench.observe(|s| {
        const CHUNKS: u64 = 64;
        let (g, device) = (s.g(), s.device());
        let address = s.range(CHUNKS * g)?;
        let chunks = (0..CHUNKS).map(|_| s.chunk(g, device)).collect::<DriverResult<Vec<_>>>()?;
        let map_all = || -> DriverResult<()> {
            (0..)
                .zip(&chunks)
                .try_for_each(|(index, &chunk)| s.map(address + index * g, g, 0, chunk))
        };
        let us = |begin: Instant| begin.elapsed().as_secs_f64() * 1e6 / CHUNKS as f64;
        // Once ahead: a first grant of fresh memory costs more.
        map_all()?;
        s.grant(address, CHUNKS * g, &[device])?;
        s.unmap(address, CHUNKS * g)?;

        map_all()?;
        let begin = Instant::now();
        s.grant(address, CHUNKS * g, &[device])?;
        let (one_call, begin) = (us(begin), Instant::now());
        s.unmap(address, CHUNKS * g)?;
        let one_unmap = us(begin);

        map_all()?;
        let begin = Instant::now();
        for index in 0..CHUNKS {
            s.grant(address + index * g, g, &[device])?;
        }
        let (many_calls, begin) = (us(begin), Instant::now());
        for index in 0..CHUNKS {
            s.unmap(address + index * g, g)?;
        }
        let many_unmaps = us(begin);
        Ok(format!(
            "us a chunk of {g} bytes, {CHUNKS} chunks: set access {one_call:.1} in one call, \
             {many_calls:.1} in many; unmap {one_unmap:.1} in one call, {many_unmaps:.1} in many"
        ))
    })
}
