//! The device's context, current on the replaying thread, as in any program that uses the GPU.
//!
//! Without it every call would have to switch contexts and back: work that is no allocator's own,
//! and that would count against the driver's allocators most, whose every operation is a call.

use std::sync::Arc;

use vmm_sys::{ContextHandle, DeviceId, Driver, DriverResult};

/// While it lives, the primary context of its device is current on the thread that made it.
#[derive(Debug)]
pub struct CurrentContext {
    driver: Arc<dyn Driver>,
    device: DeviceId,
    previous: Option<ContextHandle>,
}

impl CurrentContext {
    /// Makes the primary context of `device` current on this thread.
    ///
    /// # Errors
    /// The driver's.
    #[allow(unsafe_code, reason = "the contract takes a context as a handle")]
    pub fn enter(driver: &Arc<dyn Driver>, device: DeviceId) -> DriverResult<CurrentContext> {
        let previous = driver.context_current()?;
        let context = driver.primary_context_retain(device)?;
        // From here on dropping it gives the reference back.
        let entered = CurrentContext { driver: driver.clone(), device, previous };
        // SAFETY: `entered` holds a reference on the context.
        unsafe { driver.context_set_current(Some(context))? };
        Ok(entered)
    }
}

impl Drop for CurrentContext {
    #[allow(unsafe_code, reason = "the contract takes a context as a handle")]
    fn drop(&mut self) {
        // SAFETY: it was current on this thread when `self` was made; whoever made it so keeps it
        // alive. A failure leaves the thread with a context of a device that it just used.
        let _ = unsafe { self.driver.context_set_current(self.previous) };
        let _ = self.driver.primary_context_release(self.device);
    }
}
