//! Copies and fills: checked when they are enqueued (rows D-M5, D-A4, D-A5, D-A8), done when their
//! turn comes.
//!
//! The check is the host's: a wrong copy is refused and nothing is broken. What is mapped when the
//! turn comes is what is copied, and if nothing is, or not with access, that is a fault of the
//! device like a kernel's. Host memory is read and written when the turn comes too, as with
//! page-locked memory; the real driver stages pageable memory earlier.

use std::io;
use std::sync::Arc;

use super::Sim;
use super::answer::{Answer, Refused};
use super::graphs::{Node, Side};
use super::regions::{Piece, Place};
use super::state::State;
use super::timeline::Op;
use crate::call::Call;
use crate::error::DriverResult;
use crate::types::{DeviceId, StreamHandle, Transfer};

/// What is moved at a time through host memory.
const BOUNCE_BYTES: u64 = 256 << 10;

fn node_of(device: DeviceId, transfer: &Transfer) -> Node {
    let through = |address, via| Side::Device { address, via };
    match *transfer {
        Transfer::HostToDevice { dst, src, bytes } => Node::Copy {
            dst: through(dst, device),
            src: Side::Host { address: src.expose_provenance() as u64 },
            bytes,
            staged: None,
        },
        Transfer::DeviceToHost { dst, src, bytes } => Node::Copy {
            dst: Side::Host { address: dst.expose_provenance() as u64 },
            src: through(src, device),
            bytes,
            staged: None,
        },
        Transfer::DeviceToDevice { dst, src, bytes } => {
            Node::Copy { dst: through(dst, device), src: through(src, device), bytes, staged: None }
        }
        Transfer::Peer { dst, dst_device, src, src_device, bytes } => Node::Copy {
            dst: through(dst, dst_device),
            src: through(src, src_device),
            bytes,
            staged: None,
        },
        Transfer::Fill8 { dst, value, bytes } => {
            Node::Fill { dst, via: device, pattern: [value; 4], bytes }
        }
    }
}

fn call_of(transfer: &Transfer, on_stream: bool) -> Call {
    match (transfer, on_stream) {
        (Transfer::HostToDevice { .. }, false) => Call::MemcpyHtoD,
        (Transfer::HostToDevice { .. }, true) => Call::MemcpyHtoDAsync,
        (Transfer::DeviceToHost { .. }, false) => Call::MemcpyDtoH,
        (Transfer::DeviceToHost { .. }, true) => Call::MemcpyDtoHAsync,
        (Transfer::DeviceToDevice { .. }, false) => Call::MemcpyDtoD,
        (Transfer::DeviceToDevice { .. }, true) => Call::MemcpyDtoDAsync,
        (Transfer::Peer { .. }, false) => Call::MemcpyPeer,
        (Transfer::Peer { .. }, true) => Call::MemcpyPeerAsync,
        (Transfer::Fill8 { .. }, false) => Call::MemsetD8,
        (Transfer::Fill8 { .. }, true) => Call::MemsetD8Async,
    }
}

impl Sim {
    /// Returns when the bytes are there. A refused copy has copied nothing.
    pub(super) fn do_copy(&self, device: DeviceId, transfer: &Transfer) -> DriverResult<()> {
        self.call_on(call_of(transfer, false), device, |state| {
            state.refuse_unsafe_in_capture()?;
            // The legacy stream, so that per-thread streams are ordered with it.
            let stream = state.stream(device, StreamHandle::LEGACY)?;
            state.enqueue_transfer(device, node_of(device, transfer), stream)?;
            self.drain_stream(state, stream)?;
            state.report_fault(device)
        })
    }

    /// Access is checked now; what is mapped when its turn comes is what counts then.
    pub(super) fn do_copy_async(
        &self,
        device: DeviceId,
        transfer: &Transfer,
        stream: StreamHandle,
    ) -> DriverResult<()> {
        self.call_on(call_of(transfer, true), device, |state| {
            let stream = state.stream(device, stream)?;
            state.enqueue_transfer(device, node_of(device, transfer), stream)
        })
    }

    /// `cuMemcpyHtoDAsync` from pageable memory: the bytes are read now, as the real driver stages
    /// them, so `src` may change or go as soon as the call returns.
    ///
    /// # Errors
    /// As [`crate::Driver::copy_async`].
    pub fn upload_staged(
        &self,
        device: DeviceId,
        dst: u64,
        src: &[u8],
        stream: StreamHandle,
    ) -> DriverResult<()> {
        self.call_on(Call::MemcpyHtoDAsync, device, |state| {
            let stream = state.stream(device, stream)?;
            let staged: Arc<[u8]> = src.into();
            let transfer =
                Transfer::HostToDevice { dst, src: staged.as_ptr(), bytes: staged.len() as u64 };
            let mut node = node_of(device, &transfer);
            if let Node::Copy { staged: kept, .. } = &mut node {
                *kept = Some(staged);
            }
            state.enqueue_transfer(device, node, stream)
        })
    }

    /// `cuMemsetD8`, `cuMemsetD16` or `cuMemsetD32`, on a stream or (`None`) synchronous: writes
    /// `pattern` again and again, beginning with its first byte at `dst`. Booked as `cuMemsetD8`.
    ///
    /// # Errors
    /// As [`crate::Driver::copy`] and [`crate::Driver::copy_async`].
    pub fn fill_pattern(
        &self,
        device: DeviceId,
        dst: u64,
        pattern: [u8; 4],
        bytes: u64,
        stream: Option<StreamHandle>,
    ) -> DriverResult<()> {
        let node = Node::Fill { dst, via: device, pattern, bytes };
        let Some(stream) = stream else {
            return self.call_on(Call::MemsetD8, device, |state| {
                state.refuse_unsafe_in_capture()?;
                let stream = state.stream(device, StreamHandle::LEGACY)?;
                state.enqueue_transfer(device, node, stream)?;
                self.drain_stream(state, stream)?;
                state.report_fault(device)
            });
        };
        self.call_on(Call::MemsetD8Async, device, |state| {
            let stream = state.stream(device, stream)?;
            state.enqueue_transfer(device, node, stream)
        })
    }
}

impl State {
    /// Each side is reached through its own device's context.
    fn enqueue_transfer(&mut self, device: DeviceId, node: Node, stream: u64) -> Answer<()> {
        if let Node::Copy { dst, src, .. } = &node {
            for side in [dst, src] {
                if let Side::Device { via, .. } = side
                    && *via != device
                {
                    self.enter_context(*via)?;
                }
            }
        }
        if let Err(error) = self.touch(&node) {
            return Err(Refused::invalid_value(error));
        }
        self.submit(stream, Op::Work(node))
    }

    /// Does a copy or a fill whose pieces were looked up.
    pub(super) fn run_transfer(&mut self, node: &Node, pieces: &[Vec<Piece>]) -> io::Result<()> {
        match *node {
            Node::Copy { dst, src, bytes, .. } => {
                let mut found = pieces.iter().cloned();
                let mut side = |side: Side| match side {
                    Side::Device { .. } => found.next().unwrap_or_default(),
                    Side::Host { address } => {
                        vec![Piece { region: 0, place: Place::Host { address }, bytes }]
                    }
                };
                // In the order of `Node::spans`.
                let (src, dst) = (side(src), side(dst));
                self.copy_pieces(&dst, &src)
            }
            Node::Fill { pattern, .. } => {
                pieces.iter().flatten().try_for_each(|piece| match pattern == [pattern[0]; 4] {
                    true => self.fill_place(piece.place, 0, piece.bytes, pattern[0]),
                    false => self.fill_piece(piece, pattern),
                })
            }
            Node::Kernel { .. } | Node::Bytes { .. } => Ok(()),
        }
    }

    /// Borders of pieces are multiples of 4 bytes from the start of a fill, as it is aligned.
    fn fill_piece(&mut self, piece: &Piece, pattern: [u8; 4]) -> io::Result<()> {
        let batch = pattern.repeat(BOUNCE_BYTES as usize / 4);
        let mut done = 0;
        while done < piece.bytes {
            let part = (piece.bytes - done).min(BOUNCE_BYTES);
            self.write_place(piece.place, done, &batch[..part as usize])?;
            done += part;
        }
        Ok(())
    }

    /// Copies between two lists of pieces of the same length in all.
    pub(super) fn copy_pieces(&mut self, dst: &[Piece], src: &[Piece]) -> io::Result<()> {
        let mut bounce = Vec::new();
        let (mut to, mut from) = (dst.iter().peekable(), src.iter().peekable());
        let (mut written, mut read) = (0, 0);
        while let (Some(into), Some(out)) = (to.peek(), from.peek()) {
            let mut part = (into.bytes - written).min(out.bytes - read);
            if self.place_untouched(out.place, read, part) {
                self.fill_place(into.place, written, part, 0)?;
            } else {
                part = part.min(BOUNCE_BYTES);
                bounce.resize(part as usize, 0);
                self.read_place(out.place, read, &mut bounce)?;
                self.write_place(into.place, written, &bounce)?;
            }
            written += part;
            read += part;
            if written == into.bytes {
                to.next();
                written = 0;
            }
            if read == out.bytes {
                from.next();
                read = 0;
            }
        }
        Ok(())
    }
}
