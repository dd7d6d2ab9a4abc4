//! What the driver refused to a remedy: memory that could not be unmapped, a gate that could not be
//! asked, a buffer that could not move. Nobody is told at once, for it is tried again later; but the
//! request that the remedy was for may fail, and its error says so.
//!
//! Remedies run in the thread of the request, so each thread has a note of its own.

use std::cell::RefCell;

use vmm_sys::DriverError;

use crate::error::Error;
use crate::sync::thread_local;

thread_local! {
    static LAST: RefCell<Option<DriverError>> = const { RefCell::new(None) };
}

/// A request begins to look for memory.
pub(crate) fn forget() {
    let _ending = LAST.try_with(|last| last.replace(None));
}

/// A remedy was refused. In a thread whose own values have ended there is no request to tell.
pub(crate) fn note(error: &DriverError) {
    let _ending = LAST.try_with(|last| last.replace(Some(error.clone())));
}

/// The driver did not take something back, which is tried again later: said to the log, and noted. A
/// driver that has shut down is left in silence.
pub(crate) fn tell(error: &DriverError, what: &str) {
    if !error.is_driver_gone() {
        vmm_sys::say!(warn, %error, "{what}; tried again later");
    }
    note(error);
}

/// The same of an error that may be the driver's.
pub(crate) fn note_of(error: &Error) {
    match error {
        Error::Driver(error) => note(error),
        Error::OutOfMemory(facts) => facts.cause.iter().for_each(note),
        _ => {}
    }
}

/// The last that was refused since the request began.
pub(crate) fn take() -> Option<DriverError> {
    LAST.try_with(RefCell::take).ok().flatten()
}
