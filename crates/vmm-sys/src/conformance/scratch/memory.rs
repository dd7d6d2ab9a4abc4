//! Addresses, chunks, mappings and access.

use std::os::fd::{BorrowedFd, OwnedFd};

use crate::error::DriverResult;
use crate::types::{AccessGrant, ChunkHandle, ChunkProps, DeviceId, Location, PinnedAddress};

use super::{MappingRecord, Scratch};

impl Scratch<'_> {
    // ---- the calls, with the driver's own answers ----

    pub(crate) fn address_reserve(&self, bytes: u64, align: u64, hint: u64) -> DriverResult<u64> {
        let address = self.driver().address_reserve(bytes, align, hint)?;
        self.made.lock().ranges.push((address, bytes));
        Ok(address)
    }

    pub(crate) fn address_free(&self, address: u64, bytes: u64) -> DriverResult<()> {
        self.driver().address_free(address, bytes)?;
        self.made.lock().ranges.retain(|&(start, _)| start != address);
        Ok(())
    }

    pub(crate) fn create(&self, bytes: u64, props: &ChunkProps) -> DriverResult<ChunkHandle> {
        let chunk = self.driver().create(bytes, props)?;
        self.made.lock().references.push(chunk);
        Ok(chunk)
    }

    /// Gives one reference back, or one too many: the handle must name something all the same.
    pub(crate) fn release(&self, chunk: ChunkHandle) -> DriverResult<()> {
        self.must_know(chunk);
        // SAFETY: the handle names a chunk that a reference or a mapping of this row keeps alive.
        // The driver checks its count of references (row D-H2).
        unsafe { self.driver().release(chunk)? };
        let references = &mut self.made.lock().references;
        if let Some(index) = references.iter().position(|&owned| owned == chunk) {
            references.swap_remove(index);
        }
        Ok(())
    }

    pub(crate) fn retain(&self, address: u64) -> DriverResult<ChunkHandle> {
        let chunk = self.driver().retain(address)?;
        self.made.lock().references.push(chunk);
        Ok(chunk)
    }

    pub(crate) fn properties(&self, chunk: ChunkHandle) -> DriverResult<ChunkProps> {
        self.must_know(chunk);
        // SAFETY: the handle names a chunk that this row keeps alive.
        unsafe { self.driver().properties(chunk) }
    }

    pub(crate) fn map(
        &self,
        address: u64,
        bytes: u64,
        offset: u64,
        chunk: ChunkHandle,
    ) -> DriverResult<()> {
        self.must_know(chunk);
        // SAFETY: the handle names a chunk that a reference or a mapping of this row keeps alive.
        unsafe { self.driver().map(address, bytes, offset, chunk)? };
        self.made.lock().mappings.push(MappingRecord { address, bytes, chunk });
        Ok(())
    }

    pub(crate) fn unmap(&self, address: u64, bytes: u64) -> DriverResult<()> {
        self.driver().unmap(address, bytes)?;
        self.made
            .lock()
            .mappings
            .retain(|mapping| mapping.address < address || mapping.address >= address + bytes);
        Ok(())
    }

    pub(crate) fn set_access(
        &self,
        address: u64,
        bytes: u64,
        grants: &[AccessGrant],
    ) -> DriverResult<()> {
        self.driver().set_access(address, bytes, grants)
    }

    pub(crate) fn export_fd(&self, chunk: ChunkHandle) -> DriverResult<OwnedFd> {
        self.must_know(chunk);
        // SAFETY: the handle names a chunk that this row keeps alive.
        unsafe { self.driver().export_fd(chunk) }
    }

    pub(crate) fn import_fd(&self, descriptor: BorrowedFd<'_>) -> DriverResult<ChunkHandle> {
        let chunk = self.driver().import_fd(descriptor)?;
        self.made.lock().references.push(chunk);
        Ok(chunk)
    }

    pub(crate) fn mem_alloc(&self, device: DeviceId, bytes: u64) -> DriverResult<u64> {
        let address = self.driver().mem_alloc(device, bytes)?;
        self.made.lock().allocations.push((device, address, bytes));
        Ok(address)
    }

    pub(crate) fn mem_free(&self, device: DeviceId, address: u64) -> DriverResult<()> {
        self.driver().mem_free(device, address)?;
        self.made.lock().allocations.retain(|&(_, start, _)| start != address);
        Ok(())
    }

    /// A zeroed 32-bit word of page-locked memory, freed when the row ends.
    pub(crate) fn pinned_word(&self, device: DeviceId) -> DriverResult<PinnedAddress> {
        const BYTES: u64 = 4096;
        let address = self.driver().host_alloc(device, BYTES)?;
        self.made.lock().pinned.push((device, address));
        Ok(address)
    }

    /// Makes page-locked memory and frees it at once (`cuMemHostAlloc`, `cuMemFreeHost`).
    pub(crate) fn pinned_and_freed(&self, device: DeviceId) -> DriverResult<()> {
        const BYTES: u64 = 4096;
        let address = self.driver().host_alloc(device, BYTES)?;
        // SAFETY: the address was given out by the line above, and nobody else knows it.
        unsafe { self.driver().host_free(device, address) }
    }

    // ---- the usual combinations ----

    /// A range of `bytes`, anywhere.
    pub(crate) fn range(&self, bytes: u64) -> DriverResult<u64> {
        self.address_reserve(bytes, 0, 0)
    }

    /// A plain chunk of `device`.
    pub(crate) fn chunk(&self, bytes: u64, device: DeviceId) -> DriverResult<ChunkHandle> {
        self.create(bytes, &ChunkProps::on_device(device))
    }

    /// Maps a whole chunk, and lets `grantees` read and write it.
    pub(crate) fn map_for(
        &self,
        address: u64,
        bytes: u64,
        chunk: ChunkHandle,
        grantees: &[DeviceId],
    ) -> DriverResult<()> {
        self.map(address, bytes, 0, chunk)?;
        self.grant(address, bytes, grantees)
    }

    /// Lets `grantees` read and write what is mapped there.
    pub(crate) fn grant(
        &self,
        address: u64,
        bytes: u64,
        grantees: &[DeviceId],
    ) -> DriverResult<()> {
        let grants: Vec<AccessGrant> =
            grantees.iter().copied().map(AccessGrant::read_write).collect();
        self.set_access(address, bytes, &grants)
    }

    /// A chunk of `home` in a range of its own, open to `grantees`.
    pub(crate) fn buffer(
        &self,
        bytes: u64,
        home: DeviceId,
        grantees: &[DeviceId],
    ) -> DriverResult<u64> {
        let address = self.range(bytes)?;
        let chunk = self.chunk(bytes, home)?;
        self.map_for(address, bytes, chunk, grantees)?;
        Ok(address)
    }

    /// A second address for a chunk, open to `grantees`.
    pub(crate) fn alias(
        &self,
        bytes: u64,
        chunk: ChunkHandle,
        grantees: &[DeviceId],
    ) -> DriverResult<u64> {
        let address = self.range(bytes)?;
        self.map_for(address, bytes, chunk, grantees)?;
        Ok(address)
    }

    /// Free bytes of the device under test.
    pub(crate) fn free_bytes(&self) -> DriverResult<u64> {
        Ok(self.driver().mem_info(self.device())?.free_bytes)
    }

    /// What `device` may do at `address`.
    pub(crate) fn access_of(
        &self,
        address: u64,
        device: DeviceId,
    ) -> DriverResult<crate::types::Access> {
        self.driver().get_access(address, Location::Device(device))
    }
}
