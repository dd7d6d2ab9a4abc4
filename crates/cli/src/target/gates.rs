//! [`Gates`]: holds streams of a GPU for a set time without a kernel.
//!
//! A gate is a `cuStreamWaitValue32` on page-locked memory. A thread of its own writes the words when
//! their time has come, and does nothing else, so that no driver call that waits for a gate can keep
//! it closed (row D-V7). Every path opens all gates: dropping [`Gates`] does.

use std::cell::Cell;
use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use vmm_sys::object::Stream;
use vmm_sys::{DeviceId, Driver, DriverResult, PinnedAddress};

/// One gate serves all holds of its stream within this time: a stream has room for about a thousand
/// waits, and further ones would block the host.
const SHARED_BY: Duration = Duration::from_micros(20);
/// One word a stream, in a cache line of its own.
const WORD_STEP: u64 = 64;

/// Gates on streams that open a set time after they were closed.
pub(super) struct Gates {
    driver: Arc<dyn Driver>,
    device: DeviceId,
    late: Duration,
    words: PinnedAddress,
    sides: Vec<Side>,
    agenda: Arc<Agenda>,
    opener: Option<JoinHandle<()>>,
}

/// A stream and its last gate.
struct Side {
    stream: Stream,
    word: u64,
    value: Cell<u32>,
    shared_until: Cell<Option<Instant>>,
}

impl fmt::Debug for Gates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gates").field("device", &self.device).finish_non_exhaustive()
    }
}

impl Gates {
    /// Gates on `streams`, each open `late` after it was closed, or up to 20 us later.
    pub(super) fn start(
        driver: &Arc<dyn Driver>,
        device: DeviceId,
        streams: &[Stream],
        late: Duration,
    ) -> DriverResult<Gates> {
        let words = driver.host_alloc(device, streams.len() as u64 * WORD_STEP)?;
        let side = |(index, stream): (u64, &Stream)| {
            let word = words.0 + index * WORD_STEP;
            write(word, 0);
            let (value, shared_until) = (Cell::new(0), Cell::new(None));
            Side { stream: stream.clone(), word, value, shared_until }
        };
        let sides = (0..).zip(streams).map(side).collect();
        let agenda = Arc::new(Agenda::default());
        let shared = agenda.clone();
        let opener = Some(thread::spawn(move || shared.serve()));
        Ok(Gates { driver: driver.clone(), device, late, words, sides, agenda, opener })
    }

    /// Holds a stream, behind what it has now.
    #[allow(unsafe_code, reason = "the contract takes a stream as a handle")]
    pub(super) fn hold(&self, index: usize) -> DriverResult<()> {
        let side = &self.sides[index];
        let now = Instant::now();
        if side.shared_until.get().is_some_and(|until| now < until) {
            // The gate before is still closed, and opens late enough for this hold too.
            return Ok(());
        }
        let value = side.value.get().wrapping_add(1);
        side.value.set(value);
        side.shared_until.set(Some(now + SHARED_BY));
        // It will be opened whatever happens from here on.
        self.agenda.add(Entry { due: now + SHARED_BY + self.late, word: side.word, value });
        let word = PinnedAddress(side.word);
        // SAFETY: the stream is live, as `side` has a share in it; the words are freed only after
        // the device was synchronised.
        unsafe { self.driver.stream_wait_value32(self.device, side.stream.handle(), word, value) }
    }
}

impl Drop for Gates {
    #[allow(unsafe_code, reason = "the contract takes host memory as an address")]
    fn drop(&mut self) {
        self.agenda.state().ended = true;
        self.agenda.changed.notify_all();
        if let Some(opener) = self.opener.take() {
            let _ = opener.join();
        }
        if self.driver.device_synchronize(self.device).is_ok() {
            // SAFETY: nothing waits for the words any more, and nobody writes them. Otherwise they
            // are left alone.
            let _ = unsafe { self.driver.host_free(self.device, self.words) };
        }
    }
}

/// One gate to be opened.
struct Entry {
    due: Instant,
    word: u64,
    value: u32,
}

#[derive(Default)]
struct State {
    /// In the order of their times: each is as late as the others.
    entries: VecDeque<Entry>,
    ended: bool,
}

/// What the opener has to do.
#[derive(Default)]
struct Agenda {
    state: Mutex<State>,
    changed: Condvar,
}

impl Agenda {
    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing can be half done under this lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, entry: Entry) {
        let mut state = self.state();
        state.entries.push_back(entry);
        if state.entries.len() == 1 {
            self.changed.notify_all();
        }
    }

    /// Opens what is due, until the end, and then all of it.
    fn serve(&self) {
        let mut state = self.state();
        loop {
            let now = Instant::now();
            while let Some(entry) = state.entries.front()
                && (state.ended || entry.due <= now)
            {
                write(entry.word, entry.value);
                state.entries.pop_front();
            }
            if state.ended {
                return;
            }
            let wait = state.entries.front().map_or(Duration::from_secs(1), |it| it.due - now);
            let woken = self.changed.wait_timeout(state, wait);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Writes a word of page-locked memory that a device may be reading.
#[allow(unsafe_code, reason = "the memory is the driver's")]
fn write(word: u64, value: u32) {
    // SAFETY: the word is 4-aligned and lives until `Gates` ends, which joins the opener first;
    // beside this thread only the device reads it.
    unsafe { AtomicU32::from_ptr(word as *mut u32) }.store(value, Ordering::Release);
}
