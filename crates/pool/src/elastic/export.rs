//! Descriptors of pieces, for other processes.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use vmm_sys::Driver;

use super::stats::Piece;
use super::{ElasticBuffer, ElasticError};
use crate::error::Error;
use crate::turn::Turn;

impl ElasticBuffer {
    /// Descriptors of the pieces, for other processes; each keeps its memory taken until it is
    /// closed. Slow, 0.6 ms a piece: make them once and keep them while the generation stays. A
    /// shared chunk has one for each of its addresses.
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
        if !self.is_exportable() {
            return Err(ElasticError::NotExportable.into());
        }
        // Nobody changes the memory meanwhile.
        let operation = self.body.operate()?;
        operation.check_mended()?;
        let state = self.body.state();
        let mappings = state.pieces.values().filter_map(|it| it.mapping());
        let chunks: Vec<_> = mappings.map(|mapping| mapping.chunk().clone()).collect();
        drop(state);
        let pieces = self.pieces().into_iter().zip(chunks);
        let exported = pieces
            .filter(|(piece, _)| range.contains(&piece.offset))
            .map(|(piece, chunk)| Ok((piece, Turn::Requester.with(|| chunk.export_fd())?)))
            .collect();
        drop(operation);
        exported
    }

    /// Whether its chunks can be exported to other processes: fixed when it was built.
    pub fn is_exportable(&self) -> bool {
        self.body.shape.exportable
    }

    /// The driver that its memory comes from.
    pub fn driver(&self) -> &Arc<dyn Driver> {
        self.body.range.driver()
    }
}
