//! What can go wrong, and where its words are kept for the C side.

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int};
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};

/// Why a function of the C side did nothing.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// A negative length.
    #[error("a length of {0} bytes: expected 0 or more")]
    BadLength(isize),
    /// A device that cannot be.
    #[error("device {0}: expected an ordinal from 0 to 2^31 - 1")]
    BadDevice(c_int),
    /// The machine has fewer devices.
    #[error("device {asked}: this machine has {count} device(s), numbered from 0")]
    NoSuchDevice {
        /// The ordinal asked for.
        asked: u32,
        /// How many there are.
        count: u32,
    },
    /// A number that stands for no graph.
    #[error("graph {0}: expected a number from vmm_pool_torch_capture_begin, not yet destroyed")]
    UnknownGraph(u64),
    /// The capture is over.
    #[error("the capture of graph {0} has ended: expected one that is open")]
    CaptureEnded(u64),
    /// Nothing can be recorded on the stream.
    #[error(
        "the stream is being captured, so that it must not be destroyed: expected it to be kept, \
         and said to be gone again after the capture"
    )]
    StreamCaptured,
    /// There is no driver to take memory from.
    #[error("{0}")]
    NoDriver(String),
    /// The pool's answer.
    #[error(transparent)]
    Pool(#[from] vmm_pool::Error),
    /// The driver's answer.
    #[error(transparent)]
    Driver(#[from] vmm_sys::DriverError),
    /// A bug, kept from crossing the border. Its own words went to stderr.
    #[error("the pool panicked, which is a bug in it; please report what it printed")]
    Panicked,
}

thread_local! {
    static LAST: RefCell<Option<CString>> = const { RefCell::new(None) };
}

/// Keeps a failure's words for the calling thread.
#[cold]
pub(crate) fn keep(failure: &Failure) {
    let text = CString::new(failure.to_string().replace('\0', " ")).ok();
    // A thread that is dropping its values has nobody left to ask.
    let _ended = LAST.try_with(|last| {
        if let Ok(mut last) = last.try_borrow_mut() {
            *last = text;
        }
    });
}

/// The words kept last; they move only when others take their place.
pub(crate) fn last() -> *const c_char {
    let pointer = LAST.try_with(|last| {
        let last = last.try_borrow().ok()?;
        last.as_ref().map(|text| text.as_ptr())
    });
    pointer.ok().flatten().unwrap_or(std::ptr::null())
}

/// Tells the user why no memory can be had at all: once in a process, since the caller may look at
/// nothing but the NULL. A wrong argument is the caller's own, and no reason.
pub(crate) fn tell(failure: &Failure) {
    static TOLD: AtomicBool = AtomicBool::new(false);
    let is_argument = matches!(failure, Failure::NoSuchDevice { .. });
    if !is_argument && !TOLD.swap(true, Ordering::Relaxed) {
        // A closed stderr is no reason to fail.
        let _unheard = writeln!(std::io::stderr(), "vmm-pool: no memory can be had: {failure}");
    }
}
