//! D-P: what the driver says of an address inside a mapping.

use crate::error::ResultCode;
use crate::types::DeviceId;

use super::super::bench::Bench;
use super::super::check::{Answers, answer, refused, same};
use super::super::outcome::{Outcome, Step};
use super::super::scratch::{Scratch, WORD};

const INVALID: ResultCode = ResultCode::INVALID_VALUE;

/// D-P1: the address range of a mapping is its chunk's, not the reservation's, and a device without
/// access does not find it.
pub(super) fn d_p1(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let (g, device) = (s.g(), s.device());
        let address = s.range(8 * g)?;
        let mappings = [(g, 2 * g), (3 * g, g), (4 * g, 3 * g)];
        for (place, bytes) in mappings {
            let chunk = s.chunk(bytes, device)?;
            s.map_for(address + place, bytes, chunk, &[device])?;
        }
        for (place, bytes) in mappings {
            for inside in [0, 5, bytes - 1] {
                let asked = address + place + inside;
                let answer = s.driver().address_range(device, asked)?;
                same(format_args!("at + {}", place + inside), answer, (address + place, bytes))?;
            }
        }
        let mut answers = Answers::default();
        range_by_access(s, &mut answers)?;
        let none = ResultCode::NOT_FOUND.to_string();
        answers.expect("an address without a mapping", found(s, device, address), &none);
        answers.told()
    })
}

/// Who finds a mapping: who was granted access, wherever its memory is.
fn range_by_access(s: &Scratch<'_>, answers: &mut Answers) -> Step<()> {
    let (g, device) = (s.g(), s.device());
    let address = s.range(g)?;
    s.map(address, g, 0, s.chunk(g, device)?)?;
    let none = ResultCode::NOT_FOUND.to_string();
    answers.expect("own memory, nothing granted", found(s, device, address), &none);
    // One of two devices is missing on a smaller machine, and so are these answers.
    let Some(peer) = s.devices().into_iter().find(|&other| other != device) else { return Ok(()) };
    let address = s.range(g)?;
    s.map(address, g, 0, s.chunk(g, peer)?)?;
    s.grant(address, g, &[peer])?;
    answers.expect("the other device's, asked for it", found(s, peer, address), "OK");
    answers.expect("the other device's, no access", found(s, device, address), &none);
    if !s.driver().can_access_peer(device, peer)? {
        return Ok(());
    }
    s.grant(address, g, &[device])?;
    answers.expect("the other device's, with access", found(s, device, address), "OK");
    Ok(())
}

fn found(s: &Scratch<'_>, device: DeviceId, address: u64) -> String {
    answer(&s.driver().address_range(device, address))
}

/// D-P2: device memory, of its own device, of no context, closed to the legacy calls.
pub(super) fn d_p2(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let bytes = 2 * s.g();
        for device in s.devices() {
            let address = s.buffer(bytes, device, &[device])?;
            for place in [0, s.g() + 1] {
                let info = s.driver().pointer_info(address + place)?;
                let what = |field| format!("{field} at + {place} of {device}");
                same(what("memory type"), info.memory_type, 2)?;
                same(what("ordinal"), info.device, device)?;
                same(what("context"), info.context, None)?;
                same(what("legacy IPC"), info.legacy_ipc_capable, false)?;
            }
        }
        Ok(String::new())
    })
}

/// D-P3: the calls of the other allocator refuse mapped memory, and leave it alone.
pub(super) fn d_p3(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let (bytes, device) = (s.g(), s.device());
        let address = s.buffer(bytes, device, &[device])?;
        s.fill_words(device, address, bytes / WORD, 33)?;
        refused("legacy IPC", s.driver().legacy_ipc_export(device, address), INVALID)?;
        refused("cuMemFree", s.driver().mem_free(device, address), INVALID)?;
        s.expect_words("afterwards", device, address, bytes / WORD, 33)?;
        Ok(String::new())
    })
}
