//! [`Body`]: what an elastic buffer is made of, and who may change it.
//!
//! One thread at a time changes a buffer's memory ([`Operation`]). It holds no lock while it is at
//! the driver: what the others see, figures and pieces, is behind a lock that is only held to look
//! or to publish.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vmm_sys::object::Range;
use vmm_sys::{Access, AccessGrant, ChunkProps, DeviceId, Location};

use super::ahead::Ahead;
use super::error::ElasticError;
use super::hooks::{BackingChange, Cause, Hooks, Phase};
use super::state::{Backing, Life, State};
use super::uses::Uses;
use crate::budget::Budget;
use crate::device::Device;
use crate::error::Error;
use crate::past::User;
use crate::place::Place;
use crate::places::Places;
use crate::sync::atomic::AtomicUsize;
use crate::sync::{Condvar, Mutex, MutexGuard, thread_local};

/// What is fixed when a buffer is built.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub(crate) capacity_bytes: u64,
    pub(crate) chunk_bytes: u64,
    pub(crate) exportable: bool,
    /// Its access is the pool's policy for its home.
    pub(crate) follows_policy: bool,
    pub(crate) tag: Option<Arc<str>>,
    pub(crate) quota: Option<Budget>,
    /// As whose its contents count, where owners are told apart.
    pub(crate) user: User,
    /// Memory comes to it as nobody's, whoever used it.
    pub(crate) scrubs: bool,
    /// The pool may move it by itself: to a lender where its home is short, and for balance.
    pub(crate) movable: bool,
}

/// An elastic buffer, behind its handle, its guards and the pool's threads.
#[derive(Debug)]
pub(crate) struct Body {
    /// Handle and guards. Threads of the pool that look at it keep its addresses and no memory.
    holders: AtomicUsize,
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

impl Body {
    pub(crate) fn new(
        shape: Shape,
        places: Arc<Places>,
        keeper: Arc<Device>,
        range: Range,
        access: BTreeMap<DeviceId, Access>,
    ) -> Body {
        keeper.elastic.opened(range.bytes());
        let home = keeper.plan.device;
        Body {
            holders: AtomicUsize::new(0),
            shape,
            places,
            keeper,
            range,
            state: Mutex::new(State::new(home, access)),
            operation_ended: Condvar::new(),
            uses: Uses::default(),
            hooks: Hooks::default(),
            ahead: Ahead::default(),
        }
    }

    pub(crate) fn address(&self) -> u64 {
        self.range.address()
    }

    pub(crate) fn home(&self) -> DeviceId {
        self.state().home
    }

    /// The first home's side of the pool, which keeps the events of the buffer's users.
    pub(crate) fn keeper(&self) -> &Device {
        &self.keeper
    }

    /// The time, by the pool's clock.
    pub(crate) fn now_ms(&self) -> u64 {
        self.keeper.watch.now_ms()
    }

    /// Looks at the buffer. No driver call while the answer is held.
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// What of its memory lies at `place`, in bytes.
    pub(crate) fn bytes_at(&self, place: Place) -> u64 {
        let state = self.state();
        let count = state.pieces.values().filter(|standing| standing.place == place).count();
        count as u64 * self.shape.chunk_bytes
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
        if state.life != Life::Open {
            return Err(ElasticError::Ended.into());
        }
        state.operating = true;
        drop(state);
        Ok(self.begin())
    }

    /// The same for who goes over all buffers: one that has ended meanwhile is none of them any more.
    pub(crate) fn operate_unless_ended(&self) -> Result<Option<Operation<'_>>, Error> {
        match self.operate() {
            Ok(operation) => Ok(Some(operation)),
            Err(Error::Elastic(ElasticError::Ended)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whether it has no memory and will have none.
    pub(crate) fn has_ended(&self) -> bool {
        self.state().life == Life::Ended
    }

    /// The same for who has no time to wait, and nothing to say if somebody else is changing it.
    pub(crate) fn try_operate(&self) -> Option<Operation<'_>> {
        if vmm_sys::process::is_forked_child() || self.keeper.driver.is_gone() {
            return None;
        }
        {
            let mut state = self.state();
            if state.operating || state.life != Life::Open {
                return None;
            }
            state.operating = true;
        }
        Some(self.begin())
    }

    /// The last of handle and guards is gone: the memory leaves behind its users, and nobody waits. A
    /// thread that is changing the buffer now does it when it is done.
    fn end(&self) {
        if vmm_sys::process::is_forked_child() {
            return;
        }
        self.ahead.end();
        {
            let mut state = self.state();
            state.life = Life::Ending;
            if state.operating {
                return;
            }
            state.operating = true;
        }
        drop(Operation::begin(self));
    }

    /// Nobody else changes the buffer now.
    fn begin(&self) -> Operation<'_> {
        let operation = Operation::begin(self);
        operation.settle_debts();
        operation.settle_aliases();
        operation.mend();
        operation
    }

    /// Makes sure that all memory can be used, as far as the driver lets.
    pub(crate) fn mend(&self) -> Result<(), Error> {
        if self.state().stuck.is_empty() {
            return Ok(());
        }
        self.operate()?.check_mended()
    }

    /// Refuses what needs memory while it is asleep.
    pub(crate) fn check_awake(&self) -> Result<(), Error> {
        match self.state().asleep {
            None => Ok(()),
            Some(_) => Err(ElasticError::Asleep.into()),
        }
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
        let mut state = self.0.state();
        if state.life == Life::Ending {
            // Nobody can begin another operation, so nothing comes between.
            drop(state);
            self.end();
            state = self.0.state();
        }
        state.operating = false;
        let has_ended = state.life == Life::Ended;
        drop(state);
        OPERATIONS.with(|it| it.set(it.get() - 1));
        if has_ended {
            self.0.operation_ended.notify_all();
        } else {
            self.0.operation_ended.notify_one();
        }
    }
}

impl<'a> Operation<'a> {
    /// Nobody else changes the buffer now.
    fn begin(body: &'a Body) -> Operation<'a> {
        OPERATIONS.with(|it| it.set(it.get() + 1));
        // Counted in this thread, so it ends there.
        Operation(body, PhantomData)
    }

    /// Takes everything away, for good. The buffer is listed until all is gone.
    fn end(&self) {
        let body = self.0;
        let home = body.places.device(body.home()).unwrap_or(&body.keeper);
        home.elastic.closed(body.range.bytes());
        self.decommit_all(Cause::End);
        let asleep = {
            let mut state = body.state();
            state.life = Life::Ended;
            state.asleep.take()
        };
        drop(asleep);
    }

    /// Tries again what failed moves could not bring back.
    pub(super) fn mend(&self) {
        let stuck: Vec<u32> = self.0.state().stuck.iter().copied().collect();
        let grants = if stuck.is_empty() { Vec::new() } else { self.0.grants() };
        for slot in stuck {
            let taken = {
                let mut state = self.0.state();
                // Listed until it is known what becomes of it.
                let standing = state.pieces.get_mut(&slot);
                standing.map(|it| std::mem::replace(&mut it.backing, Backing::InHand))
            };
            let Some(Backing::Stuck(stuck)) = taken else { continue };
            let backing = self.stand(slot, stuck, &grants);
            self.0.state().set_backing(slot, backing);
        }
    }

    /// Refuses what concerns memory that is still stuck.
    pub(super) fn check_mended(&self) -> Result<(), Error> {
        match self.0.state().stuck.first() {
            None => Ok(()),
            Some(slot) => {
                let offset = u64::from(*slot) * self.0.shape.chunk_bytes;
                Err(ElasticError::Stuck { offset }.into())
            }
        }
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

/// The handle's hold on a buffer, or a guard's: with the last of them the buffer ends.
#[derive(Debug)]
pub(crate) struct Holder(Arc<Body>);

impl Holder {
    pub(crate) fn new(body: Arc<Body>) -> Holder {
        body.holders.fetch_add(1, Ordering::Relaxed);
        Holder(body)
    }

    /// For who looks at the buffer without keeping its memory.
    pub(crate) fn body(&self) -> &Arc<Body> {
        &self.0
    }
}

impl Clone for Holder {
    fn clone(&self) -> Holder {
        Holder::new(self.0.clone())
    }
}

impl Deref for Holder {
    type Target = Body;

    fn deref(&self) -> &Body {
        &self.0
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        if self.0.holders.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.end();
        }
    }
}
