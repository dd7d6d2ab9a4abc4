//! [`Range`]: reserved addresses, owned and shared.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::drops::{Leftover, give_back_or_keep};
use super::{Stream, same_driver};
use crate::call::Call;
use crate::caught::caught;
use crate::driver::Driver;
use crate::error::{DriverError, DriverResult, ResultCode};
use crate::types::{DeviceId, Transfer};

/// A reserved range of device addresses. Clones share it; it is freed with the last clone, and every
/// [`super::Mapping`] in it holds one.
#[derive(Clone, Debug)]
pub struct Range(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    driver: Arc<dyn Driver>,
    address: u64,
    bytes: u64,
}

impl Drop for Inner {
    fn drop(&mut self) {
        give_back_or_keep(&self.driver, Leftover::Range(self.address, self.bytes));
    }
}

impl Range {
    /// Reserves `bytes` of addresses (`cuMemAddressReserve`) whose start is a multiple of
    /// `align_bytes`, near `hint` if the driver likes (0: anywhere). Costs no memory.
    ///
    /// The alignment of the answer is checked, not trusted: platforms were seen to ignore it.
    ///
    /// # Errors
    /// The driver's; [`DriverError::is_out_of_addresses`] tells a shortage of addresses.
    pub fn reserve(
        driver: &Arc<dyn Driver>,
        bytes: u64,
        align_bytes: u64,
        hint: u64,
    ) -> DriverResult<Range> {
        let address =
            caught(Call::MemAddressReserve, || driver.address_reserve(bytes, align_bytes, hint))?;
        let range = Range(Arc::new(Inner { driver: driver.clone(), address, bytes }));
        if align_bytes != 0 && address.checked_rem(align_bytes) != Some(0) {
            return Err(DriverError::new(Call::MemAddressReserve, ResultCode::NOT_SUPPORTED)
                .because(format_args!(
                    "asked for {bytes} bytes aligned to {align_bytes}, got {address:#x}"
                )));
        }
        Ok(range)
    }

    /// First address.
    pub fn address(&self) -> u64 {
        self.0.address
    }

    /// Length in bytes.
    pub fn bytes(&self) -> u64 {
        self.0.bytes
    }

    /// The driver it belongs to.
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.0.driver
    }

    /// Copies `source` to `offset` in the range and waits, with `device`'s context current.
    ///
    /// # Errors
    /// Invalid value, before any driver call, if the bytes do not lie in the range; else the
    /// driver's (no access, not mapped).
    pub fn write(&self, device: DeviceId, offset: u64, source: &[u8]) -> DriverResult<()> {
        let bytes = source.len() as u64;
        let dst = self.checked(Call::MemcpyHtoD, offset, bytes)?;
        let transfer = Transfer::HostToDevice { dst, src: source.as_ptr(), bytes };
        // SAFETY: `source` is readable for its length during this synchronous call, and the
        // device bytes lie inside a range that this driver reserved.
        caught(Call::MemcpyHtoD, || unsafe { self.0.driver.copy(device, &transfer) })
    }

    /// Copies from `offset` in the range into `target` and waits.
    ///
    /// # Errors
    /// As [`Range::write`].
    pub fn read(&self, device: DeviceId, offset: u64, target: &mut [u8]) -> DriverResult<()> {
        let bytes = target.len() as u64;
        let src = self.checked(Call::MemcpyDtoH, offset, bytes)?;
        let transfer = Transfer::DeviceToHost { dst: target.as_mut_ptr(), src, bytes };
        // SAFETY: `target` is writable for its length during this synchronous call, and the
        // device bytes lie inside a range that this driver reserved.
        caught(Call::MemcpyDtoH, || unsafe { self.0.driver.copy(device, &transfer) })
    }

    /// Sets `bytes` bytes at `offset` to `value` and waits.
    ///
    /// # Errors
    /// As [`Range::write`].
    pub fn fill(&self, device: DeviceId, offset: u64, bytes: u64, value: u8) -> DriverResult<()> {
        let dst = self.checked(Call::MemsetD8, offset, bytes)?;
        // SAFETY: no host memory; the device bytes lie inside a range that this driver reserved.
        let fill = || unsafe { self.0.driver.copy(device, &Transfer::Fill8 { dst, value, bytes }) };
        caught(Call::MemsetD8, fill)
    }

    /// Enqueues a copy of `bytes` bytes from offset `from` to offset `to` on `stream`: see
    /// [`Stream::copy`]. The two must not overlap, and both stay mapped until it is done, as for any
    /// work.
    ///
    /// # Errors
    /// Invalid value, before any driver call, if the bytes do not lie in the range, or the stream is
    /// another driver's; else the driver's.
    pub fn copy_on(&self, stream: &Stream, to: u64, from: u64, bytes: u64) -> DriverResult<()> {
        let call = Call::MemcpyDtoDAsync;
        let (dst, src) = (self.checked(call, to, bytes)?, self.checked(call, from, bytes)?);
        if !same_driver(stream.driver(), self.driver()) {
            return Err(DriverError::new(call, ResultCode::INVALID_VALUE)
                .because(format_args!("{stream:?} is a stream of another driver")));
        }
        // SAFETY: both lie inside a range that this driver reserved.
        unsafe { stream.copy(dst, src, bytes) }
    }

    /// A dma-buf of `bytes` bytes at `offset` (`cuMemGetHandleForAddressRange`), by which RDMA
    /// libraries and other drivers reach the memory that is mapped there now. It covers neighbouring
    /// mappings too, and keeps their chunks taken until it is closed, unmapped or not (row D-X9): it
    /// does not follow what is mapped there later.
    ///
    /// # Errors
    /// Invalid value, before any driver call, if the bytes do not lie in the range; else the driver's:
    /// a hole, ends off a page of the host (row D-X8), no support.
    pub fn dma_buf(&self, device: DeviceId, offset: u64, bytes: u64) -> DriverResult<OwnedFd> {
        let address = self.checked(Call::MemGetHandleForAddressRange, offset, bytes)?;
        caught(Call::MemGetHandleForAddressRange, || self.0.driver.dma_buf(device, address, bytes))
    }

    fn checked(&self, call: Call, offset: u64, bytes: u64) -> DriverResult<u64> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.0.bytes => Ok(self.0.address + offset),
            _ => Err(DriverError::new(call, ResultCode::INVALID_VALUE).because(format_args!(
                "{bytes} bytes at offset {offset} do not lie in a range of {} bytes",
                self.0.bytes
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Chunk, Mapping};
    use super::*;
    use crate::sim::Sim;
    use crate::types::{AccessGrant, ChunkProps};

    const G: u64 = 2 << 20;
    const HOME: DeviceId = DeviceId(0);

    #[test]
    fn a_copy_within_a_range_stays_in_it_and_on_its_driver() {
        let sim = Sim::builder().build();
        let driver: Arc<dyn Driver> = sim.clone();
        let range = Range::reserve(&driver, 2 * G, 0, 0).unwrap();
        let chunk = Chunk::create(&driver, 2 * G, &ChunkProps::on_device(HOME)).unwrap();
        let mapping = Mapping::map(&range, 0, Arc::new(chunk)).unwrap();
        mapping.set_access(&[AccessGrant::read_write(HOME)]).unwrap();
        range.fill(HOME, 0, G, 7).unwrap();
        let stream = Stream::create(&driver, HOME).unwrap();
        range.copy_on(&stream, G + 1, 0, 100).unwrap();
        stream.synchronize().unwrap();
        let mut found = [9; 102];
        range.read(HOME, G, &mut found).unwrap();
        assert!(found[0] == 0 && found[101] == 0 && found[1..101].iter().all(|byte| *byte == 7));
        let other: Arc<dyn Driver> = Sim::builder().build();
        let strange = Stream::create(&other, HOME).unwrap();
        let calls = driver.ledger().snapshot();
        for (stream, to, from) in
            [(&stream, 2 * G - 1, 0), (&stream, 0, u64::MAX), (&strange, G, 0)]
        {
            let refused = range.copy_on(stream, to, from, 2).unwrap_err();
            assert_eq!(refused.code(), ResultCode::INVALID_VALUE);
        }
        assert_eq!(driver.ledger().snapshot().since(&calls).total(), 0);
        drop((mapping, range, stream));
        sim.check_clean().unwrap();
    }
}
