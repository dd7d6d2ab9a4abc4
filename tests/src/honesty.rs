//! Whether a refusal is one that had to be.

use std::collections::BTreeMap;
use std::mem::Discriminant;

use vmm_pool::{Error, Lane, OutOfMemory, Request};

use crate::model::Entry;
use crate::setup::Setup;

/// A request is refused outright above this, or 32 Mi granules, or four times the device.
const REQUEST_MAX_BYTES: u64 = 1 << 46;
/// But not below this.
const REQUEST_MAX_FLOOR_BYTES: u64 = 64 << 30;
/// Requests up to this are placed in slabs.
const SMALL_MAX_BYTES: u64 = 256 << 10;
const SLAB_BYTES: u64 = 2 << 20;
/// Ranges start at a multiple of this, or of the longest chunk.
const ALIGN_MAX_BYTES: u64 = 32 << 20;

/// The kind of error that a request must meet before anything is touched.
pub(crate) fn must_refuse(setup: &Setup, request: &Request) -> Option<Discriminant<Error>> {
    let (bytes, align_bytes) = (request.bytes(), request.align_bytes());
    let device_bytes = (4 * setup.device_bytes).max(REQUEST_MAX_FLOOR_BYTES);
    let max_bytes = REQUEST_MAX_BYTES.min(setup.granularity_bytes << 25).min(device_bytes);
    if bytes > max_bytes {
        let error = Error::TooLarge { bytes, max_bytes };
        return Some(std::mem::discriminant(&error));
    }
    let longest = setup.chunk_bytes.unwrap_or(setup.granularity_bytes);
    let max_bytes = ALIGN_MAX_BYTES.max(longest);
    if !align_bytes.is_power_of_two() || align_bytes > max_bytes {
        let error = Error::BadAlignment { align_bytes, max_bytes };
        return Some(std::mem::discriminant(&error));
    }
    None
}

/// The figures in an out-of-memory error.
///
/// # Errors
/// In words, what is wrong with them.
pub(crate) fn check_figures(facts: &OutOfMemory) -> Result<(), String> {
    let stats = &facts.stats;
    let reach = (stats.idle_bytes + stats.stock_bytes).saturating_add(facts.room_bytes);
    if !stats.adds_up() || facts.largest_bytes.is_some_and(|largest| largest > reach) {
        return Err(format!("an error with wrong figures: {facts:?}"));
    }
    Ok(())
}

/// The largest request that would succeed does, and one granule more does not.
///
/// # Errors
/// In words, which of the two is wrong.
pub(crate) fn check_largest(
    setup: &Setup,
    lane: &Lane,
    request: &Request,
    facts: &OutOfMemory,
) -> Result<(), String> {
    let Some(largest) = facts.largest_bytes else {
        return Err(format!("a lane asked, and the error does not say: {facts:?}"));
    };
    if facts.stats.limbo_bytes + facts.stats.retired_mappings > 0 {
        // What is pending may be done by the next request.
        return Ok(());
    }
    if facts.device_free_bytes.is_none() {
        // Only a try can tell how much there is.
        return Ok(());
    }
    let like = |bytes| {
        let like = Request::new(bytes).align(request.align_bytes());
        if request.may_wait() { like } else { like.no_wait() }
    };
    if let Err(error) = lane.alloc_with(&like(largest)) {
        return Err(format!("{largest} bytes would succeed, said {facts:?}; they do not: {error}"));
    }
    // The least of those above that is placed in the same way.
    let small = is_small(setup, request.bytes(), request.align_bytes());
    let more = if small || setup.guard || request.align_bytes() > 512 {
        largest + 512
    } else {
        (largest + 512).max(SMALL_MAX_BYTES + 512)
    };
    match lane.alloc_with(&like(more)) {
        Err(error) if error.is_out_of_memory() => Ok(()),
        other => Err(format!("{largest} bytes are not the most, said {facts:?}; more: {other:?}")),
    }
}

/// A shortage is honest only if the request would not fit were every free chunk given back: chunks
/// that hold nothing alive count against nobody, except `kept_bytes` for graphs.
///
/// # Errors
/// In words, that there was room.
pub(crate) fn check_shortage<'a>(
    setup: &Setup,
    lane: &Lane,
    (pool, request): (u64, &Request),
    kept_bytes: u64,
    entries: impl Iterator<Item = &'a Entry>,
) -> Result<(), String> {
    let device = lane.device();
    let mut pinned: BTreeMap<u64, u64> = BTreeMap::new();
    let mut foreign_bytes = 0;
    for entry in entries.filter(|entry| entry.device == device.0 && entry.bytes > 0) {
        if entry.pool != pool {
            // An earlier pool's lane gives nothing back before its last buffer goes.
            foreign_bytes = setup.device_bytes;
            continue;
        }
        let (mut at, mut end) = (entry.address, entry.address + entry.bytes);
        if is_small(setup, entry.bytes, entry.align) {
            // The whole slab is taken.
            at -= at % SLAB_BYTES;
            end = at + SLAB_BYTES;
        }
        while at < end {
            let range = lane.stream().driver().address_range(device, at);
            let (base, bytes) = range.map_err(|error| format!("{at:#x} is live: {error}"))?;
            pinned.insert(base, bytes);
            at = base + bytes;
        }
    }
    let granularity = setup.granularity_bytes;
    let limit_bytes = setup.limit_bytes.unwrap_or(u64::MAX);
    let limit_bytes = limit_bytes - limit_bytes % granularity;
    let device_bytes = setup.device_bytes.saturating_sub(foreign_bytes);
    let room = limit_bytes.min(device_bytes).saturating_sub(pinned.values().sum());
    let room = room.saturating_sub(kept_bytes);
    let small = is_small(setup, request.bytes(), request.align_bytes());
    let need = if small { SLAB_BYTES } else { request.bytes() };
    let need = need.next_multiple_of(granularity);
    if need <= room {
        return Err(format!(
            "{request:?} was refused for want of memory, but needs {need} bytes of chunks and \
             {room} bytes hold nothing alive"
        ));
    }
    Ok(())
}

fn is_small(setup: &Setup, bytes: u64, align_bytes: u64) -> bool {
    !setup.guard && bytes <= SMALL_MAX_BYTES && align_bytes <= 512
}
