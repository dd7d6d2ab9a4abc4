//! What a device can do: the tries of [`vmm_sys::topology`], in words.

use vmm_sys::error::explain;
use vmm_sys::topology::{DeviceFacts, Finding as Found};
use vmm_sys::{DriverError, ResultCode};

use super::finding::Finding;
use super::remedy;

/// The one ability that nothing works without, judged as a pool judges it when it is built: a
/// device that denies it is not used, even where the calls answer.
pub(super) fn memory_calls(facts: &DeviceFacts) -> Finding {
    let (id, what) = ("memory_calls", "memory calls");
    let found = &facts.abilities.vmm;
    let finding = match found.usable() {
        Ok(()) => Finding::ok(id, what, "reserve, create, map, set access and unmap work"),
        Err(error) => {
            let text = format!("{} ({})", meaning(&error), advertised(found));
            Finding::fail(id, what, text).refused_by(&error)
        }
    };
    finding.with("advertised", found.advertised).on(facts.device)
}

/// What a pool can do without: what is lost, and whether that can be helped.
pub(super) fn optional(facts: &DeviceFacts) -> [Finding; 4] {
    let abilities = &facts.abilities;
    [
        (
            "export_fd",
            "export as descriptor",
            &abilities.export_fd,
            "a chunk was exported and imported again",
            "memory cannot be shared with other processes; all else works",
        ),
        (
            "fabric",
            "fabric handles",
            &abilities.fabric,
            "a chunk with a fabric handle was made, mapped and granted",
            "memory cannot be shared with other hosts over NVLink, which needs an IMEX channel \
             (nvidia-imex); all else works",
        ),
        (
            "rdma",
            "RDMA flag",
            &abilities.rdma,
            "a chunk that a NIC may read was made, mapped and granted",
            "NICs cannot read pool memory directly: leave the RDMA flag off; all else works",
        ),
        (
            "host_numa",
            "host memory",
            &abilities.host_numa,
            "a chunk of the host's memory was made, mapped and granted",
            "buffers cannot be moved to the host; all else works",
        ),
    ]
    .map(|(id, what, found, works, loss)| {
        let finding = match found.error() {
            None => {
                let text = match found.advertised {
                    Some(true) => works.to_owned(),
                    _ => format!("{works}, though {}", advertised(found)),
                };
                Finding::ok(id, what, text)
            }
            Some(error) => {
                let text = format!("{} ({})", meaning(error), advertised(found));
                let advice = match error.is_out_of_memory() {
                    true => remedy::of(error),
                    false => loss,
                };
                Finding::warn(id, what, text).advise(advice).refused_by(error)
            }
        };
        finding.with("advertised", found.advertised).on(facts.device)
    })
}

fn advertised(found: &Found) -> &'static str {
    match found.advertised {
        Some(true) => "advertised all the same",
        Some(false) => "not advertised",
        None => "unknown to the driver's attributes",
    }
}

/// The driver's answer with the classic explanation of its kind, unless the error has it already.
pub(super) fn meaning(error: &DriverError) -> String {
    let classic = match error.code() {
        ResultCode::NOT_SUPPORTED | ResultCode::NOT_PERMITTED => explain::MISSING_SUPPORT,
        ResultCode::PEER_ACCESS_UNSUPPORTED => explain::MISSING_GRANT,
        ResultCode::INVALID_HANDLE => explain::HANDLE_LIFE,
        _ => "",
    };
    if error.detail().contains(classic) { error.to_string() } else { format!("{error}: {classic}") }
}
