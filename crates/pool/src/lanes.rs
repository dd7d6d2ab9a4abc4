//! [`Lanes`]: which lanes of a device there are.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};

use vmm_sys::StreamId;

use crate::lane::{LaneCell, LaneGuard, LaneState};

/// A lane, by its shell and its number. The shell may hold a later lane by the time it is locked,
/// another pool's too: then this one has retired.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LaneRef {
    pub(crate) cell: &'static LaneCell,
    pub(crate) id: u64,
}

impl LaneRef {
    /// The lane's state, locked; `None` once it has retired.
    pub(crate) fn lock(self) -> Option<LockedLane> {
        let shell = self.cell.lock();
        let is_mine = shell.as_ref().is_some_and(|state| state.id == self.id);
        is_mine.then_some(LockedLane(shell))
    }
}

/// A lane's state under its lock. The shell is never empty here.
pub(crate) struct LockedLane(LaneGuard);

impl Deref for LockedLane {
    type Target = LaneState;

    fn deref(&self) -> &LaneState {
        self.0.as_ref().expect("the shell was full when it was locked")
    }
}

impl DerefMut for LockedLane {
    fn deref_mut(&mut self) -> &mut LaneState {
        self.0.as_mut().expect("the shell was full when it was locked")
    }
}

/// The lanes of a device: each that holds something is listed, until it has retired.
#[derive(Debug, Default)]
pub(crate) struct Lanes {
    /// The newest lane of each stream. In one order, so that runs repeat.
    newest: BTreeMap<StreamId, LaneRef>,
    /// Closed ones, whose stream has a newer lane, with buffers left.
    older: Vec<LaneRef>,
    /// Those that hold memory for captured graphs.
    private: Vec<LaneRef>,
}

impl Lanes {
    /// The newest lane of a stream. It may be closing.
    pub(crate) fn of(&self, stream: StreamId) -> Option<LaneRef> {
        self.newest.get(&stream).copied()
    }

    /// Lists a new lane of a stream.
    pub(crate) fn add(&mut self, stream: StreamId, lane: LaneRef) {
        self.older.extend(self.newest.insert(stream, lane));
    }

    /// Lists a new private lane.
    pub(crate) fn add_private(&mut self, lane: LaneRef) {
        self.private.push(lane);
    }

    /// Takes a lane that has retired off the list.
    pub(crate) fn remove(&mut self, stream: StreamId, id: u64) {
        if self.newest.get(&stream).is_some_and(|lane| lane.id == id) {
            self.newest.remove(&stream);
        }
        self.older.retain(|lane| lane.id != id);
        self.private.retain(|lane| lane.id != id);
    }

    /// Every lane.
    pub(crate) fn all(&self) -> Vec<LaneRef> {
        self.iter().collect()
    }

    /// Every lane. While the list is locked, none of their shells is reused.
    pub(crate) fn iter(&self) -> impl Iterator<Item = LaneRef> + '_ {
        self.newest.values().chain(&self.older).chain(&self.private).copied()
    }
}
