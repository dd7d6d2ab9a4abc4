//! The walker: checks the invariants of a device's pool, and names those that do not hold
//! (docs/INVARIANTS.md).

use std::collections::HashSet;
use std::sync::Arc;

use vmm_sys::object::{Chunk, Mapping};

use crate::device::Device;
use crate::lane::LaneState;

/// Walks one device. Sums are checked only while no thread has memory of it in its hands.
pub(crate) fn device(device: &Device) -> Result<(), String> {
    let carries = device.depot.carries.settled();
    let name = device.plan.device;
    // Held on, so that two threads never lock the same lanes in two orders.
    let list = device.lanes.lock();
    let guards: Vec<_> =
        list.all().into_iter().filter_map(|lane| Some((lane, lane.lock()?))).collect();
    let states: Vec<&LaneState> = guards.iter().map(|(_, guard)| &**guard).collect();
    for (reference, state) in &guards {
        lane(state).map_err(|text| format!("{name}, {:?}: {text}", state.stream))?;
        let figures = &reference.cell.figures;
        if !figures.are(state.live.asked_bytes, state.region.mapped_bytes()) {
            return Err(format!("I33: {name}, {:?}: {figures:?}, {:?}", state.stream, state.live));
        }
        if !state.is_listed_right(reference.cell) {
            return Err(format!("I20: {name}, {:?}: the directory is wrong", state.stream));
        }
    }
    let stats = device.stats_of(&states);
    if !stats.adds_up() {
        return Err(format!("I3: {name}: the columns do not add up: {stats:?}"));
    }
    if states.iter().any(|state| state.busy > 0) {
        return Ok(());
    }
    // What is booked is read last: whoever changes it has carried since before, and is seen below.
    let mapped: u64 = states.iter().map(|state| state.region.mapped_bytes()).sum();
    let leaving = leaving_bytes(&states, device);
    let shelf = device.depot.stock.lock().bytes();
    let others = device.depot.elastic_bytes() + device.depot.anchor_bytes();
    let held = device.depot.held_bytes();
    if carries.is_none() || device.depot.carries.settled() != carries {
        return Ok(());
    }
    if held != mapped + leaving + others + shelf {
        return Err(format!(
            "I1: {name}: {held} bytes are booked, but {mapped} are mapped in lanes, {others} in \
             elastic buffers and anchors, {leaving} leaving and {shelf} on the shelf"
        ));
    }
    if held > device.plan.limit_bytes {
        let limit = device.plan.limit_bytes;
        return Err(format!("I2: {name}: {held} bytes exceed the limit {limit}"));
    }
    Ok(())
}

/// Bytes of the chunks that stand at addresses of no use any more, and only there: on their way to
/// the shelf.
pub(crate) fn leaving_bytes(states: &[&LaneState], device: &Device) -> u64 {
    let placed = states.iter().flat_map(|state| state.region.placed());
    let mut known: HashSet<*const Chunk> =
        placed.map(|(_, placed)| Arc::as_ptr(placed.mapping.chunk())).collect();
    let retired = states.iter().flat_map(|state| &state.limbo.retired);
    let leaving = device.depot.leaving.entries();
    // What stands in broken lanes is on its way until the end of the device.
    let mut wrecked_bytes = 0;
    device.wrecks.chunks(|chunk| {
        if known.insert(Arc::as_ptr(chunk)) {
            wrecked_bytes += chunk.bytes();
        }
    });
    let leaving_bytes: u64 = retired
        .map(|entry| &entry.mapping)
        .chain(leaving.values().filter(|it| !it.is_elsewhere()).map(|entry| &entry.mapping))
        .filter(|mapping| known.insert(Arc::as_ptr(mapping.chunk())))
        .map(Mapping::bytes)
        .sum();
    leaving_bytes + wrecked_bytes
}

fn lane(state: &LaneState) -> Result<(), String> {
    state.heap.verify().map_err(|text| format!("I7: {text}"))?;
    state.region.verify().map_err(|text| format!("I4: {text}"))?;
    if let Some(guards) = &state.guards {
        guards.verify(&state.region).map_err(|text| format!("I31: {text}"))?;
    }
    if state.busy > 0 {
        return Ok(());
    }
    let heap = state.heap.stats();
    let blocks = state.live.block_bytes + state.limbo.block_bytes;
    if heap.used_bytes != blocks {
        return Err(format!("I6: the heap lent {} bytes, buffers hold {blocks}", heap.used_bytes));
    }
    let inserted = heap.used_bytes + heap.free_bytes;
    if inserted != state.region.mapped_bytes() {
        return Err(format!(
            "I5: the heap places {inserted} bytes, {} are mapped",
            state.region.mapped_bytes()
        ));
    }
    if state.live.asked_bytes > state.live.block_bytes {
        return Err(format!("I6: more is live than was lent: {:?}", state.live));
    }
    Ok(())
}
