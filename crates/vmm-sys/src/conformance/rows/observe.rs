//! D-N4 and on: questions that the table does not answer yet.

use std::thread;
use std::time::Instant;

use crate::error::DriverResult;
use crate::types::{Access, AccessGrant, ChunkHandle, GranularityKind, Location, ProbeKernel};

use super::super::bench::Bench;
use super::super::check::{answer, ensure};
use super::super::outcome::{Outcome, Step};
use super::super::row::Case;
use super::super::scratch::Scratch;

/// D-N4: the VMM calls on a thread that has no current context.
pub(super) fn d_n4(bench: &Bench) -> Outcome {
    bench.observe(|s| {
        thread::scope(|scope| match scope.spawn(|| without_context(s)).join() {
            Ok(text) => text,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })
}

fn without_context(s: &Scratch<'_>) -> Step<String> {
    let (g, device) = (s.g(), s.device());
    let before = s.driver().context_current()?;
    ensure(before.is_none(), || format!("a fresh thread has the current context {before:?}"))?;
    let mut lines = Vec::new();
    let mut note = |name: &str, came: String| lines.push(format!("{name}: {came}"));
    let granularity = s.driver().granularity(&s.props(), GranularityKind::Recommended);
    note("granularity", answer(&granularity));
    let address = s.range(2 * g);
    note("reserve", answer(&address));
    let chunk = s.chunk(g, device);
    note("create", answer(&chunk));
    let (address, chunk) = (address?, chunk?);
    note("map", answer(&s.map(address, g, 0, chunk)));
    note("set access", answer(&s.grant(address, g, &[device])));
    note("get access", answer(&s.access_of(address, device)));
    note("properties", answer(&s.properties(chunk)));
    note("retain", answer(&s.retain(address)));
    note("address range", answer(&s.driver().address_range(address)));
    note("pointer attributes", answer(&s.driver().pointer_info(address)));
    note("unmap", answer(&s.unmap(address, g)));
    note("release", answer(&s.release(chunk)));
    note("free the range", answer(&s.address_free(address, 2 * g)));
    let after = s.driver().context_current()?;
    note("current context afterwards", format!("{after:?}"));
    Ok(lines.join("\n"))
}

/// The wrong handles of D-N5, each in a place of its own: the driver may follow them.
pub(super) const N5_CASES: &[Case] = &[
    Case::any("release of a value never given out"),
    Case::any("map of a value never given out"),
    Case::any("release again, nothing mapped"),
    Case::any("map after release, nothing mapped"),
];

/// D-N5: handles that name nothing.
pub(super) fn d_n5(bench: &Bench) -> Outcome {
    bench.observe(|s| {
        let bytes = s.g();
        let address = s.range(bytes)?;
        let stale = s.chunk(bytes, s.device())?;
        s.release(stale)?;
        let nothing = ChunkHandle(0x1234_5670);
        let driver = s.driver();
        // SAFETY: none of these handles is live, which is the question. This row runs where nothing
        // else does: in a child process, or on a simulated device, which follows no handle.
        let result = unsafe {
            match bench.case() {
                0 => driver.release(nothing),
                1 => driver.map(address, bytes, 0, nothing),
                2 => driver.release(stale),
                _ => driver.map(address, bytes, 0, stale),
            }
        };
        Ok(answer(&result))
    })
}

/// D-N6: what get access says, inside mappings and outside.
pub(super) fn d_n6(bench: &Bench) -> Outcome {
    bench.observe(|s| {
        let (g, device) = (s.g(), s.device());
        let address = s.range(4 * g)?;
        let chunk = s.chunk(2 * g, device)?;
        let says = |place: u64, location| match s.driver().get_access(address + place, location) {
            Ok(access) => format!("{access:?}"),
            Err(error) => error.code().to_string(),
        };
        let own = Location::Device(device);
        let mut lines = vec![format!("reserved, not mapped: {}", says(0, own))];
        s.map(address, 2 * g, 0, chunk)?;
        lines.push(format!("mapped, nothing granted: {}", says(0, own)));
        s.grant(address, 2 * g, &[device])?;
        lines.push(format!("granted, at its start: {}", says(0, own)));
        lines.push(format!("granted, one byte in: {}", says(1, own)));
        lines.push(format!("granted, its second half: {}", says(g, own)));
        lines.push(format!("past the mapping: {}", says(2 * g, own)));
        lines.push(format!("asked for the host: {}", says(0, Location::Host)));
        lines.push(format!("asked for host NUMA node 0: {}", says(0, Location::HostNuma(0))));
        if let Some(peer) = bench.second_device() {
            lines.push(format!("asked for {peer}: {}", says(0, Location::Device(peer))));
        }
        s.set_access(address, 2 * g, &[AccessGrant { location: own, access: Access::Read }])?;
        lines.push(format!("read only: {}", says(0, own)));
        s.unmap(address, 2 * g)?;
        lines.push(format!("unmapped: {}", says(0, own)));
        s.address_free(address, 4 * g)?;
        lines.push(format!("freed: {}", says(0, own)));
        Ok(lines.join("\n"))
    })
}

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

/// D-N8: whether memory can still be given back once a context is broken.
pub(super) fn d_n8(bench: &Bench) -> Outcome {
    bench.observe(|s| {
        let (g, device) = (s.g(), s.device());
        let mapped = s.range(2 * g)?;
        let chunk = s.chunk(g, device)?;
        s.map_for(mapped, g, chunk, &[device])?;
        let nothing = s.range(g)?;
        let stream = s.stream(device)?;
        s.launch(device, ProbeKernel::FillWords { dst: nothing, words: 1, value: 1 }, stream)?;
        let mut lines = vec![format!("synchronise: {}", answer(&s.synchronize(device, stream)))];
        let mut note = |name: &str, came: String| lines.push(format!("{name}: {came}"));
        note("reserve", answer(&s.range(g)));
        let fresh = s.chunk(g, device);
        note("create", answer(&fresh));
        if let Ok(fresh) = fresh {
            note("map", answer(&s.map(mapped + g, g, 0, fresh)));
            note("set access", answer(&s.grant(mapped + g, g, &[device])));
        }
        note("unmap", answer(&s.unmap(mapped, g)));
        note("release", answer(&s.release(chunk)));
        note("free the range", answer(&s.address_free(nothing, g)));
        note("free memory query", answer(&s.driver().mem_info(device)));
        if let Some(peer) = bench.second_device() {
            note(&format!("synchronise {peer}"), answer(&s.driver().device_synchronize(peer)));
        }
        Ok(lines.join("\n"))
    })
}
