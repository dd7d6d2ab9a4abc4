//! D-N2, D-N15, D-N16: what is made, or used for the first time, while a stream is held.
//!
//! A program that made streams beside a held one hung once; these rows run where a hang ends with
//! its process.

use crate::error::DriverResult;
use crate::types::{DeviceId, ProbeKernel, StreamHandle};

use super::super::bench::Bench;
use super::super::check::{Answers, answer};
use super::super::gate::{Gate, hold_limit};
use super::super::outcome::{Outcome, Step};
use super::super::row::Case;
use super::super::scratch::Scratch;
use super::held::short_hold;

/// Where D-N2 holds its stream, each in a place of its own.
pub(super) const N2_CASES: &[Case] = &[Case::any("same device"), Case::any("other device")];

/// D-N2: of 40 streams that are made and launched on while one is held, the one that is the 35th
/// of its device waits for the held stream (the 36th where the process sees one device only); none
/// waits for a stream of the other device.
pub(super) fn d_n2(bench: &Bench) -> Outcome {
    bench.check(|s| {
        const STREAMS: u32 = 40;
        let (g, device) = (s.g(), s.device());
        let same_device = bench.case() == 0;
        let held_on = if same_device { device } else { s.peer()? };
        let target = s.buffer(g, device, &[device])?;
        // This kernel's stream and the held one are the first two of the device.
        s.fill_words(device, target, 16, 0)?;
        let held = s.stream(held_on)?;
        let expected: &[&str] = match same_device {
            true => &["making stream 32 waits", "making stream 33 waits"],
            false => &["none waits"],
        };
        let mut gate = Gate::close(s, held_on, held, hold_limit(s))?;
        let mut came = "none waits".to_owned();
        for index in 0..STREAMS {
            if same_device && index == 32 {
                gate.open_in(short_hold(s));
            }
            bench.say(&format!("making stream {index}"));
            let stream = s.stream(device)?;
            if gate.timed_out() {
                came = format!("making stream {index} waits");
                break;
            }
            bench.say(&format!("launching on stream {index}"));
            let kernel = ProbeKernel::FillWords { dst: target, words: 16, value: index };
            s.launch(device, kernel, stream)?;
            if gate.timed_out() {
                came = format!("the launch on stream {index} waits");
                break;
            }
        }
        gate.open();
        s.synchronize(held_on, held)?;
        let mut answers = Answers::default();
        let known = expected.iter().find(|known| **known == came).unwrap_or(&expected[0]);
        answers.expect(format_args!("{STREAMS} streams, numbered from 0"), &came, known);
        answers.told()
    })
}

/// What goes before the streams of D-N15, or beside them.
pub(super) const N15_CASES: &[Case] = &[
    Case::any("made"),
    Case::any("made and launched on"),
    Case::any("64 made and destroyed before"),
    Case::any("64 made and kept before"),
    Case::any("held by a host function"),
];

/// D-N15: which of many new streams wait, each beside a gate of its own.
pub(super) fn d_n15(bench: &Bench) -> Outcome {
    bench.observe(|s| {
        const STREAMS: usize = 100;
        const WAITS_MAX: usize = 6;
        let device = s.device();
        let target = s.buffer(s.g(), device, &[device])?;
        // The kernel's stream stays, and so does the held one.
        s.fill_words(device, target, 16, 0)?;
        let held = s.stream(device)?;
        let mut alive = 2;
        if matches!(bench.case(), 2 | 3) {
            let before = (0..64).map(|_| s.stream(device)).collect::<DriverResult<Vec<_>>>()?;
            alive += before.len();
            if bench.case() == 2 {
                before.iter().try_for_each(|&stream| s.destroy_stream(device, stream))?;
                alive -= before.len();
            }
        }
        let mut waited = Vec::new();
        let mut made = 0;
        while made < STREAMS && waited.len() < WAITS_MAX {
            made += 1;
            alive += 1;
            bench.say(&format!("making stream {made}, number {alive} alive"));
            if new_stream_waits(s, bench.case(), device, held, target)? {
                waited.push(alive.to_string());
            }
        }
        Ok(format!(
            "{made} made; those that waited, by how many were alive with them: {}",
            if waited.is_empty() { "none".to_owned() } else { waited.join(", ") }
        ))
    })
}

fn new_stream_waits(
    s: &Scratch<'_>,
    case: usize,
    device: DeviceId,
    held: StreamHandle,
    target: u64,
) -> Step<bool> {
    let mut gate = match case {
        4 => Gate::close_by_host_function(s, device, held, short_hold(s))?,
        _ => Gate::close(s, device, held, short_hold(s))?,
    };
    let stream = s.stream(device)?;
    if case == 1 {
        s.launch(device, ProbeKernel::FillWords { dst: target, words: 16, value: 1 }, stream)?;
    }
    let waits = gate.timed_out();
    gate.open();
    s.synchronize(device, held)?;
    Ok(waits)
}

/// D-N16: first uses beside a held stream. The driver may load code lazily, and that may wait.
pub(super) fn d_n16(bench: &Bench) -> Outcome {
    bench.observe(|s| {
        let device = s.device();
        let target = s.buffer(2 * s.g(), device, &[device])?;
        let (held, stream) = (s.stream(device)?, s.stream(device)?);
        let fill = ProbeKernel::FillWords { dst: target, words: 16, value: 1 };
        let copy = ProbeKernel::CopyWords { dst: target + s.g(), src: target, words: 16 };
        let mut answers = Answers::default();
        for (what, kernel) in [
            ("the first launch of all", fill),
            ("the first launch of another kernel", copy),
            ("a launch of a kernel that ran before", fill),
        ] {
            bench.say(what);
            let mut gate = Gate::close(s, device, held, short_hold(s))?;
            let result = s.launch(device, kernel, stream);
            let waits = if gate.timed_out() { "waits" } else { "does not wait" };
            gate.open();
            s.synchronize(device, held)?;
            answers.note(what, format_args!("{waits}, {}", answer(&result)));
        }
        answers.told()
    })
}
