//! [`Broken`]: a part of a pool that a thread left in the middle of a change, by a panic.
//!
//! Foreign code cannot bring that about: hooks, callbacks, clocks, logs and drivers that throw are caught
//! where they are called. What remains are faults of the pool itself. The part is taken out of use then, and
//! says so; all others go on.

use std::any::Any;
use std::fmt;
use std::sync::{Mutex, TryLockError};

use vmm_sys::{DeviceId, StreamId};

/// A part of a pool that cannot be used any more: a thread panicked while it changed it. What it holds
/// stays mapped and booked until the end of the pool; for good, if somebody may still use it then.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Broken {
    /// What is broken.
    pub part: BrokenPart,
    /// The name of the thread that panicked.
    pub thread: String,
}

/// What can break, apart from the rest.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BrokenPart {
    /// The lane of a stream. [`Pool::lane`](crate::Pool::lane) makes another one for it.
    Lane {
        /// The device.
        device: DeviceId,
        /// The stream.
        stream: StreamId,
    },
    /// The elastic buffer at this address.
    Elastic {
        /// Its first address.
        address: u64,
    },
}

impl Broken {
    /// Says that the calling thread panics.
    pub(crate) fn here(part: BrokenPart) -> Broken {
        let thread = std::thread::current();
        let thread = thread.name().unwrap_or("without a name").to_owned();
        Broken { part, thread }
    }
}

/// What nobody may ever give back, since nobody knows who uses it. Found from here to the end of the process,
/// so that who looks for leaks does not take it for one.
static KEPT: Mutex<Vec<Box<dyn Any + Send>>> = Mutex::new(Vec::new());

/// Never drops it.
pub(crate) fn keep_for_good(what: impl Any + Send) {
    // No scheduler of proofs needs to know this lock: nothing else is taken or waited for under it.
    match KEPT.try_lock() {
        Ok(mut kept) => kept.push(Box::new(what)),
        Err(TryLockError::Poisoned(kept)) => kept.into_inner().push(Box::new(what)),
        // Held in another thread; in a forked child maybe for ever.
        Err(TryLockError::WouldBlock) => std::mem::forget(what),
    }
}

impl fmt::Display for BrokenPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BrokenPart::Lane { device, stream } => write!(f, "the lane of {stream:?} of {device}"),
            BrokenPart::Elastic { address } => write!(f, "the elastic buffer at {address:#x}"),
        }
    }
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Broken { part, thread } = self;
        write!(f, "{part} is broken: thread {thread:?} panicked while it changed it")
    }
}

/// Whether the calling thread has begun to panic since this was made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Since {
    panicked_before: bool,
}

impl Since {
    #[inline]
    pub(crate) fn now() -> Since {
        Since { panicked_before: std::thread::panicking() }
    }

    #[inline]
    pub(crate) fn has_panicked(self) -> bool {
        // The scheduler of proofs ends its threads by unwinding them.
        !cfg!(shuttle) && !self.panicked_before && std::thread::panicking()
    }
}
