//! [`Hold`]: keeps a stream from going on until it is told to, the same way on both drivers.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vmm_sys::object::Stream;
use vmm_sys::{DeviceId, Driver, DriverResult, PinnedAddress, ProbeKernel};

/// Bytes of the page of words, and of a word.
const PAGE_BYTES: u64 = 4096;
const WORD_BYTES: u64 = 4;

/// Words in page-locked memory that streams wait for.
///
/// They are all made before the first stream is held: making or freeing page-locked memory may
/// wait for every stream of the device, a held one too.
#[derive(Debug)]
pub struct Words {
    driver: Arc<dyn Driver>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    page: Option<PinnedAddress>,
    free: Vec<PinnedAddress>,
    lent: u64,
}

impl Words {
    /// None yet.
    pub fn new(driver: &Arc<dyn Driver>) -> Arc<Words> {
        Arc::new(Words { driver: driver.clone(), state: Mutex::new(State::default()) })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A test that panicked leaves whole words behind.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self) -> DriverResult<PinnedAddress> {
        let mut state = self.lock();
        if state.page.is_none() {
            let page = self.driver.host_alloc(DeviceId(0), PAGE_BYTES)?;
            state.page = Some(page);
            let words =
                (0..PAGE_BYTES / WORD_BYTES).map(|n| PinnedAddress(page.0 + n * WORD_BYTES));
            state.free = words.collect();
        }
        let word = state.free.pop().expect("no test holds a thousand streams");
        state.lent += 1;
        drop(state);
        store(word, 0);
        Ok(word)
    }

    fn put(&self, word: PinnedAddress) {
        let mut state = self.lock();
        state.free.push(word);
        state.lent -= 1;
    }

    /// Gives the page back, if no word is lent.
    pub fn give_back(&self) {
        let mut state = self.lock();
        if state.lent > 0 {
            return;
        }
        if let Some(page) = state.page.take() {
            state.free.clear();
            // SAFETY: the page came from this driver; no word of it is lent, so no stream waits
            // for one and no test writes one.
            let freed = unsafe { self.driver.host_free(DeviceId(0), page) };
            if let Err(error) = freed {
                eprintln!("a page of page-locked memory stays: {error}");
            }
        }
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        self.give_back();
    }
}

fn store(word: PinnedAddress, value: u32) {
    let pointer = word.0 as *const AtomicU32;
    // SAFETY: a word is 4 aligned bytes of a page that the driver allocated, which is not freed
    // while a word of it is lent; host and GPU access it as a whole.
    unsafe { &*pointer }.store(value, Ordering::Release);
}

/// A word, lent.
#[derive(Debug)]
struct Word {
    words: Arc<Words>,
    address: PinnedAddress,
}

impl Drop for Word {
    fn drop(&mut self) {
        self.words.put(self.address);
    }
}

/// A stream that waits for a word, which [`Hold::release`] writes. Dropping it releases the stream
/// and waits for it.
#[derive(Debug)]
pub struct Hold {
    word: Arc<Word>,
    stream: Stream,
}

/// Lets a held stream go, from any thread. Keeps nothing else alive.
#[derive(Clone, Debug)]
pub struct Release(Arc<Word>);

impl Release {
    /// Lets the stream go.
    pub fn now(&self) {
        store(self.0.address, 1);
    }
}

impl Hold {
    /// Holds `stream`: work enqueued from now on waits.
    ///
    /// # Errors
    /// The driver's.
    pub fn on(words: &Arc<Words>, stream: &Stream) -> DriverResult<Hold> {
        let word = Arc::new(Word { words: words.clone(), address: words.take()? });
        let (driver, device) = (stream.driver(), stream.device());
        // SAFETY: the stream is live, and the word stays until the stream has passed it: whoever
        // drops the hold waits for the stream first.
        unsafe { driver.stream_wait_value32(device, stream.handle(), word.address, 1)? };
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
        store(self.word.address, 1);
        self.stream.synchronize()
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        store(self.word.address, 1);
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
