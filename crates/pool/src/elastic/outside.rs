//! What leaves the process: descriptors of a buffer's memory, for other processes and other drivers.
//!
//! The chunks that are behind one are marked for good: see [`past`].

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use vmm_sys::Driver;
use vmm_sys::object::Chunk;

use super::ElasticBuffer;
use super::error::ElasticError;
use super::operation::Operation;
use super::stats::Piece;
use crate::error::Error;
use crate::past;
use crate::turn::Turn;

/// A descriptor by which RDMA libraries and other drivers reach memory of an elastic buffer. It names
/// the memory and not the address: once the memory behind the address has changed it is of the old one,
/// which stays taken until the descriptor, and whatever was registered with it, is closed.
#[derive(Debug)]
#[non_exhaustive]
pub struct DmaBuf {
    /// Where it begins, from the start of the buffer.
    pub offset: u64,
    /// Its device address.
    pub address: u64,
    /// Its length in bytes.
    pub bytes: u64,
    /// The pieces in it, one behind the other.
    pub pieces: Vec<Piece>,
    /// The buffer's generation when it was made. While that is the buffer's, it is of the memory that
    /// is behind the address.
    pub generation: u64,
    /// The descriptor. It is closed when this is dropped.
    pub descriptor: OwnedFd,
}

impl ElasticBuffer {
    /// Descriptors of the pieces, for other processes; each keeps its memory taken until it is
    /// closed. Slow, 0.6 ms a piece the first time: make them once and keep them while the generation
    /// stays. A shared chunk has one for each of its addresses.
    ///
    /// Memory of which there was a descriptor goes back to the driver when the buffer has no more use
    /// for it, and to nobody else.
    ///
    /// # Errors
    /// [`ElasticError::NotExportable`] unless the buffer was built exportable; the driver's.
    pub fn export_pieces(&self) -> Result<Vec<(Piece, OwnedFd)>, Error> {
        self.export_pieces_in(0..u64::MAX)
    }

    /// As [`ElasticBuffer::export_pieces`], of the pieces that begin in these bytes: a large buffer may
    /// have more pieces than a process may have descriptors.
    ///
    /// # Errors
    /// As [`ElasticBuffer::export_pieces`].
    pub fn export_pieces_in(&self, range: Range<u64>) -> Result<Vec<(Piece, OwnedFd)>, Error> {
        let operation = self.leave()?;
        let all = self.chunks_with_pieces().into_iter();
        let exported =
            all.filter(|(piece, _)| range.contains(&piece.offset)).map(|(piece, chunk)| {
                past::note_outside(&chunk);
                Ok((piece, Turn::Requester.with(|| chunk.export_fd())?))
            });
        let exported = exported.collect();
        drop(operation);
        exported
    }

    /// Dma-bufs of the memory, for RDMA libraries (`ibv_reg_dmabuf_mr`) and other drivers: one for each
    /// run of neighbouring pieces at one place, as long as it can be. Each keeps its memory taken until
    /// it is closed.
    ///
    /// They are good for one generation: whoever holds one closes it in
    /// [`Phase::Before`](crate::Phase::Before) of [`on_backing_change`](ElasticBuffer::on_backing_change)
    /// and makes new ones afterwards. Memory of which there was one goes back to the driver when the
    /// buffer has no more use for it, and to nobody else.
    ///
    /// # Errors
    /// [`ElasticError::NotExportable`] unless the buffer was built exportable; the driver's: not
    /// supported where it makes none, or none of memory of the host.
    pub fn dma_bufs(&self) -> Result<Vec<DmaBuf>, Error> {
        let operation = self.leave()?;
        let generation = self.generation();
        let mut runs: Vec<(Vec<Piece>, Vec<Arc<Chunk>>)> = Vec::new();
        for (piece, chunk) in self.chunks_with_pieces() {
            match runs.last_mut() {
                Some((pieces, chunks)) if pieces.last().is_some_and(|it| it.is_before(&piece)) => {
                    pieces.push(piece);
                    chunks.push(chunk);
                }
                _ => runs.push((vec![piece], vec![chunk])),
            }
        }
        let made = runs.into_iter().map(|(pieces, chunks)| {
            chunks.iter().for_each(|chunk| past::note_outside(chunk));
            let (offset, address) = pieces.first().map_or((0, 0), |it| (it.offset, it.address));
            let bytes = pieces.iter().map(|it| it.bytes).sum();
            let range = &self.body.range;
            let make = || range.dma_buf(self.device(), offset, bytes);
            let descriptor = Turn::Requester.with(make)?;
            Ok(DmaBuf { offset, address, bytes, pieces, generation, descriptor })
        });
        let made = made.collect();
        drop(operation);
        made
    }

    /// Whether its chunks can be exported to other processes: fixed when it was built.
    pub fn is_exportable(&self) -> bool {
        self.body.shape.exportable
    }

    /// The driver that its memory comes from.
    pub fn driver(&self) -> &Arc<dyn Driver> {
        self.body.range.driver()
    }

    /// The right to hand memory out: nobody changes it meanwhile.
    fn leave(&self) -> Result<Operation<'_>, Error> {
        if !self.is_exportable() {
            return Err(ElasticError::NotExportable.into());
        }
        let operation = self.body.operate()?;
        operation.check_mended()?;
        Ok(operation)
    }

    /// The pieces with their chunks.
    fn chunks_with_pieces(&self) -> Vec<(Piece, Arc<Chunk>)> {
        let pieces = self.pieces();
        let state = self.body.state();
        let mappings = state.pieces.values().filter_map(|it| it.mapping());
        let chunks = mappings.map(|mapping| mapping.chunk().clone());
        pieces.into_iter().zip(chunks).collect()
    }
}

impl Piece {
    /// Whether `next` goes on where it ends, at the same place.
    fn is_before(&self, next: &Piece) -> bool {
        self.offset + self.bytes == next.offset && self.place == next.place
    }
}
