//! [`Hold`]: keeps a stream from going on until it is told to, the same way on both drivers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use vmm_sys::object::Stream;
use vmm_sys::{DeviceId, Driver, DriverResult, PinnedAddress, ProbeKernel};

/// A stream waits for a word in page-locked memory, which [`Hold::release`] writes. Dropping it
/// releases the stream and waits for it.
#[derive(Debug)]
pub struct Hold {
    word: Arc<Word>,
    stream: Stream,
}

/// The word, shared with whoever may open the gate.
#[derive(Debug)]
struct Word {
    driver: Arc<dyn Driver>,
    device: DeviceId,
    address: PinnedAddress,
}

impl Word {
    fn open(&self) {
        let pointer = self.address.0 as *const AtomicU32;
        // SAFETY: the word is 4 aligned bytes of memory that the driver allocated and that is
        // freed only when `self` is dropped; host and GPU access it as a whole.
        unsafe { &*pointer }.store(1, Ordering::Release);
    }
}

impl Drop for Word {
    fn drop(&mut self) {
        // SAFETY: the address came from this driver, and the stream that waited for the word has
        // passed it: `Hold` synchronises before it lets its word go.
        let freed = unsafe { self.driver.host_free(self.device, self.address) };
        if let Err(error) = freed {
            eprintln!("a word of page-locked memory stays: {error}");
        }
    }
}

/// Lets a held stream go, from any thread. Keeps nothing else alive.
#[derive(Clone, Debug)]
pub struct Release(Arc<Word>);

impl Release {
    /// Lets the stream go.
    pub fn now(&self) {
        self.0.open();
    }
}

impl Hold {
    /// Holds `stream`: work enqueued from now on waits.
    ///
    /// # Errors
    /// The driver's.
    pub fn on(stream: &Stream) -> DriverResult<Hold> {
        let (driver, device) = (stream.driver().clone(), stream.device());
        // Zeroed by the contract.
        let address = driver.host_alloc(device, 4096)?;
        let word = Arc::new(Word { driver: driver.clone(), device, address });
        // SAFETY: the stream is live, and the word stays until the stream has passed it.
        unsafe { driver.stream_wait_value32(device, stream.handle(), address, 1)? };
        Ok(Hold { word, stream: stream.clone() })
    }

    /// The means to let it go from another thread.
    pub fn releaser(&self) -> Release {
        Release(self.word.clone())
    }

    /// Lets the stream go, and waits until it has done its work.
    ///
    /// # Errors
    /// The driver's: a fault of the work shows up here.
    pub fn release(self) -> DriverResult<()> {
        self.word.open();
        self.stream.synchronize()
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.word.open();
        if let Err(error) = self.stream.synchronize() {
            eprintln!("a held stream did not finish: {error}");
        }
    }
}

/// Enqueues work on `stream` that takes about `us` microseconds and touches no memory.
///
/// # Errors
/// The driver's.
pub fn keep_busy(stream: &Stream, us: u64) -> DriverResult<()> {
    let kernel = ProbeKernel::Spin { busy_us: us, done: 0 };
    // SAFETY: the stream is live; the kernel touches no memory.
    unsafe { stream.driver().launch(stream.device(), &kernel, stream.handle()) }
}
