//! [`RelaxedCapture`]: calls that harm no capture.

use std::marker::PhantomData;
use std::sync::Arc;

use crate::call::Call;
use crate::caught::caught;
use crate::driver::Driver;
use crate::error::DriverResult;
use crate::types::CaptureMode;

const CALL: Call = Call::ThreadExchangeStreamCaptureMode;

/// While it lives, the calling thread is in relaxed capture mode: event queries and creations made
/// meanwhile invalidate no capture, neither this thread's nor another's (rows D-G3, D-G4).
/// Dropping it restores the thread's mode.
#[derive(Debug)]
pub struct RelaxedCapture {
    driver: Arc<dyn Driver>,
    before: CaptureMode,
    /// The mode belongs to the thread, so the guard must stay on it.
    _not_send: PhantomData<*const ()>,
}

impl RelaxedCapture {
    /// Sets relaxed mode (`cuThreadExchangeStreamCaptureMode`).
    ///
    /// # Errors
    /// The driver's.
    pub fn enter(driver: &Arc<dyn Driver>) -> DriverResult<RelaxedCapture> {
        let before = caught(CALL, || driver.exchange_capture_mode(CaptureMode::Relaxed))?;
        Ok(RelaxedCapture { driver: driver.clone(), before, _not_send: PhantomData })
    }
}

impl Drop for RelaxedCapture {
    fn drop(&mut self) {
        if self.driver.is_gone() {
            return;
        }
        if let Err(error) = caught(CALL, || self.driver.exchange_capture_mode(self.before)) {
            crate::say!(debug, %error, "the thread's capture mode could not be restored");
        }
    }
}
