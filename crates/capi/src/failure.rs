//! What can go wrong, its status, and where its words are kept for the C side.

use std::cell::{Cell, RefCell};
use std::ffi::{CString, c_char, c_int};
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};

use vmm_pool::{ElasticError, Error, PeerFault};
use vmm_sys::ResultCode;

use crate::status::vmm_pool_status as Status;

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
    /// An argument that is missing, or has a value that it cannot have.
    #[error("{name} = {value}: expected {expected}")]
    BadArgument {
        /// Its name in the header.
        name: &'static str,
        /// What was given.
        value: String,
        /// What would be accepted.
        expected: String,
    },
    /// A handle that is of another kind, or no longer valid.
    #[error("{value:#x} is no {kind}: expected a handle that was given out and not given back")]
    UnknownHandle {
        /// What was expected.
        kind: &'static str,
        /// What was given.
        value: usize,
    },
    /// The pool that the process shares does not end.
    #[error("this is the process's own pool of a device: it is not destroyed")]
    DefaultPool,
    /// Elastic buffers of the pool are alive, or uses of them.
    #[error("{0} elastic buffer(s) and uses of the pool are alive: release and end them first")]
    PoolInUse(usize),
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
    /// The text does not fit into the caller's buffer.
    #[error("the text needs {needed} bytes and a 0 behind it, more than the {capacity} there are")]
    Truncated {
        /// Its length.
        needed: usize,
        /// That of the buffer.
        capacity: usize,
    },
    /// There is no driver to take memory from.
    #[error("{0}")]
    NoDriver(String),
    /// The pool's answer.
    #[error(transparent)]
    Pool(#[from] Error),
    /// The driver's answer.
    #[error(transparent)]
    Driver(#[from] vmm_sys::DriverError),
    /// What another process offers could not be had.
    #[error("{words}")]
    Share {
        /// Which status says so.
        status: Status,
        /// The words of the cause.
        words: String,
    },
    /// A bug, kept from crossing the border. Its own words went to stderr.
    #[error("the pool panicked, which is a bug in it; please report what it printed")]
    Panicked,
}

impl Failure {
    /// An argument with a value that it cannot have.
    #[cold]
    pub fn argument(
        name: &'static str,
        value: impl ToString,
        expected: impl Into<String>,
    ) -> Failure {
        Failure::BadArgument { name, value: value.to_string(), expected: expected.into() }
    }

    /// The status that stands for it.
    pub fn status(&self) -> Status {
        match self {
            Failure::BadLength(_)
            | Failure::BadDevice(_)
            | Failure::NoSuchDevice { .. }
            | Failure::BadArgument { .. }
            | Failure::UnknownHandle { .. }
            | Failure::DefaultPool
            | Failure::UnknownGraph(_)
            | Failure::CaptureEnded(_) => Status::VMM_POOL_INVALID,
            Failure::PoolInUse(_) | Failure::StreamCaptured => Status::VMM_POOL_BUSY,
            Failure::Truncated { .. } => Status::VMM_POOL_TRUNCATED,
            Failure::NoDriver(_) => Status::VMM_POOL_NO_DRIVER,
            Failure::Pool(error) => of_pool(error),
            Failure::Driver(error) => of_driver(error),
            Failure::Share { status, .. } => *status,
            Failure::Panicked => Status::VMM_POOL_PANICKED,
        }
    }
}

pub(crate) fn of_driver(error: &vmm_sys::DriverError) -> Status {
    match error {
        _ if error.is_out_of_memory() => Status::VMM_POOL_OUT_OF_MEMORY,
        _ if error.is_out_of_addresses() => Status::VMM_POOL_OUT_OF_ADDRESSES,
        _ if error.is_driver_gone() => Status::VMM_POOL_FORKED,
        _ => Status::VMM_POOL_DRIVER,
    }
}

pub(crate) fn of_pool(error: &Error) -> Status {
    match error {
        _ if error.is_out_of_memory() => Status::VMM_POOL_OUT_OF_MEMORY,
        // More than any device has: to whoever asks that is no other case than a little more.
        Error::TooLarge { .. } => Status::VMM_POOL_OUT_OF_MEMORY,
        Error::OutOfAddresses { .. } => Status::VMM_POOL_OUT_OF_ADDRESSES,
        Error::UnknownAddress { .. } | Error::NotAllocated { .. } => Status::VMM_POOL_NOT_A_BLOCK,
        Error::Unsupported { .. } | Error::AddressTaken { .. } => Status::VMM_POOL_NOT_SUPPORTED,
        Error::LaneClosed | Error::CaptureOpen => Status::VMM_POOL_BUSY,
        Error::DriverGone => Status::VMM_POOL_FORKED,
        Error::Elastic(error) => of_elastic(error),
        Error::Driver(error) => of_driver(error),
        // What is wrong with a request.
        _ => Status::VMM_POOL_INVALID,
    }
}

fn of_elastic(error: &ElasticError) -> Status {
    match error {
        ElasticError::OverQuota { .. } => Status::VMM_POOL_OUT_OF_MEMORY,
        // What is full is not unable.
        ElasticError::NoHostMemory { cause, .. }
        | ElasticError::NoPeer { cause: PeerFault::Refused(cause), .. }
            if cause.code() == ResultCode::OUT_OF_MEMORY =>
        {
            of_driver(cause)
        }
        ElasticError::Busy
        | ElasticError::Ended
        | ElasticError::StillUsed { .. }
        | ElasticError::InUse { .. }
        | ElasticError::Asleep
        | ElasticError::Stuck { .. } => Status::VMM_POOL_BUSY,
        ElasticError::NotExportable
        | ElasticError::NoPeer { .. }
        | ElasticError::NoHostMemory { .. } => Status::VMM_POOL_NOT_SUPPORTED,
        // What is wrong with a request.
        _ => Status::VMM_POOL_INVALID,
    }
}

thread_local! {
    static LAST: RefCell<Option<CString>> = const { RefCell::new(None) };
    static LAST_STATUS: Cell<i32> = const { Cell::new(Status::VMM_POOL_OK as i32) };
    static REPORT: RefCell<Option<CString>> = const { RefCell::new(None) };
}

type Slot = std::thread::LocalKey<RefCell<Option<CString>>>;

fn put(slot: &'static Slot, text: &str) {
    let text = CString::new(text.replace('\0', " ")).ok();
    // A thread that is dropping its values has nobody left to ask.
    let _ended = slot.try_with(|last| {
        if let Ok(mut last) = last.try_borrow_mut() {
            *last = text;
        }
    });
}

fn look(slot: &'static Slot) -> *const c_char {
    let pointer = slot.try_with(|last| {
        let last = last.try_borrow().ok()?;
        last.as_ref().map(|text| text.as_ptr())
    });
    pointer.ok().flatten().unwrap_or(std::ptr::null())
}

/// Keeps a failure's words for the calling thread.
#[cold]
pub fn keep(failure: &Failure) {
    put(&LAST, &failure.to_string());
    // A thread that is dropping its values has nobody left to ask.
    let _ended = LAST_STATUS.try_with(|last| last.set(failure.status() as i32));
}

/// The status of the failure kept last; that of no failure before.
pub fn last_status() -> i32 {
    LAST_STATUS.try_with(Cell::get).unwrap_or(Status::VMM_POOL_OK as i32)
}

/// The words kept last; they move only when others take their place.
pub fn last() -> *const c_char {
    look(&LAST)
}

/// Keeps a report for the calling thread, in the place of its last one.
pub fn keep_report(text: &str) -> *const c_char {
    put(&REPORT, text);
    look(&REPORT)
}

/// Tells the user why no memory can be had at all: once in a process, since the caller may look at
/// nothing but the NULL. A wrong argument is the caller's own, and no reason.
pub fn tell(failure: &Failure) {
    static TOLD: AtomicBool = AtomicBool::new(false);
    let is_argument = matches!(failure, Failure::NoSuchDevice { .. });
    if !is_argument && !TOLD.swap(true, Ordering::Relaxed) {
        // A closed stderr is no reason to fail.
        let _unheard = writeln!(std::io::stderr(), "vmm-pool: no memory can be had: {failure}");
    }
}

#[cfg(test)]
mod tests {
    use vmm_sys::{Call, DriverError};

    use super::*;

    #[test]
    fn what_the_driver_answers_has_the_status_that_stands_for_it() {
        let status = |call, code| Failure::from(DriverError::new(call, code)).status();
        let short = ResultCode::OUT_OF_MEMORY;
        assert_eq!(status(Call::MemCreate, short), Status::VMM_POOL_OUT_OF_MEMORY);
        assert_eq!(status(Call::MemAddressReserve, short), Status::VMM_POOL_OUT_OF_ADDRESSES);
        assert_eq!(status(Call::MemMap, ResultCode::DEINITIALIZED), Status::VMM_POOL_FORKED);
        assert_eq!(status(Call::MemMap, ResultCode::UNKNOWN), Status::VMM_POOL_DRIVER);
    }
}
