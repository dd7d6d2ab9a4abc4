//! [`Request`]: what a caller asks a lane for.

use crate::config::Plan;
use crate::error::Error;

/// The alignment of every buffer that asks for none.
const DEFAULT_ALIGN_BYTES: u64 = 256;

/// A request for memory: length, alignment, and what may be done to serve it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    bytes: u64,
    align_bytes: u64,
    may_wait: bool,
    may_borrow: bool,
}

impl Request {
    /// `bytes` bytes, aligned to 256, waiting for the GPU if nothing else helps.
    #[inline]
    pub fn new(bytes: u64) -> Request {
        let align_bytes = DEFAULT_ALIGN_BYTES;
        Request { bytes, align_bytes, may_wait: true, may_borrow: false }
    }

    /// The address shall be a multiple of `align_bytes`, a power of two of at most the largest
    /// chunk.
    pub fn align(self, align_bytes: u64) -> Request {
        Request { align_bytes, ..self }
    }

    /// Never wait for the GPU.
    pub fn no_wait(self) -> Request {
        Request { may_wait: false, ..self }
    }

    /// If all of the device's own memory does not suffice, a neighbour or the host may help out
    /// ([`crate::PoolBuilder::neighbour`], [`crate::PoolBuilder::host`]): elastic buffers may move there
    /// to make room. The memory of the request itself is the device's.
    pub fn may_borrow(self) -> Request {
        Request { may_borrow: true, ..self }
    }

    /// Length in bytes.
    #[inline]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Alignment in bytes.
    #[inline]
    pub fn align_bytes(&self) -> u64 {
        self.align_bytes
    }

    /// Whether the GPU may be waited for.
    pub fn may_wait(&self) -> bool {
        self.may_wait
    }

    /// Whether a neighbour or the host may help out.
    pub fn can_borrow(&self) -> bool {
        self.may_borrow
    }

    /// The same for another length.
    pub(crate) fn of_bytes(self, bytes: u64) -> Request {
        Request { bytes, ..self }
    }

    /// The same for whole granules of the heap. The length was checked before.
    #[inline]
    pub(crate) fn in_granules(self) -> Request {
        Request { bytes: self.bytes.next_multiple_of(vmm_heap::GRANULE_BYTES), ..self }
    }

    /// Refuses what could never be served, before anything is touched.
    #[inline]
    pub(crate) fn check(&self, plan: &Plan) -> Result<(), Error> {
        if self.bytes > plan.request_max_bytes {
            return Err(Error::TooLarge { bytes: self.bytes, max_bytes: plan.request_max_bytes });
        }
        if !self.align_bytes.is_power_of_two() || self.align_bytes > plan.align_max_bytes {
            return Err(Error::BadAlignment {
                align_bytes: self.align_bytes,
                max_bytes: plan.align_max_bytes,
            });
        }
        Ok(())
    }
}
