//! Kernels that a program brings along, as functions on bytes.
//!
//! The probe kernels are what the contract has; a program on the stand-in `libcuda` launches kernels
//! of its own. One of these says which stretches of memory it touches and how, and has a function
//! that turns their bytes; when its turn comes the stretches are looked up as a probe kernel's are,
//! all or nothing, and a fault is as sticky.

use std::fmt;
use std::io;
use std::sync::Arc;

use super::Sim;
use super::graphs::{Node, Span};
use super::regions::{Piece, Touch};
use super::state::State;
use super::timeline::Op;
use crate::call::Call;
use crate::error::DriverResult;
use crate::types::{DeviceId, StreamHandle};

/// One stretch of device memory that a [`ByteKernel`] touches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteSpan {
    /// Device address, 4-aligned.
    pub address: u64,
    /// Length.
    pub bytes: u64,
    /// Whether the bytes are written back.
    pub write: bool,
}

impl ByteSpan {
    /// A stretch that is read.
    pub fn read(address: u64, bytes: u64) -> ByteSpan {
        ByteSpan { address, bytes, write: false }
    }

    /// A stretch that is read and written.
    pub fn write(address: u64, bytes: u64) -> ByteSpan {
        ByteSpan { address, bytes, write: true }
    }
}

type Body = dyn Fn(&mut [Vec<u8>]) + Send + Sync;

/// A kernel as a function on the bytes of its stretches, in their order. It runs under the lock of
/// the simulated machine, so it must make no driver call.
#[derive(Clone)]
pub struct ByteKernel {
    spans: Arc<[ByteSpan]>,
    body: Arc<Body>,
}

impl ByteKernel {
    /// A kernel that touches `spans`. Where two of them overlap, what is written last stays.
    pub fn new(
        spans: impl Into<Arc<[ByteSpan]>>,
        body: impl Fn(&mut [Vec<u8>]) + Send + Sync + 'static,
    ) -> ByteKernel {
        ByteKernel { spans: spans.into(), body: Arc::new(body) }
    }

    pub(super) fn touched_by(&self, device: DeviceId) -> Vec<Span> {
        let span = |span: &ByteSpan| Span {
            address: span.address,
            bytes: span.bytes,
            touch: Touch { device, write: span.write, copy: false },
        };
        self.spans.iter().map(span).collect()
    }
}

impl fmt::Debug for ByteKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ByteKernel").field("spans", &self.spans).finish_non_exhaustive()
    }
}

impl Sim {
    /// `cuLaunchKernel` of a kernel of the program's own, on a stream of the device's own.
    ///
    /// # Errors
    /// As [`crate::Driver::launch`]: what it must not touch it finds out when it runs.
    pub fn launch_bytes(
        &self,
        device: DeviceId,
        kernel: ByteKernel,
        stream: StreamHandle,
    ) -> DriverResult<()> {
        self.call_on(Call::LaunchKernel, device, |state| {
            let stream = state.own_stream(device, stream)?;
            state.submit(stream, Op::Work(Node::Bytes { kernel, device }))
        })
    }
}

impl State {
    /// Runs a kernel whose pieces were looked up in the order of its spans.
    pub(super) fn run_byte_kernel(
        &mut self,
        kernel: &ByteKernel,
        pieces: &[Vec<Piece>],
    ) -> io::Result<()> {
        let mut contents = Vec::with_capacity(pieces.len());
        for (span, pieces) in kernel.spans.iter().zip(pieces) {
            let mut bytes = vec![0; span.bytes as usize];
            let mut at = 0;
            for piece in pieces {
                let part = piece.bytes as usize;
                self.read_place(piece.place, 0, &mut bytes[at..at + part])?;
                at += part;
            }
            contents.push(bytes);
        }
        (kernel.body)(&mut contents);
        for ((span, pieces), bytes) in kernel.spans.iter().zip(pieces).zip(&contents) {
            let mut at = 0;
            for piece in pieces.iter().filter(|_| span.write) {
                let part = piece.bytes as usize;
                // A body that shortened its bytes leaves the rest as it was.
                let Some(from) = bytes.get(at..at + part) else { break };
                self.write_place(piece.place, 0, from)?;
                at += part;
            }
        }
        Ok(())
    }
}
