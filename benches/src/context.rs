//! The device's context, current on a thread.
//!
//! The contract makes the right context current for each call. Where it is current already that
//! costs one cheap query, so a program as others write it, which sets its context once, is not
//! charged for two switches a call.

#![allow(unsafe_code)] // a context handle is the driver's own pointer

use std::marker::PhantomData;
use std::sync::Arc;

use vmm_sys::{DeviceId, Driver, DriverResult};

/// While it lives, the device's primary context is current on the thread that made it.
#[derive(Debug)]
pub struct CurrentContext {
    driver: Arc<dyn Driver>,
    device: DeviceId,
    /// Of one thread: it cannot be sent to another.
    _thread: PhantomData<*const ()>,
}

impl CurrentContext {
    /// Makes the primary context of `device` current on this thread.
    ///
    /// # Errors
    /// The driver's.
    pub fn enter(driver: &Arc<dyn Driver>, device: DeviceId) -> DriverResult<CurrentContext> {
        let context = driver.primary_context_retain(device)?;
        let entered = CurrentContext { driver: driver.clone(), device, _thread: PhantomData };
        // SAFETY: `entered` holds a reference to the context, so it is live.
        unsafe { driver.context_set_current(Some(context))? };
        Ok(entered)
    }
}

impl Drop for CurrentContext {
    fn drop(&mut self) {
        if self.driver.is_gone() {
            return;
        }
        // SAFETY: no context is named.
        let unset = unsafe { self.driver.context_set_current(None) };
        // A failure of either leaves a reference behind, in a program that is about to end.
        let _ = unset.and_then(|()| self.driver.primary_context_release(self.device));
    }
}

#[cfg(test)]
mod tests {
    use vmm_sys::sim::Sim;

    use super::*;

    #[test]
    fn the_context_is_current_as_long_as_the_guard_lives() {
        let driver: Arc<dyn Driver> = Sim::builder().build();
        assert_eq!(driver.context_current().unwrap(), None);
        let entered = CurrentContext::enter(&driver, DeviceId(0)).unwrap();
        assert!(driver.context_current().unwrap().is_some());
        drop(entered);
        assert_eq!(driver.context_current().unwrap(), None);
    }
}
