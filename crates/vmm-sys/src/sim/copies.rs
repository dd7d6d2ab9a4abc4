//! Copies and fills: checked when they are enqueued (rows D-M5, D-A4, D-A5, D-A8), done when their
//! turn comes.
//!
//! The check is the host's: a wrong copy is refused and nothing is broken. What is mapped when the
//! turn comes is what is copied, and if nothing is, or not with access, that is a fault of the
//! device like a kernel's. Host memory is read and written when the turn comes too, as with
//! page-locked memory; the real driver stages pageable memory earlier.

use std::io;

use super::answer::{Answer, Refused};
use super::graphs::{Node, Side};
use super::regions::{Piece, Place};
use super::state::State;
use super::timeline::Op;
use super::{Locked, Sim};
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
        },
        Transfer::DeviceToHost { dst, src, bytes } => Node::Copy {
            dst: Side::Host { address: dst.expose_provenance() as u64 },
            src: through(src, device),
            bytes,
        },
        Transfer::DeviceToDevice { dst, src, bytes } => {
            Node::Copy { dst: through(dst, device), src: through(src, device), bytes }
        }
        Transfer::Peer { dst, dst_device, src, src_device, bytes } => {
            Node::Copy { dst: through(dst, dst_device), src: through(src, src_device), bytes }
        }
        Transfer::Fill8 { dst, value, bytes } => Node::Fill { dst, via: device, value, bytes },
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
            Self::enqueue_transfer(state, device, transfer, stream)?;
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
            Self::enqueue_transfer(state, device, transfer, stream)
        })
    }

    fn enqueue_transfer(
        state: &mut Locked<'_>,
        device: DeviceId,
        transfer: &Transfer,
        stream: u64,
    ) -> Answer<()> {
        if let Transfer::Peer { dst_device, src_device, .. } = transfer {
            state.enter_context(*dst_device)?;
            state.enter_context(*src_device)?;
        }
        let node = node_of(device, transfer);
        if let Err(error) = state.touch(&node) {
            return Err(Refused::invalid_value(error));
        }
        state.submit(stream, Op::Work(node))
    }
}

impl State {
    /// Does a copy or a fill whose pieces were looked up.
    pub(super) fn run_transfer(&mut self, node: &Node, pieces: &[Vec<Piece>]) -> io::Result<()> {
        match *node {
            Node::Copy { dst, src, bytes } => {
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
            Node::Fill { value, .. } => pieces
                .iter()
                .flatten()
                .try_for_each(|piece| self.fill_place(piece.place, 0, piece.bytes, value)),
            Node::Kernel { .. } => Ok(()),
        }
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
