//! [`Body`]: what an elastic buffer is made of, and who may change it.
//!
//! One thread at a time changes a buffer's memory ([`Operation`]). It holds no lock while it is at
//! the driver: what the others see, figures and pieces, is behind a lock that is only held to look
//! or to publish.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vmm_sys::object::Range;
use vmm_sys::{Access, AccessGrant, ChunkProps, DeviceId, Location};

use super::ahead::Ahead;
use super::error::ElasticError;
use super::hooks::Hooks;
use super::operation::{Operation, is_operating};
use super::state::{Life, State};
use super::uses::Uses;
use crate::broken::Broken;
use crate::budget::Budget;
use crate::device::Device;
use crate::error::Error;
use crate::past::User;
use crate::place::Place;
use crate::places::Places;
use crate::sync::atomic::AtomicUsize;
use crate::sync::{Condvar, Mutex, MutexGuard};

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
    pub(super) operation_ended: Condvar,
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
    pub(crate) fn keeper(&self) -> &Arc<Device> {
        &self.keeper
    }

    /// The time, by the pool's clock.
    pub(crate) fn now_ms(&self) -> u64 {
        self.keeper.watch.now_ms()
    }

    /// Looks at the buffer. No driver call while the answer is held.
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        if vmm_sys::process::is_forked_child() {
            // Somebody may have held the lock at the fork, who is not here. The child sees a buffer
            // without memory; what a look takes is not given back, for nobody looks twice.
            let empty = State::new(self.keeper.plan.device, BTreeMap::new());
            return Box::leak(Box::new(Mutex::new(empty))).lock();
        }
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
        state.check_whole()?;
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
            if state.operating || state.life != Life::Open || state.broken.is_some() {
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
        if vmm_sys::process::is_forked_child() {
            return Err(Error::DriverGone);
        }
        {
            let state = self.state();
            state.check_whole()?;
            if state.stuck.is_empty() {
                return Ok(());
            }
        }
        self.operate()?.check_mended()
    }

    /// Who broke it, if somebody did.
    pub(crate) fn broken(&self) -> Option<Broken> {
        self.state().broken.clone()
    }

    /// Refuses what needs memory while it is asleep.
    pub(crate) fn check_awake(&self) -> Result<(), Error> {
        match self.state().asleep {
            None => Ok(()),
            Some(_) => Err(ElasticError::Asleep.into()),
        }
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
        vmm_sys::process::keep_in_forked_child(&self.0);
        if self.0.holders.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.end();
        }
    }
}
