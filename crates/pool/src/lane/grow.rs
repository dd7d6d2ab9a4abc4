//! The cold path of an allocation: a miss is served by bringing memory to a window of addresses.
//!
//! Claim under the lock, act at the driver without it, publish or hand back under it. The window is
//! taken as one block when it is claimed, so no other thread can use its free parts meanwhile.
//! All or nothing: a failure at any step leaves the lane as before.

use vmm_heap::{Block, Miss};
use vmm_sys::DriverError;

use super::claim::{Claim, act, claim, grant_again, hand_back, split};
use super::gate::is_captured;
use super::guard::Guards;
use super::report::out_of_memory;
use super::survey::{Found, Surveyed, Terms, survey};
use super::thrift::{Lack, Thrift};
use super::window::reserve;
use super::wreck::AtDriver;
use super::{Lane, LaneState, Wait, sweep};
use crate::buffer::Buffer;
use crate::capture;
use crate::carries::Carrying;
use crate::depot::Shortage;
use crate::device::Device;
use crate::error::Error;
use crate::growth::Source;
use crate::idle;
use crate::ladder::{Climb, Rung};
use crate::request::Request;
use crate::turn::Turn;

/// Rounds of reserve, race and retry before a request gives up: far more than can be needed.
const ROUNDS_MAX: u32 = 256;

enum Planned<'a> {
    Claim(Claim, Carrying<'a>),
    /// Addresses are missing, for this block at least.
    Reserve(Miss),
    /// Memory is missing.
    Short,
    /// A chunk would move: only if the lane's stream is not being captured.
    AskCapture,
    /// Memory would be made beyond the soft limit.
    Beyond(Lack),
}

/// Whether the lane's own free chunks may move to other addresses, for one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moves {
    /// Not known: the driver is asked when a chunk is about to move.
    Unasked,
    Yes,
    /// The lane's stream is being captured.
    No,
}

enum Outcome {
    Done(Buffer),
    Reserve(Miss),
    AskCapture,
    Beyond(Lack),
    Short(Short),
}

/// Memory is missing.
struct Short {
    /// The driver's refusal, if there was one.
    refusal: Option<DriverError>,
    /// No other thread had memory in its hands meanwhile that might have been enough.
    is_sure: bool,
    /// What may be lacking at most.
    bytes: u64,
}

/// What one attempt goes by.
#[derive(Clone, Copy, Debug)]
struct Means {
    rung: Rung,
    moves: Moves,
    /// What was done so far to stay within the soft limit.
    thrift: Thrift,
    /// What is alive in the device's other lanes, once it was asked.
    elsewhere_bytes: u64,
    /// What was on the shelf when the request came.
    shelf_bytes: u64,
}

/// Serves a request that found no mapped hole.
#[cold]
#[inline(never)]
pub(super) fn alloc_cold(lane: &Lane, request: &Request) -> Result<Buffer, Error> {
    let _within = vmm_sys::within!(
        "vmm_pool.grow",
        device = lane.device.plan.device.0,
        bytes = request.bytes()
    );
    let device = &*lane.device;
    if device.driver.is_gone() {
        return Err(Error::DriverGone);
    }
    while let Some(private) = capture::diversion(lane)? {
        match private.alloc_with(request) {
            // The scope has ended meanwhile, and its memory is gone: the lane is itself again.
            Err(Error::LaneClosed) => {}
            answer => return answer,
        }
    }
    idle::look_in_passing(device);
    let shelf_bytes = device.depot.stock.lock().bytes();
    let served = climb_to_memory(lane, request, shelf_bytes);
    if !matches!(served, Ok(Ok(_))) {
        // What was made for this request alone is of no use to anybody.
        device.release_stock(shelf_bytes, Turn::Requester);
    }
    served?.map_err(|cause| out_of_memory(lane, request, cause))
}

/// Tries, and does what the next rung of the ladder says after each shortage. The inner error is
/// that memory is short, with the driver's refusal if there was one.
fn climb_to_memory(
    lane: &Lane,
    request: &Request,
    shelf_bytes: u64,
) -> Result<Result<Buffer, Option<DriverError>>, Error> {
    let device = &*lane.device;
    let mut climb = Climb::new();
    let mut cause = None;
    let mut means = Means {
        rung: climb.rung(),
        moves: Moves::Unasked,
        thrift: Thrift::Untried,
        elsewhere_bytes: 0,
        shelf_bytes,
    };
    let mut is_swept = false;
    for _ in 0..ROUNDS_MAX {
        if !is_swept {
            sweep(lane.cell, Wait::No, Turn::Requester);
            device.sweep_leaving(Wait::No, Turn::Requester);
            is_swept = true;
        }
        means.rung = climb.rung();
        match attempt(lane, request, means)? {
            Outcome::Done(buffer) => return Ok(Ok(buffer)),
            Outcome::Reserve(miss) => reserve(lane, &miss)?,
            Outcome::AskCapture => {
                means.moves = if is_captured(&lane.stream) { Moves::No } else { Moves::Yes };
            }
            Outcome::Beyond(lack) => {
                let elsewhere_bytes = &mut means.elsewhere_bytes;
                means.thrift = means.thrift.next(device, lane.reference(), lack, elsewhere_bytes);
            }
            Outcome::Short(Short { refusal, is_sure, bytes }) => {
                // Of the driver's memory nobody knows how much is left.
                let room_bytes = if refusal.is_none() { device.depot.room_bytes() } else { 0 };
                let lack_bytes = bytes.saturating_sub(room_bytes);
                cause = refusal.or(cause);
                if !climb.next(device, lane.reference(), request, is_sure, lack_bytes) {
                    break;
                }
                is_swept = false;
            }
        }
    }
    Ok(Err(cause))
}

fn attempt(lane: &Lane, request: &Request, means: Means) -> Result<Outcome, Error> {
    let device = &*lane.device;
    let carries = device.depot.carries.settled();
    let (mut claim, carrying, bytes) = {
        let mut guard = lane.cell.lock();
        let state = lane.state(&mut guard)?;
        let miss = match find(state, request, means.rung) {
            Ok(block) => {
                return Ok(Outcome::Done(state.hand_out(lane.cell, block, request.bytes())));
            }
            Err(miss) => miss,
        };
        let bytes = miss.bytes.next_multiple_of(state.region.slot_bytes());
        match plan(state, device, &miss, request, means) {
            Planned::Claim(claim, carrying) => (claim, carrying, bytes),
            Planned::Reserve(miss) => return Ok(Outcome::Reserve(miss)),
            Planned::Short => {
                let is_sure = carries.is_some() && device.depot.carries.settled() == carries;
                return Ok(Outcome::Short(Short { refusal: None, is_sure, bytes }));
            }
            Planned::AskCapture => return Ok(Outcome::AskCapture),
            Planned::Beyond(lack) => return Ok(Outcome::Beyond(lack)),
        }
    };
    let _at_driver = AtDriver::for_lane(lane.cell);
    let mut brought = act(device, &mut claim);
    while brought.is_ok() {
        match publish(lane, claim, request, means.elsewhere_bytes) {
            Ok(outcome) => return Ok(outcome),
            Err(stale) => claim = stale,
        }
        brought = grant_again(device, &mut claim);
    }
    hand_back(lane, claim);
    drop(carrying);
    // One of them was this thread's own.
    let is_sure = carries.is_some_and(|before| device.depot.carries.settled() == Some(before + 1));
    let short = |refusal| Ok(Outcome::Short(Short { refusal, is_sure, bytes }));
    match brought {
        Ok(()) | Err(Shortage::Limit) => short(None),
        Err(Shortage::Driver(error)) if error.is_out_of_memory() => short(Some(error)),
        Err(Shortage::Driver(error)) => Err(error.into()),
    }
}

/// Looks again, after the magazines if need be.
///
/// With the soft limit off the magazines stay as they are until memory is short: then the layout
/// does not depend on when memory was missing, and work that repeats finds every block where it
/// found it before. With the limit on, they are emptied before anything grows.
fn find(state: &mut LaneState, request: &Request, rung: Rung) -> Result<Block, Miss> {
    if state.guards.is_some() {
        return Err(Guards::miss(&state.region, request));
    }
    let (bytes, align) = (request.bytes(), request.align_bytes());
    let drains = state.device.plan.soft_limit.is_some() || rung != Rung::Create;
    match state.heap.alloc(bytes, align) {
        Err(_) if drains && state.heap.drain() => state.heap.alloc(bytes, align),
        answer => answer,
    }
}

fn plan<'a>(
    state: &mut LaneState,
    device: &'a Device,
    miss: &Miss,
    request: &Request,
    means: Means,
) -> Planned<'a> {
    let Means { rung, moves, .. } = means;
    let slot_bytes = state.region.slot_bytes();
    let terms = Terms {
        create_slots: if rung == Rung::OwnOnly {
            0
        } else {
            device.depot.room_bytes() / slot_bytes
        },
        with_stock: true,
        exact: rung != Rung::Create,
        may_move: moves != Moves::No,
        elsewhere_bytes: means.elsewhere_bytes,
        shelf_bytes: means.shelf_bytes,
    };
    let (found, mut stock) = match survey(state, device, miss, request, terms) {
        Surveyed::Found(found, stock) => (found, stock),
        Surveyed::NoAddresses => return Planned::Reserve(*miss),
        Surveyed::Short => return Planned::Short,
    };
    let Found { window, pieces, keys, beyond } = found;
    if beyond.bytes > 0 && rung == Rung::Create && means.thrift != Thrift::Done {
        return Planned::Beyond(beyond);
    }
    let moving = pieces.iter().any(|piece| matches!(piece.source, Source::Free(_)));
    if moving && moves == Moves::Unasked {
        return Planned::AskCapture;
    }
    let carrying = device.depot.carries.begin();
    let props = &device.plan.props;
    let mut take = |slots: u32| stock.take(props, u64::from(slots) * slot_bytes);
    Planned::Claim(claim(state, miss, &window, &pieces, &keys, &mut take), carrying)
}

/// Makes the brought memory part of the heap and serves the request from it; gives the claim back
/// if the device's policy has changed since the memory was granted.
fn publish(
    lane: &Lane,
    claim: Claim,
    request: &Request,
    elsewhere_bytes: u64,
) -> Result<Outcome, Claim> {
    let (start, stop) = (claim.window_offset, claim.window_offset + claim.window_bytes);
    let mut guard = lane.cell.lock();
    // A busy lane does not retire.
    let bytes = claim.window_bytes;
    let lost = Outcome::Short(Short { refusal: None, is_sure: false, bytes });
    let Some(state) = guard.as_mut() else { return Ok(lost) };
    // Whoever changes it looks at the lane's mappings afterwards.
    if claim.policy != lane.device.policy.version() {
        return Err(claim);
    }
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
    state.marks.clear(start);
    if state.guards.is_some() {
        let block = Block { offset: start, bytes: claim.window_bytes };
        let buffer = state.hand_out_guarded(lane.cell, block, request);
        state.note_live(elsewhere_bytes);
        return Ok(Outcome::Done(buffer));
    }
    if let Err(error) = state.heap.free(start) {
        debug_assert!(false, "the window is a block: {error:?}");
    }
    Ok(match state.heap.alloc(request.bytes(), request.align_bytes()) {
        Ok(block) => {
            let buffer = state.hand_out(lane.cell, block, request.bytes());
            state.note_live(elsewhere_bytes);
            Outcome::Done(buffer)
        }
        // The window was made for this request; were it ever too small, the next round grows
        // again instead of losing what was brought.
        Err(_) => lost,
    })
}
