//! What an offer keeps of its buffer: the description of its pieces, and their descriptors.

use std::collections::HashMap;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use vmm_pool::{ElasticBuffer, Piece, Place};

use crate::error::{AtStep, ShareError};
use crate::wire::{Home, PieceEntry};

/// The pieces of one generation, by offset.
#[derive(Debug, Default)]
pub(super) struct Layout {
    pub(super) generation: u64,
    pub(super) entries: Vec<PieceEntry>,
    /// The pool's number of each: another one at the same offset is other memory.
    came: Vec<u64>,
    index: HashMap<u64, usize>,
}

impl Layout {
    /// Describes the pieces of a buffer. Those that `earlier` has too keep their numbers.
    pub(super) fn describe(
        buffer: &ElasticBuffer,
        generation: u64,
        earlier: &Layout,
        mut next_id: impl FnMut() -> u64,
    ) -> Result<Layout, ShareError> {
        let mut homes = HashMap::new();
        let mut layout = Layout { generation, ..Layout::default() };
        for piece in buffer.pieces() {
            let home = match homes.get(&piece.place) {
                Some(home) => *home,
                None => {
                    let home = home_of(buffer, piece.place)?;
                    homes.insert(piece.place, home);
                    home
                }
            };
            let id = earlier.id_of(&piece).unwrap_or_else(&mut next_id);
            layout.index.insert(id, layout.entries.len());
            layout.came.push(piece.generation);
            let Piece { offset, bytes, .. } = piece;
            layout.entries.push(PieceEntry { id, offset, bytes, home });
        }
        Ok(layout)
    }

    /// The number of the same memory at the same offset.
    fn id_of(&self, piece: &Piece) -> Option<u64> {
        let at = self.entries.binary_search_by_key(&piece.offset, |entry| entry.offset).ok()?;
        (self.came.get(at) == Some(&piece.generation)).then(|| self.entries[at].id)
    }

    pub(super) fn id_at(&self, piece: &Piece) -> Option<u64> {
        self.id_of(piece)
    }

    pub(super) fn entry(&self, id: u64) -> Option<&PieceEntry> {
        self.entries.get(*self.index.get(&id)?)
    }

    /// Those that touch these bytes.
    fn touching(&self, bytes: Range<u64>) -> &[PieceEntry] {
        let first = self.entries.partition_point(|it| it.offset + it.bytes <= bytes.start);
        let end = self.entries.partition_point(|it| it.offset < bytes.end);
        self.entries.get(first..end).unwrap_or_default()
    }
}

fn home_of(buffer: &ElasticBuffer, place: Place) -> Result<Home, ShareError> {
    match place {
        Place::Device(device) => {
            Ok(Home::Gpu(buffer.driver().device_uuid(device).at("naming a GPU")?))
        }
        Place::HostNuma(node) => Ok(Home::HostNuma(node)),
    }
}

/// A descriptor of a piece.
#[derive(Debug)]
struct Kept {
    descriptor: Arc<OwnedFd>,
    /// Made for this client, beyond the limit: it goes with the answer.
    once: Option<u64>,
}

/// The description that was valid last, and the descriptors that are open.
#[derive(Debug, Default)]
pub(super) struct Shelf {
    pub(super) layout: Arc<Layout>,
    kept: HashMap<u64, Kept>,
    once: usize,
}

impl Shelf {
    /// Descriptors that are open.
    pub(super) fn open(&self) -> usize {
        self.kept.len()
    }

    /// Those of them that wait for an answer.
    pub(super) fn open_once(&self) -> usize {
        self.once
    }

    pub(super) fn keep(&mut self, id: u64, descriptor: OwnedFd, once: Option<u64>) {
        // One that stands stays: whoever made the other one made it for nothing.
        if !self.kept.contains_key(&id) {
            self.once += usize::from(once.is_some());
            self.kept.insert(id, Kept { descriptor: Arc::new(descriptor), once });
        }
    }

    /// Closes the descriptors of pieces that touch these bytes.
    pub(super) fn close(&mut self, bytes: Range<u64>) {
        let layout = self.layout.clone();
        for entry in layout.touching(bytes) {
            self.remove(entry.id);
        }
    }

    pub(super) fn close_all(&mut self) {
        self.kept.clear();
        self.once = 0;
    }

    /// Takes a new description; descriptors of pieces that it has not are closed.
    pub(super) fn take_layout(&mut self, layout: Layout) {
        let layout = Arc::new(layout);
        let stale: Vec<u64> =
            self.kept.keys().copied().filter(|id| layout.entry(*id).is_none()).collect();
        stale.into_iter().for_each(|id| self.remove(id));
        self.layout = layout;
    }

    /// Which of these have no descriptor.
    pub(super) fn missing(&self, ids: &[u64]) -> Vec<u64> {
        ids.iter().copied().filter(|id| !self.kept.contains_key(id)).collect()
    }

    /// The first pieces without a descriptor.
    pub(super) fn next_missing(&self, most: usize) -> Vec<u64> {
        let missing = self.layout.entries.iter().map(|entry| entry.id);
        missing.filter(|id| !self.kept.contains_key(id)).take(most).collect()
    }

    /// The descriptors of all of these, or `None` if one is missing. Those that were made for one
    /// answer leave the shelf.
    pub(super) fn take(&mut self, ids: &[u64]) -> Option<Vec<Arc<OwnedFd>>> {
        let found: Option<Vec<_>> =
            ids.iter().map(|id| Some(self.kept.get(id)?.descriptor.clone())).collect();
        let found = found?;
        for id in ids {
            if self.kept.get(id).is_some_and(|kept| kept.once.is_some()) {
                self.remove(*id);
            }
        }
        Some(found)
    }

    /// Closes what was made for a client that is gone.
    pub(super) fn forget_client(&mut self, client: u64) {
        self.kept.retain(|_, kept| kept.once != Some(client));
        self.once = self.kept.values().filter(|kept| kept.once.is_some()).count();
    }

    fn remove(&mut self, id: u64) {
        if let Some(kept) = self.kept.remove(&id) {
            self.once -= usize::from(kept.once.is_some());
        }
    }
}
