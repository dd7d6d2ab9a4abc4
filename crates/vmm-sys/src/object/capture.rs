//! [`RelaxedCapture`]: calls that harm no capture.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::sync::{Arc, Weak};

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
        let found = caught(CALL, || driver.exchange_capture_mode(CaptureMode::Relaxed))?;
        let before = owed(driver).unwrap_or(found);
        Ok(RelaxedCapture { driver: driver.clone(), before, _not_send: PhantomData })
    }
}

impl Drop for RelaxedCapture {
    fn drop(&mut self) {
        if self.driver.is_gone() {
            return;
        }
        let restore = || caught(CALL, || self.driver.exchange_capture_mode(self.before));
        let Err(error) = restore().or_else(|_| restore()) else { return };
        crate::say!(warn, %error, "the thread's capture mode could not be restored; tried again later");
        // The thread must not stay in relaxed mode, where its own mistakes would not be refused.
        if self.before != CaptureMode::Relaxed {
            let debt = (Arc::downgrade(&self.driver), self.before);
            // Where the thread is ending, its mode ends with it.
            let _ended = OWED.try_with(|owed| owed.replace(Some(debt)));
        }
    }
}

/// The mode that a thread had, and of which driver.
type Debt = (Weak<dyn Driver>, CaptureMode);

thread_local! {
    /// What a guard of the calling thread could not restore: the next one does.
    static OWED: RefCell<Option<Debt>> = const { RefCell::new(None) };
}

/// Takes what the calling thread is owed by guards of `driver`.
fn owed(driver: &Arc<dyn Driver>) -> Option<CaptureMode> {
    let is_mine = |(of, _): &mut Debt| std::ptr::addr_eq(of.as_ptr(), Arc::as_ptr(driver));
    let taken = OWED.try_with(|owed| owed.borrow_mut().take_if(is_mine)).ok().flatten();
    taken.map(|(_, mode)| mode)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::Call;
    use crate::error::ResultCode;
    use crate::sim::{FaultPlan, Sim};

    #[test]
    fn a_mode_that_could_not_be_restored_is_restored_by_the_next_guard() {
        let sim = Sim::builder().build();
        let driver: Arc<dyn Driver> = sim.clone();
        let mode = || {
            let mode = driver.exchange_capture_mode(CaptureMode::Relaxed).unwrap();
            driver.exchange_capture_mode(mode).unwrap();
            mode
        };
        let before = mode();
        let outer = RelaxedCapture::enter(&driver).unwrap();
        let inner = RelaxedCapture::enter(&driver).unwrap();
        let call = Call::ThreadExchangeStreamCaptureMode;
        sim.inject(FaultPlan::fail(ResultCode::UNKNOWN).on(call));
        drop(inner);
        drop(outer);
        sim.clear_faults();
        assert_eq!(mode(), CaptureMode::Relaxed);
        drop(RelaxedCapture::enter(&driver).unwrap());
        assert_eq!(mode(), before);
        // One refusal is made good at once.
        let guard = RelaxedCapture::enter(&driver).unwrap();
        sim.inject(FaultPlan::fail(ResultCode::UNKNOWN).on(call).once());
        drop(guard);
        assert_eq!(mode(), before);
    }
}
