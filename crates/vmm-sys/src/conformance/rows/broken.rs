//! D-N8, D-N14: what still works in a process once a kernel has faulted.

use std::thread;
use std::time::Duration;

use crate::error::ResultCode;
use crate::types::{DeviceId, DriverKind, ProbeKernel, StreamHandle};

use super::super::bench::Bench;
use super::super::check::{Answers, answer};
use super::super::outcome::{Outcome, Step};
use super::super::row::Case;
use super::super::scratch::Scratch;

/// Launches a kernel that faults; returns the range that it touched.
fn launch_a_fault(s: &Scratch<'_>, device: DeviceId, stream: StreamHandle) -> Step<u64> {
    let nothing = s.range(s.g())?;
    s.launch(device, ProbeKernel::FillWords { dst: nothing, words: 1, value: 1 }, stream)?;
    Ok(nothing)
}

/// D-N8: the VMM calls go on, so memory can be given back; every device's context is lost.
pub(super) fn d_n8(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let (g, device) = (s.g(), s.device());
        let mapped = s.range(2 * g)?;
        let chunk = s.chunk(g, device)?;
        s.map_for(mapped, g, chunk, &[device])?;
        let stream = s.stream(device)?;
        let nothing = launch_a_fault(s, device, stream)?;
        let mut answers = Answers::default();
        let lost = ResultCode::ILLEGAL_ADDRESS.to_string();
        answers.expect("synchronise", answer(&s.synchronize(device, stream)), &lost);
        answers.expect("reserve", answer(&s.range(g)), "OK");
        let fresh = s.chunk(g, device);
        answers.expect("create", answer(&fresh), "OK");
        if let Ok(fresh) = fresh {
            answers.expect("map", answer(&s.map(mapped + g, g, 0, fresh)), "OK");
            answers.expect("set access", answer(&s.grant(mapped + g, g, &[device])), "OK");
        }
        answers.expect("unmap", answer(&s.unmap(mapped, g)), "OK");
        answers.expect("release", answer(&s.release(chunk)), "OK");
        answers.expect("free the range", answer(&s.address_free(nothing, g)), "OK");
        answers.expect("free memory query", answer(&s.driver().mem_info(device)), &lost);
        if let Some(peer) = bench.second_device() {
            let came = answer(&s.driver().device_synchronize(peer));
            answers.expect(format_args!("synchronise {peer}"), came, &lost);
        }
        answers.told()
    })
}

/// Which device's context D-N14 asks first after the fault.
pub(super) const N14_CASES: &[Case] =
    &[Case::any("its own device asked first"), Case::any("the other device asked first")];

/// D-N14: the other device after a fault. The first call on the list is what meets it first.
pub(super) fn d_n14(bench: &Bench) -> Outcome {
    bench.observe(|s| {
        let (g, device, peer) = (s.g(), s.device(), s.peer()?);
        let good = s.buffer(g, peer, &[peer])?;
        s.fill_words(peer, good, 16, 1)?;
        let (stream, theirs) = (s.stream(device)?, s.stream(peer)?);
        launch_a_fault(s, device, stream)?;
        if s.driver().kind() == DriverKind::Cuda {
            // Nothing may ask before it has happened.
            thread::sleep(Duration::from_millis(200));
        }
        let mut answers = Answers::default();
        if bench.case() == 0 {
            answers.note("synchronise its own", answer(&s.synchronize(device, stream)));
        }
        let kernel = ProbeKernel::FillWords { dst: good, words: 16, value: 1 };
        answers.note("other: free memory query", answer(&s.driver().mem_info(peer)));
        answers.note("other: make an event", answer(&s.event(peer)));
        answers.note("other: launch", answer(&s.launch(peer, kernel, theirs)));
        answers.note("other: synchronise the stream", answer(&s.synchronize(peer, theirs)));
        answers.note("other: copy out", answer(&s.read(peer, good, 64)));
        answers.note("other: make a stream", answer(&s.stream(peer)));
        answers.note("other: cuMemAlloc", answer(&s.mem_alloc(peer, g)));
        answers.note("other: synchronise", answer(&s.driver().device_synchronize(peer)));
        answers.note("its own: free memory query", answer(&s.driver().mem_info(device)));
        answers.note("its own: synchronise", answer(&s.driver().device_synchronize(device)));
        answers.note("other: free memory query", answer(&s.driver().mem_info(peer)));
        answers.told()
    })
}
