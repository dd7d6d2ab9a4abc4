//! [`Chunk`]: physical memory, owned.

use std::any::Any;
use std::mem::ManuallyDrop;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::drops::{Leftover, give_back_or_keep};
use crate::call::Call;
use crate::caught::caught;
use crate::driver::Driver;
use crate::error::{DriverError, DriverResult};
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
    receipt: Receipt,
}

/// What goes when the driver has taken the chunk back.
pub(super) type Receipt = Option<Box<dyn Any + Send + Sync>>;

impl Chunk {
    /// Commits `bytes` of physical memory (`cuMemCreate`), all zero.
    ///
    /// # Errors
    /// The driver's: out of memory, or an invalid value if `bytes` is no multiple of the
    /// granularity of `props`.
    pub fn create(driver: &Arc<dyn Driver>, bytes: u64, props: &ChunkProps) -> DriverResult<Chunk> {
        let handle = caught(Call::MemCreate, || driver.create(bytes, props))?;
        Ok(Chunk { driver: driver.clone(), handle, bytes, props: *props, receipt: None })
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
        let handle = caught(Call::MemImportFromShareableHandle, || driver.import_fd(descriptor))?;
        Ok(Chunk { driver: driver.clone(), handle, bytes, props: *props, receipt: None })
    }

    /// Keeps `receipt` until the driver has taken the reference back, in whatever try: dropped then
    /// and not before. How a booking is as true as what it stands for. Replaces an earlier one.
    #[must_use]
    pub fn with_receipt(mut self, receipt: impl Any + Send + Sync) -> Chunk {
        self.receipt = Some(Box::new(receipt));
        self
    }

    /// What [`Chunk::with_receipt`] gave it to keep, if that is a `T`.
    pub fn receipt<T: Any>(&self) -> Option<&T> {
        self.receipt.as_deref()?.downcast_ref()
    }

    /// Gives the reference back (`cuMemRelease`), as dropping the chunk does, and says if the
    /// driver refuses.
    ///
    /// # Errors
    /// The driver's, with the chunk, which is as before.
    pub fn release(self) -> Result<(), (Chunk, DriverError)> {
        if !self.driver.is_gone() {
            // SAFETY: `self` owns the reference, and keeps it only if it was not taken.
            let release = || unsafe { self.driver.release(self.handle) };
            match caught(Call::MemRelease, release) {
                Err(error) if !error.is_driver_gone() => return Err((self, error)),
                // Where the driver is gone for good, the memory went with it.
                Ok(()) | Err(_) => {}
            }
        }
        let chunk = ManuallyDrop::new(self);
        // SAFETY: `chunk` is never dropped, so each field is moved out exactly once.
        let (driver, receipt) =
            unsafe { (std::ptr::read(&chunk.driver), std::ptr::read(&chunk.receipt)) };
        drop((driver, receipt));
        Ok(())
    }

    /// A descriptor for other processes (`cuMemExportToShareableHandle`). It keeps the memory
    /// taken until it is closed.
    ///
    /// # Errors
    /// The driver's; invalid value if the chunk was not created exportable (row D-X1).
    pub fn export_fd(&self) -> DriverResult<OwnedFd> {
        // SAFETY: `self` owns a live reference to the handle.
        let export = || unsafe { self.driver.export_fd(self.handle) };
        caught(Call::MemExportToShareableHandle, export)
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
        let leftover = Leftover::Chunk { handle: self.handle, _receipt: self.receipt.take() };
        give_back_or_keep(&self.driver, leftover);
    }
}

#[cfg(test)]
mod tests {
    use super::super::{failed_drops, retry_failed_drops};
    use super::*;
    use crate::error::ResultCode;
    use crate::sim::{FaultPlan, Sim};
    use crate::types::DeviceId;

    fn chunk_with_receipt(sim: &Arc<Sim>) -> (Chunk, Arc<()>) {
        let driver: Arc<dyn Driver> = sim.clone();
        let receipt = Arc::new(());
        let props = ChunkProps::on_device(DeviceId(0));
        let chunk = Chunk::create(&driver, 2 << 20, &props).unwrap();
        (chunk.with_receipt(receipt.clone()), receipt)
    }

    #[test]
    fn a_refused_release_gives_the_chunk_and_keeps_the_receipt() {
        let sim = Sim::builder().build();
        let (chunk, receipt) = chunk_with_receipt(&sim);
        assert!(chunk.receipt::<Arc<()>>().is_some_and(|kept| Arc::ptr_eq(kept, &receipt)));
        assert!(chunk.receipt::<u64>().is_none());
        sim.inject(FaultPlan::fail(ResultCode::UNKNOWN).on(Call::MemRelease).once());
        let (chunk, error) = chunk.release().unwrap_err();
        assert_eq!((error.code(), chunk.bytes()), (ResultCode::UNKNOWN, 2 << 20));
        assert_eq!(Arc::strong_count(&receipt), 2, "the memory is still taken");
        assert!(sim.check_clean().is_err());
        chunk.release().unwrap();
        assert_eq!(Arc::strong_count(&receipt), 1);
        sim.check_clean().unwrap();
    }

    #[test]
    fn the_receipt_of_a_dropped_chunk_goes_with_the_try_that_succeeds() {
        let sim = Sim::builder().build();
        let driver: Arc<dyn Driver> = sim.clone();
        let (chunk, receipt) = chunk_with_receipt(&sim);
        sim.inject(FaultPlan::fail(ResultCode::UNKNOWN).on(Call::MemRelease).times(2));
        drop(chunk);
        assert_eq!((failed_drops(&driver).len(), Arc::strong_count(&receipt)), (1, 2));
        assert_eq!((retry_failed_drops(&driver), Arc::strong_count(&receipt)), (1, 2));
        assert_eq!((retry_failed_drops(&driver), Arc::strong_count(&receipt)), (0, 1));
        sim.check_clean().unwrap();
    }
}
