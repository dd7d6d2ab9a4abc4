//! Host functions in stream order.
//!
//! The driver is given a number, not a pointer to the closure: a function that is captured into a
//! graph is called again at every launch, and by then the closure is gone. A number that is no
//! longer in the list is simply over.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use super::{Cuda, have};
use crate::call::Call;
use crate::caught::thrown;
use crate::error::DriverResult;
use crate::types::{DeviceId, StreamHandle};

type HostFunction = Box<dyn FnOnce() + Send>;

/// Functions enqueued and not called yet, of all drivers of the process. A stream whose context has
/// faulted never calls its functions: those stay, as the driver's own record of them does.
static WAITING: Mutex<BTreeMap<usize, HostFunction>> = Mutex::new(BTreeMap::new());
/// Numbers are never given out twice.
static NEXT: AtomicUsize = AtomicUsize::new(1);

fn enqueue(function: HostFunction) -> usize {
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    WAITING.lock().insert(number, function);
    number
}

fn take(number: usize) -> Option<HostFunction> {
    WAITING.lock().remove(&number)
}

/// What the driver calls, on a thread of its own: no panic may leave it.
extern "C" fn run_one(number: *mut c_void) {
    let Some(function) = take(number.addr()) else { return };
    if let Err(words) = thrown(function) {
        crate::say!(error, words, "a host function panicked; the stream goes on");
    }
}

impl Cuda {
    /// Captured into a graph, the function runs at the first launch only.
    ///
    /// # Safety
    /// As [`crate::Driver::launch_host_function`].
    pub(super) unsafe fn launch_host_function(
        &self,
        device: DeviceId,
        stream: StreamHandle,
        function: HostFunction,
    ) -> DriverResult<()> {
        let launch = have(Call::LaunchHostFunc, self.entry.launch_host_func)?;
        let _scope = self.enter(device)?;
        let number = enqueue(function);
        let result = self.door(Call::LaunchHostFunc, Some(device), || {
            // SAFETY: the caller says that the stream is live; the argument is a number in the
            // place of a pointer, which only `run_one` reads, and as a number.
            unsafe { launch(stream.0, run_one, std::ptr::without_provenance_mut(number)) }
        });
        if result.is_err() {
            // Refused: it will not be called, so it is dropped here.
            drop(take(number));
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use std::ptr::without_provenance_mut;
    use std::sync::Arc;
    use std::sync::atomic::AtomicU32;

    use super::*;

    #[test]
    fn a_function_runs_once_even_if_the_driver_calls_again() {
        let calls = Arc::new(AtomicU32::new(0));
        let seen = calls.clone();
        let number = enqueue(Box::new(move || {
            seen.fetch_add(1, Ordering::Relaxed);
        }));
        run_one(without_provenance_mut(number));
        run_one(without_provenance_mut(number));
        assert_eq!(calls.load(Ordering::Relaxed), 1);
        assert_eq!(Arc::strong_count(&calls), 1, "the closure is dropped after its call");
    }

    #[test]
    fn a_panic_does_not_leave_the_function() {
        run_one(without_provenance_mut(enqueue(Box::new(|| panic!("on purpose")))));
    }
}
