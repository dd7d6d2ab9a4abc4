//! Moving memory to the neighbour, under the same addresses, while the stream that uses it is held.
//!
//! Chunks on the neighbour are made ahead and mapped aside; the link of the pair is up. Bytes are
//! checked after each move.

use std::cell::Cell;
use std::sync::Arc;

use vmm_pool_cli::replay::Cause;
use vmm_sys::object::{Chunk, Event, Mapping, Range, Stream};
use vmm_sys::{AccessGrant, ChunkProps, DeviceId};

use super::ground::{map_all, unmap_all};
use super::held::HeldStream;
use super::pooled::PoolMove;
use super::row::in_words;
use super::{Anchor, Case, Ground, Rows};
use crate::gpu::{self, Area};
use crate::timed::{Parts, Run, in_turns};

/// The reference of all others.
const WHOLE: &str = "bare: one copy";

/// Moves `bytes`, once in chunks of each length.
///
/// # Errors
/// The driver's; a length that does not divide `bytes`; bytes that are wrong after a move.
pub fn measure(
    ground: &Ground,
    peer: DeviceId,
    bytes: u64,
    chunks: &[u64],
    repetitions: u32,
) -> Result<Rows, Cause> {
    let mut rows = Rows::of_work(ground, "move", repetitions);
    for &chunk_bytes in chunks {
        if chunk_bytes == 0 || !bytes.is_multiple_of(chunk_bytes) {
            let (bytes, chunk) = (in_words(bytes), in_words(chunk_bytes));
            return Err(format!("{bytes} are no whole number of chunks of {chunk}").into());
        }
        let case = Case::in_chunks(bytes, chunk_bytes);
        let scene = Scene::new(ground, peer, &case)?;
        let pool = PoolMove::new(ground, peer, &case)?;
        let sides: Vec<Run<'_>> = vec![
            Box::new(|| scene.bare_copy(WHOLE, bytes)),
            Box::new(|| scene.bare_copy("bare: copies by the chunk", chunk_bytes)),
            Box::new(|| scene.naive_swap()),
            Box::new(|| pool.there()),
        ];
        let found = in_turns(repetitions, sides)?;
        rows.add(&case, found, |side| (side != WHOLE).then_some(WHOLE))?;
    }
    Ok(rows)
}

/// Chunks of both devices, and addresses for them.
struct Scene<'g> {
    ground: &'g Ground,
    /// Before the ranges and chunks, so that its stream is waited for first.
    user: HeldStream,
    mover: Stream,
    chunk_bytes: u64,
    grants: [AccessGrant; 2],
    /// Where the memory is used.
    at: Range,
    /// Where the destination is mapped ahead.
    aside: Range,
    here: Vec<Arc<Chunk>>,
    there: Vec<Arc<Chunk>>,
    /// What the memory holds in this repetition.
    value: Cell<u8>,
    _anchors: [Anchor; 2],
}

/// Both sides of a move, mapped.
struct Laid {
    here: Vec<Mapping>,
    there: Vec<Mapping>,
}

impl Scene<'_> {
    fn new<'g>(ground: &'g Ground, peer: DeviceId, case: &Case) -> Result<Scene<'g>, Cause> {
        let home = ground.home();
        let (bytes, chunk_bytes) = (case.bytes, case.chunk_bytes);
        let chunks = |device| ground.chunks(&ChunkProps::on_device(device), bytes, chunk_bytes);
        Ok(Scene {
            ground,
            user: HeldStream::new(ground)?,
            mover: ground.stream()?,
            chunk_bytes,
            grants: [home, peer].map(AccessGrant::read_write),
            at: ground.range(bytes, chunk_bytes)?,
            aside: ground.range(bytes, chunk_bytes)?,
            here: chunks(home)?,
            there: chunks(peer)?,
            value: Cell::new(0),
            _anchors: [Anchor::new(ground, home, peer)?, Anchor::new(ground, peer, home)?],
        })
    }

    /// Maps both sides, and fills the memory with what no repetition before had.
    fn lay(&self) -> Result<Laid, Cause> {
        let here = map_all(&self.at, &self.here, &self.grants)?;
        let there = map_all(&self.aside, &self.there, &self.grants)?;
        let value = self.value.get().wrapping_add(1);
        self.value.set(value);
        gpu::fill(&self.mover, Area::of_range(&self.at), value)?;
        self.mover.synchronize()?;
        Ok(Laid { here, there })
    }

    /// The first and the last byte of each chunk must be those of this repetition.
    fn check(&self, range: &Range) -> Result<(), Cause> {
        for index in 0..range.bytes() / self.chunk_bytes {
            let start = index * self.chunk_bytes;
            for offset in [start, start + self.chunk_bytes - 1] {
                let mut byte = [0];
                range.read(self.ground.home(), offset, &mut byte)?;
                if byte[0] != self.value.get() {
                    return Err(format!("after a move, byte {offset} is wrong").into());
                }
            }
        }
        Ok(())
    }

    /// Enqueues copies of the memory to what is mapped aside, in pieces, and an event behind them.
    fn copy(&self, piece_bytes: u64, copied: &Event) -> Result<(), Cause> {
        let (dst, src) = (Area::of_range(&self.aside), Area::of_range(&self.at));
        for index in 0..src.bytes() / piece_bytes {
            let offset = index * piece_bytes;
            let (dst, src) = (dst.part(offset, piece_bytes)?, src.part(offset, piece_bytes)?);
            gpu::copy(&self.mover, dst, src)?;
        }
        Ok(copied.record(&self.mover)?)
    }

    fn bare_copy(&self, name: &'static str, piece_bytes: u64) -> Result<Parts, Cause> {
        let laid = self.lay()?;
        let copied = self.ground.event()?;
        let ((), took) = self.ground.timed(|| {
            self.copy(piece_bytes, &copied)?;
            Ok(copied.wait()?)
        })?;
        self.check(&self.aside)?;
        unmap_all(laid.here)?;
        unmap_all(laid.there)?;
        Ok(vec![(name, took)])
    }

    /// What a program without a pool would do: hold the stream, copy everything, exchange chunk by
    /// chunk, let go.
    fn naive_swap(&self) -> Result<Parts, Cause> {
        let laid = self.lay()?;
        let event = || self.ground.event();
        let (before, copied, after) = (event()?, event()?, event()?);
        let hold = self.user.ready();
        let ground = self.ground;
        let ((copying, swapping, moved), held) = ground.timed(|| {
            before.record(hold.stream())?;
            hold.close()?;
            after.record(hold.stream())?;
            let ((), copying) = ground.timed(|| {
                self.mover.wait_event(&before)?;
                self.copy(self.chunk_bytes, &copied)?;
                Ok(copied.wait()?)
            })?;
            let (moved, swapping) = ground.timed(|| self.exchange(laid.here))?;
            hold.open();
            after.wait()?;
            Ok((copying, swapping, moved))
        })?;
        hold.end()?;
        let ((), retiring) = ground.timed(|| unmap_all(laid.there))?;
        self.check(&self.at)?;
        unmap_all(moved)?;
        Ok(vec![
            ("naive swap: the stream is held", held),
            ("naive swap: of it copying", copying),
            ("naive swap: of it exchanging", swapping),
            ("naive swap: unmapping afterwards", retiring),
        ])
    }

    /// Puts the neighbour's chunks where the home's stood.
    fn exchange(&self, standing: Vec<Mapping>) -> Result<Vec<Mapping>, Cause> {
        let mut moved = Vec::with_capacity(standing.len());
        let mut offset = 0;
        for (old, chunk) in standing.into_iter().zip(&self.there) {
            // The chunk of the home stays with the scene: giving memory back is no part of it.
            old.unmap().map_err(|(_, error)| error)?;
            let mapping = Mapping::map(&self.at, offset, chunk.clone())?;
            offset += mapping.bytes();
            mapping.set_access(&self.grants)?;
            moved.push(mapping);
        }
        Ok(moved)
    }
}
