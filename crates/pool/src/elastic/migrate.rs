//! Moves that somebody asks for: now, or in the background.

use std::sync::Arc;
use std::time::Duration;

use vmm_sys::{Access, DeviceId};

use super::ElasticBuffer;
use super::body::Body;
use super::error::ElasticError;
use super::hooks::Cause;
use super::operation::Operation;
use super::progress::Progress;
use super::state::State;
use super::terms::{Effort, Left, Moved, Target, Terms};
use crate::error::Error;
use crate::lane::Wait;
use crate::mover::Job;
use crate::place::Place;
use crate::turn::Turn;

/// How long a move waits for guards that are alive, unless it is told otherwise.
const PATIENCE: Duration = Duration::from_secs(1);

/// Where an elastic buffer's memory is to move: see
/// [`ElasticBuffer::migrate`](super::ElasticBuffer::migrate).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    to: Place,
    range: Option<std::ops::Range<u64>>,
    patience: Duration,
}

impl Move {
    /// Everything that is committed, to `place`. A device becomes the buffer's home: later memory
    /// comes from there, and it reads and writes the buffer.
    pub fn to(place: impl Into<Place>) -> Move {
        Move { to: place.into(), range: None, patience: PATIENCE }
    }

    /// Only the chunks that these bytes touch. The home stays what it is.
    #[must_use]
    pub fn range(self, range: std::ops::Range<u64>) -> Move {
        Move { range: Some(range), ..self }
    }

    /// How long guards of `use_on` that are alive are waited for; a second unless said otherwise.
    #[must_use]
    pub fn patience(self, patience: Duration) -> Move {
        Move { patience, ..self }
    }
}

impl<P: Into<Place>> From<P> for Move {
    fn from(place: P) -> Move {
        Move::to(place)
    }
}

/// What became of a move in the background.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum MigrationState {
    /// Not begun.
    Waiting,
    /// Under way.
    Moving,
    /// The memory is there.
    Done(Moved),
    /// The buffer is as it was before.
    Failed(Error),
}

impl MigrationState {
    fn is_finished(&self) -> bool {
        matches!(self, MigrationState::Done(_) | MigrationState::Failed(_))
    }
}

/// A move in the background: see
/// [`ElasticBuffer::migrate_async`](super::ElasticBuffer::migrate_async). Dropping it changes
/// nothing.
#[derive(Clone, Debug)]
pub struct Migration(Arc<Progress<MigrationState>>);

impl Migration {
    /// What has become of it by now. Never waits.
    pub fn state(&self) -> MigrationState {
        if vmm_sys::process::is_forked_child() {
            return MigrationState::Failed(Error::DriverGone);
        }
        self.0.get()
    }

    /// Whether it has ended, well or not.
    pub fn is_finished(&self) -> bool {
        self.state().is_finished()
    }

    /// Waits for the end, `timeout` at most.
    pub fn wait(&self, timeout: Duration) -> MigrationState {
        if vmm_sys::process::is_forked_child() {
            return self.state();
        }
        self.0.wait_while(|state| !state.is_finished(), timeout)
    }
}

/// A move that nobody has begun. Dropped, it has failed.
#[derive(Debug)]
pub(crate) struct Task {
    body: Arc<Body>,
    order: Move,
    progress: Arc<Progress<MigrationState>>,
}

impl Task {
    pub(crate) fn new(body: Arc<Body>, order: Move) -> (Task, Migration) {
        let progress = Arc::new(Progress::new(MigrationState::Waiting));
        (Task { body, order, progress: progress.clone() }, Migration(progress))
    }

    /// Does it.
    pub(crate) fn run(self) {
        self.progress.update(|state| *state = MigrationState::Moving);
        let moved = self.body.operate().and_then(|operation| operation.migrate(&self.order));
        self.progress.update(|state| {
            *state = moved.map_or_else(MigrationState::Failed, MigrationState::Done);
        });
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        if !self.progress.get().is_finished() {
            let ended = MigrationState::Failed(ElasticError::Ended.into());
            self.progress.update(|state| *state = ended);
        }
    }
}

impl ElasticBuffer {
    /// Moves the memory behind the addresses to another device, or to the host: the address stays,
    /// the contents too, and graphs captured before go on working. All or nothing: after an error the
    /// buffer is as it was. Returns when the memory is there.
    ///
    /// Work that uses of the buffer have enqueued is waited for; work of uses that begin meanwhile
    /// is held on its stream until the move is over. Guards of [`use_on`](ElasticBuffer::use_on) that
    /// are alive are waited for, as long as [`Move::patience`] says; while that goes on, other threads
    /// wait before they begin a use. The new memory is made ahead, so it is there twice for a while;
    /// what is left behind goes to the stock of its place.
    ///
    /// # Errors
    /// [`ElasticError::InUse`], at once if the calling thread has a guard itself;
    /// [`ElasticError::StillUsed`] where a capture is in the way; [`ElasticError::Asleep`]; as
    /// [`ElasticBuffer::commit_from`] for the memory of the new place.
    pub fn migrate(&self, to: impl Into<Move>) -> Result<Moved, Error> {
        self.body.operate()?.migrate(&to.into())
    }

    /// Moves all memory that lies elsewhere to the home, borrowed or placed by name: all, or nothing.
    /// For a part of it, [`ElasticBuffer::migrate`] takes a range.
    ///
    /// # Errors
    /// As [`ElasticBuffer::migrate`].
    pub fn come_home(&self, patience: Duration) -> Result<Moved, Error> {
        let operation = self.body.operate()?;
        operation.migrate(&Move::to(self.device()).patience(patience))
    }

    /// Asks a thread of the pool to do what [`ElasticBuffer::migrate`] does, and returns at once:
    /// nobody waits but the streams that use the buffer meanwhile.
    ///
    /// # Errors
    /// [`ElasticError::BeyondCapacity`], [`ElasticError::UnknownPlace`]; later ones are in the
    /// answer.
    pub fn migrate_async(&self, to: impl Into<Move>) -> Result<Migration, Error> {
        if vmm_sys::process::is_forked_child() {
            return Err(Error::DriverGone);
        }
        let order = to.into();
        self.pool.places().site(order.to)?;
        if let Some(range) = &order.range {
            self.body.slots_over(range.start, range.end.saturating_sub(range.start))?;
        }
        let (task, migration) = Task::new(self.body.body().clone(), order);
        self.pool.places().mover.submit(Job::Move(task));
        Ok(migration)
    }
}

impl Operation<'_> {
    /// Moves what `order` says.
    pub(super) fn migrate(&self, order: &Move) -> Result<Moved, Error> {
        let body = self.0;
        body.check_awake()?;
        let to = order.to;
        body.places.site(to)?;
        let slots: Vec<u32> = match &order.range {
            None => body.state().pieces.keys().copied().collect(),
            Some(range) => {
                let bytes = range.end.saturating_sub(range.start);
                let slots = body.slots_over(range.start, bytes)?;
                body.state().slots_in(slots)
            }
        };
        let home = match order.range {
            None => to.device().filter(|device| *device != body.home()),
            Some(_) => None,
        };
        let terms = Terms {
            cause: Cause::Move,
            turn: Turn::Requester,
            wait: Wait::Yes,
            patience: order.patience,
            left: Left::Shelf,
            effort: Effort::Ladder,
            shut: false,
        };
        let _within = vmm_sys::within!("vmm_pool.move", address = body.address(), to = %to);
        let targets = slots.into_iter().map(|slot| Target::chosen(slot, to));
        match home {
            None => self.relocate(targets, &terms, |_| {}),
            Some(home) => self.settle_at(home, |publish| self.relocate(targets, &terms, publish)),
        }
    }

    /// Makes `home` the home, along with `work`: who may use memory of the new home by the policy may
    /// use the buffer, and nobody loses access. After an error of `work` nothing has changed.
    fn settle_at(
        &self,
        home: DeviceId,
        work: impl FnOnce(&dyn Fn(&mut State)) -> Result<Moved, Error>,
    ) -> Result<Moved, Error> {
        let body = self.0;
        let new = body.places.device(home).ok_or(Error::UnknownDevice { device: home })?;
        let mut granted = vec![(home, Access::ReadWrite)];
        if body.shape.follows_policy {
            let state = body.state();
            let others = new.policy.others();
            let unknown = |(device, _): &(DeviceId, Access)| {
                !state.own_words.contains(device) && !state.access.contains_key(device)
            };
            granted.extend(others.into_iter().filter(|it| it.0 != home).filter(unknown));
        }
        let old = body.home();
        let mut before = Vec::new();
        let done = granted
            .into_iter()
            .try_for_each(|(device, access)| {
                let had = self.set(device, access)?;
                before.push((device, had));
                Ok(())
            })
            .and_then(|()| work(&|state| body.settle(state, home)));
        match done {
            Ok(moved) => {
                if let Some(old) = body.places.device(old) {
                    old.elastic.closed(body.range.bytes());
                }
                new.elastic.opened(body.range.bytes());
                Ok(moved)
            }
            Err(error) => {
                before.into_iter().rev().for_each(|(device, had)| self.unset(device, had));
                Err(error)
            }
        }
    }
}
