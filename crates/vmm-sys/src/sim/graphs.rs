//! Work on memory as data: what copies, fills and kernels touch and how long they take. Queues
//! run it once, graphs again and again, against whatever is mapped at its addresses at that time
//! (row D-V1).

use std::sync::Arc;

use super::builder::Link;
use super::byte_kernel::ByteKernel;
use super::costs::work::{self, Distance};
use super::regions::{Backing, Piece, Place, Touch, TouchError};
use super::state::State;
use crate::types::{DeviceId, Location, ProbeKernel};

/// One side of a copy.
#[derive(Clone, Copy, Debug)]
pub(super) enum Side {
    /// A device address, reached through a device's context.
    Device { address: u64, via: DeviceId },
    /// Memory of this process.
    Host { address: u64 },
}

/// A copy, a fill or a kernel.
#[derive(Clone, Debug)]
pub(super) enum Node {
    /// `staged` keeps the host side's bytes, where that is a copy of the caller's memory.
    Copy {
        dst: Side,
        src: Side,
        bytes: u64,
        staged: Option<Arc<[u8]>>,
    },
    /// `pattern` again and again, beginning with its first byte at `dst`.
    Fill {
        dst: u64,
        via: DeviceId,
        pattern: [u8; 4],
        bytes: u64,
    },
    Kernel {
        kernel: ProbeKernel,
        device: DeviceId,
    },
    Bytes {
        kernel: ByteKernel,
        device: DeviceId,
    },
}

/// A captured graph: nodes in an order that respects what they wait for.
#[derive(Debug)]
pub(super) struct Graph {
    pub(super) nodes: Vec<Node>,
}

/// One stretch of addresses that a node touches.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    pub(super) address: u64,
    pub(super) bytes: u64,
    pub(super) touch: Touch,
}

impl Side {
    /// The device addresses of a side, if it has some.
    fn span(self, bytes: u64, write: bool) -> Option<Span> {
        match self {
            Side::Device { address, via } => {
                Some(Span { address, bytes, touch: Touch { device: via, write, copy: true } })
            }
            Side::Host { .. } => None,
        }
    }
}

impl Node {
    /// The device addresses touched: what is read before what is written.
    pub(super) fn spans(&self) -> Vec<Span> {
        match *self {
            Node::Copy { dst, src, bytes, .. } => {
                src.span(bytes, false).into_iter().chain(dst.span(bytes, true)).collect()
            }
            Node::Fill { dst, via, bytes, .. } => {
                let touch = Touch { device: via, write: true, copy: true };
                vec![Span { address: dst, bytes, touch }]
            }
            Node::Kernel { kernel, device } => kernel_spans(kernel, device),
            Node::Bytes { ref kernel, device } => kernel.touched_by(device),
        }
    }

    /// Whether the node touches memory only as it ends (a spinning kernel does).
    pub(super) fn touches_at_end_only(&self) -> bool {
        matches!(self, Node::Kernel { kernel: ProbeKernel::Spin { .. }, .. })
    }
}

/// In the order in which `run_kernel` expects the pieces.
fn kernel_spans(kernel: ProbeKernel, device: DeviceId) -> Vec<Span> {
    let span = |address, words: u64, write| Span {
        address,
        bytes: words.saturating_mul(4),
        touch: Touch { device, write, copy: false },
    };
    match kernel {
        ProbeKernel::FillWords { dst, words, .. } => vec![span(dst, words, true)],
        ProbeKernel::CopyWords { dst, src, words } => {
            vec![span(src, words, false), span(dst, words, true)]
        }
        ProbeKernel::CheckWords { src, words, errors, .. } => {
            // The counter is added to atomically: read and written.
            vec![span(src, words, false), span(errors, 1, true)]
        }
        ProbeKernel::Spin { done: 0, .. } => Vec::new(),
        ProbeKernel::Spin { done, .. } => vec![span(done, 1, true)],
    }
}

impl State {
    /// All the pieces of a node, or the first address that it must not touch.
    pub(super) fn touch(&self, node: &Node) -> Result<Vec<Vec<Piece>>, TouchError> {
        node.spans().iter().map(|span| self.pieces(span.address, span.bytes, span.touch)).collect()
    }

    /// How long a node takes on the GPU, in nanoseconds.
    pub(super) fn node_ns(&self, node: &Node) -> u64 {
        match *node {
            Node::Copy { dst, src, bytes, .. } => {
                work::copy_ns(self.side_distance(dst, src), bytes)
            }
            Node::Fill { dst, via, bytes, .. } => {
                work::kernel_write_ns(self.distance(via, dst), bytes)
            }
            Node::Kernel { kernel, device } => self.kernel_ns(kernel, device),
            Node::Bytes { ref kernel, device } => {
                let of_span = |span: Span| match span.touch.write {
                    true => work::kernel_write_ns(self.distance(device, span.address), span.bytes),
                    false => work::kernel_read_ns(self.distance(device, span.address), span.bytes),
                };
                kernel.touched_by(device).into_iter().map(of_span).sum()
            }
        }
    }

    /// What the measured bandwidths say.
    fn kernel_ns(&self, kernel: ProbeKernel, device: DeviceId) -> u64 {
        let read = |at, words: u64| work::kernel_read_ns(self.distance(device, at), words * 4);
        let write = |at, words: u64| work::kernel_write_ns(self.distance(device, at), words * 4);
        match kernel {
            ProbeKernel::FillWords { dst, words, .. } => write(dst, words),
            ProbeKernel::CopyWords { dst, src, words } => read(src, words) + write(dst, words),
            ProbeKernel::CheckWords { src, words, .. } => read(src, words),
            ProbeKernel::Spin { busy_us, .. } => busy_us.saturating_mul(1000),
        }
    }

    /// Where an address is, seen from a device. The first chunk of a span stands for all of it.
    fn distance(&self, device: DeviceId, address: u64) -> Distance {
        let home = match self.region_at(address).map(|(_, region)| region.backing) {
            Some(Backing::Chunk { physical, .. } | Backing::Legacy { physical, .. }) => {
                self.physical[physical].props.location
            }
            Some(Backing::Pinned) => Location::Host,
            None => Location::Device(device),
        };
        match home {
            Location::Host | Location::HostNuma(_) => Distance::Host,
            Location::Device(owner) if owner == device => Distance::Local,
            Location::Device(owner) => match self.config.link(device, owner) {
                Link::NvLink => Distance::Neighbour,
                Link::Pcie | Link::None => Distance::NeighbourOverPcie,
            },
        }
    }

    /// A copy is as slow as its farther side.
    fn side_distance(&self, dst: Side, src: Side) -> Distance {
        let (Side::Device { address: to, via }, Side::Device { address: from, .. }) = (dst, src)
        else {
            return Distance::Host;
        };
        let home = |address| match self.distance(via, address) {
            Distance::Local => None,
            other => Some(other),
        };
        home(from).or_else(|| home(to)).unwrap_or(Distance::Local)
    }

    /// The ids of the regions in a list of pieces.
    pub(super) fn region_ids(pieces: &[Vec<Piece>]) -> Vec<u64> {
        pieces.iter().flatten().map(|piece| piece.region).collect()
    }

    /// Reads from a place.
    pub(super) fn read_place(
        &self,
        place: Place,
        skip: u64,
        into: &mut [u8],
    ) -> std::io::Result<()> {
        match place {
            Place::Physical { index, offset } => {
                self.physical[index].store.read(offset + skip, into)
            }
            Place::Host { address } => {
                let from = std::ptr::with_exposed_provenance::<u8>((address + skip) as usize);
                // SAFETY: host places come from page-locked memory that this driver allocated and
                // has not freed, or from a caller who promised `into.len()` readable bytes there
                // until the copy has run (`Driver::copy_async`).
                unsafe { std::ptr::copy(from, into.as_mut_ptr(), into.len()) };
                Ok(())
            }
        }
    }

    /// Writes to a place.
    pub(super) fn write_place(
        &mut self,
        place: Place,
        skip: u64,
        from: &[u8],
    ) -> std::io::Result<()> {
        match place {
            Place::Physical { index, offset } => {
                self.physical[index].store.write(offset + skip, from)
            }
            Place::Host { address } => {
                let into = std::ptr::with_exposed_provenance_mut::<u8>((address + skip) as usize);
                // SAFETY: as in `read_place`, with writable bytes.
                unsafe { std::ptr::copy(from.as_ptr(), into, from.len()) };
                Ok(())
            }
        }
    }

    /// Fills a place with one value.
    pub(super) fn fill_place(
        &mut self,
        place: Place,
        skip: u64,
        bytes: u64,
        value: u8,
    ) -> std::io::Result<()> {
        match place {
            Place::Physical { index, offset } => {
                self.physical[index].store.fill(offset + skip, bytes, value)
            }
            Place::Host { address } => {
                let into = std::ptr::with_exposed_provenance_mut::<u8>((address + skip) as usize);
                // SAFETY: as in `write_place`.
                unsafe { std::ptr::write_bytes(into, value, bytes as usize) };
                Ok(())
            }
        }
    }

    /// Whether a place is known to be zero without reading it.
    pub(super) fn place_untouched(&self, place: Place, skip: u64, bytes: u64) -> bool {
        match place {
            Place::Physical { index, offset } => {
                self.physical[index].store.untouched(offset + skip, bytes)
            }
            Place::Host { .. } => false,
        }
    }
}
