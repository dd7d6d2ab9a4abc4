//! Sleep: a buffer's memory goes back to the driver, its addresses stay; and the waking.
//!
//! With its contents on a node of the host, a sleeping buffer is one that has moved there. With its
//! contents dropped it has no memory, and knows what it had.

use std::collections::BTreeMap;
use std::time::Duration;

use vmm_sys::object::RelaxedCapture;

use super::ElasticBuffer;
use super::commit::{How, Origin, give_back};
use super::door::Closed;
use super::error::ElasticError;
use super::growth::Lenders;
use super::hooks::{Cause, Phase};
use super::operation::Operation;
use super::state::{Backing, Loose, Standing, State, Stuck};
use super::terms::{Effort, Left, Target, Terms};
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
    pub(super) lay: BTreeMap<u32, Lay>,
}

/// Where a chunk lay before the sleep.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lay {
    place: Place,
    /// On loan: it wakes at home if that has room now, else at the lender again.
    is_loan: bool,
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
    /// [`ElasticError::HostShort`], [`ElasticError::UnknownPlace`]. The buffer is awake then, as it was.
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
    Terms {
        cause,
        turn: Turn::Requester,
        wait: Wait::Yes,
        patience,
        left,
        effort: Effort::Ladder,
        shut: true,
    }
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
        if let Contents::Kept { node } = contents {
            // Also of a buffer that has nothing to keep.
            body.places.site(Place::HostNuma(node))?;
        }
        self.check_mended()?;
        let lie = |it: &Standing| Lay { place: it.place, is_loan: it.is_borrowed() };
        let lay: BTreeMap<u32, Lay> =
            body.state().pieces.iter().map(|(slot, it)| (*slot, lie(it))).collect();
        let on_devices = lay.iter().filter(|(_, it)| it.place.device().is_some());
        let given = body.chunks_of(on_devices.map(|(slot, _)| *slot));
        match contents {
            Contents::Dropped => self.drop_memory(lay, patience)?,
            Contents::Kept { node } => {
                let to = Place::HostNuma(node);
                let slots: Vec<u32> = lay.keys().copied().collect();
                let terms = terms(Cause::Sleep, Left::Driver, patience);
                let fall_asleep = |state: &mut State| {
                    state.asleep = Some(Asleep { contents, lay });
                };
                let targets = slots.into_iter().map(|slot| Target::chosen(slot, to));
                self.relocate(targets, &terms, fall_asleep)?;
            }
        }
        Ok(Some(self.bytes_of(given.count())))
    }

    /// A buffer that sleeps with its contents kept loses them after all.
    fn drop_contents(&self, patience: Duration) -> Result<Option<u64>, Error> {
        let lay = self.0.state().asleep.as_ref().map(|asleep| asleep.lay.clone());
        self.drop_memory(lay.unwrap_or_default(), patience)?;
        Ok(None)
    }

    /// Gives all memory back to the driver, once its users are done.
    fn drop_memory(&self, lay: BTreeMap<u32, Lay>, patience: Duration) -> Result<(), Error> {
        let body = self.0;
        let slots: Vec<u32> = body.state().pieces.keys().copied().collect();
        let mut change = self.change(Cause::Sleep, &slots);
        body.hooks.call(&change);
        let closed = match self.close_when_done(patience) {
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
            state.asleep = Some(Asleep { contents, lay });
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
    pub(super) fn close_when_done(&self, patience: Duration) -> Result<Closed<'_>, Error> {
        let closed = self.0.uses.close(patience)?;
        let _relaxed = RelaxedCapture::enter(self.0.range.driver())?;
        for gate in &closed.gates {
            if gate.wait()? == Waited::Captured {
                return Err(ElasticError::StillUsed { offset: 0 }.into());
            }
        }
        Ok(closed)
    }

    /// Gives a chunk back to the driver that nobody uses.
    fn release(&self, mut standing: Standing) {
        let turn = Turn::Requester;
        let Ok(site) = self.0.places.site(standing.place) else { return };
        for other in standing.take_others() {
            drop(site.depot.unmap(other, turn));
        }
        let chunk = match standing.backing {
            Backing::Mapped(mapping)
            | Backing::Stuck(Stuck { loose: Loose::Ungranted(mapping), .. }) => {
                site.depot.unmap(mapping, turn)
            }
            Backing::Stuck(Stuck { loose: Loose::Unmapped(chunk), .. }) => Some(chunk),
            Backing::InHand => None,
        };
        if let Some(chunk) = chunk {
            give_back(&site, chunk, &Origin::Made, turn);
        }
    }

    /// Wakes the buffer. `None` if it was awake. After an error it sleeps on as it did.
    pub(crate) fn wake(&self, patience: Duration) -> Result<Option<u64>, Error> {
        let body = self.0;
        let asleep = body.state().asleep.as_ref().map(|it| (it.contents, it.lay.clone()));
        let Some((contents, lay)) = asleep else { return Ok(None) };
        let on_devices = lay.values().filter(|it| it.place.device().is_some()).count();
        match contents {
            Contents::Kept { .. } => self.move_back(&lay, patience)?,
            Contents::Dropped => {
                self.commit_all(&lay)?;
                body.state().asleep = None;
            }
        }
        Ok(Some(self.bytes_of(on_devices)))
    }

    /// Brings the contents back to where they lay; what was borrowed, home if that has room.
    fn move_back(&self, lay: &BTreeMap<u32, Lay>, patience: Duration) -> Result<(), Error> {
        let terms = terms(Cause::Wake, Left::Shelf, patience);
        let home = Place::Device(self.0.home());
        let to_home = |(slot, lay): (&u32, &Lay)| {
            Target::chosen(*slot, if lay.is_loan { home } else { lay.place })
        };
        let to_lender = |(slot, lay): (&u32, &Lay)| Target {
            is_loan: lay.is_loan,
            ..Target::chosen(*slot, lay.place)
        };
        let awake = |state: &mut State| state.asleep = None;
        let borrowed = lay.values().any(|it| it.is_loan);
        match self.relocate(lay.iter().map(to_home), &terms, awake) {
            Err(error) if borrowed && error.is_out_of_memory() => {
                self.relocate(lay.iter().map(to_lender), &terms, awake).map(drop)
            }
            moved => moved.map(drop),
        }
    }

    /// Brings memory to each of the slots from where it lay, or none to any.
    fn commit_all(&self, lay: &BTreeMap<u32, Lay>) -> Result<(), Error> {
        let home = Place::Device(self.0.home());
        // Each place as it was chosen; then what was borrowed, from home and from who lent it.
        let mut kinds: Vec<(bool, Place)> =
            lay.values().map(|it| (it.is_loan, if it.is_loan { home } else { it.place })).collect();
        kinds.sort_unstable();
        kinds.dedup();
        let mut lenders: Vec<Place> =
            lay.values().filter(|it| it.is_loan).map(|it| it.place).collect();
        lenders.sort_unstable();
        lenders.dedup();
        let (nobody, lenders) = (Lenders::Nobody, Lenders::Named(lenders));
        let mut brought: Vec<u32> = Vec::new();
        for (is_loan, place) in kinds {
            let is_it = |it: &Lay| it.is_loan == is_loan && (is_loan || it.place == place);
            let slots: Vec<u32> =
                lay.iter().filter(|(_, it)| is_it(it)).map(|(slot, _)| *slot).collect();
            let how = How { place, turn: Turn::Requester, wait: Wait::Yes };
            let lenders = if is_loan { &lenders } else { &nobody };
            let committed =
                Operation::commit_for(self, slots.iter().copied(), how, lenders, Cause::Wake);
            if let Err(error) = committed {
                self.decommit(brought.into_iter(), Cause::Sleep);
                return Err(error);
            }
            brought.extend(slots);
        }
        Ok(())
    }
}
