//! The driver's own allocators, and page-locked host memory.

use std::ffi::c_void;
use std::ptr;

use super::ffi::{HOST_ALLOC_PORTABLE_MAPPED, POOL_RELEASE_THRESHOLD};
use super::{Cuda, have};
use crate::call::Call;
use crate::error::DriverResult;
use crate::types::{DeviceId, PinnedAddress, StreamHandle};

impl Cuda {
    pub(super) fn mem_alloc(&self, device: DeviceId, bytes: u64) -> DriverResult<u64> {
        let alloc = have(Call::MemAlloc, self.entry.mem_alloc)?;
        let _scope = self.enter(device)?;
        let mut address = 0;
        self.door(Call::MemAlloc, Some(device), || alloc(&mut address, bytes))
            .map_err(|error| error.because(format_args!("{bytes} bytes wanted")))?;
        Ok(address)
    }

    pub(super) fn mem_free(&self, device: DeviceId, address: u64) -> DriverResult<()> {
        let free = have(Call::MemFree, self.entry.mem_free)?;
        let _scope = self.enter(device)?;
        self.door(Call::MemFree, Some(device), || free(address))
            .map_err(|error| error.because(format_args!("address {address:#x}")))
    }

    /// # Safety
    /// As [`crate::Driver::mem_alloc_async`].
    pub(super) unsafe fn mem_alloc_async(
        &self,
        device: DeviceId,
        bytes: u64,
        stream: StreamHandle,
    ) -> DriverResult<u64> {
        let alloc = have(Call::MemAllocAsync, self.entry.mem_alloc_async)?;
        let _scope = self.enter(device)?;
        let mut address = 0;
        self.door(Call::MemAllocAsync, Some(device), || {
            // SAFETY: the caller says that the stream is live.
            unsafe { alloc(&mut address, bytes, stream.0) }
        })
        .map_err(|error| error.because(format_args!("{bytes} bytes wanted")))?;
        Ok(address)
    }

    /// # Safety
    /// As [`crate::Driver::mem_free_async`].
    pub(super) unsafe fn mem_free_async(
        &self,
        device: DeviceId,
        address: u64,
        stream: StreamHandle,
    ) -> DriverResult<()> {
        let free = have(Call::MemFreeAsync, self.entry.mem_free_async)?;
        let _scope = self.enter(device)?;
        self.door(Call::MemFreeAsync, Some(device), || {
            // SAFETY: the caller says that the stream is live.
            unsafe { free(address, stream.0) }
        })
        .map_err(|error| error.because(format_args!("address {address:#x}")))
    }

    pub(super) fn mem_pool_set_release_threshold(
        &self,
        device: DeviceId,
        bytes: u64,
    ) -> DriverResult<()> {
        let get_pool = have(Call::DeviceGetDefaultMemPool, self.entry.default_mem_pool)?;
        let set = have(Call::MemPoolSetAttribute, self.entry.mem_pool_set_attribute)?;
        let handle = self.device_handle(device)?;
        let mut pool = 0;
        self.door(Call::DeviceGetDefaultMemPool, Some(device), || get_pool(&mut pool, handle))?;
        let mut threshold = bytes;
        self.door(Call::MemPoolSetAttribute, Some(device), || {
            // SAFETY: the driver gave out the pool just now, and default pools live as long as the
            // driver; this attribute is a u64, which is read.
            unsafe { set(pool, POOL_RELEASE_THRESHOLD, (&raw mut threshold).cast()) }
        })
    }

    pub(super) fn host_alloc(&self, device: DeviceId, bytes: u64) -> DriverResult<PinnedAddress> {
        let alloc = have(Call::MemHostAlloc, self.entry.mem_host_alloc)?;
        let _scope = self.enter(device)?;
        let mut place: *mut c_void = ptr::null_mut();
        self.door(Call::MemHostAlloc, Some(device), || {
            alloc(&mut place, bytes, HOST_ALLOC_PORTABLE_MAPPED)
        })
        .map_err(|error| error.because(format_args!("{bytes} bytes wanted")))?;
        // SAFETY: the driver gave out that many writable bytes, which nobody else knows yet; u64
        // and usize are the same here.
        unsafe { ptr::write_bytes(place.cast::<u8>(), 0, bytes as usize) };
        Ok(PinnedAddress(place.expose_provenance() as u64))
    }

    /// # Safety
    /// As [`crate::Driver::host_free`].
    pub(super) unsafe fn host_free(
        &self,
        device: DeviceId,
        address: PinnedAddress,
    ) -> DriverResult<()> {
        let free = have(Call::MemFreeHost, self.entry.mem_free_host)?;
        let _scope = self.enter(device)?;
        let place = ptr::with_exposed_provenance_mut::<c_void>(address.0 as usize);
        self.door(Call::MemFreeHost, Some(device), || {
            // SAFETY: the caller says that it came from `host_alloc` and is out of use.
            unsafe { free(place) }
        })
    }
}
