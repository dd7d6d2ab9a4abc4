//! The probe kernels, known by name.

use std::io;

use super::Sim;
use super::graphs::Node;
use super::regions::Piece;
use super::state::State;
use super::timeline::Op;
use crate::call::Call;
use crate::error::DriverResult;
use crate::types::{DeviceId, ProbeKernel, StreamHandle};

/// Words handled at a time.
const BATCH_WORDS: u64 = 64 << 10;

impl Sim {
    /// On a stream of the device's own.
    pub(super) fn do_launch(
        &self,
        device: DeviceId,
        kernel: &ProbeKernel,
        stream: StreamHandle,
    ) -> DriverResult<()> {
        let kernel = *kernel;
        self.call_on(Call::LaunchKernel, device, |state| {
            let stream = state.own_stream(device, stream)?;
            // Nothing is checked now: a kernel finds out when it runs (row D-M6).
            state.submit(stream, Op::Work(Node::Kernel { kernel, device }))
        })
    }
}

impl State {
    /// Runs a kernel whose pieces were looked up in the order of `Node::spans`.
    pub(super) fn run_kernel(
        &mut self,
        kernel: ProbeKernel,
        pieces: &[Vec<Piece>],
    ) -> io::Result<()> {
        match (kernel, pieces) {
            (ProbeKernel::FillWords { value, .. }, [dst]) => self.fill_words(dst, value),
            (ProbeKernel::CopyWords { .. }, [src, dst]) => self.copy_pieces(dst, src),
            (ProbeKernel::CheckWords { value, .. }, [src, errors]) => {
                let wrong = self.count_wrong_words(src, value)?;
                let mut word = [0; 4];
                self.read_words(errors, &mut word)?;
                let count = u32::from_le_bytes(word).wrapping_add(wrong);
                self.write_words(errors, &count.to_le_bytes())
            }
            (ProbeKernel::Spin { .. }, [done]) => self.write_words(done, &1_u32.to_le_bytes()),
            _ => Ok(()),
        }
    }

    /// Counts up from a first value.
    fn fill_words(&mut self, dst: &[Piece], first: u32) -> io::Result<()> {
        let mut value = first;
        self.for_each_batch(dst, |state, piece, skip, batch| {
            for word in batch.chunks_exact_mut(4) {
                word.copy_from_slice(&value.to_le_bytes());
                value = value.wrapping_add(1);
            }
            state.write_place(piece.place, skip, batch)
        })
    }

    /// How many words differ from a count up from a first value.
    fn count_wrong_words(&mut self, src: &[Piece], first: u32) -> io::Result<u32> {
        let (mut value, mut wrong) = (first, 0_u32);
        self.for_each_batch(src, |state, piece, skip, batch| {
            state.read_place(piece.place, skip, batch)?;
            for word in batch.chunks_exact(4) {
                let expected = value.to_le_bytes();
                wrong = wrong.wrapping_add(u32::from(word != expected));
                value = value.wrapping_add(1);
            }
            Ok(())
        })?;
        Ok(wrong)
    }

    /// Visits pieces in batches. Borders of pieces are multiples of 4, as mappings and aligned
    /// addresses are.
    fn for_each_batch(
        &mut self,
        pieces: &[Piece],
        mut visit: impl FnMut(&mut State, &Piece, u64, &mut [u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut buffer = Vec::new();
        for piece in pieces {
            let mut skip = 0;
            while skip < piece.bytes {
                let part = (piece.bytes - skip).min(BATCH_WORDS * 4);
                buffer.resize(part as usize, 0);
                visit(self, piece, skip, &mut buffer)?;
                skip += part;
            }
        }
        Ok(())
    }

    /// One word, which lies in one piece as it is aligned.
    fn read_words(&self, pieces: &[Piece], into: &mut [u8]) -> io::Result<()> {
        match pieces {
            [piece] => self.read_place(piece.place, 0, into),
            _ => Ok(()),
        }
    }

    /// As `read_words`.
    fn write_words(&mut self, pieces: &[Piece], from: &[u8]) -> io::Result<()> {
        match pieces {
            [piece] => self.write_place(piece.place, 0, from),
            _ => Ok(()),
        }
    }
}
