//! [`Chunk`]: physical memory, owned.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::drops::{Leftover, give_back_or_keep};
use crate::driver::Driver;
use crate::error::DriverResult;
use crate::types::{ChunkHandle, ChunkProps};

/// One physical allocation of the driver: never split, mapped whole.
///
/// Owns one reference to the memory. The memory itself lives until every reference, mapping and
/// exported descriptor is gone (rows D-H1, D-X6).
#[derive(Debug)]
pub struct Chunk {
    driver: Arc<dyn Driver>,
    handle: ChunkHandle,
    bytes: u64,
    props: ChunkProps,
}

impl Chunk {
    /// Commits `bytes` of physical memory (`cuMemCreate`), all zero.
    ///
    /// # Errors
    /// The driver's: out of memory, or an invalid value if `bytes` is no multiple of the
    /// granularity of `props`.
    pub fn create(driver: &Arc<dyn Driver>, bytes: u64, props: &ChunkProps) -> DriverResult<Chunk> {
        let handle = driver.create(bytes, props)?;
        Ok(Chunk { driver: driver.clone(), handle, bytes, props: *props })
    }

    /// Takes a chunk that another process, or this one, exported (`cuMemImportFromShareableHandle`).
    /// The descriptor does not carry `bytes` and `props`: they come from the exporter.
    ///
    /// # Errors
    /// The driver's; a descriptor that is no export is an unknown error (row D-X3).
    pub fn import_fd(
        driver: &Arc<dyn Driver>,
        descriptor: BorrowedFd<'_>,
        bytes: u64,
        props: &ChunkProps,
    ) -> DriverResult<Chunk> {
        let handle = driver.import_fd(descriptor)?;
        Ok(Chunk { driver: driver.clone(), handle, bytes, props: *props })
    }

    /// A descriptor for other processes (`cuMemExportToShareableHandle`). It keeps the memory
    /// taken until it is closed.
    ///
    /// # Errors
    /// The driver's; invalid value if the chunk was not created exportable (row D-X1).
    pub fn export_fd(&self) -> DriverResult<OwnedFd> {
        // SAFETY: `self` owns a live reference to the handle.
        unsafe { self.driver.export_fd(self.handle) }
    }

    /// The driver's handle, valid while `self` lives.
    pub fn handle(&self) -> ChunkHandle {
        self.handle
    }

    /// Length in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// What it was created with.
    pub fn props(&self) -> &ChunkProps {
        &self.props
    }

    /// The driver it belongs to.
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        give_back_or_keep(&self.driver, Leftover::Chunk(self.handle));
    }
}
