//! Borrowed memory that leaves its lender: to its home as far as that has room, else to the host.
//!
//! Nobody is pressed for it, and nobody who uses the buffer: what is in use longer than the lender's
//! patience stays, and so does what there is no room for.

use std::time::Duration;

use super::commit::How;
use super::operation::Operation;
use super::terms::{Target, Terms};
use crate::elastic::ElasticError;
use crate::error::Error;
use crate::lane::Wait;
use crate::place::Place;
use crate::places::Site;
use crate::turn::Turn;

/// What [`Pool::recall`](crate::Pool::recall) did.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Recall {
    /// Memory that left the lender, in bytes. It lies in the lender's stock now.
    pub moved_bytes: u64,
    /// What of that went to the host, since its home had no room.
    pub to_host_bytes: u64,
    /// What stays with its borrower, and why.
    pub refused: Vec<NotRecalled>,
}

/// Memory that a borrower did not give back.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct NotRecalled {
    /// The buffer's address.
    pub address: u64,
    /// How much, in bytes.
    pub bytes: u64,
    /// [`ElasticError::InUse`](crate::ElasticError::InUse) if the buffer is in use,
    /// [`Error::OutOfMemory`] if neither its home nor the host has room, or what went wrong.
    pub why: Error,
}

/// Where memory may go that leaves its lender.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ways {
    pub(crate) home: bool,
    pub(crate) host: bool,
}

/// What one buffer gave back.
#[derive(Debug, Default)]
pub(crate) struct Returned {
    pub(crate) home_bytes: u64,
    pub(crate) host_bytes: u64,
    /// What it did not give, and why.
    pub(crate) refused: Option<(u64, Error)>,
}

impl Operation<'_> {
    /// Gives back what `lender` lent, `most_bytes` and the rest of a chunk at most.
    pub(crate) fn give_back(
        &self,
        lender: Place,
        most_bytes: u64,
        ways: Ways,
        patience: Duration,
    ) -> Returned {
        let body = self.0;
        let home = Place::Device(body.home());
        let slots = {
            let state = body.state();
            state.last_chunks(state.borrowed(Some(lender)), most_bytes, body.shape.chunk_bytes)
        };
        let chunks = body.chunks_of(slots.iter().copied());
        let mut homeward = match ways.home && !slots.is_empty() {
            true => self.ready_slots(home).min(slots.len()),
            false => 0,
        };
        let mut homeward_refused = None;
        loop {
            let rest = slots.len() - homeward;
            let host = if ways.host { self.host_for(rest, lender) } else { None };
            let (near, far) = slots.split_at(homeward);
            let host_count = if host.is_some() { rest } else { 0 };
            let to_home = near.iter().map(|slot| Target::chosen(*slot, home));
            let to_host =
                host.iter().flat_map(|host| far.iter().map(|slot| Target::loan(*slot, *host)));
            match self.relocate(to_home.chain(to_host), &Terms::unasked(patience), |_| {}) {
                Ok(_) => {
                    // What is shared has left once all of its slots have.
                    let gone_bytes = self.bytes_of(chunks.gone());
                    let left = self.bytes_of(chunks.count()) - gone_bytes;
                    let host_bytes = self.bytes_of(host_count).min(gone_bytes);
                    return Returned {
                        home_bytes: gone_bytes - host_bytes,
                        host_bytes,
                        refused: (left > 0).then(|| (left, self.no_room(home, left))),
                    };
                }
                // The room was taken meanwhile.
                Err(error) if homeward > 0 && error.is_out_of_memory() => {
                    homeward = 0;
                    homeward_refused = Some(error);
                }
                Err(error) => {
                    // Where even the way back from home was refused, that is why, not what it left.
                    let why = match (homeward_refused, error) {
                        (Some(first), Error::Elastic(ElasticError::Stuck { .. })) => first,
                        (_, error) => error,
                    };
                    let refused = Some((self.bytes_of(chunks.count()), why));
                    return Returned { refused, ..Returned::default() };
                }
            }
        }
    }

    /// How many chunks a place has ready, as far as can be said; with what can come to its shelf now.
    pub(super) fn ready_slots(&self, place: Place) -> usize {
        let body = self.0;
        let Ok(site) = body.places.site(place) else { return 0 };
        if !site.depot.leaving.is_empty() {
            site.sweep_now(Turn::Requester);
        }
        let bytes = site.ready_bytes(&body.props(place), body.shape.chunk_bytes);
        usize::try_from(bytes / body.shape.chunk_bytes).unwrap_or(usize::MAX)
    }

    /// A node of the host that lends so many chunks.
    fn host_for(&self, count: usize, except: Place) -> Option<Place> {
        let hosts = self.0.places.sites().filter(|site| site.place.device().is_none());
        let mut others = hosts.filter(|site| site.place != except && count > 0);
        others.find(|site| self.lends(site) >= count).map(|site| site.place)
    }

    /// How many chunks a lender may have for this buffer, as far as can be said.
    pub(super) fn lends(&self, site: &Site<'_>) -> usize {
        let chunk_bytes = self.0.shape.chunk_bytes;
        if site.check_chunk(chunk_bytes).is_err() {
            return 0;
        }
        let room = site.depot.lending.room_bytes() / chunk_bytes;
        usize::try_from(room).unwrap_or(usize::MAX).min(self.ready_slots(site.place))
    }

    fn no_room(&self, home: Place, bytes: u64) -> Error {
        let how = How { place: home, turn: Turn::Requester, wait: Wait::Yes };
        match self.0.places.site(home) {
            Ok(site) => site.shortage(bytes, how, None),
            Err(error) => error,
        }
    }
}
