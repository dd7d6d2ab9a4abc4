//! [`Body`]: what an elastic buffer is made of, and who may change it.
//!
//! One thread at a time changes a buffer's memory ([`Operation`]). It holds no lock while it is at
//! the driver: what the others see, figures and pieces, is behind a lock that is only held to look
//! or to publish.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::marker::PhantomData;
use std::sync::Arc;

use vmm_sys::object::{Mapping, Range};
use vmm_sys::{Access, AccessGrant, ChunkProps, DeviceId, Location};

use super::ahead::Ahead;
use super::error::ElasticError;
use super::hooks::{BackingChange, Cause, Hooks, Phase};
use super::uses::Uses;
use crate::budget::Budget;
use crate::device::Device;
use crate::error::Error;
use crate::place::Place;
use crate::places::Places;
use crate::sync::{Condvar, Mutex, MutexGuard, thread_local};

/// What is fixed when a buffer is built.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    /// Whose streams keep the buffer's events, and where memory comes from unless told otherwise.
    pub(crate) home: DeviceId,
    pub(crate) capacity_bytes: u64,
    pub(crate) chunk_bytes: u64,
    pub(crate) exportable: bool,
    /// Its access is the pool's policy for its home.
    pub(crate) follows_policy: bool,
    pub(crate) tag: Option<Arc<str>>,
    pub(crate) quota: Option<Budget>,
}

/// An elastic buffer, behind its handle, its guards and the background thread.
#[derive(Debug)]
pub(crate) struct Body {
    pub(crate) shape: Shape,
    pub(crate) places: Arc<Places>,
    keeper: Arc<Device>,
    pub(crate) range: Range,
    state: Mutex<State>,
    operation_ended: Condvar,
    pub(crate) uses: Uses,
    pub(crate) hooks: Hooks,
    pub(crate) ahead: Ahead,
}

/// What others see of a buffer. Its lock is never held at the driver.
#[derive(Debug, Default)]
pub(crate) struct State {
    /// By slot: the slot's number times the chunk length is the offset.
    pub(crate) pieces: BTreeMap<u32, Standing>,
    /// Who may do what, the home included. Others may do nothing.
    pub(crate) access: BTreeMap<DeviceId, Access>,
    /// Devices of whose access the buffer has said something itself.
    pub(crate) own_words: BTreeSet<DeviceId>,
    /// Counts the changes of the memory behind the addresses.
    pub(crate) generation: u64,
    pub(crate) counts: Counts,
    /// A thread is changing the buffer's memory.
    operating: bool,
}

/// A chunk that stands in a slot.
#[derive(Debug)]
pub(crate) struct Standing {
    pub(crate) mapping: Mapping,
    /// The buffer's generation when it came.
    pub(crate) generation: u64,
    /// Grants that the driver refused to take back: tried again before the next operation.
    pub(crate) owed: Vec<AccessGrant>,
}

impl Standing {
    pub(crate) fn place(&self) -> Place {
        Place::of(self.mapping.chunk().props())
    }
}

/// Where a buffer's memory came from, in bytes since it was built.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) created_bytes: u64,
    pub(crate) stock_bytes: u64,
    pub(crate) returned_bytes: u64,
}

impl Body {
    pub(crate) fn new(
        shape: Shape,
        places: Arc<Places>,
        keeper: Arc<Device>,
        range: Range,
        access: BTreeMap<DeviceId, Access>,
    ) -> Body {
        keeper.elastic.opened(range.bytes());
        Body {
            shape,
            places,
            keeper,
            range,
            state: Mutex::new(State { access, ..State::default() }),
            operation_ended: Condvar::new(),
            uses: Uses::default(),
            hooks: Hooks::default(),
            ahead: Ahead::default(),
        }
    }

    pub(crate) fn address(&self) -> u64 {
        self.range.address()
    }

    /// The home's side of the pool, which keeps the events of the buffer's users.
    pub(crate) fn keeper(&self) -> &Device {
        &self.keeper
    }

    /// Looks at the buffer. No driver call while the answer is held.
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    pub(crate) fn committed_bytes(&self) -> u64 {
        self.state().pieces.len() as u64 * self.shape.chunk_bytes
    }

    /// The properties of this buffer's chunks at a place.
    pub(crate) fn props(&self, place: Place) -> ChunkProps {
        place.props(self.shape.exportable)
    }

    pub(crate) fn may_access(&self, device: DeviceId) -> bool {
        self.state().access.contains_key(&device)
    }

    /// What a mapping at this buffer's addresses is granted.
    pub(crate) fn grants(&self) -> Vec<AccessGrant> {
        let grant = |(device, access): (&DeviceId, &Access)| AccessGrant {
            location: Location::Device(*device),
            access: *access,
        };
        self.state().access.iter().map(grant).collect()
    }

    /// Begins to change the buffer's memory: waits for the thread that does so now, unless the
    /// calling thread is changing some buffer's memory itself. Then two that wait for each other
    /// would wait for ever.
    pub(crate) fn operate(&self) -> Result<Operation<'_>, Error> {
        if vmm_sys::process::is_forked_child() || self.keeper.driver.is_gone() {
            return Err(Error::DriverGone);
        }
        let mut state = self.state();
        while state.operating {
            if is_operating() {
                return Err(ElasticError::Busy.into());
            }
            self.operation_ended.wait(&mut state);
        }
        state.operating = true;
        drop(state);
        let operation = Operation::begin(self);
        operation.settle_debts();
        Ok(operation)
    }
}

/// Whether the calling thread is changing some buffer's memory.
pub(crate) fn is_operating() -> bool {
    OPERATIONS.with(Cell::get) > 0
}

/// The right to change a buffer's memory, one thread's at a time.
#[derive(Debug)]
pub(crate) struct Operation<'a>(pub(super) &'a Body, PhantomData<*const ()>);

thread_local! {
    /// Operations of this thread: more than one where a hook or a callback begins another.
    static OPERATIONS: Cell<u32> = const { Cell::new(0) };
}

impl Drop for Operation<'_> {
    fn drop(&mut self) {
        OPERATIONS.with(|it| it.set(it.get() - 1));
        self.0.state().operating = false;
        self.0.operation_ended.notify_one();
    }
}

impl<'a> Operation<'a> {
    /// Nobody else changes the buffer now.
    fn begin(body: &'a Body) -> Operation<'a> {
        OPERATIONS.with(|it| it.set(it.get() + 1));
        // Counted in this thread, so it ends there.
        Operation(body, PhantomData)
    }

    /// A change of these slots, for the hooks.
    pub(super) fn change(&self, cause: Cause, slots: &[u32]) -> BackingChange {
        let chunk_bytes = self.0.shape.chunk_bytes;
        let (first, last) = (slots.iter().min(), slots.iter().max());
        let offset = first.map_or(0, |first| u64::from(*first) * chunk_bytes);
        let end = last.map_or(0, |last| (u64::from(*last) + 1) * chunk_bytes);
        let generation = self.0.state().generation;
        BackingChange { phase: Phase::Before, cause, offset, bytes: end - offset, generation }
    }
}

impl Drop for Body {
    /// The last of handle, guards and threads is gone: the memory leaves behind its users, and
    /// nobody waits.
    fn drop(&mut self) {
        if vmm_sys::process::is_forked_child() {
            return;
        }
        self.ahead.end();
        self.keeper.elastic.closed(self.range.bytes());
        let operation = Operation::begin(self);
        operation.decommit_all(Cause::End);
    }
}
