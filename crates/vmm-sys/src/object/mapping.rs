//! [`Mapping`]: a chunk at a place in a range.

use std::mem::ManuallyDrop;
use std::sync::Arc;

use super::drops::{Leftover, give_back_or_keep};
use super::{Chunk, Range, Stream, same_driver};
use crate::call::Call;
use crate::error::{DriverError, DriverResult, ResultCode};
use crate::types::AccessGrant;

/// A chunk mapped at an address. Access is a property of the mapping and starts as none, for the
/// owner too (row D-A6).
///
/// Owns its tie to both sides: the chunk and the range outlive it. One chunk may stand in several
/// mappings (an alias: row D-M4).
#[derive(Debug)]
pub struct Mapping {
    address: u64,
    chunk: Arc<Chunk>,
    range: Range,
}

impl Mapping {
    /// Maps the whole `chunk` at `offset` in `range` (`cuMemMap`).
    ///
    /// # Errors
    /// The driver's: invalid value for a place that is misaligned, outside, or taken (rows D-M2,
    /// D-M3). The chunk is then as before.
    pub fn map(range: &Range, offset: u64, chunk: Arc<Chunk>) -> DriverResult<Mapping> {
        let address = range.address().wrapping_add(offset);
        // SAFETY: `chunk` owns a live reference to its handle.
        unsafe { range.driver().map(address, chunk.bytes(), 0, chunk.handle())? };
        Ok(Mapping { address, chunk, range: range.clone() })
    }

    /// Grants access to the whole mapping (`cuMemSetAccess`).
    ///
    /// # Errors
    /// The driver's; the access is then as before.
    pub fn set_access(&self, grants: &[AccessGrant]) -> DriverResult<()> {
        self.range.driver().set_access(self.address, self.bytes(), grants)
    }

    /// Enqueues a copy of all bytes of `source` to this mapping: see [`Stream::copy`]. Both stay
    /// mapped until it is done, as for any work.
    ///
    /// # Errors
    /// The driver's; invalid value, before any call, if the lengths or the drivers differ.
    pub fn copy_from(&self, source: &Mapping, stream: &Stream) -> DriverResult<()> {
        let drivers = [source.range.driver(), stream.driver()];
        let strange = drivers.iter().any(|it| !same_driver(it, self.range.driver()));
        if strange || source.bytes() != self.bytes() {
            let error = DriverError::new(Call::MemcpyDtoDAsync, ResultCode::INVALID_VALUE);
            return Err(error.because(format_args!(
                "{} bytes at {:#x} to {} bytes at {:#x}, which must be as many, of one driver",
                source.bytes(),
                source.address,
                self.bytes(),
                self.address
            )));
        }
        // SAFETY: both addresses are mapped by this driver for the whole length, as each mapping
        // covers its chunk.
        unsafe { stream.copy(self.address, source.address, self.bytes()) }
    }

    /// Unmaps (`cuMemUnmap`) and gives the chunk back. Does not wait for the GPU: the caller knows
    /// that nothing uses the address any more (row D-U4).
    ///
    /// # Errors
    /// The driver's, with the mapping, which stands as before.
    pub fn unmap(self) -> Result<Arc<Chunk>, (Mapping, DriverError)> {
        if !self.range.driver().is_gone()
            && let Err(error) = self.range.driver().unmap(self.address, self.bytes())
        {
            return Err((self, error));
        }
        let mapping = ManuallyDrop::new(self);
        // SAFETY: `mapping` is never dropped, so each field is moved out exactly once.
        let (chunk, range) =
            unsafe { (std::ptr::read(&mapping.chunk), std::ptr::read(&mapping.range)) };
        drop(range);
        Ok(chunk)
    }

    /// First address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Length in bytes: the chunk's.
    pub fn bytes(&self) -> u64 {
        self.chunk.bytes()
    }

    /// The chunk.
    pub fn chunk(&self) -> &Arc<Chunk> {
        &self.chunk
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        give_back_or_keep(
            self.range.driver(),
            Leftover::Mapping {
                address: self.address,
                bytes: self.bytes(),
                _keeps: (self.chunk.clone(), self.range.clone()),
            },
        );
    }
}
