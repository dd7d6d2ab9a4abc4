//! How a miss could be served: where the block would go, and which chunks would bring memory there.
//! Looks only, and changes nothing.

use vmm_heap::Miss;

use super::LaneState;
use super::thrift::{Lack, soft_slots};
use super::window::{Window, choose_window, runs};
use crate::device::Device;
use crate::growth::{self, Piece, Supply};
use crate::request::Request;
use crate::stock::Stock;
use crate::sync::MutexGuard;

/// What a request may draw on beside its lane's own chunks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    /// Slots that may be created.
    pub(super) create_slots: u64,
    /// Whether the stock may be used.
    pub(super) with_stock: bool,
    /// Create no more than is missing.
    pub(super) exact: bool,
    /// Whether the lane's own chunks may move to other addresses.
    pub(super) may_move: bool,
    /// What is alive in the device's other lanes.
    pub(super) elsewhere_bytes: u64,
    /// Bytes of the stock that the soft limit does not count: they were made ahead of need.
    pub(super) shelf_bytes: u64,
}

/// Where a missing block would go, and what would bring memory there.
pub(super) struct Found {
    pub(super) window: Window,
    pub(super) pieces: Vec<Piece>,
    /// Of the lane's free chunks, for the pieces that name one.
    pub(super) keys: Vec<u32>,
    /// What is to be made beyond the soft limit.
    pub(super) beyond: Lack,
}

pub(super) enum Surveyed<'a> {
    /// It can be served, as long as the stock stays locked.
    Found(Found, MutexGuard<'a, Stock>),
    /// Addresses are missing.
    NoAddresses,
    /// Memory is missing.
    Short,
}

/// Looks how a miss could be served, and changes nothing.
pub(super) fn survey<'a>(
    state: &LaneState,
    device: &'a Device,
    miss: &Miss,
    request: &Request,
    terms: Terms,
) -> Surveyed<'a> {
    let region = &state.region;
    let slot_bytes = region.slot_bytes();
    let window = match &state.guards {
        None => choose_window(region, &state.heap, miss),
        Some(guards) => guards.choose_window(region, miss),
    };
    let Some(window) = window else { return Surveyed::NoAddresses };
    let mut runs = runs(region, &window);
    let live_bytes = state.live.asked_bytes + request.bytes();
    let peak_live = state.peak_live_bytes().max(live_bytes);
    let soft = soft_slots(device, peak_live.max(live_bytes + terms.elsewhere_bytes), terms);
    let needed = u64::from(window.missing_slots);
    let mut chunk_bytes = growth::chunk_bytes(&device.plan, peak_live);
    if state.guards.is_some() {
        // As few mappings as can be, and none that reaches into the gap.
        chunk_bytes = device.plan.chunk_max_bytes;
        runs.iter_mut().for_each(|run| run.spare_slots = 0);
    }
    let chunk_slots = (chunk_bytes / slot_bytes) as u32;
    // Looked for only where they may be needed: it walks the whole heap.
    let is_short = soft < needed + u64::from(chunk_slots) || terms.create_slots < needed;
    let keys = if is_short && terms.may_move && state.may_move() {
        state.free_chunks(window.first_slot, window.end_slot)
    } else {
        Vec::new()
    };
    let length = |key: &u32| region.placed_at(*key).map_or(0, |placed| placed.slots);
    let free_chunks = keys.iter().map(length).collect();
    let stock = device.depot.stock.lock();
    let shelves = stock.counts(&device.plan.props).filter(|_| terms.with_stock);
    let supply = Supply {
        stock: shelves.map(|(b, n)| ((b / slot_bytes) as u32, n as u32)).collect(),
        free_chunks,
        create_slots: terms.create_slots,
        soft_slots: soft,
        chunk_slots,
        exact: terms.exact || state.guards.is_some(),
    };
    match growth::cover(&runs, supply) {
        Some(pieces) => {
            let beyond = Lack::of(&pieces, soft, slot_bytes, &window);
            Surveyed::Found(Found { window, pieces, keys, beyond }, stock)
        }
        None => Surveyed::Short,
    }
}
