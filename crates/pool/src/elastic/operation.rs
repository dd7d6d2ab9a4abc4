//! [`Operation`]: the right to change a buffer's memory.

use std::cell::Cell;
use std::marker::PhantomData;

use super::body::Body;
use super::error::ElasticError;
use super::hooks::{BackingChange, Cause, Phase};
use super::state::{Backing, Life};
use crate::broken::{Broken, BrokenPart, Since};
use crate::error::Error;
use crate::sync::thread_local;

/// Whether the calling thread is changing some buffer's memory: a hook or a callback asks, which must
/// not wait for a thread that changes buffers itself.
#[doc(hidden)]
pub fn is_operating() -> bool {
    OPERATIONS.with(Cell::get) > 0
}

/// The right to change a buffer's memory, one thread's at a time.
#[derive(Debug)]
pub(crate) struct Operation<'a>(pub(super) &'a Body, Since, PhantomData<*const ()>);

thread_local! {
    /// Operations of this thread: more than one where a hook or a callback begins another.
    static OPERATIONS: Cell<u32> = const { Cell::new(0) };
}

impl Drop for Operation<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        if self.1.has_panicked() {
            let part = BrokenPart::Elastic { address: self.0.address() };
            state.broken = Some(Broken::here(part));
        }
        if state.life == Life::Ending {
            // Nobody can begin another operation, so nothing comes between.
            drop(state);
            self.end();
            state = self.0.state();
        }
        state.operating = false;
        let (has_ended, is_broken) = (state.life == Life::Ended, state.broken.is_some());
        drop(state);
        OPERATIONS.with(|it| it.set(it.get() - 1));
        if has_ended || is_broken {
            // None of them will get further.
            self.0.operation_ended.notify_all();
        } else {
            self.0.operation_ended.notify_one();
        }
    }
}

impl<'a> Operation<'a> {
    /// Nobody else changes the buffer now.
    pub(super) fn begin(body: &'a Body) -> Operation<'a> {
        OPERATIONS.with(|it| it.set(it.get() + 1));
        // Counted in this thread, so it ends there.
        Operation(body, Since::now(), PhantomData)
    }

    /// Takes everything away, for good. The buffer is listed until all is gone.
    fn end(&self) {
        let body = self.0;
        let home = body.places.device(body.home()).unwrap_or(body.keeper());
        home.elastic.closed(body.range.bytes());
        if let Some(broken) = body.broken() {
            // Nobody knows what stands where, nor behind whom.
            vmm_sys::say!(error, %broken, "its memory is kept for good");
            let mut state = body.state();
            state.keep_for_good();
            state.life = Life::Ended;
            return;
        }
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
            let backing = self.stand(slot, stuck.loose, &grants);
            self.0.state().set_backing(slot, backing);
        }
    }

    /// Refuses what concerns memory that is still stuck.
    pub(super) fn check_mended(&self) -> Result<(), Error> {
        match self.0.state().first_stuck() {
            None => Ok(()),
            Some((slot, refused)) => {
                let offset = u64::from(slot) * self.0.shape.chunk_bytes;
                Err(ElasticError::Stuck { offset, refused: refused.clone() }.into())
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
