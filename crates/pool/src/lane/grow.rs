//! The cold path of an allocation: a miss is served by bringing memory to a window of addresses.
//!
//! Claim under the lock, act at the driver without it, publish or hand back under it. The window is
//! taken as one block when it is claimed, so no other thread can use its free parts meanwhile.
//! All or nothing: a failure at any step leaves the lane as before.

use std::sync::Arc;

use vmm_heap::Miss;
use vmm_sys::DriverError;
use vmm_sys::object::{Chunk, Mapping};

use super::limbo::Retired;
use super::{Gate, Lane, LaneState, Wait, sweep, trim};
use crate::buffer::Buffer;
use crate::device::{Device, Shortage};
use crate::error::{Error, OutOfMemory};
use crate::growth::{self, Piece, Run, Source, Supply};
use crate::region::{Region, Segment, Slot};
use crate::request::Request;
use crate::turn::Turn;

/// Rounds of reserve, race and retry before a request gives up: far more than can be needed.
const ROUNDS_MAX: u32 = 64;

/// Where a piece's chunk comes from, once it is claimed.
enum Supplied {
    Stock(Chunk),
    Create(u64),
    Alias(Arc<Chunk>),
}

/// One chunk to be mapped.
struct Part {
    first_slot: u32,
    slots: u32,
    segment: Segment,
    supplied: Option<Supplied>,
    mapping: Option<Mapping>,
}

/// Memory on its way to a window.
struct Claim {
    window_offset: u64,
    window_bytes: u64,
    parts: Vec<Part>,
}

enum Planned {
    Claim(Claim),
    /// Addresses are missing: this many bytes at least.
    Reserve(u64),
    /// Memory is missing.
    Short,
}

enum Outcome {
    Done(Buffer),
    Reserve(u64),
    Short(Option<DriverError>),
}

/// The out-of-memory ladder, a rung a failure, cheapest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rung {
    /// Create what is missing.
    Create,
    /// The driver has nothing left: use what the lane and the stock hold.
    OwnOnly,
    /// Wait for what is in limbo.
    WaitLimbo,
    /// Empty the other lanes into the stock.
    OtherLanes,
    /// Give the stock back, its chunks have the wrong length.
    ReleaseStock,
    /// Nothing more to try.
    End,
}

impl Rung {
    fn next(self) -> Rung {
        match self {
            Rung::Create => Rung::OwnOnly,
            Rung::OwnOnly => Rung::WaitLimbo,
            Rung::WaitLimbo => Rung::OtherLanes,
            Rung::OtherLanes => Rung::ReleaseStock,
            Rung::ReleaseStock | Rung::End => Rung::End,
        }
    }
}

/// Serves a request that found no mapped hole.
#[cold]
#[inline(never)]
pub(super) fn alloc_cold(lane: &Lane, request: &Request) -> Result<Buffer, Error> {
    let span = tracing::debug_span!("vmm_pool.grow", bytes = request.bytes());
    let _entered = span.enter();
    let device = &*lane.device;
    if device.driver.is_gone() {
        return Err(Error::DriverGone);
    }
    let mut rung = Rung::Create;
    let mut cause = None;
    for _ in 0..ROUNDS_MAX {
        sweep(lane.cell, Wait::No, Turn::Requester);
        match attempt(lane, request, rung)? {
            Outcome::Done(buffer) => return Ok(buffer),
            Outcome::Reserve(bytes) => reserve(lane, bytes)?,
            Outcome::Short(refusal) => {
                cause = refusal.or(cause);
                rung = rung.next();
                if rung == Rung::End {
                    break;
                }
                climb(lane, request, rung);
            }
        }
    }
    Err(out_of_memory(lane, request, cause))
}

/// Does what a rung of the ladder stands for.
fn climb(lane: &Lane, request: &Request, rung: Rung) {
    let device = &*lane.device;
    let wait = if request.may_wait() { Wait::Yes } else { Wait::No };
    match rung {
        Rung::Create | Rung::OwnOnly | Rung::End => {}
        Rung::WaitLimbo => {
            if request.may_wait() {
                sweep(lane.cell, Wait::Yes, Turn::Requester);
            }
        }
        Rung::OtherLanes => {
            let others: Vec<_> = device.lanes.lock().values().copied().collect();
            for cell in others.into_iter().filter(|cell| !std::ptr::eq(*cell, lane.cell)) {
                trim(cell, wait, Turn::Requester);
            }
        }
        Rung::ReleaseStock => {
            device.release_stock(0, Turn::Requester);
        }
    }
}

fn attempt(lane: &Lane, request: &Request, rung: Rung) -> Result<Outcome, Error> {
    let mut claim = {
        let mut guard = lane.cell.lock();
        let state = lane.state(&mut guard)?;
        let miss = match find(state, request) {
            Ok(block) => {
                return Ok(Outcome::Done(state.hand_out(lane.cell, block, request.bytes())));
            }
            Err(miss) => miss,
        };
        match plan(state, &lane.device, &miss, request, rung) {
            Planned::Claim(claim) => claim,
            Planned::Reserve(bytes) => return Ok(Outcome::Reserve(bytes)),
            Planned::Short => return Ok(Outcome::Short(None)),
        }
    };
    match act(&lane.device, &mut claim) {
        Ok(()) => Ok(publish(lane, claim, request)),
        Err(shortage) => {
            hand_back(lane, claim);
            match shortage {
                Shortage::Limit => Ok(Outcome::Short(None)),
                Shortage::Driver(error) if error.is_out_of_memory() => {
                    Ok(Outcome::Short(Some(error)))
                }
                Shortage::Driver(error) => Err(error.into()),
            }
        }
    }
}

fn find(state: &mut LaneState, request: &Request) -> Result<vmm_heap::Block, Miss> {
    let (bytes, align) = (request.bytes(), request.align_bytes());
    match state.heap.alloc(bytes, align) {
        Err(_) if state.heap.drain() => state.heap.alloc(bytes, align),
        answer => answer,
    }
}

/// A window of addresses and what it lacks.
struct Window {
    offset: u64,
    first_slot: u32,
    end_slot: u32,
    missing_slots: u32,
}

/// The window that needs the least new memory, lowest address first.
fn choose_window(region: &Region, heap: &vmm_heap::Heap, miss: &Miss) -> Option<Window> {
    let slot_bytes = region.slot_bytes();
    let end_slot = region.end_slot();
    // Sums over the slots below each: how many lack memory, how many cannot be used.
    let mut vacant = Vec::with_capacity(end_slot as usize + 1);
    let mut blocked = Vec::with_capacity(end_slot as usize + 1);
    let (mut vacant_sum, mut blocked_sum) = (0u32, 0u32);
    for slot in 0..end_slot {
        vacant.push(vacant_sum);
        blocked.push(blocked_sum);
        match region.slot(slot) {
            Slot::Vacant => vacant_sum += 1,
            Slot::Mapped(_) => {}
            Slot::Claimed | Slot::Retiring | Slot::Barrier => blocked_sum += 1,
        }
    }
    vacant.push(vacant_sum);
    blocked.push(blocked_sum);
    let mut best: Option<Window> = None;
    let mut consider = |offset: u64| {
        let Some(stop) = offset.checked_add(miss.bytes) else { return };
        let first_slot = (offset / slot_bytes) as u32;
        let stop_slot = stop.div_ceil(slot_bytes) as u32;
        if stop_slot > region.capacity_slots() {
            return;
        }
        let (low, high) = (first_slot.min(end_slot) as usize, stop_slot.min(end_slot) as usize);
        if blocked[high] != blocked[low] {
            return;
        }
        let beyond = stop_slot - stop_slot.min(end_slot).max(first_slot);
        let missing_slots = vacant[high] - vacant[low] + beyond;
        let better = |b: &Window| (missing_slots, offset) < (b.missing_slots, b.offset);
        if best.as_ref().is_none_or(better) {
            best = Some(Window { offset, first_slot, end_slot: stop_slot, missing_slots });
        }
    };
    heap.windows(miss, region.end_bytes(), &mut consider);
    consider(region.end_bytes().next_multiple_of(miss.align.max(slot_bytes)));
    best
}

/// The stretches of a window without memory.
fn runs(region: &Region, window: &Window) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for slot in window.first_slot..window.end_slot {
        if region.slot(slot) != Slot::Vacant {
            continue;
        }
        // A chunk does not reach over the border of two reservations.
        let segment_end = region.segment_of(slot).map_or(0, |s| s.first_slot + s.slots);
        match runs.last_mut() {
            Some(run)
                if run.first_slot + run.slots == slot
                    && region.segment_of(run.first_slot).map_or(0, |s| s.first_slot + s.slots)
                        == segment_end =>
            {
                run.slots += 1;
            }
            _ => runs.push(Run { first_slot: slot, slots: 1, spare_slots: 0 }),
        }
    }
    if let Some(run) = runs.last_mut() {
        // Vacant slots behind the window may be covered by the last chunk too.
        let mut slot = run.first_slot + run.slots;
        let limit = region.segment_of(run.first_slot).map_or(slot, |s| s.first_slot + s.slots);
        while slot < limit && slot >= region.end_slot() {
            run.spare_slots = limit - slot;
            slot = limit;
        }
    }
    runs
}

fn plan(
    state: &mut LaneState,
    device: &Device,
    miss: &Miss,
    request: &Request,
    rung: Rung,
) -> Planned {
    let region = &state.region;
    let slot_bytes = region.slot_bytes();
    let Some(window) = choose_window(region, &state.heap, miss) else {
        // A new range may be no neighbour of the last: it must hold the window alone.
        let padding = miss.align.max(slot_bytes);
        return Planned::Reserve((miss.bytes + padding).next_multiple_of(slot_bytes));
    };
    let runs = runs(region, &window);
    let live = &state.live;
    let peak_live = live.peak_asked_bytes.max(live.asked_bytes + request.bytes());
    let soft_limit = device.plan.soft_limit;
    let soft =
        growth::soft_allowance_bytes(soft_limit, peak_live, region.mapped_bytes()) / slot_bytes;
    let create = if rung == Rung::OwnOnly { 0 } else { device.room_bytes() / slot_bytes };
    let needed = u64::from(window.missing_slots);
    let chunk_slots = (growth::chunk_bytes(&device.plan, peak_live) / slot_bytes) as u32;
    // Looked for only where they may be needed: it walks the whole heap.
    let keys = if soft < needed + u64::from(chunk_slots) || create < needed {
        state.free_chunks(window.first_slot, window.end_slot)
    } else {
        Vec::new()
    };
    let length = |key: &u32| region.placed_at(*key).map_or(0, |placed| placed.slots);
    let free_chunks = keys.iter().map(length).collect();
    let mut stock = device.stock.lock();
    let supply = Supply {
        stock: stock.counts().map(|(b, n)| ((b / slot_bytes) as u32, n as u32)).collect(),
        free_chunks,
        create_slots: create,
        soft_slots: soft,
        chunk_slots,
    };
    let Some(pieces) = growth::cover(&runs, supply) else { return Planned::Short };
    let mut take = |slots: u32| stock.take(u64::from(slots) * slot_bytes);
    let claim = claim(state, miss, &window, &pieces, &keys, &mut take);
    drop(stock);
    Planned::Claim(claim)
}

/// Takes hold of everything a window needs, under the lane's lock.
fn claim(
    state: &mut LaneState,
    miss: &Miss,
    window: &Window,
    pieces: &[Piece],
    free_keys: &[u32],
    take_stock: &mut dyn FnMut(u32) -> Option<Chunk>,
) -> Claim {
    let slot_bytes = state.region.slot_bytes();
    let mut parts = Vec::with_capacity(pieces.len());
    for piece in pieces {
        let create = Supplied::Create(u64::from(piece.slots) * slot_bytes);
        let supplied = match piece.source {
            Source::Create => create,
            Source::Stock => take_stock(piece.slots).map_or(create, Supplied::Stock),
            Source::Free(index) => {
                let key = free_keys[index];
                let chunk = state.region.placed_at(key).map(|p| p.mapping.chunk().clone());
                state.retire_chunk(key);
                chunk.map_or(create, Supplied::Alias)
            }
        };
        let Some(segment) = state.region.segment_of(piece.first_slot).cloned() else { continue };
        state.region.claim(piece.first_slot, piece.slots);
        parts.push(Part {
            first_slot: piece.first_slot,
            slots: piece.slots,
            segment,
            supplied: Some(supplied),
            mapping: None,
        });
    }
    let (start, stop) = (window.offset, window.offset + miss.bytes);
    for part in &parts {
        let (inside, _) = split(part, slot_bytes, start, stop);
        state.heap.insert_free(inside.0, inside.1);
    }
    if let Err(error) = state.heap.alloc_at(start, miss.bytes) {
        debug_assert!(false, "the window is free now: {error:?}");
    }
    state.busy += 1;
    Claim { window_offset: start, window_bytes: miss.bytes, parts }
}

/// A part's bytes inside of the window, and behind and before it: (offset, bytes).
fn split(part: &Part, slot_bytes: u64, start: u64, stop: u64) -> ((u64, u64), [(u64, u64); 2]) {
    let first = u64::from(part.first_slot) * slot_bytes;
    let end = first + u64::from(part.slots) * slot_bytes;
    let (low, high) = (first.max(start), end.min(stop));
    ((low, high - low), [(first, low - first), (high, end - high)])
}

/// Brings the memory: the driver's part, without any lock.
fn act(device: &Device, claim: &mut Claim) -> Result<(), Shortage> {
    let turn = Turn::Requester;
    let slot_bytes = device.plan.granularity_bytes;
    for part in &mut claim.parts {
        let chunk = match part.supplied.take() {
            Some(Supplied::Stock(chunk)) => Arc::new(chunk),
            Some(Supplied::Alias(chunk)) => chunk,
            Some(Supplied::Create(bytes)) => match device.create_chunk(bytes, turn) {
                Ok(chunk) => Arc::new(chunk),
                Err(shortage) => return Err(shortage),
            },
            None => continue,
        };
        let kept = chunk.clone();
        let mapped =
            turn.with(|| Region::map_in(&part.segment, slot_bytes, part.first_slot, chunk));
        match mapped {
            Ok(mapping) => {
                drop(kept);
                let mapping = part.mapping.insert(mapping);
                turn.with(|| mapping.set_access(&device.plan.grants)).map_err(Shortage::Driver)?;
            }
            Err(error) => {
                device.settle(kept, turn);
                return Err(Shortage::Driver(error));
            }
        }
    }
    Ok(())
}

/// Makes the brought memory part of the heap and serves the request from it.
fn publish(lane: &Lane, claim: Claim, request: &Request) -> Outcome {
    let (start, stop) = (claim.window_offset, claim.window_offset + claim.window_bytes);
    let mut guard = lane.cell.lock();
    // A busy lane does not retire.
    let Some(state) = guard.as_mut() else { return Outcome::Short(None) };
    let slot_bytes = state.region.slot_bytes();
    state.busy -= 1;
    for mut part in claim.parts {
        let (_, outside) = split(&part, slot_bytes, start, stop);
        if let Some(mapping) = part.mapping.take() {
            state.region.publish(part.first_slot, mapping);
        }
        for (offset, bytes) in outside.into_iter().filter(|(_, bytes)| *bytes > 0) {
            state.heap.insert_free(offset, bytes);
        }
    }
    if let Err(error) = state.heap.free(start) {
        debug_assert!(false, "the window is a block: {error:?}");
    }
    match state.heap.alloc(request.bytes(), request.align_bytes()) {
        Ok(block) => Outcome::Done(state.hand_out(lane.cell, block, request.bytes())),
        // The window was made for this request; were it ever too small, the next round grows
        // again instead of losing what was brought.
        Err(_) => Outcome::Short(None),
    }
}

/// Undoes a claim: nobody has seen its addresses, so no gate is needed.
fn hand_back(lane: &Lane, claim: Claim) {
    let device = &*lane.device;
    let turn = Turn::Requester;
    let mut stuck = Vec::new();
    let mut places = Vec::new();
    for mut part in claim.parts {
        places.push((part.first_slot, part.slots));
        match part.supplied.take() {
            Some(Supplied::Stock(chunk)) => device.settle(Arc::new(chunk), turn),
            Some(Supplied::Alias(chunk)) => device.settle(chunk, turn),
            Some(Supplied::Create(_)) | None => {}
        }
        let Some(mapping) = part.mapping.take() else { continue };
        match turn.with(|| mapping.unmap()) {
            Ok(chunk) => device.settle(chunk, turn),
            Err((mapping, _)) => {
                let (first_slot, slots) = (part.first_slot, part.slots);
                stuck.push(Retired { mapping, first_slot, slots, gate: Gate::Passed });
            }
        }
    }
    let mut guard = lane.cell.lock();
    let Some(state) = guard.as_mut() else { return };
    let slot_bytes = state.region.slot_bytes();
    state.busy -= 1;
    if let Err(error) = state.heap.free(claim.window_offset) {
        debug_assert!(false, "the window is a block: {error:?}");
    }
    let (start, stop) = (claim.window_offset, claim.window_offset + claim.window_bytes);
    for (first_slot, slots) in places {
        let first = u64::from(first_slot) * slot_bytes;
        let end = first + u64::from(slots) * slot_bytes;
        let (low, high) = (first.max(start), end.min(stop));
        if let Err(error) = state.heap.remove_free(low, high - low) {
            debug_assert!(false, "what was claimed is free again: {error:?}");
        }
        if stuck.iter().any(|entry| entry.first_slot == first_slot) {
            state.region.hold(first_slot, slots);
        } else {
            state.region.vacate(first_slot, slots);
        }
    }
    state.limbo.retired.extend(stuck);
}

/// Reserves more addresses: twice what the lane has, down to what the request needs.
fn reserve(lane: &Lane, min_bytes: u64) -> Result<(), Error> {
    let plan = &lane.device.plan;
    let (hint, reserved) = {
        let mut guard = lane.cell.lock();
        let state = lane.state(&mut guard)?;
        (state.region.next_address(), state.region.reserved_bytes())
    };
    let wish = reserved.max(plan.reserve_bytes).max(min_bytes.next_multiple_of(plan.align_max_bytes));
    let range =
        Region::reserve(&lane.device.driver, min_bytes, wish, plan.align_max_bytes, hint).map_err(
            |cause| match cause.is_out_of_addresses() {
                true => Error::OutOfAddresses { bytes: min_bytes, cause },
                false => Error::Driver(cause),
            },
        )?;
    let mut guard = lane.cell.lock();
    let state = lane.state(&mut guard)?;
    let align_slots = (plan.align_max_bytes / plan.granularity_bytes) as u32;
    state.region.add_segment(range, align_slots);
    Ok(())
}

fn out_of_memory(lane: &Lane, request: &Request, cause: Option<DriverError>) -> Error {
    let device = &*lane.device;
    // Advice for the message only: a device that cannot say is reported as unknown.
    let info = device.driver.mem_info(device.plan.device).ok();
    Error::OutOfMemory(Box::new(OutOfMemory {
        device: device.plan.device,
        asked_bytes: request.bytes(),
        stats: device.stats(),
        largest_bytes: lane.largest_free_bytes(),
        device_free_bytes: info.map(|info| info.free_bytes),
        device_total_bytes: info.map(|info| info.total_bytes),
        cause,
    }))
}
