//! The door: every entry point passes it. No panic leaves it, and every call is counted and, if
//! somebody wants it, logged.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::OnceLock;

use parking_lot::Mutex;
use vmm_sys::caught::thrown;
use vmm_sys::{DriverError, ResultCode, process};

use crate::{faults, settings};

/// Why a call did not succeed: the code that the program gets, and words for the log.
#[derive(Debug)]
pub(crate) struct Refusal {
    code: ResultCode,
    why: String,
}

/// What an entry point comes to.
pub(crate) type Done = Result<(), Refusal>;

impl Refusal {
    /// A refusal of the stand-in itself, with its reason.
    pub(crate) fn new(code: ResultCode, why: impl Display) -> Refusal {
        Refusal { code, why: why.to_string() }
    }
}

impl From<DriverError> for Refusal {
    fn from(error: DriverError) -> Refusal {
        Refusal { code: error.code(), why: error.to_string() }
    }
}

/// How often each entry point was called.
static CALLS: Mutex<BTreeMap<&'static str, u64>> = Mutex::new(BTreeMap::new());
/// Where calls are written down, line by line.
static LOG: Mutex<Option<File>> = Mutex::new(None);
/// The environment's log is opened at the first call.
static OPENED: OnceLock<()> = OnceLock::new();

/// Runs the body of an entry point.
pub(crate) fn pass(name: &'static str, body: impl FnOnce() -> Done) -> u32 {
    // Before any lock: in a forked child another thread of the parent may have held it.
    if process::is_forked_child() {
        return ResultCode::NOT_INITIALIZED.0;
    }
    OPENED.get_or_init(|| {
        if let Some(path) = settings::log_path()
            && let Err(error) = log_to(&path)
        {
            eprintln!("vmm-standin: no log at {}: {error}", path.display());
        }
    });
    *CALLS.lock().entry(name).or_insert(0) += 1;
    let answer = thrown(|| faults::check(name).and_then(|()| body())).unwrap_or_else(|words| {
        Err(Refusal::new(ResultCode::UNKNOWN, format_args!("the stand-in panicked: {words}")))
    });
    let (code, why) = match answer {
        Ok(()) => (ResultCode::SUCCESS, String::new()),
        Err(refusal) => (refusal.code, refusal.why),
    };
    if let Some(log) = &mut *LOG.lock() {
        // A full disk must not change what the program sees.
        let _ = match why.as_str() {
            "" => writeln!(log, "{name} {}", code.0),
            why => writeln!(log, "{name} {}: {why}", code.0),
        };
    }
    code.0
}

/// How often an entry point was called.
pub(crate) fn calls_of(name: &str) -> u64 {
    CALLS.lock().get(name).copied().unwrap_or(0)
}

/// Writes calls down from now on, at the end of what the file holds.
pub(crate) fn log_to(path: &Path) -> std::io::Result<()> {
    let file = File::options().create(true).append(true).open(path)?;
    *LOG.lock() = Some(file);
    Ok(())
}

/// A place that the caller wants a result in; checked before anything is done.
pub(crate) struct Out<T>(*mut T);

impl<T> Out<T> {
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for null.
    pub(crate) fn new(place: *mut T) -> Result<Out<T>, Refusal> {
        match place.is_null() {
            true => Err(Refusal::new(ResultCode::INVALID_VALUE, "null in the place of a result")),
            false => Ok(Out(place)),
        }
    }

    /// Writes the result.
    pub(crate) fn set(self, value: T) -> Done {
        // SAFETY: not null, and the caller of the entry point says that there is room for a value
        // of this type; it need not be aligned by more than C's rules, so no reference is made.
        unsafe { self.0.write(value) };
        Ok(())
    }
}

/// Entry points: exported C functions that go through [`pass`].
macro_rules! entries {
    ($($(#[$meta:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        $(#[$meta])*
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name($($argument: $type),*) -> u32 {
            $crate::door::pass(stringify!($name), move || $body)
        }
    )*};
}
