//! Room on a device that is short, by way of its neighbours and of the host: elastic buffers give back
//! what they borrowed there, and those whose owners allow it are lent elsewhere.
//!
//! Nobody is waited for but the work that was enqueued before: buffers that are in use, or that
//! another thread is changing, are passed over.

use std::time::Duration;

use super::body::Body;
use super::growth::Lenders;
use super::operation::Operation;
use super::recall::Ways;
use super::terms::{Target, Terms};
use crate::obstacle;
use crate::place::Place;
use crate::places::{Places, Site};
use crate::request::Request;

/// By way of whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Neighbour,
    Host,
}

/// Whether there is anybody who could make room at `here` for `request`.
pub(crate) fn can_help(places: &Places, here: Place, way: Way, request: &Request) -> bool {
    // Copies are waited for.
    if !request.can_borrow() || !request.may_wait() {
        return false;
    }
    let Ok(site) = places.site(here) else { return false };
    let is_lent = site.depot.lending.booked_bytes() > 0;
    let lends = |site: Site<'_>| site.place != here && site.depot.lending.budget_bytes() > 0;
    let is_way = |site: &Site<'_>| site.place.device().is_none() == (way == Way::Host);
    let is_movable = || places.bodies().iter().any(|body| body.shape.movable);
    let mut sites = places.sites().filter(is_way);
    match way {
        Way::Neighbour => is_lent || sites.any(lends) && is_movable(),
        Way::Host => sites.any(lends) && (is_lent || is_movable()),
    }
}

/// Makes room at `here` for `request`, as much as it asks for if that can be. Says whether it did
/// anything.
pub(crate) fn help(places: &Places, here: Place, way: Way, request: &Request) -> bool {
    let mut missing_bytes = request.bytes();
    let bodies = places.bodies();
    let give = |body: &Body, missing_bytes| {
        let operation = at_rest(body)?;
        let ways = Ways { home: way == Way::Neighbour, host: way == Way::Host };
        let returned = operation.give_back(here, missing_bytes, ways, Duration::ZERO);
        if let Some((bytes, error)) = returned.refused {
            vmm_sys::say!(debug, bytes, %error, "borrowed memory is not given back");
            obstacle::note_of(&error);
        }
        Some(returned.home_bytes + returned.host_bytes)
    };
    let lend = |body: &Body, missing_bytes| at_rest(body)?.lend_away(here, missing_bytes, way);
    for body in &bodies {
        if missing_bytes > 0 {
            missing_bytes = missing_bytes.saturating_sub(give(body, missing_bytes).unwrap_or(0));
        }
    }
    for body in bodies.iter().filter(|body| body.shape.movable) {
        if missing_bytes > 0 {
            missing_bytes = missing_bytes.saturating_sub(lend(body, missing_bytes).unwrap_or(0));
        }
    }
    missing_bytes < request.bytes()
}

/// The right to change a buffer that nobody uses or changes.
fn at_rest(body: &Body) -> Option<Operation<'_>> {
    if body.uses.is_in_use() {
        return None;
    }
    body.try_operate().filter(|_| body.check_awake().is_ok())
}

impl Operation<'_> {
    /// Moves memory that lies `here` to who lends. Returns the bytes moved.
    fn lend_away(&self, here: Place, most_bytes: u64, way: Way) -> Option<u64> {
        let body = self.0;
        let mut slots = {
            let state = body.state();
            let here = state.pieces.iter().filter(|(_, it)| it.place == here);
            let lying = here.map(|(slot, _)| *slot).collect();
            state.last_chunks(lying, most_bytes, body.shape.chunk_bytes)
        };
        let mut moved = 0;
        for site in targets(body, here, way) {
            let is_loan = site.place != Place::Device(body.home());
            let ready = if is_loan { self.lends(&site) } else { self.ready_slots(site.place) };
            let count = ready.min(slots.len());
            if count == 0 || self.reach(site.place).inspect_err(obstacle::note_of).is_err() {
                continue;
            }
            let going = slots[slots.len() - count..].iter();
            let chunks = body.chunks_of(going.clone().copied());
            let to = |slot: &u32| Target { is_loan, ..Target::chosen(*slot, site.place) };
            match self.relocate(going.map(to), &Terms::unasked(Duration::ZERO), |_| {}) {
                Ok(_) => {
                    slots.truncate(slots.len() - count);
                    moved += self.bytes_of(chunks.gone());
                }
                Err(error) => {
                    vmm_sys::say!(debug, %error, to = %site.place, "a buffer is not moved");
                    obstacle::note_of(&error);
                }
            }
        }
        Some(moved)
    }
}

/// Where a buffer may go from `here`: home if it is not there, then to who lends.
fn targets(body: &Body, here: Place, way: Way) -> Vec<Site<'_>> {
    let is_way = |site: &Site<'_>| site.place.device().is_none() == (way == Way::Host);
    let home = body.places.site(Place::Device(body.home())).ok();
    let lenders = match way {
        Way::Neighbour => Lenders::Any.in_order(body),
        Way::Host => body.places.sites().collect(),
    };
    let all = home.into_iter().chain(lenders);
    all.filter(|site| site.place != here && is_way(site)).collect()
}
