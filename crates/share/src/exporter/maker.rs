//! The thread that calls the pool and the driver for an exporter: it describes buffers after changes
//! and makes descriptors. It holds no lock meanwhile, so neither clients nor changes wait for it.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vmm_pool::Piece;

use vmm_sys::caught::thrown;

use super::core::{Core, Job, Task};
use super::offer::OfferCore;
use crate::limits::keep_limit;
use crate::page::Notice;
use crate::steps::step;
use crate::wire::DESCRIPTORS_MAX;

/// Descriptors made ahead before something more urgent is looked for.
const AHEAD_AT_ONCE: usize = 16;

pub(super) fn run(core: &Core) {
    while let Some(task) = core.next_task() {
        // The thread works for others too: a panic is a failure of what it was about.
        let done = match task {
            Task::Describe(offer) => thrown(|| describe(core, offer)),
            Task::Make(job) => thrown(|| make(core, &job)).inspect_err(|words| {
                core.made_for(job.client, Some(format!("the exporter panicked: {words}")));
            }),
            Task::Ahead(offer) => thrown(|| ahead(core, offer)),
        };
        if let Err(words) = done {
            vmm_sys::say!(error, words, "the thread of an exporter panicked");
        }
        core.wake_service();
    }
}

fn describe(core: &Core, offer: Arc<OfferCore>) {
    match offer.describe(|| core.next_piece()) {
        Ok(true) => core.add_ahead(offer),
        // The end of the change under way asks for it again.
        Ok(false) => {}
        Err(error) => {
            vmm_sys::say!(warn, %error, name = offer.name, "a buffer could not be described")
        }
    }
}

/// Makes what an answer lacks.
fn make(core: &Core, job: &Job) {
    let missing = job.offer.shelf.lock().missing(&job.pieces);
    let (open, _) = core.open_descriptors();
    let room = room(core, open);
    let once = (open + missing.len() > room).then_some(job.client);
    let failure = export(core, &job.offer, &missing, once).err();
    core.made_for(job.client, failure);
    step!("exporter-made");
}

/// Makes some of what somebody may ask for.
fn ahead(core: &Core, offer: Arc<OfferCore>) {
    let (open, _) = core.open_descriptors();
    let most = room(core, open).saturating_sub(open).min(AHEAD_AT_ONCE);
    let missing = offer.shelf.lock().next_missing(most);
    if missing.is_empty() {
        return;
    }
    match export(core, &offer, &missing, None) {
        // More, unless the memory has changed: then its description comes first.
        Ok(true) => core.add_ahead(offer),
        Ok(false) => {}
        // Whoever asks for them finds out again.
        Err(why) => {
            vmm_sys::say!(warn, why, name = offer.name, "descriptors could not be made ahead")
        }
    }
}

/// How many descriptors may be open between answers: those of one answer have to fit beside them.
fn room(core: &Core, open: usize) -> usize {
    let plan = &core.plan;
    keep_limit(plan.descriptors_max.saturating_add(DESCRIPTORS_MAX), plan.reserve, open)
        .saturating_sub(DESCRIPTORS_MAX)
        .min(plan.descriptors_max)
}

/// Puts descriptors of these pieces on the shelf. Says whether the buffer is still as it was: else
/// nothing is put there.
fn export(core: &Core, offer: &OfferCore, ids: &[u64], once: Option<u64>) -> Result<bool, String> {
    let Some(visit) = offer.visit() else { return Ok(false) };
    let layout = offer.shelf.lock().layout.clone();
    let is_current = |notice: Notice| {
        !notice.changing && !notice.withdrawn && notice.generation == layout.generation
    };
    let mut entries: Vec<_> = ids.iter().filter_map(|id| layout.entry(*id)).collect();
    entries.sort_unstable_by_key(|entry| entry.offset);
    for run in entries.chunk_by(|a, b| a.offset + a.bytes == b.offset) {
        let (Some(first), Some(last)) = (run.first(), run.last()) else { continue };
        // A change may take long, and this call would wait for it.
        if !is_current(offer.board.notice()) {
            return Ok(false);
        }
        let exported: Vec<(Piece, OwnedFd)> = visit
            .buffer()
            .export_pieces_in(first.offset..last.offset + 1)
            .map_err(|error| error.to_string())?;
        core.counts.made.fetch_add(exported.len() as u64, Ordering::Relaxed);
        let mut shelf = offer.shelf.lock();
        // Whoever changes the memory says so first, and then closes what is on the shelf.
        if !is_current(offer.board.notice()) {
            return Ok(false);
        }
        for (piece, descriptor) in exported {
            if let Some(id) = layout.id_at(&piece) {
                shelf.keep(id, descriptor, once);
            }
        }
    }
    Ok(true)
}
