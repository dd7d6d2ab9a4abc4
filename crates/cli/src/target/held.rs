//! Held memory of allocators that keep no statistics: what the driver says is taken.

use std::cell::Cell;
use std::sync::Arc;

use vmm_sys::{DeviceId, Driver, DriverResult};

/// Free memory of a device, watched from a starting point. Other users of the device show in it:
/// on a shared GPU these figures are upper bounds.
pub(super) struct HeldWatch {
    driver: Arc<dyn Driver>,
    device: DeviceId,
    start_free_bytes: u64,
    least_free_bytes: Cell<u64>,
}

impl HeldWatch {
    pub(super) fn start(driver: &Arc<dyn Driver>, device: DeviceId) -> DriverResult<HeldWatch> {
        let start_free_bytes = driver.mem_info(device)?.free_bytes;
        Ok(HeldWatch {
            driver: driver.clone(),
            device,
            start_free_bytes,
            least_free_bytes: Cell::new(start_free_bytes),
        })
    }

    /// Forgets what was seen so far, and looks.
    pub(super) fn reset(&self) -> DriverResult<()> {
        self.least_free_bytes.set(u64::MAX);
        self.look()
    }

    pub(super) fn look(&self) -> DriverResult<()> {
        let free_bytes = self.driver.mem_info(self.device)?.free_bytes;
        self.least_free_bytes.set(self.least_free_bytes.get().min(free_bytes));
        Ok(())
    }

    pub(super) fn peak_bytes(&self) -> u64 {
        self.start_free_bytes.saturating_sub(self.least_free_bytes.get())
    }
}
