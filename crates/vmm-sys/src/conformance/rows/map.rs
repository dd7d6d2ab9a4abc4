//! D-M: mappings.

use crate::error::{DriverResult, ResultCode};
use crate::types::{ProbeKernel, Transfer};

use super::super::bench::Bench;
use super::super::check::{Answers, answer, refused};
use super::super::outcome::{Outcome, Step};
use super::super::row::Case;
use super::super::scratch::{Scratch, WORD};

const INVALID: ResultCode = ResultCode::INVALID_VALUE;
const UNSUPPORTED: ResultCode = ResultCode::NOT_SUPPORTED;
const FAULT: ResultCode = ResultCode::ILLEGAL_ADDRESS;

/// D-M1: a chunk is mapped whole or not at all.
pub(super) fn d_m1(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let g = s.g();
        let address = s.range(4 * g)?;
        let chunk = s.chunk(2 * g, s.device())?;
        for (what, bytes, offset) in [
            ("the second half, by an offset", g, g),
            ("half a chunk", g, 0),
            ("more than the chunk", 4 * g, 0),
        ] {
            refused(what, s.map(address, bytes, offset, chunk), UNSUPPORTED)?;
        }
        // Nothing was left behind in the range.
        s.map_for(address, 2 * g, chunk, &[s.device()])?;
        s.expect_fill("mapped whole", s.device(), address, 2 * g, 0)?;
        Ok(String::new())
    })
}

/// D-M2: addresses at which nothing can be mapped. Past the end of a range: D-N9.
pub(super) fn d_m2(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let g = s.g();
        let bytes = 4 * g;
        let address = s.range(bytes)?;
        let chunk = s.chunk(2 * g, s.device())?;
        let mut answers = Answers::default();
        for (what, place) in [
            ("4 KiB off the granularity", address + g / 512),
            ("half a granule off", address + g / 2),
            ("in the first pages, which no range covers", 4 * g),
        ] {
            let came = s.map(place, 2 * g, 0, chunk);
            answers.expect(what, answer(&came), &INVALID.to_string());
        }
        let text = answers.told()?;
        // Nothing was left behind in the range.
        s.map(address, 2 * g, 0, chunk)?;
        s.unmap(address, 2 * g)?;
        s.map(address + bytes - 2 * g, 2 * g, 0, chunk)?;
        Ok(text)
    })
}

/// D-M3: a slot that is taken, in whole or in part; what was there stays.
pub(super) fn d_m3(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let (g, bytes) = (s.g(), 2 * s.g());
        let address = s.range(4 * g)?;
        let first = s.chunk(bytes, s.device())?;
        s.map_for(address + g, bytes, first, &[s.device()])?;
        s.fill_words(s.device(), address + g, bytes / WORD, 9)?;
        let second = s.chunk(bytes, s.device())?;
        for (what, place) in
            [("the same slot", g), ("its first half", 0), ("its second half", bytes)]
        {
            refused(what, s.map(address + place, bytes, 0, second), INVALID)?;
        }
        refused("the same chunk there again", s.map(address + g, bytes, 0, first), INVALID)?;
        s.expect_words("the first mapping", s.device(), address + g, bytes / WORD, 9)?;
        Ok(String::new())
    })
}

/// D-M4: one chunk at two addresses is one memory.
pub(super) fn d_m4(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let (bytes, device) = (2 * s.g(), s.device());
        let words = bytes / WORD;
        let chunk = s.chunk(bytes, device)?;
        let left = s.alias(bytes, chunk, &[device])?;
        let right = s.alias(bytes, chunk, &[device])?;
        s.fill_words(device, left, words, 100)?;
        s.expect_words("written left, read right", device, right, words, 100)?;
        s.fill(device, right, 0x3c, bytes)?;
        s.expect_fill("written right, read left", device, left, bytes, 0x3c)?;
        s.fill_words(device, right, words, 200)?;
        s.expect_words_by_kernel("by kernels", device, left, words, 200)?;
        Ok(String::new())
    })
}

/// D-M5: copies and fills see at once that there is no access; nothing is written.
pub(super) fn d_m5(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let (bytes, device) = (s.g(), s.device());
        let address = s.range(bytes)?;
        let chunk = s.chunk(bytes, device)?;
        s.map(address, bytes, 0, chunk)?;
        let open = s.buffer(bytes, device, &[device])?;
        s.fill(device, open, 0x77, bytes)?;
        refused("copy in", s.write(device, address, &[1; 64]), INVALID)?;
        refused("copy out", s.read(device, address, 64), INVALID)?;
        refused("fill", s.fill(device, address, 1, bytes), INVALID)?;
        let copy = |dst, src| s.transfer(device, Transfer::DeviceToDevice { dst, src, bytes });
        refused("copy from open memory", copy(address, open), INVALID)?;
        refused("copy to open memory", copy(open, address), INVALID)?;
        s.grant(address, bytes, &[device])?;
        s.expect_fill("what could not be written", device, address, bytes, 0)?;
        s.expect_fill("what could not be overwritten", device, open, bytes, 0x77)?;
        Ok(String::new())
    })
}

/// The states of D-M6; each ends its context.
pub(super) const M6_CASES: &[Case] = &[
    Case::any("mapped, no access"),
    Case::any("reserved, not mapped"),
    Case::any("unmapped under it"),
];

/// D-M6: a kernel that touches what it may not breaks its context for good.
pub(super) fn d_m6(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let (bytes, device) = (s.g(), s.device());
        let good = s.buffer(bytes, device, &[device])?;
        s.fill_words(device, good, 16, 1)?;
        let address = s.range(bytes)?;
        let chunk = s.chunk(bytes, device)?;
        match bench.case() {
            0 => s.map(address, bytes, 0, chunk)?,
            1 => {}
            _ => {
                s.map_for(address, bytes, chunk, &[device])?;
                s.fill_words(device, address, 16, 1)?;
                s.unmap(address, bytes)?;
            }
        }
        let stream = s.stream(device)?;
        let touch = ProbeKernel::FillWords { dst: address, words: 16, value: 1 };
        s.launch(device, touch, stream)?;
        refused("synchronise after the kernel", s.synchronize(device, stream), FAULT)?;
        broken(s, good)
    })
}

/// Every call in the device's context must fail as the first one did.
pub(super) fn broken(s: &Scratch<'_>, good: u64) -> Step<String> {
    let device = s.device();
    let calls: [(&str, DriverResult<()>); 5] = [
        ("synchronise the device", s.driver().device_synchronize(device)),
        ("copy from good memory", s.read(device, good, 64).map(drop)),
        ("copy to good memory", s.write(device, good, &[1; 64])),
        ("make a stream", s.stream(device).map(drop)),
        ("cuMemAlloc", s.mem_alloc(device, 4096).map(drop)),
    ];
    for (what, answer) in calls {
        refused(format_args!("{what}, after the fault"), answer, FAULT)?;
    }
    Ok(String::new())
}
