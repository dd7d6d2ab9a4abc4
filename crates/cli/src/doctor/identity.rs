//! What a device says of itself. Nothing here decides anything.

use std::sync::Arc;

use serde_json::{Map, Value};
use vmm_sys::topology::{DeviceFacts, Granularity};
use vmm_sys::{DeviceAttribute, DeviceId, Driver, DriverResult, MemInfo};

use super::finding::Finding;

/// Attributes that are shown, by the names that they have in the output.
const SHOWN: [(&str, DeviceAttribute); 14] = [
    ("vmm", DeviceAttribute::VirtualMemoryManagementSupported),
    ("posix_fd", DeviceAttribute::HandleTypePosixFdSupported),
    ("fabric", DeviceAttribute::HandleTypeFabricSupported),
    ("rdma_with_vmm", DeviceAttribute::GpuDirectRdmaWithVmmSupported),
    ("rdma", DeviceAttribute::GpuDirectRdmaSupported),
    ("dma_buf", DeviceAttribute::DmaBufSupported),
    ("ipc_event", DeviceAttribute::IpcEventSupported),
    ("host_numa_vmm", DeviceAttribute::HostNumaVmmSupported),
    ("host_numa_id", DeviceAttribute::HostNumaId),
    ("memory_pools", DeviceAttribute::MemoryPoolsSupported),
    ("unified_addressing", DeviceAttribute::UnifiedAddressing),
    ("compute_major", DeviceAttribute::ComputeCapabilityMajor),
    ("compute_minor", DeviceAttribute::ComputeCapabilityMinor),
    ("multiprocessors", DeviceAttribute::MultiprocessorCount),
];

pub(super) fn identity(facts: &DeviceFacts) -> Finding {
    let DeviceFacts { device, uuid, name, total_bytes, numa_node, integrated, .. } = facts;
    let node = numa_node.map_or("unknown".to_owned(), |node| node.to_string());
    let kind = if *integrated { "memory shared with the host" } else { "memory of its own" };
    let text = format!("{name}, {uuid}, {} {kind}, host NUMA node {node}", gibibytes(*total_bytes));
    Finding::ok("identity", "identity", text)
        .on(*device)
        .with("name", name.as_str())
        .with("uuid", uuid.to_string())
        .with("total_bytes", *total_bytes)
        .with("integrated", *integrated)
        .with("numa_node", *numa_node)
}

pub(super) fn attributes(driver: &Arc<dyn Driver>, device: DeviceId) -> Finding {
    let mut figures = Map::new();
    let mut words = Vec::new();
    for (name, attribute) in SHOWN {
        let value = driver.device_attribute(device, attribute).ok();
        words.push(match value {
            Some(value) => format!("{name} {value}"),
            None => format!("{name} unknown"),
        });
        figures.insert(name.to_owned(), value.into());
    }
    let text = format!("{} (advertised; tried below)", words.join(", "));
    Finding::ok("attributes", "attributes", text)
        .on(device)
        .with("attributes", Value::Object(figures))
}

pub(super) fn granularities(facts: &DeviceFacts) -> Finding {
    let kinds = [("plain", &facts.plain), ("exportable", &facts.exportable), ("rdma", &facts.rdma)];
    let words = kinds.map(|(name, kind)| match kind {
        Ok(Granularity { minimum_bytes, recommended_bytes }) => {
            format!("{name} {minimum_bytes} (better {recommended_bytes})")
        }
        Err(_) => format!("{name} unknown"),
    });
    let text =
        format!("bytes of which sizes and addresses must be multiples: {}", words.join(", "));
    let mut finding = match &facts.plain {
        Ok(_) => Finding::ok("granularity", "granularity", text),
        Err(error) => Finding::warn("granularity", "granularity", text).refused_by(error),
    };
    for (name, kind) in kinds {
        let kind = kind.as_ref().ok();
        finding = finding
            .with(&format!("{name}_minimum_bytes"), kind.map(|kind| kind.minimum_bytes))
            .with(&format!("{name}_recommended_bytes"), kind.map(|kind| kind.recommended_bytes));
    }
    finding.on(facts.device)
}

/// Platforms are known that answer 0, or more than there is, or not at all, and work.
pub(super) fn free_memory(
    device: DeviceId,
    answer: DriverResult<MemInfo>,
    integrated: bool,
) -> Finding {
    let (id, what) = ("free_memory", "free memory");
    let finding = match &answer {
        Ok(MemInfo { free_bytes, total_bytes }) => {
            let text = format!("{} of {}", gibibytes(*free_bytes), gibibytes(*total_bytes));
            let odd = *free_bytes == 0 || free_bytes > total_bytes;
            let finding = if odd {
                Finding::warn(id, what, format!("{text}, which cannot be relied on"))
                    .advise("the figure is advice only: what can be made is what counts")
            } else if integrated {
                let text = format!("{text}, without what the host could give up");
                Finding::ok(id, what, text)
            } else {
                Finding::ok(id, what, text)
            };
            finding.with("free_bytes", *free_bytes).with("total_bytes", *total_bytes)
        }
        Err(error) => Finding::warn(id, what, format!("unknown: {error}"))
            .advise("the figure is advice only: what can be made is what counts")
            .refused_by(error),
    };
    finding.on(device)
}

pub(super) fn gibibytes(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / (1_u64 << 30) as f64)
}
