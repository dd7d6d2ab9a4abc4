//! What an out-of-memory error says of the lane that asked.

use vmm_heap::GRANULE_BYTES;
use vmm_sys::DriverError;

use super::guard::Guards;
use super::survey::{Surveyed, Terms, survey};
use super::{Lane, LaneState};
use crate::device::Device;
use crate::error::Error;
use crate::out_of_memory::{Asked, OutOfMemory, device_memory, room_bytes};
use crate::request::Request;

/// The error of a request that no rung of the ladder could serve.
pub(super) fn out_of_memory(lane: &Lane, request: &Request, cause: Option<DriverError>) -> Error {
    let device = &*lane.device;
    let info = device_memory(device);
    let room_bytes = room_bytes(device, info, cause.as_ref());
    let is_guarded = lane.reference().lock().is_some_and(|state| state.guards.is_some());
    let unit_bytes = if is_guarded { device.plan.granularity_bytes } else { GRANULE_BYTES };
    let asked = Asked {
        bytes: request.bytes(),
        rounded_bytes: request.bytes().next_multiple_of(unit_bytes),
        may_wait: request.may_wait(),
    };
    let largest_bytes = largest_bytes(lane, request, room_bytes);
    let facts = OutOfMemory::new(device, asked, largest_bytes, info, cause).hindered();
    Error::OutOfMemory(Box::new(facts))
}

/// The largest request like `request` that would succeed now; `None` if the lane is closed.
///
/// Found by asking what the ladder would ask, so the answer is true for its own length and for one
/// granule more.
fn largest_bytes(lane: &Lane, request: &Request, room_bytes: u64) -> Option<u64> {
    let mut guard = lane.cell.lock();
    let state = lane.state(&mut guard).ok()?;
    state.heap.drain();
    let device = &*lane.device;
    let small_max = state.heap.config().small_max_bytes / GRANULE_BYTES;
    let hole = state.heap.largest_free_bytes() / GRANULE_BYTES;
    let mut serves = |granules: u64| {
        let like = request.of_bytes(granules * GRANULE_BYTES);
        would_serve(state, device, &like, room_bytes)
    };
    let fails = request.bytes().div_ceil(GRANULE_BYTES);
    if serves(fails) {
        return Some(fails * GRANULE_BYTES); // somebody freed something meanwhile
    }
    // Small requests need a whole slab, so one that fails says nothing of those above.
    let start = [hole, small_max + 1]
        .into_iter()
        .find(|start| (small_max + 1..fails).contains(start) && serves(*start));
    let (mut fits, mut fails) = match start {
        Some(start) => (start, fails),
        None => (0, fails.min(small_max + 1)),
    };
    while fits + 1 < fails {
        let middle = fits.midpoint(fails);
        if serves(middle) {
            fits = middle;
        } else {
            fails = middle;
        }
    }
    Some(fits * GRANULE_BYTES)
}

/// Whether some rung of the ladder would serve a request, were it made now.
fn would_serve(state: &mut LaneState, device: &Device, request: &Request, room_bytes: u64) -> bool {
    let found = match &state.guards {
        None => state.heap.alloc(request.bytes(), request.align_bytes()),
        Some(_) => Err(Guards::miss(&state.region, request)),
    };
    let miss = match found {
        Ok(block) => {
            if let Err(error) = state.heap.free(block.offset) {
                debug_assert!(false, "it was allocated just now: {error:?}");
            }
            // A small block goes to a magazine, where it would pin its slab.
            state.heap.drain();
            return true;
        }
        Err(miss) => miss,
    };
    let slot_bytes = state.region.slot_bytes();
    let room = room_bytes / slot_bytes;
    let shelf = device.depot.stock.lock().bytes() / slot_bytes;
    let own = Terms {
        create_slots: 0,
        with_stock: true,
        exact: true,
        may_move: true,
        elsewhere_bytes: 0,
        shelf_bytes: 0,
    };
    [
        // Own chunks and the stock as it is.
        own,
        // And new memory.
        Terms { create_slots: room, ..own },
        // The stock given back, its bytes made anew.
        Terms { create_slots: room.saturating_add(shelf), with_stock: false, ..own },
    ]
    .into_iter()
    .any(|terms| matches!(survey(state, device, &miss, request, terms), Surveyed::Found(..)))
}
