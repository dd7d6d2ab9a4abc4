//! What could not be given back in a `Drop`: kept, so that nothing is lost for good.

use std::sync::Arc;

use super::RelaxedCapture;
use super::chunk::Receipt;
use crate::call::Call;
use crate::caught::caught;
use crate::driver::Driver;
use crate::error::{DriverError, DriverResult, ResultCode};
use crate::sync::{Mutex, global};
use crate::types::{ChunkHandle, DeviceId, EventHandle, PinnedAddress, StreamHandle};

/// Something the driver refused to take back, with what it hangs on.
pub(crate) enum Leftover {
    /// A reference to a chunk, and what goes when it was taken back.
    Chunk { handle: ChunkHandle, _receipt: Receipt },
    /// A reserved range: address, bytes.
    Range(u64, u64),
    /// A mapping: address, bytes, and the objects it keeps alive until it is gone.
    Mapping { address: u64, bytes: u64, _keeps: (Arc<super::Chunk>, super::Range) },
    /// Page-locked host memory, and the device in whose context it was allocated.
    Pinned(DeviceId, PinnedAddress),
    /// A stream that was made here; contexts have room for few.
    Stream(DeviceId, StreamHandle),
    /// An event.
    Event(DeviceId, EventHandle),
}

struct Failed {
    driver: Arc<dyn Driver>,
    leftover: Leftover,
    error: DriverError,
}

global! {
    static FAILED: Mutex<Vec<Failed>> = Mutex::new(Vec::new());
}

impl Leftover {
    /// Tries to give it back.
    pub(crate) fn give_back(&self, driver: &dyn Driver) -> DriverResult<()> {
        let call = match self {
            Leftover::Chunk { .. } => Call::MemRelease,
            Leftover::Range(..) => Call::MemAddressFree,
            Leftover::Mapping { .. } => Call::MemUnmap,
            Leftover::Pinned(..) => Call::MemFreeHost,
            Leftover::Stream(..) => Call::StreamDestroy,
            Leftover::Event(..) => Call::EventDestroy,
        };
        caught(call, || match self {
            // SAFETY: the reference was owned by the object that was dropped and by nothing since.
            Leftover::Chunk { handle, .. } => unsafe { driver.release(*handle) },
            Leftover::Range(address, bytes) => driver.address_free(*address, *bytes),
            Leftover::Mapping { address, bytes, .. } => driver.unmap(*address, *bytes),
            // SAFETY: the memory was owned by the object that was dropped, after its last use, and
            // by nothing since.
            Leftover::Pinned(device, address) => unsafe { driver.host_free(*device, *address) },
            // SAFETY: the handle was owned by the object that was dropped and by nothing since; work
            // enqueued goes on.
            Leftover::Stream(device, stream) => unsafe { driver.stream_destroy(*device, *stream) },
            // SAFETY: as above.
            Leftover::Event(device, event) => unsafe { driver.event_destroy(*device, *event) },
        })
    }

    /// Whether it is gone although the driver answered so: what belongs to a context goes with it, and
    /// a second try could meet the handle of somebody else.
    fn went_with(&self, error: &DriverError) -> bool {
        let of_context = matches!(self, Leftover::Stream(..) | Leftover::Event(..));
        let context_is_gone =
            matches!(error.code(), ResultCode::INVALID_HANDLE | ResultCode::INVALID_CONTEXT);
        error.is_driver_gone() || of_context && (error.is_sticky() || context_is_gone)
    }
}

/// Gives `leftover` back now, or keeps it for a later try.
///
/// Where the driver or the context is gone for good there is nothing left to give back to, and the
/// leftover is let go: its memory went with the context.
pub(crate) fn give_back_or_keep(driver: &Arc<dyn Driver>, leftover: Leftover) {
    if driver.is_gone() {
        // The objects that a mapping keeps are dropped here, and make no call either.
        return;
    }
    let given = match &leftover {
        // Like every call that may wait for the device, it ends captures (rows D-G3, D-G4).
        Leftover::Pinned(..) => {
            RelaxedCapture::enter(driver).and_then(|_relaxed| leftover.give_back(&**driver))
        }
        _ => leftover.give_back(&**driver),
    };
    if let Err(error) = given {
        if leftover.went_with(&error) {
            crate::say!(debug, %error, "gone with its context");
            return;
        }
        crate::say!(warn, %error, "the driver refused to take something back; kept for a later try");
        FAILED.lock().push(Failed { driver: driver.clone(), leftover, error });
    }
}

pub(super) fn same_driver(a: &Arc<dyn Driver>, b: &Arc<dyn Driver>) -> bool {
    std::ptr::addr_eq(Arc::as_ptr(a), Arc::as_ptr(b))
}

/// The errors of what `driver` refused to take back and still holds.
pub fn failed_drops(driver: &Arc<dyn Driver>) -> Vec<DriverError> {
    let failed = FAILED.lock();
    failed.iter().filter(|f| same_driver(&f.driver, driver)).map(|f| f.error.clone()).collect()
}

/// Tries again to give back what `driver` refused. Returns how many are still left.
pub fn retry_failed_drops(driver: &Arc<dyn Driver>) -> usize {
    // Taken out first: giving a mapping back drops its chunk, whose own drop may come here.
    let mine: Vec<Failed> = {
        let mut failed = FAILED.lock();
        let (mine, others) = failed.drain(..).partition(|f| same_driver(&f.driver, driver));
        *failed = others;
        mine
    };
    for Failed { driver, leftover, .. } in mine {
        give_back_or_keep(&driver, leftover);
    }
    FAILED.lock().iter().filter(|f| same_driver(&f.driver, driver)).count()
}

#[cfg(test)]
mod tests {
    use super::super::{Event, Stream};
    use super::*;
    use crate::sim::{FaultPlan, Sim};

    #[test]
    fn a_stream_and_an_event_that_the_driver_does_not_take_back_are_kept() {
        let sim = Sim::builder().build();
        let driver: Arc<dyn Driver> = sim.clone();
        let make = || {
            let device = DeviceId(0);
            (Stream::create(&driver, device).unwrap(), Event::create(&driver, device).unwrap())
        };
        let made = make();
        sim.inject(FaultPlan::fail(ResultCode::UNKNOWN));
        drop(made);
        assert_eq!(failed_drops(&driver).len(), 2);
        sim.clear_faults();
        assert_eq!(retry_failed_drops(&driver), 0);
        sim.check_clean().unwrap();
        // What went with its context is not tried again: its handle may be another's by then.
        let made = make();
        sim.reset_context(DeviceId(0));
        drop(made);
        assert_eq!(failed_drops(&driver), []);
        sim.check_clean().unwrap();
    }
}
