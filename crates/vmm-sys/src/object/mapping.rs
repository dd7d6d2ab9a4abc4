//! [`Mapping`]: a chunk at a place in a range.

use std::mem::ManuallyDrop;
use std::sync::Arc;

use super::drops::{Leftover, give_back_or_keep};
use super::{Chunk, Range, Stream, same_driver};
use crate::call::Call;
use crate::caught::caught;
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
        let map = || unsafe { range.driver().map(address, chunk.bytes(), 0, chunk.handle()) };
        caught(Call::MemMap, map)?;
        Ok(Mapping { address, chunk, range: range.clone() })
    }

    /// Grants access to the whole mapping (`cuMemSetAccess`).
    ///
    /// # Errors
    /// The driver's; the access is then as before.
    pub fn set_access(&self, grants: &[AccessGrant]) -> DriverResult<()> {
        let set = || self.range.driver().set_access(self.address, self.bytes(), grants);
        caught(Call::MemSetAccess, set)
    }

    /// Enqueues a copy of all bytes of `source` to this mapping, by the engines of the stream's device:
    /// see [`Stream::copy`]. Both stay mapped until it is done, as for any work.
    ///
    /// # Errors
    /// The driver's; invalid value, before any call, if the lengths or the drivers differ.
    pub fn copy_from(&self, source: &Mapping, stream: &Stream) -> DriverResult<()> {
        self.check_copy(source, stream)?;
        // SAFETY: both addresses are mapped by this driver for the whole length, as each mapping
        // covers its chunk.
        unsafe { stream.copy(self.address, source.address, self.bytes()) }
    }

    /// The same by a kernel of the stream's device: a little slower, but mapping calls do not wait
    /// for it (docs/DRIVER.md). An address without access faults the context (row D-M6) instead of
    /// being refused.
    ///
    /// # Errors
    /// As [`Mapping::copy_from`]; that this driver has no kernels.
    pub fn copy_from_by_kernel(&self, source: &Mapping, stream: &Stream) -> DriverResult<()> {
        self.check_copy(source, stream)?;
        let (dst, src, words) = (self.address, source.address, self.bytes() / 4);
        // SAFETY: as above; a chunk is a whole number of words.
        unsafe { stream.copy_words(dst, src, words) }
    }

    /// Enqueues a fill of all bytes with `value` (`cuMemsetD8Async`), by the stream's device. It stays
    /// mapped until that is done, as for any work.
    ///
    /// # Errors
    /// The driver's: invalid value without access; the same, before any call, if the drivers differ.
    pub fn fill(&self, value: u8, stream: &Stream) -> DriverResult<()> {
        if !same_driver(stream.driver(), self.range.driver()) {
            return Err(DriverError::new(Call::MemsetD8Async, ResultCode::INVALID_VALUE)
                .because(format_args!("{stream:?} is a stream of another driver")));
        }
        // SAFETY: the address is mapped by this driver for the whole length.
        unsafe { stream.fill(self.address, self.bytes(), value) }
    }

    fn check_copy(&self, source: &Mapping, stream: &Stream) -> DriverResult<()> {
        let drivers = [source.range.driver(), stream.driver()];
        let strange = drivers.iter().any(|it| !same_driver(it, self.range.driver()));
        if strange || source.bytes() != self.bytes() {
            let error = DriverError::new(Call::MemcpyDtoDAsync, ResultCode::INVALID_VALUE);
            return Err(error.because(format_args!(
                "{} bytes at {:#x} to {} bytes at {:#x}: expected as many, of one driver",
                source.bytes(),
                source.address,
                self.bytes(),
                self.address
            )));
        }
        Ok(())
    }

    /// Unmaps (`cuMemUnmap`) and gives the chunk back. Does not wait for the GPU: the caller knows
    /// that nothing uses the address any more (row D-U4).
    ///
    /// # Errors
    /// The driver's, with the mapping, which stands as before.
    pub fn unmap(self) -> Result<Arc<Chunk>, (Mapping, DriverError)> {
        let unmap = || self.range.driver().unmap(self.address, self.bytes());
        if !self.range.driver().is_gone()
            && let Err(error) = caught(Call::MemUnmap, unmap)
        {
            return Err((self, error));
        }
        Ok(self.into_chunk())
    }

    /// Unmaps mappings that stand one behind the other, in one call (row D-U3): see
    /// [`Mapping::unmap`]. Gives their chunks in the same order.
    ///
    /// # Errors
    /// The driver's, with the mappings, which stand as before; invalid value, before any call, if
    /// they are not neighbours in one range.
    pub fn unmap_all(
        mappings: Vec<Mapping>,
    ) -> Result<Vec<Arc<Chunk>>, (Vec<Mapping>, DriverError)> {
        let whole = match Mapping::whole(Call::MemUnmap, &mappings) {
            Ok(whole) => whole,
            Err(error) => return Err((mappings, error)),
        };
        if let Some((range, address, bytes)) = whole
            && !range.driver().is_gone()
            && let Err(error) = caught(Call::MemUnmap, || range.driver().unmap(address, bytes))
        {
            return Err((mappings, error));
        }
        Ok(mappings.into_iter().map(Mapping::into_chunk).collect())
    }

    /// Grants access to mappings that stand one behind the other, in one call (row D-A2): see
    /// [`Mapping::set_access`].
    ///
    /// # Errors
    /// The driver's; invalid value, before any call, if they are not neighbours in one range.
    pub fn set_access_all<'a>(
        mappings: impl IntoIterator<Item = &'a Mapping>,
        grants: &[AccessGrant],
    ) -> DriverResult<()> {
        match Mapping::whole(Call::MemSetAccess, mappings)? {
            Some((range, address, bytes)) => {
                caught(Call::MemSetAccess, || range.driver().set_access(address, bytes, grants))
            }
            None => Ok(()),
        }
    }

    /// What neighbours cover together: range, first address, bytes. `None` of none.
    fn whole<'a>(
        call: Call,
        mappings: impl IntoIterator<Item = &'a Mapping>,
    ) -> DriverResult<Option<(Range, u64, u64)>> {
        let mut whole: Option<(Range, u64, u64)> = None;
        for mapping in mappings {
            let Some((range, address, bytes)) = &mut whole else {
                whole = Some((mapping.range.clone(), mapping.address, mapping.bytes()));
                continue;
            };
            let next = *address + *bytes;
            if mapping.address != next || mapping.range.address() != range.address() {
                return Err(DriverError::new(call, ResultCode::INVALID_VALUE).because(
                    format_args!(
                        "{:#x} is not the neighbour of the mapping that ends at {next:#x}",
                        mapping.address
                    ),
                ));
            }
            *bytes += mapping.bytes();
        }
        Ok(whole)
    }

    /// Takes the chunk out of a mapping that does not stand any more.
    fn into_chunk(self) -> Arc<Chunk> {
        let mapping = ManuallyDrop::new(self);
        // SAFETY: `mapping` is never dropped, so each field is moved out exactly once.
        let (chunk, range) =
            unsafe { (std::ptr::read(&mapping.chunk), std::ptr::read(&mapping.range)) };
        drop(range);
        chunk
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::Driver;
    use crate::sim::{FaultPlan, Sim};
    use crate::types::{ChunkProps, DeviceId};

    const G: u64 = 2 << 20;
    const HOME: DeviceId = DeviceId(0);

    fn mapped(driver: &Arc<dyn Driver>, range: &Range, slot: u64) -> Mapping {
        let chunk = Chunk::create(driver, G, &ChunkProps::on_device(HOME)).unwrap();
        Mapping::map(range, slot * G, Arc::new(chunk)).unwrap()
    }

    #[test]
    fn neighbours_are_granted_and_unmapped_in_one_call_each() {
        let sim = Sim::builder().build();
        let driver: Arc<dyn Driver> = sim.clone();
        let range = Range::reserve(&driver, 4 * G, 0, 0).unwrap();
        let mappings: Vec<Mapping> = (0..4).map(|slot| mapped(&driver, &range, slot)).collect();
        let calls = driver.ledger().snapshot();
        Mapping::set_access_all(&mappings[1..3], &[AccessGrant::read_write(HOME)]).unwrap();
        range.fill(HOME, G, 2 * G, 7).unwrap();
        assert!(range.fill(HOME, 0, G, 7).is_err(), "the first was not named");
        sim.inject(FaultPlan::fail(ResultCode::UNKNOWN).on(Call::MemUnmap).once());
        let (mappings, error) = Mapping::unmap_all(mappings).unwrap_err();
        assert_eq!((mappings.len(), error.code()), (4, ResultCode::UNKNOWN));
        let chunks = Mapping::unmap_all(mappings).unwrap();
        let calls = driver.ledger().snapshot().since(&calls);
        assert_eq!((calls.of(Call::MemSetAccess), calls.of(Call::MemUnmap)), (1, 2));
        assert!(chunks.into_iter().all(|chunk| Arc::into_inner(chunk).is_some()));
        drop(range);
        sim.check_clean().unwrap();
    }

    #[test]
    fn a_chunk_is_copied_by_engines_and_by_a_kernel() {
        let sim = Sim::builder().build();
        let driver: Arc<dyn Driver> = sim.clone();
        let stream = Stream::create(&driver, HOME).unwrap();
        let range = Range::reserve(&driver, 4 * G, 0, 0).unwrap();
        let all: Vec<Mapping> = (0..2).map(|slot| mapped(&driver, &range, slot)).collect();
        Mapping::set_access_all(&all, &[AccessGrant::read_write(HOME)]).unwrap();
        for (value, by_kernel) in [(3, false), (5, true)] {
            range.fill(HOME, 0, G, value).unwrap();
            match by_kernel {
                false => all[1].copy_from(&all[0], &stream).unwrap(),
                true => all[1].copy_from_by_kernel(&all[0], &stream).unwrap(),
            }
            stream.synchronize().unwrap();
            let mut bytes = [0; 2];
            range.read(HOME, 2 * G - 2, &mut bytes).unwrap();
            assert_eq!(bytes, [value; 2]);
        }
        let chunk = Chunk::create(&driver, 2 * G, &ChunkProps::on_device(HOME)).unwrap();
        let longer = Mapping::map(&range, 2 * G, Arc::new(chunk)).unwrap();
        let other: Arc<dyn Driver> = Sim::builder().build();
        let strange = Stream::create(&other, HOME).unwrap();
        let calls = driver.ledger().snapshot();
        for (from, stream) in [(&longer, &stream), (&all[0], &strange)] {
            let refused = all[1].copy_from(from, stream).unwrap_err();
            assert_eq!(refused.code(), ResultCode::INVALID_VALUE);
            assert!(all[1].copy_from_by_kernel(from, stream).is_err());
        }
        assert_eq!(all[0].fill(0, &strange).unwrap_err().code(), ResultCode::INVALID_VALUE);
        assert_eq!(driver.ledger().snapshot().since(&calls).total(), 0);
        all[1].fill(9, &stream).unwrap();
        stream.synchronize().unwrap();
        let mut bytes = [0; 2];
        range.read(HOME, G, &mut bytes).unwrap();
        assert_eq!(bytes, [9; 2]);
        range.read(HOME, G - 2, &mut bytes).unwrap();
        assert_eq!(bytes, [5; 2], "not beyond its chunk");
        drop((longer, all, range, stream));
        sim.check_clean().unwrap();
    }

    #[test]
    fn what_are_no_neighbours_is_refused_before_any_call() {
        let sim = Sim::builder().build();
        let driver: Arc<dyn Driver> = sim.clone();
        let range = Range::reserve(&driver, 4 * G, 0, 0).unwrap();
        let mappings = vec![mapped(&driver, &range, 0), mapped(&driver, &range, 2)];
        let calls = driver.ledger().snapshot();
        let grants = [AccessGrant::read_write(HOME)];
        let refused = Mapping::set_access_all(&mappings, &grants).unwrap_err();
        assert_eq!(refused.code(), ResultCode::INVALID_VALUE);
        let (mappings, refused) = Mapping::unmap_all(mappings).unwrap_err();
        assert_eq!(refused.code(), ResultCode::INVALID_VALUE);
        assert_eq!(driver.ledger().snapshot().since(&calls).total(), 0);
        assert!(Mapping::unmap_all(Vec::new()).unwrap().is_empty());
        drop((mappings, range));
        sim.check_clean().unwrap();
    }
}
