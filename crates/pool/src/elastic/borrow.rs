//! [`Sources`]: where the chunks of one growth come from: the place that was named, else the home;
//! and what that cannot give, from lenders, one after the other.
//!
//! The home is pressed by all means before anybody lends. A lender is not: it gives what lies ready
//! and what the driver still makes, as far as its budget and its limit go, and loses nothing that it
//! uses itself.

use std::sync::Arc;

use vmm_sys::DriverError;
use vmm_sys::object::Chunk;

use super::commit::{How, Origin, Short};
use super::error::{ElasticError, LenderAnswer, Refusal};
use super::growth::Lenders;
use super::operation::Operation;
use crate::carries::Carrying;
use crate::depot::Shortage;
use crate::error::Error;
use crate::lending::Loan;
use crate::place::Place;
use crate::places::Site;
use crate::turn::Turn;

/// A chunk for a buffer.
pub(super) struct Supplied<'a> {
    pub(super) site: Site<'a>,
    pub(super) chunk: Arc<Chunk>,
    pub(super) origin: Origin,
    pub(super) loan: Option<Loan>,
}

/// Where the chunks of one growth come from.
pub(super) struct Sources<'a> {
    own: Site<'a>,
    how: How,
    lenders: &'a Lenders,
    short: Short,
    /// Why the own place gives no more; then the lenders, and who of them is asked.
    refused: Option<(Error, Vec<Site<'a>>)>,
    at: usize,
    answers: Vec<LenderAnswer>,
    /// Lenders whose memory is in this thread's hands.
    carried: Vec<Place>,
    carrying: Vec<Carrying<'a>>,
    /// What the growth takes, and what it has: from its own place, and from the lender that is asked.
    bytes: u64,
    own_bytes: u64,
    lender_bytes: u64,
}

impl<'a> Sources<'a> {
    /// Refuses what cannot be, before anything is touched.
    pub(super) fn new(
        operation: &Operation<'a>,
        how: How,
        lenders: &'a Lenders,
        bytes: u64,
    ) -> Result<Sources<'a>, Error> {
        let places = &operation.0.places;
        let own = places.site(how.place)?;
        own.check_chunk(operation.0.shape.chunk_bytes)?;
        if let Some(place) = lenders.unknown(places) {
            return Err(ElasticError::UnknownPlace { place }.into());
        }
        operation.reach(how.place)?;
        Ok(Sources {
            own,
            how,
            lenders,
            short: Short::new(bytes),
            refused: None,
            at: 0,
            answers: Vec::new(),
            carried: Vec::new(),
            carrying: Vec::new(),
            bytes,
            own_bytes: 0,
            lender_bytes: 0,
        })
    }

    /// The place that is asked first.
    pub(super) fn own(&self) -> Site<'a> {
        self.own
    }

    /// Books what comes from another place. `None` if nothing may.
    pub(super) fn book(&mut self, site: &Site<'a>, bytes: u64) -> Option<Loan> {
        if !self.lenders.include(site) {
            return None;
        }
        self.carry(site);
        site.depot.lending.book(bytes)
    }

    /// Says that memory of a lender is in this thread's hands, until the growth is over. Not before it is
    /// asked: the lender's own requests may have to wait for what is in somebody's hands.
    fn carry(&mut self, site: &Site<'a>) {
        if !self.carried.contains(&site.place) {
            self.carried.push(site.place);
            self.carrying.push(site.depot.carries.begin());
        }
    }

    /// The next chunk.
    pub(super) fn next(&mut self, operation: &Operation<'a>) -> Result<Supplied<'a>, Error> {
        let chunk_bytes = operation.0.shape.chunk_bytes;
        let lenders = match self.refused.take() {
            Some(refused) => refused,
            None => match operation.supply(&self.own, self.how, &mut self.short) {
                Ok((chunk, origin)) => {
                    self.own_bytes += chunk_bytes;
                    return Ok(Supplied { site: self.own, chunk, origin, loan: None });
                }
                Err(error) if *self.lenders == Lenders::Nobody || !error.is_out_of_memory() => {
                    return Err(error);
                }
                Err(error) => (error, self.lenders.in_order(operation.0)),
            },
        };
        let (own, sites) = lenders;
        while let Some(site) = sites.get(self.at).copied() {
            self.carry(&site);
            match operation.borrow(&site, self.how.turn)? {
                Ok((chunk, origin, loan)) => {
                    self.lender_bytes += chunk_bytes;
                    self.refused = Some((own, sites));
                    return Ok(Supplied { site, chunk, origin, loan: Some(loan) });
                }
                Err(refusal) => {
                    let gives_bytes = std::mem::take(&mut self.lender_bytes);
                    self.answers.push(LenderAnswer { place: site.place, gives_bytes, refusal });
                    self.at += 1;
                }
            }
        }
        let (bytes, home) = (self.bytes - self.own_bytes, Box::new(own));
        let answers = std::mem::take(&mut self.answers);
        Err(ElasticError::NobodyLends { bytes, home, answers }.into())
    }
}

impl Operation<'_> {
    /// A chunk of a lender, booked there.
    #[expect(clippy::type_complexity, reason = "what came, or the lender's no; or an error")]
    pub(super) fn borrow(
        &self,
        site: &Site<'_>,
        turn: Turn,
    ) -> Result<Result<(Arc<Chunk>, Origin, Loan), Refusal>, Error> {
        let bytes = self.0.shape.chunk_bytes;
        let lending = &site.depot.lending;
        let Some(loan) = lending.book(bytes) else {
            let (budget_bytes, booked_bytes) = (lending.budget_bytes(), lending.booked_bytes());
            return Ok(Err(Refusal::Budget { budget_bytes, booked_bytes }));
        };
        match site.check_chunk(bytes).and_then(|()| self.reach(site.place)) {
            Ok(()) => {}
            Err(error) if error.is_out_of_memory() => {
                return Ok(Err(Refusal::Unusable(Box::new(error))));
            }
            Err(
                error @ Error::Elastic(
                    ElasticError::NoPeer { .. } | ElasticError::ChunkTooFine { .. },
                ),
            ) => return Ok(Err(Refusal::Unusable(Box::new(error)))),
            Err(error) => return Err(error),
        }
        match self.take_ready(site, turn) {
            Ok((chunk, origin)) => Ok(Ok((chunk, origin, loan))),
            Err(Shortage::Limit) => {
                let limit_bytes = site.depot.terms.limit_bytes;
                Ok(Err(Refusal::Limit { limit_bytes, held_bytes: site.depot.held_bytes() }))
            }
            Err(Shortage::Driver(cause)) if cause.is_out_of_memory() => {
                Ok(Err(Refusal::Full { cause }))
            }
            Err(Shortage::Driver(error)) => Err(error.into()),
        }
    }

    /// A chunk that a place has at once: of its stock, what can come there now included, else new.
    pub(super) fn take_ready(
        &self,
        site: &Site<'_>,
        turn: Turn,
    ) -> Result<(Arc<Chunk>, Origin), Shortage> {
        let shortage = match self.take(site, turn) {
            Ok(taken) => return Ok(taken),
            Err(shortage) => shortage,
        };
        if !is_shortage(&shortage) || site.depot.leaving.is_empty() {
            return Err(shortage);
        }
        site.sweep_now(turn);
        self.take(site, turn)
    }

    /// The same, and what lies in the stock in other lengths is given back for it: for the memory of
    /// a home, not of a lender.
    pub(super) fn take_any(
        &self,
        site: &Site<'_>,
        turn: Turn,
    ) -> Result<(Arc<Chunk>, Origin), Shortage> {
        match self.take_ready(site, turn) {
            Err(shortage) if is_shortage(&shortage) => {
                site.depot.release_for(self.0.shape.chunk_bytes, 0, turn);
                self.take(site, turn)
            }
            taken => taken,
        }
    }

    /// A chunk of the place's stock, else a new one.
    pub(super) fn take(
        &self,
        site: &Site<'_>,
        turn: Turn,
    ) -> Result<(Arc<Chunk>, Origin), Shortage> {
        let (props, bytes) = (self.0.props(site.place), self.0.shape.chunk_bytes);
        // Let go before the driver is called.
        let ready = site.depot.stock.lock().take_for(&props, bytes, &self.0.shape.user);
        match ready {
            Some(chunk) => Ok((Arc::new(chunk), Origin::Stock)),
            None => Ok((Arc::new(site.depot.create(bytes, &props, turn)?), Origin::Made)),
        }
    }
}

fn is_shortage(shortage: &Shortage) -> bool {
    match shortage {
        Shortage::Limit => true,
        Shortage::Driver(error) => DriverError::is_out_of_memory(error),
    }
}

/// Adds what a place gave to a list by place.
pub(super) fn add(list: &mut Vec<(Place, u64)>, place: Place, bytes: u64) {
    match list.iter_mut().find(|(known, _)| *known == place) {
        Some((_, sum)) => *sum += bytes,
        None => list.push((place, bytes)),
    }
}
