//! The memory behind an import follows that of the buffer.

use std::time::{Duration, Instant};

use vmm_sys::object::retry_failed_drops;

use super::body::Body;
use super::fetch;
use super::layout::{self, Layout};
use crate::error::ShareError;
use crate::steps::step;
use crate::wire::PieceEntry;

const STEP: &str = "refreshing";

/// What a refresh has done, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Refreshed {
    /// The generation now.
    pub generation: u64,
    /// Memory that was mapped anew.
    pub came_bytes: u64,
    /// Memory that was unmapped.
    pub left_bytes: u64,
}

impl Body {
    /// See [`Import::refresh`](super::Import::refresh).
    pub(super) fn refresh(&self, patience: Duration) -> Result<Refreshed, ShareError> {
        let deadline = Instant::now() + patience;
        let Some(_change) = self.change.try_lock_until(deadline) else {
            return Err(ShareError::Timeout { step: STEP, after: patience });
        };
        step!("importer-refresh");
        let shared = &self.shared;
        let mut pause = super::Pause::default();
        loop {
            let notice = self.page.notice();
            if notice.withdrawn {
                return Err(ShareError::Withdrawn { step: STEP });
            }
            let have = self.generation();
            if !notice.changing && notice.generation == have {
                return Ok(Refreshed { generation: have, ..Refreshed::default() });
            }
            let layout = layout::describe(&shared.link, self.export, deadline)?;
            layout::check(&shared.link, &*shared.driver, &shared.gpus, &layout)?;
            let drivers = (&shared.link, &shared.driver);
            let caches = (&shared.gpus, &shared.cache);
            if let Some(chunks) = fetch::chunks(drivers, caches, self.export, &layout)? {
                return self.apply(&layout, &chunks, (deadline, patience));
            }
            if !pause.wait(deadline) {
                return Err(ShareError::Changing { step: STEP });
            }
        }
    }

    fn apply(
        &self,
        layout: &Layout,
        chunks: &fetch::Chunks,
        (deadline, patience): (Instant, Duration),
    ) -> Result<Refreshed, ShareError> {
        // What an earlier try could not take down may stand where memory comes.
        retry_failed_drops(&self.shared.driver);
        let missing = || ShareError::NotMapped { step: STEP, offset: 0, bytes: 0 };
        let (leaving, coming) = self.difference(layout).ok_or_else(missing)?;
        let more = match &*self.space.lock() {
            Some(space) => space.adjacent(STEP, layout.end_bytes())?,
            None => return Err(missing()),
        };
        // No use begins meanwhile: the import lags.
        if !leaving.is_empty() && !self.uses.wait(deadline) {
            return Err(ShareError::Timeout {
                step: "waiting for users of memory",
                after: patience,
            });
        }
        let mut space = self.space.lock();
        let space = space.as_mut().ok_or_else(missing)?;
        let is_extended = more.is_some();
        space.extend(more);
        let offsets: Vec<u64> = leaving.iter().map(|piece| piece.offset).collect();
        if let Err(error) = space.replace(&offsets, &coming, chunks) {
            space.retract(is_extended);
            return Err(error);
        }
        self.set_generation(layout.generation);
        let bytes = |pieces: &[PieceEntry]| pieces.iter().map(|piece| piece.bytes).sum();
        Ok(Refreshed {
            generation: layout.generation,
            came_bytes: bytes(&coming),
            left_bytes: bytes(&leaving),
        })
    }

    /// What has to go, and what has to come.
    fn difference(&self, layout: &Layout) -> Option<(Vec<PieceEntry>, Vec<PieceEntry>)> {
        let space = self.space.lock();
        let placed = &space.as_ref()?.placed;
        let stands =
            |piece: &PieceEntry| placed.get(&piece.offset).is_some_and(|it| it.piece == *piece);
        let coming: Vec<_> = layout.pieces.iter().filter(|piece| !stands(piece)).copied().collect();
        let stays = |piece: &PieceEntry| {
            let at = layout.pieces.binary_search_by_key(&piece.offset, |it| it.offset);
            at.is_ok_and(|at| layout.pieces.get(at) == Some(piece))
        };
        let all = placed.values().map(|it| it.piece);
        Some((all.filter(|piece| !stays(piece)).collect(), coming))
    }
}
