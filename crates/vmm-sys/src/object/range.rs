//! [`Range`]: reserved addresses, owned and shared.

use std::sync::Arc;

use super::drops::{Leftover, give_back_or_keep};
use crate::call::Call;
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
        let address = driver.address_reserve(bytes, align_bytes, hint)?;
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
        unsafe { self.0.driver.copy(device, &transfer) }
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
        unsafe { self.0.driver.copy(device, &transfer) }
    }

    /// Sets `bytes` bytes at `offset` to `value` and waits.
    ///
    /// # Errors
    /// As [`Range::write`].
    pub fn fill(&self, device: DeviceId, offset: u64, bytes: u64, value: u8) -> DriverResult<()> {
        let dst = self.checked(Call::MemsetD8, offset, bytes)?;
        // SAFETY: no host memory; the device bytes lie inside a range that this driver reserved.
        unsafe { self.0.driver.copy(device, &Transfer::Fill8 { dst, value, bytes }) }
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
