//! Sleep: a buffer's memory goes back to the driver, its addresses stay; and the waking.
//!
//! With its contents on a node of the host, a sleeping buffer is one that has moved there. With its
//! contents dropped it has no memory, and knows what it had.

use std::collections::BTreeMap;
use std::time::Duration;

use vmm_sys::object::RelaxedCapture;

use super::ElasticBuffer;
use super::body::{Backing, Operation, Standing, State, Stuck};
use super::commit::{How, Origin, give_back};
use super::door::Closed;
use super::error::ElasticError;
use super::hooks::{Cause, Phase};
use super::relocate::{Left, Terms};
use crate::error::Error;
use crate::lane::{Wait, Waited};
use crate::place::Place;
use crate::turn::Turn;

/// What becomes of a sleeping buffer's contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Contents {
    /// They are lost: after the waking the memory holds anything.
    Dropped,
    /// They are kept in the memory of a NUMA node of the host, which the pool was told to use
    /// ([`PoolBuilder::host_memory`](crate::PoolBuilder::host_memory)).
    Kept {
        /// The node.
        node: u32,
    },
}

/// A buffer that sleeps.
#[derive(Debug)]
pub(crate) struct Asleep {
    pub(super) contents: Contents,
    /// Where the memory of which slot lay.
    pub(super) places: BTreeMap<u32, Place>,
}

/// What [`Pool::sleep`](crate::Pool::sleep) and [`Pool::wake`](crate::Pool::wake) did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Slept {
    /// Buffers that fell asleep or woke; those that were so already do not count.
    pub buffers: u64,
    /// Memory of devices that they gave back to the driver, or have again, in bytes.
    pub bytes: u64,
}

impl Slept {
    pub(crate) fn add(&mut self, bytes: u64) {
        self.buffers += 1;
        self.bytes += bytes;
    }
}

impl ElasticBuffer {
    /// Gives the memory of devices back to the driver until [`ElasticBuffer::wake`]; the addresses
    /// stay. Work that uses have enqueued is waited for; guards that are alive too, for `patience`.
    /// Uses that begin later are refused. Does nothing to a buffer that sleeps; told to drop what
    /// a sleeping buffer keeps, it does. Returns the bytes given back.
    ///
    /// # Errors
    /// [`ElasticError::InUse`], [`ElasticError::StillUsed`] where a capture is in the way;
    /// [`ElasticError::HostShort`]. The buffer is awake then, as it was.
    pub fn sleep(&self, contents: Contents, patience: Duration) -> Result<u64, Error> {
        Ok(self.body.operate()?.sleep(contents, patience)?.unwrap_or(0))
    }

    /// Brings the memory back to where it lay. Does nothing to a buffer that is awake. Returns the
    /// bytes that devices gave.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] and as [`ElasticBuffer::commit_from`]: it sleeps on, and can be woken
    /// later.
    pub fn wake(&self) -> Result<u64, Error> {
        Ok(self.body.operate()?.wake(Duration::ZERO)?.unwrap_or(0))
    }

    /// What became of the contents, if it sleeps.
    pub fn asleep(&self) -> Option<Contents> {
        self.body.state().asleep.as_ref().map(|asleep| asleep.contents)
    }
}

fn terms(cause: Cause, left: Left, patience: Duration) -> Terms {
    // A sleeping buffer is of no use to those who would be held.
    Terms { cause, turn: Turn::Requester, wait: Wait::Yes, patience, left, shut: true }
}

impl Operation<'_> {
    /// Puts the buffer to sleep. `None` if it slept already.
    pub(crate) fn sleep(
        &self,
        contents: Contents,
        patience: Duration,
    ) -> Result<Option<u64>, Error> {
        let body = self.0;
        let asleep = body.state().asleep.as_ref().map(|asleep| asleep.contents);
        match (asleep, contents) {
            (Some(Contents::Kept { .. }), Contents::Dropped) => {
                return self.drop_contents(patience);
            }
            (Some(_), _) => return Ok(None),
            (None, _) => {}
        }
        self.check_mended()?;
        let places: BTreeMap<u32, Place> =
            body.state().pieces.iter().map(|(slot, it)| (*slot, it.place)).collect();
        let on_devices = places.values().filter(|place| place.device().is_some()).count();
        match contents {
            Contents::Dropped => self.drop_memory(places, patience)?,
            Contents::Kept { node } => {
                let to = Place::HostNuma(node);
                let slots: Vec<u32> = places.keys().copied().collect();
                let terms = terms(Cause::Sleep, Left::Driver, patience);
                let fall_asleep = |state: &mut State| {
                    state.asleep = Some(Asleep { contents, places });
                };
                self.relocate(slots.into_iter().map(|slot| (slot, to)), &terms, fall_asleep)?;
            }
        }
        Ok(Some(self.bytes_of(on_devices)))
    }

    /// A buffer that sleeps with its contents kept loses them after all.
    fn drop_contents(&self, patience: Duration) -> Result<Option<u64>, Error> {
        let places = self.0.state().asleep.as_ref().map(|asleep| asleep.places.clone());
        self.drop_memory(places.unwrap_or_default(), patience)?;
        Ok(None)
    }

    /// Gives all memory back to the driver, once its users are done.
    fn drop_memory(&self, places: BTreeMap<u32, Place>, patience: Duration) -> Result<(), Error> {
        let body = self.0;
        let slots: Vec<u32> = body.state().pieces.keys().copied().collect();
        let mut change = self.change(Cause::Sleep, &slots);
        body.hooks.call(&change);
        let terms = terms(Cause::Sleep, Left::Driver, patience);
        let closed = match self.close_when_done(&terms) {
            Ok(closed) => closed,
            Err(error) => {
                change.phase = Phase::Failed;
                body.hooks.call(&change);
                return Err(error);
            }
        };
        let sites: Vec<_> = body.places.sites().collect();
        let carrying: Vec<_> = sites.iter().map(|site| site.depot.carries.begin()).collect();
        let gone: Vec<Standing> = {
            let mut state = body.state();
            state.generation += 1;
            change.generation = state.generation;
            let contents = Contents::Dropped;
            state.asleep = Some(Asleep { contents, places });
            slots.iter().filter_map(|slot| state.remove(*slot)).collect()
        };
        drop(closed);
        self.unbook_quota(self.bytes_of(gone.len()));
        gone.into_iter().for_each(|standing| self.release(standing));
        drop(carrying);
        change.phase = Phase::After;
        body.hooks.call(&change);
        Ok(())
    }

    /// Lets nobody in, and waits on the host for what the buffer's users have enqueued.
    pub(super) fn close_when_done(&self, terms: &Terms) -> Result<Closed<'_>, Error> {
        let closed = self.close(terms)?;
        let _relaxed = RelaxedCapture::enter(self.0.range.driver())?;
        for gate in &closed.gates {
            if gate.wait()? == Waited::Captured {
                return Err(ElasticError::StillUsed { offset: 0 }.into());
            }
        }
        Ok(closed)
    }

    /// Gives a chunk back to the driver that nobody uses.
    fn release(&self, standing: Standing) {
        let turn = Turn::Requester;
        let Ok(site) = self.0.places.site(standing.place) else { return };
        site.depot.elastic_shrank(self.0.shape.chunk_bytes);
        site.depot.leaving.add(standing.aliases.into_iter(), Vec::new());
        let chunk = match standing.backing {
            Backing::Mapped(mapping) | Backing::Stuck(Stuck::Ungranted(mapping)) => {
                match turn.with(|| mapping.unmap()) {
                    Ok(chunk) => chunk,
                    Err((mapping, error)) => {
                        tracing::warn!(%error, "memory could not be unmapped; tried again later");
                        site.depot.leaving.add(std::iter::once(mapping), Vec::new());
                        return;
                    }
                }
            }
            Backing::Stuck(Stuck::Unmapped(chunk)) => chunk,
            Backing::InHand => return,
        };
        give_back(&site, chunk, &Origin::Made, turn);
    }

    /// Wakes the buffer. `None` if it was awake. After an error it sleeps on as it did.
    pub(crate) fn wake(&self, patience: Duration) -> Result<Option<u64>, Error> {
        let body = self.0;
        let asleep = body.state().asleep.as_ref().map(|it| (it.contents, it.places.clone()));
        let Some((contents, places)) = asleep else { return Ok(None) };
        let on_devices = places.values().filter(|place| place.device().is_some()).count();
        match contents {
            Contents::Kept { .. } => {
                let terms = terms(Cause::Wake, Left::Shelf, patience);
                self.relocate(places.into_iter(), &terms, |state| state.asleep = None)?;
            }
            Contents::Dropped => {
                self.commit_all(&places)?;
                body.state().asleep = None;
            }
        }
        Ok(Some(self.bytes_of(on_devices)))
    }

    /// Brings memory to each of the slots from its place, or none to any.
    fn commit_all(&self, places: &BTreeMap<u32, Place>) -> Result<(), Error> {
        let mut kinds: Vec<Place> = places.values().copied().collect();
        kinds.sort_unstable();
        kinds.dedup();
        let of = |kind: Place| {
            places.iter().filter(move |(_, place)| **place == kind).map(|(slot, _)| *slot)
        };
        for (index, &place) in kinds.iter().enumerate() {
            let how = How { place, turn: Turn::Requester, wait: Wait::Yes };
            if let Err(error) = self.commit_for(of(place), how, Cause::Wake) {
                let brought: Vec<u32> = kinds[..index].iter().flat_map(|kind| of(*kind)).collect();
                self.decommit(brought.into_iter(), Cause::Sleep);
                return Err(error);
            }
        }
        Ok(())
    }
}
