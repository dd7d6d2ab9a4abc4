//! Pieces of other processes become chunks of this one, each once.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use vmm_sys::Driver;
use vmm_sys::object::Chunk;

use super::layout::{Gpus, Layout};
use super::link::Link;
use crate::error::{AtStep, Refusal, ShareError};
use crate::limits::{descriptor_limit, open_descriptors};
use crate::steps::step;
use crate::wire::{DESCRIPTORS_MAX, Message, PieceEntry};

const STEP: &str = "fetching descriptors";

/// The chunks that this connection has imported and that somebody still holds, by piece and length.
/// Another connection's are not used: its exporter may say anything.
#[derive(Debug, Default)]
pub(super) struct Cache {
    chunks: Mutex<HashMap<(u64, u64), Weak<Chunk>>>,
}

impl Cache {
    fn get(&self, piece: &PieceEntry) -> Option<Arc<Chunk>> {
        self.chunks.lock().get(&(piece.id, piece.bytes))?.upgrade()
    }

    fn put(&self, piece: &PieceEntry, chunk: &Arc<Chunk>) {
        self.chunks.lock().insert((piece.id, piece.bytes), Arc::downgrade(chunk));
    }

    /// Forgets what nobody holds any more.
    fn prune(&self) {
        self.chunks.lock().retain(|_, chunk| chunk.strong_count() > 0);
    }
}

/// Chunks by the number of their piece.
pub(super) type Chunks = HashMap<u64, Arc<Chunk>>;

/// The chunks of all pieces; `None` if the buffer changed meanwhile. After an error nothing
/// is left of those that came.
pub(super) fn chunks(
    (link, driver): (&Link, &Arc<dyn Driver>),
    (gpus, cache): (&Gpus, &Cache),
    export: u64,
    layout: &Layout,
) -> Result<Option<Chunks>, ShareError> {
    cache.prune();
    let mut chunks = HashMap::with_capacity(layout.pieces.len());
    let mut missing = Vec::new();
    for piece in &layout.pieces {
        match cache.get(piece) {
            Some(chunk) => {
                chunks.insert(piece.id, chunk);
            }
            None => missing.push(*piece),
        }
    }
    if missing.is_empty() {
        return Ok(Some(chunks));
    }
    for batch in missing.chunks(batch()?) {
        let Some(imported) = fetch((link, driver), gpus, export, layout.generation, batch)? else {
            return Ok(None);
        };
        for (piece, chunk) in batch.iter().zip(imported) {
            cache.put(piece, &chunk);
            chunks.insert(piece.id, chunk);
        }
    }
    Ok(Some(chunks))
}

/// How many descriptors may come at once: half of what this process may still open, and no more than its
/// table of descriptors has room for, if that is a good number. Linux makes a table larger, up to twice at
/// a time from 64 on, behind a grace period of all processors where threads share it: 5 to 20 ms on the
/// machines with H200s, as long as all else of an import takes.
fn batch() -> Result<usize, ShareError> {
    let limit = descriptor_limit();
    let open = open_descriptors();
    match (limit.saturating_sub(open) / 2).min(DESCRIPTORS_MAX) {
        0 => Err(ShareError::TooLarge {
            step: STEP,
            what: "open descriptors",
            value: open as u64 + 2,
            max: limit as u64,
        }),
        most => Ok(most.min(room_in_table(open))),
    }
}

/// What fits beside `open` descriptors without a larger table; more than will come, if that is too few to
/// be worth the questions.
fn room_in_table(open: usize) -> usize {
    const TABLE_MIN: usize = 64;
    const WORTH_A_QUESTION: usize = 8;
    let table = (open + 1).next_power_of_two().max(TABLE_MIN);
    match table - open - 1 {
        few if few < WORTH_A_QUESTION => usize::MAX,
        room => room,
    }
}

fn fetch(
    (link, driver): (&Link, &Arc<dyn Driver>),
    gpus: &Gpus,
    export: u64,
    generation: u64,
    batch: &[PieceEntry],
) -> Result<Option<Vec<Arc<Chunk>>>, ShareError> {
    let ids: Vec<u64> = batch.iter().map(|piece| piece.id).collect();
    let question = Message::Fetch { export, generation, pieces: ids.clone() };
    let (pieces, descriptors) = match link.ask(STEP, question, batch.len()) {
        Ok((Message::Pieces { generation: theirs, pieces }, descriptors))
            if theirs == generation =>
        {
            (pieces, descriptors)
        }
        Ok((other, _)) => return Err(link.unexpected(STEP, "pieces of that generation", &other)),
        Err(ShareError::Refused { reason: Refusal::Changed, .. }) => return Ok(None),
        Err(error) => return Err(error),
    };
    if pieces != ids || descriptors.len() != ids.len() {
        let got = format!("{} pieces and {} descriptors", pieces.len(), descriptors.len());
        return Err(link.wrong(STEP, "the pieces that were asked for, a descriptor each", got));
    }
    step!("importer-received");
    let chunks = batch.iter().zip(descriptors).map(|(piece, descriptor)| {
        let props = gpus.props(piece.home)?;
        let chunk = Chunk::import_fd(driver, descriptor.as_fd(), piece.bytes, &props);
        Ok(Arc::new(chunk.at("importing a piece")?))
    });
    let chunks = chunks.collect::<Result<Vec<_>, ShareError>>()?;
    step!("importer-imported");
    Ok(Some(chunks))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_fits_into_the_table_or_is_worth_a_larger_one() {
        for (open, room) in [(0, 63), (41, 22), (55, 8), (56, usize::MAX), (63, usize::MAX)] {
            assert_eq!(room_in_table(open), room, "{open} open");
        }
        assert_eq!((room_in_table(64), room_in_table(100)), (63, 27));
    }
}
