//! A pool's figures: as JSON for programs, in words for people.

use std::fmt::Write;

use serde_json::{Map, Value, json};
use vmm_pool::{Contents, DeviceStats, ElasticStats, HostStats, Place, Pool};
use vmm_sys::DeviceId;

use crate::failure::Failure;

/// `u64::MAX` stands for no limit.
fn limit(bytes: u64) -> Value {
    if bytes == u64::MAX { Value::Null } else { bytes.into() }
}

fn device(device: DeviceId, it: &DeviceStats) -> Value {
    let ladder: Map<String, Value> = it
        .ladder
        .by_name()
        .map(|(name, count)| (name.to_owned(), count.into()))
        .into_iter()
        .collect();
    json!({
        "device": device.0,
        "live_bytes": it.live_bytes,
        "rounding_bytes": it.rounding_bytes,
        "idle_bytes": it.idle_bytes,
        "limbo_bytes": it.limbo_bytes,
        "private_bytes": it.private_bytes,
        "elastic_bytes": it.elastic_bytes,
        "anchor_bytes": it.anchor_bytes,
        "stock_bytes": it.stock_bytes,
        "held_bytes": it.held_bytes,
        "lent_bytes": it.lent_bytes,
        "borrowed_bytes": it.borrowed_bytes,
        "lending_bytes": it.lending_bytes,
        "lending_booked_bytes": it.lending_booked_bytes,
        "peak_live_bytes": it.peak_live_bytes,
        "peak_held_bytes": it.peak_held_bytes,
        "reserved_bytes": it.reserved_bytes,
        "limit_bytes": limit(it.limit_bytes),
        "buffers": it.buffers,
        "elastic_buffers": it.elastic_buffers,
        "lanes": it.lanes,
        "retired_mappings": it.retired_mappings,
        "limbo_buffers": it.limbo_buffers,
        "idle_lanes_emptied": it.idle_lanes_emptied,
        "lanes_asked": it.lanes_asked,
        "ladder": ladder,
    })
}

fn host(it: &HostStats) -> Value {
    json!({
        "node": it.node,
        "elastic_bytes": it.elastic_bytes,
        "limbo_bytes": it.limbo_bytes,
        "stock_bytes": it.stock_bytes,
        "held_bytes": it.held_bytes,
        "peak_held_bytes": it.peak_held_bytes,
        "limit_bytes": limit(it.limit_bytes),
        "lending_bytes": limit(it.lending_bytes),
        "lending_booked_bytes": it.lending_booked_bytes,
    })
}

fn places(places: &[(Place, u64)]) -> Value {
    let entry = |(place, bytes): &(Place, u64)| match place {
        Place::Device(device) => json!({ "device": device.0, "bytes": bytes }),
        Place::HostNuma(node) => json!({ "host_node": node, "bytes": bytes }),
    };
    places.iter().map(entry).collect()
}

fn elastic(it: &ElasticStats) -> Value {
    let asleep = it.asleep.map(|contents| match contents {
        Contents::Dropped => "dropped",
        _ => "kept",
    });
    json!({
        "device": it.device.0,
        "tag": it.tag.as_deref(),
        "reserved_bytes": it.reserved_bytes,
        "committed_bytes": it.committed_bytes,
        "physical_bytes": it.physical_bytes,
        "shared_bytes": it.shared_bytes,
        "by_place": places(&it.by_place),
        "borrowed": places(&it.borrowed),
        "chunk_bytes": it.chunk_bytes,
        "quota_bytes": limit(it.quota_bytes),
        "quota_booked_bytes": it.quota_booked_bytes,
        "created_bytes": it.created_bytes,
        "from_stock_bytes": it.from_stock_bytes,
        "returned_bytes": it.returned_bytes,
        "moved_bytes": it.moved_bytes,
        "incoming_bytes": it.incoming_bytes,
        "asleep": asleep,
        "generation": it.generation,
        "open_uses": it.open_uses,
        "uses": it.uses,
        "growth_waits": it.growth_waits,
    })
}

/// Everything that a pool counts, as one JSON object.
pub fn json(pool: &Pool) -> String {
    let stats = pool.stats();
    let devices: Value = stats.devices.iter().map(|(id, it)| device(*id, it)).collect();
    let hosts: Value = stats.hosts.iter().map(host).collect();
    let elastic: Value = pool.elastic_stats().iter().map(elastic).collect();
    json!({ "devices": devices, "hosts": hosts, "elastic": elastic }).to_string()
}

/// How a device's memory is used, in lines for people.
///
/// # Errors
/// [`vmm_pool::Error::UnknownDevice`].
pub fn report(pool: &Pool, device: DeviceId) -> Result<String, Failure> {
    let unknown = vmm_pool::Error::UnknownDevice { device };
    let it = pool.device_stats(device).ok_or(unknown)?;
    let mut lines = format!("{device}: the pool holds {} bytes", it.held_bytes);
    match it.limit_bytes {
        u64::MAX => lines.push_str(", and has no limit"),
        limit => append(&mut lines, format_args!(" of a limit of {limit}")),
    }
    if let Ok(info) = pool.driver().mem_info(device) {
        let (free, total) = (info.free_bytes, info.total_bytes);
        append(&mut lines, format_args!("; the driver says that {free} of {total} are free"));
    }
    for (bytes, what) in [
        (it.live_bytes, "are asked for by blocks that are alive"),
        (it.rounding_bytes, "are what these occupy beyond"),
        (it.idle_bytes, "are mapped and free"),
        (it.limbo_bytes, "are freed, but work may still use them"),
        (it.private_bytes, "are kept for captured graphs"),
        (it.elastic_bytes, "are at the addresses of elastic buffers"),
        (it.anchor_bytes, "keep the links to peers up"),
        (it.stock_bytes, "are ready, mapped for nobody"),
    ] {
        if bytes > 0 {
            append(&mut lines, format_args!("\n  {bytes} {what}"));
        }
    }
    let peaks = (it.peak_live_bytes, it.peak_held_bytes);
    append(&mut lines, format_args!("\nat most: {} alive, {} held", peaks.0, peaks.1));
    append(&mut lines, format_args!("\n{} blocks in {} streams' memory", it.buffers, it.lanes));
    append(
        &mut lines,
        format_args!("; requests that failed for want of memory: {}", it.ladder.failed),
    );
    Ok(lines)
}

fn append(lines: &mut String, more: std::fmt::Arguments<'_>) {
    // A string takes everything.
    let _taken = lines.write_fmt(more);
}
