//! The walker: checks every invariant of a device's pool (docs/INVARIANTS.md).

use std::sync::Arc;

use crate::device::Device;
use crate::lane::LaneState;

/// Walks one device. Sums are checked only while no thread is at the driver for one of its lanes.
pub(crate) fn device(device: &Device) -> Result<(), String> {
    let name = device.plan.device;
    // Held on, so that two threads never lock the same lanes in two orders.
    let lanes = device.lanes.lock();
    let guards: Vec<_> = lanes.values().map(|cell| cell.lock()).collect();
    let states: Vec<&LaneState> = guards.iter().filter_map(|guard| guard.as_ref()).collect();
    for (cell, guard) in lanes.values().zip(&guards) {
        let Some(state) = guard.as_ref() else { continue };
        lane(state).map_err(|text| format!("{name}, {:?}: {text}", state.stream))?;
        if !state.is_listed_right(cell) {
            return Err(format!("{name}, {:?}: the directory does not find it", state.stream));
        }
    }
    let stats = device.stats_of(&states);
    if !stats.adds_up() {
        return Err(format!("{name}: the columns do not add up: {stats:?}"));
    }
    if states.iter().any(|state| state.busy > 0) {
        return Ok(());
    }
    let mapped: u64 = states.iter().map(|state| state.region.mapped_bytes()).sum();
    // A chunk whose only mapping is a retired one is on its way to the shelf.
    let leaving: u64 = states
        .iter()
        .flat_map(|state| &state.limbo.retired)
        .filter(|entry| Arc::strong_count(entry.mapping.chunk()) == 1)
        .map(|entry| entry.mapping.bytes())
        .sum();
    let shelf = device.stock.lock().bytes() + device.stuck_bytes();
    let held = device.held_bytes();
    if held != mapped + leaving + shelf {
        return Err(format!(
            "{name}: {held} bytes are booked, but {mapped} are mapped, {leaving} leaving and \
             {shelf} on the shelf"
        ));
    }
    if held > device.plan.limit_bytes {
        return Err(format!("{name}: {held} bytes exceed the limit {}", device.plan.limit_bytes));
    }
    Ok(())
}

fn lane(state: &LaneState) -> Result<(), String> {
    state.heap.verify()?;
    state.region.verify()?;
    if state.busy > 0 {
        return Ok(());
    }
    let heap = state.heap.stats();
    let blocks = state.live.block_bytes + state.limbo.block_bytes;
    if heap.used_bytes != blocks {
        return Err(format!("the heap lent {} bytes, buffers hold {blocks}", heap.used_bytes));
    }
    let inserted = heap.used_bytes + heap.free_bytes;
    if inserted != state.region.mapped_bytes() {
        return Err(format!(
            "the heap places {inserted} bytes, {} are mapped",
            state.region.mapped_bytes()
        ));
    }
    if state.live.asked_bytes > state.live.block_bytes {
        return Err(format!("more is live than was lent: {:?}", state.live));
    }
    Ok(())
}
