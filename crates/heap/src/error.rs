//! The answers that are not a block. Each leaves the heap as it was.

use std::error::Error;
use std::fmt;

/// No free space fits a request: what the large placement would have to serve for it to succeed.
///
/// For a small request that is a whole slab, else the request rounded up to the granule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Miss {
    /// Contiguous bytes needed.
    pub bytes: u64,
    /// Alignment of their start, a power of two; with [`Placement::Buddy`](crate::Placement::Buddy)
    /// it includes the natural alignment that this placement asks for.
    pub align: u64,
}

impl fmt::Display for Miss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no free space of {} bytes aligned to {}", self.bytes, self.align)
    }
}

impl Error for Miss {}

/// A part of the range is used, was never inserted, or lies in a slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NotFree {
    /// Start of the range asked for, in bytes.
    pub offset: u64,
    /// Length of the range asked for, in bytes.
    pub bytes: u64,
}

impl fmt::Display for NotFree {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "[{:#x}, +{:#x}) is not a range of whole granules that is wholly free",
            self.offset, self.bytes
        )
    }
}

impl Error for NotFree {}

/// No live block starts at the offset: an interior offset, a second free, or never handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NotAllocated {
    /// The offset asked for, in bytes.
    pub offset: u64,
}

impl fmt::Display for NotAllocated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no live block starts at offset {:#x}", self.offset)
    }
}

impl Error for NotAllocated {}
