//! [`State`]: what others see of an elastic buffer, behind a lock that is only held to look or to
//! publish.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::ops::Range;
use std::sync::{Arc, Weak};

use vmm_sys::object::{Chunk, Mapping};
use vmm_sys::{Access, AccessGrant, DeviceId, DriverError};

use super::body::Body;
use super::sleep::Asleep;
use crate::broken::{Broken, keep_for_good};
use crate::depot::Footing;
use crate::error::Error;
use crate::landing::Spare;
use crate::lending::{Lent, Loan};
use crate::place::Place;

/// What others see of a buffer. Its lock is never held at the driver.
#[derive(Debug)]
pub(crate) struct State {
    /// By slot: the slot's number times the chunk length is the offset.
    pub(crate) pieces: BTreeMap<u32, Standing>,
    /// Slots whose chunks are [`Stuck`]; those that owe grants, and those with aliases: what every
    /// operation begins with goes by these, and not by all pieces.
    pub(super) stuck: BTreeSet<u32>,
    pub(super) indebted: BTreeSet<u32>,
    pub(super) aliased: BTreeSet<u32>,
    /// Bytes of chunks that stand at addresses of a move's own, by the place they are made at.
    pub(crate) incoming: BTreeMap<Place, Incoming>,
    /// Until then it does not come home by itself, by the pool's clock.
    pub(crate) rests_until_ms: u64,
    /// It is about to come home: somebody was told.
    pub(crate) homeward: bool,
    /// What woke would bring back, while the buffer sleeps.
    pub(crate) asleep: Option<Asleep>,
    /// Where memory comes from unless told otherwise.
    pub(crate) home: DeviceId,
    /// Who may do what, the home included. Others may do nothing.
    pub(crate) access: BTreeMap<DeviceId, Access>,
    /// Devices of whose access the buffer has said something itself.
    pub(crate) own_words: BTreeSet<DeviceId>,
    /// Counts the changes of the memory behind the addresses.
    pub(crate) generation: u64,
    pub(crate) counts: Counts,
    /// A thread is changing the buffer's memory.
    pub(super) operating: bool,
    pub(super) life: Life,
    /// One panicked while it did.
    pub(super) broken: Option<Broken>,
}

/// How far a buffer's end has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Life {
    /// Somebody holds it.
    Open,
    /// Nobody does; the thread that is changing it takes its memory away.
    Ending,
    /// No memory, and none will come.
    Ended,
}

/// A chunk that stands in a slot.
#[derive(Debug)]
pub(crate) struct Standing {
    pub(crate) backing: Backing,
    pub(crate) place: Place,
    /// The buffer's generation when it came.
    pub(crate) generation: u64,
    /// Grants that the driver refused to take back: tried again before the next operation.
    pub(crate) owed: Vec<AccessGrant>,
    /// Its chunk's entry in the account of its place: one for all slots of a shared chunk.
    pub(crate) footing: Arc<Footing>,
    /// If it lies elsewhere than the home: whose it is, on both sides' accounts; one as well.
    pub(crate) lent: Option<Arc<Lent>>,
    /// Where else the chunk is mapped, if it lies on the host and a move brought it.
    pub(super) spare: Option<Spare>,
    /// Where it is mapped although it should not be: see [`alias`](super::alias).
    pub(super) aliases: Vec<Mapping>,
}

/// Chunks that stand at addresses of a move's own, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Incoming {
    pub(crate) bytes: u64,
    /// Of these, booked under the lender's budget.
    pub(crate) booked_bytes: u64,
}

/// What is at a slot's addresses.
#[derive(Debug)]
pub(crate) enum Backing {
    Mapped(Mapping),
    /// The thread that holds the operation has the mapping in its hands.
    InHand,
    /// The driver refused to bring the chunk back after a move that failed.
    Stuck(Stuck),
}

/// A chunk with a buffer's contents that nobody can use at its addresses: tried again before each
/// operation and each use.
#[derive(Debug)]
pub(crate) struct Stuck {
    pub(super) loose: Loose,
    /// What the driver last said.
    pub(super) refused: DriverError,
}

/// How far a chunk is from being used at its addresses.
#[derive(Debug)]
pub(crate) enum Loose {
    Unmapped(Arc<Chunk>),
    Ungranted(Mapping),
}

impl Loose {
    fn chunk(&self) -> &Arc<Chunk> {
        match self {
            Loose::Unmapped(chunk) => chunk,
            Loose::Ungranted(mapping) => mapping.chunk(),
        }
    }
}

impl Standing {
    /// Whether a lender's budget is booked for it.
    pub(crate) fn is_borrowed(&self) -> bool {
        self.lent.as_ref().is_some_and(|lent| lent.is_loan())
    }

    /// Whether its chunk stands in other slots too.
    pub(crate) fn is_shared(&self) -> bool {
        Arc::strong_count(&self.footing) > 1
    }

    /// Whether this is its chunk.
    pub(super) fn holds(&self, chunk: &Arc<Chunk>) -> bool {
        let own = match &self.backing {
            Backing::Mapped(mapping) => mapping.chunk(),
            Backing::Stuck(stuck) => stuck.loose.chunk(),
            Backing::InHand => return false,
        };
        Arc::ptr_eq(own, chunk)
    }

    /// The other mappings of its chunk.
    pub(super) fn take_others(&mut self) -> Vec<Mapping> {
        let spare = self.spare.take().map(|spare| spare.mapping);
        self.aliases.drain(..).chain(spare).collect()
    }

    pub(crate) fn mapping(&self) -> Option<&Mapping> {
        match &self.backing {
            Backing::Mapped(mapping) => Some(mapping),
            Backing::InHand | Backing::Stuck(_) => None,
        }
    }

    /// Takes the mapping into the hands of the thread that holds the operation.
    pub(super) fn take(&mut self) -> Option<Mapping> {
        match std::mem::replace(&mut self.backing, Backing::InHand) {
            Backing::Mapped(mapping) => Some(mapping),
            other => {
                self.backing = other;
                None
            }
        }
    }
}

/// Where a buffer's memory came from, in bytes since it was built.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) created_bytes: u64,
    pub(crate) stock_bytes: u64,
    pub(crate) returned_bytes: u64,
    pub(crate) moved_bytes: u64,
    pub(crate) scrubbed_bytes: u64,
}

impl State {
    /// Refuses a buffer in the middle of whose change a thread panicked.
    pub(super) fn check_whole(&self) -> Result<(), Error> {
        match &self.broken {
            None => Ok(()),
            Some(broken) => Err(Error::Broken(Box::new(broken.clone()))),
        }
    }

    /// Lets everything stay where it is, whoever may still use it.
    pub(super) fn keep_for_good(&mut self) {
        keep_for_good((std::mem::take(&mut self.pieces), self.asleep.take()));
    }

    pub(super) fn new(home: DeviceId, access: BTreeMap<DeviceId, Access>) -> State {
        State {
            pieces: BTreeMap::new(),
            stuck: BTreeSet::new(),
            indebted: BTreeSet::new(),
            aliased: BTreeSet::new(),
            incoming: BTreeMap::new(),
            rests_until_ms: 0,
            homeward: false,
            asleep: None,
            home,
            access,
            own_words: BTreeSet::new(),
            generation: 0,
            counts: Counts::default(),
            operating: false,
            life: Life::Open,
            broken: None,
        }
    }

    /// Says what is at a slot's addresses, if the slot has memory.
    pub(super) fn set_backing(&mut self, slot: u32, backing: Backing) {
        self.change(slot, |standing| standing.backing = backing);
    }

    /// Puts a chunk into a slot. Returns the one that stood there.
    pub(super) fn insert(&mut self, slot: u32, standing: Standing) -> Option<Standing> {
        let before = self.remove(slot);
        self.pieces.insert(slot, standing);
        self.note(slot);
        before
    }

    /// Takes a slot's chunk out.
    pub(super) fn remove(&mut self, slot: u32) -> Option<Standing> {
        let standing = self.pieces.remove(&slot);
        self.note(slot);
        standing
    }

    /// Changes what a slot's chunk owes, and where else it is mapped.
    pub(super) fn change(&mut self, slot: u32, change: impl FnOnce(&mut Standing)) {
        if let Some(standing) = self.pieces.get_mut(&slot) {
            change(standing);
        }
        self.note(slot);
    }

    /// Lists the slot where it belongs.
    fn note(&mut self, slot: u32) {
        let standing = self.pieces.get(&slot);
        let is_stuck = standing.is_some_and(|it| matches!(it.backing, Backing::Stuck(_)));
        let is_indebted = standing.is_some_and(|it| !it.owed.is_empty());
        let is_aliased = standing.is_some_and(|it| !it.aliases.is_empty());
        let lists = [
            (&mut self.stuck, is_stuck),
            (&mut self.indebted, is_indebted),
            (&mut self.aliased, is_aliased),
        ];
        for (list, is_in) in lists {
            match is_in {
                true => list.insert(slot),
                false => list.remove(&slot),
            };
        }
    }

    /// The first slot whose chunk is stuck, for who holds the operation: nobody else has one in hand.
    pub(super) fn first_stuck(&self) -> Option<(u32, &DriverError)> {
        self.stuck.iter().find_map(|slot| {
            let Backing::Stuck(stuck) = &self.pieces.get(slot)?.backing else { return None };
            Some((*slot, &stuck.refused))
        })
    }

    /// Those of these slots that have memory.
    pub(super) fn slots_in(&self, slots: Range<u32>) -> Vec<u32> {
        self.pieces.range(slots).map(|(slot, _)| *slot).collect()
    }

    /// A chunk is to come to `place`.
    pub(super) fn expect(&mut self, place: Place, bytes: u64, is_loan: bool) {
        let incoming = self.incoming.entry(place).or_default();
        incoming.bytes += bytes;
        incoming.booked_bytes += if is_loan { bytes } else { 0 };
    }

    /// A chunk that was to come to `place` has come, or will not.
    pub(super) fn arrived(&mut self, place: Place, bytes: u64, is_loan: bool) {
        if let Some(incoming) = self.incoming.get_mut(&place) {
            incoming.bytes -= bytes;
            incoming.booked_bytes -= if is_loan { bytes } else { 0 };
            if incoming.bytes == 0 {
                self.incoming.remove(&place);
            }
        }
    }

    /// Of these slots with memory, whole chunks with all of their slots: the last that sum to `bytes`,
    /// or all. `slots` has all slots of each of its chunks.
    pub(super) fn last_chunks(
        &self,
        mut slots: Vec<u32>,
        bytes: u64,
        chunk_bytes: u64,
    ) -> Vec<u32> {
        let most = usize::try_from(bytes.div_ceil(chunk_bytes)).unwrap_or(usize::MAX);
        let footing = |slot: &u32| self.pieces.get(slot).map(|it| Arc::as_ptr(&it.footing));
        let mut chosen = HashSet::new();
        for footing in slots.iter().rev().filter_map(footing) {
            if chosen.len() >= most {
                break;
            }
            chosen.insert(footing);
        }
        slots.retain(|slot| footing(slot).is_some_and(|it| chosen.contains(&it)));
        slots
    }

    /// Slots with memory that a lender's budget is booked for; of one lender, if it is named.
    pub(crate) fn borrowed(&self, lender: Option<Place>) -> Vec<u32> {
        let is_it =
            |it: &Standing| it.is_borrowed() && lender.is_none_or(|lender| it.place == lender);
        self.pieces.iter().filter(|(_, it)| is_it(it)).map(|(slot, _)| *slot).collect()
    }
}

/// The chunks of some slots, each once, and what becomes of them.
pub(crate) struct Chunks(Vec<Weak<Footing>>);

impl Chunks {
    /// How many there were.
    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    /// How many of them the buffer does not have any more.
    pub(super) fn gone(&self) -> usize {
        self.0.iter().filter(|footing| footing.strong_count() == 0).count()
    }
}

impl Body {
    /// The chunks of these slots.
    pub(crate) fn chunks_of(&self, slots: impl Iterator<Item = u32>) -> Chunks {
        let state = self.state();
        let mut known = HashSet::new();
        let footings = slots.filter_map(|slot| state.pieces.get(&slot).map(|it| &it.footing));
        let new = footings.filter(|footing| known.insert(Arc::as_ptr(footing)));
        Chunks(new.map(Arc::downgrade).collect())
    }

    /// A chunk that stands at this buffer's addresses: on the accounts of both sides, unless it lies
    /// at home.
    pub(super) fn standing(
        &self,
        home: DeviceId,
        mapping: Mapping,
        generation: u64,
        footing: Footing,
        loan: Option<Loan>,
    ) -> Standing {
        let place = Place::of(mapping.chunk().props());
        let (footing, lent) = (Arc::new(footing), self.lent(home, place, loan));
        let (backing, owed, aliases) = (Backing::Mapped(mapping), Vec::new(), Vec::new());
        Standing { backing, place, generation, owed, footing, lent, spare: None, aliases }
    }

    /// Both sides' accounts of one chunk at `place`.
    pub(super) fn lent(
        &self,
        home: DeviceId,
        place: Place,
        loan: Option<Loan>,
    ) -> Option<Arc<Lent>> {
        let home = Place::Device(home);
        if place == home {
            return None;
        }
        let of = |place| self.places.site(place).ok().map(|site| &site.depot.lending);
        Some(Arc::new(Lent::new(of(place)?, of(home)?, self.shape.chunk_bytes, loan)))
    }

    /// Makes a device the home. All memory lies there: nothing is lent any more.
    pub(super) fn settle(&self, state: &mut State, home: DeviceId) {
        state.home = home;
        for standing in state.pieces.values_mut() {
            standing.lent = self.lent(home, standing.place, None);
        }
    }
}
