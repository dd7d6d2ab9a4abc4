//! Borrowed memory that comes home by itself, once there is room.
//!
//! The background thread looks, and the thread of moves moves: only what was borrowed, all that a
//! buffer borrowed at once, while no guard of it is alive. So that memory does not go to and fro, the
//! home must have an eighth more than comes, and a buffer rests after it has borrowed.

use std::sync::Arc;
use std::time::Duration;

use super::body::Body;
use super::terms::{Target, Terms};
use crate::mover::Job;
use crate::place::Place;

/// How long a buffer rests after it has borrowed, or was to come home.
const REST_MS: u64 = 1000;
/// How long nobody looks again at a home that has no room.
const LOOK_MS: u64 = 100;
/// The home has this part more of what comes.
const MARGIN: u64 = 8;

/// A buffer that is about to come home.
#[derive(Debug)]
pub(crate) struct Homecoming(Arc<Body>);

/// Has a buffer come home, if it can.
pub(crate) fn look(body: &Arc<Body>) {
    if !body.places.returns_home || !may_come(body) {
        return;
    }
    match homeward(body) {
        Some(_) => {
            body.state().homeward = true;
            body.places.mover.submit(Job::Home(Homecoming(body.clone())));
        }
        None => body.rest(LOOK_MS),
    }
}

/// What costs next to nothing to ask.
fn may_come(body: &Body) -> bool {
    let now_ms = body.now_ms();
    let home = {
        let state = body.state();
        if state.homeward || state.asleep.is_some() || now_ms < state.rests_until_ms {
            return false;
        }
        state.home
    };
    let home = body.places.device(home);
    home.is_some_and(|home| home.depot.lending.borrowed_bytes() > 0)
}

/// The slots that are to come home, if there are some, nobody uses them and the home has room.
fn homeward(body: &Body) -> Option<Vec<u32>> {
    let (home, slots) = {
        let state = body.state();
        (Place::Device(state.home), state.borrowed(None))
    };
    if slots.is_empty() || body.uses.is_in_use() {
        return None;
    }
    let chunk_bytes = body.shape.chunk_bytes;
    let bytes = slots.len() as u64 * chunk_bytes;
    let site = body.places.site(home).ok()?;
    let ready_bytes = site.ready_bytes(&body.props(home), chunk_bytes);
    (ready_bytes >= bytes + bytes / MARGIN).then_some(slots)
}

impl Homecoming {
    /// Moves it, unless it is in use by now.
    pub(crate) fn run(self) {
        let body = &self.0;
        let Some(operation) = body.try_operate() else { return };
        let Some(slots) = homeward(body) else { return };
        let home = Place::Device(body.home());
        let targets = slots.into_iter().map(|slot| Target::chosen(slot, home));
        match operation.relocate(targets, &Terms::unasked(Duration::ZERO), |_| {}) {
            Ok(moved) => vmm_sys::say!(debug, bytes = moved.bytes, "borrowed memory came home"),
            Err(error) => vmm_sys::say!(debug, %error, "borrowed memory does not come home now"),
        }
    }
}

impl Drop for Homecoming {
    fn drop(&mut self) {
        // It came, or could not; or nobody was there to move it.
        self.0.rest(REST_MS);
        self.0.state().homeward = false;
    }
}

impl Body {
    /// Nobody moves it by himself for so long.
    fn rest(&self, ms: u64) {
        let until_ms = self.now_ms().saturating_add(ms);
        let mut state = self.state();
        state.rests_until_ms = state.rests_until_ms.max(until_ms);
    }

    /// Until when a buffer rests that borrows now.
    pub(super) fn rest_after_borrowing_ms(&self) -> u64 {
        self.now_ms().saturating_add(REST_MS)
    }
}
