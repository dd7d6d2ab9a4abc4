//! Finds the driver library. Whatever is missing is a [`LoadError`], never a panic.

use std::ffi::{CStr, c_void};

use libloading::Library;
use thiserror::Error;

use super::entry::{EntryPoints, symbol};
use crate::call::Call;
use crate::error::{DriverError, ResultCode};

/// The names to try, the loader's own search path each. The versioned one first: it comes with the
/// driver, while the bare one may be a toolkit's stub.
const NAMES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

/// The oldest driver that has the VMM calls: CUDA 10.2.
const OLDEST_VERSION: u32 = 10_020;

/// Why there is no driver to talk to.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LoadError {
    /// No library of that name can be opened. `reasons` has the loader's words, one for each name.
    #[error("no CUDA driver library: {}", pairs(.tried, .reasons))]
    NoLibrary {
        /// The names or paths tried, in order.
        tried: Vec<String>,
        /// Why each could not be opened.
        reasons: Vec<String>,
    },
    /// The library is the toolkit's empty stand-in for linking, not a driver.
    #[error(
        "{library} is a stub for linking, not a driver: take its directory off LD_LIBRARY_PATH"
    )]
    StubLibrary {
        /// The file that was opened.
        library: String,
    },
    /// The library is older than the virtual memory management calls.
    #[error("{library} is driver version {version}, and the VMM calls came with {oldest}")]
    TooOld {
        /// The file that was opened.
        library: String,
        /// What it says it is: 1000 x major + 10 x minor.
        version: u32,
        /// The least that is needed, in the same form.
        oldest: u32,
    },
    /// The library lacks an entry point that nothing works without.
    #[error("{library} has no {symbol}, which {call} needs")]
    MissingSymbol {
        /// The call.
        call: Call,
        /// The exported name.
        symbol: &'static str,
        /// The file that was opened.
        library: String,
    },
    /// The driver is there, but does not start.
    #[error("{library} does not start: {source}")]
    Init {
        /// The file that was opened.
        library: String,
        /// What it answered.
        source: DriverError,
    },
    /// The driver is there, but no GPU that this process may use.
    #[error("{library} finds no device: look at nvidia-smi and CUDA_VISIBLE_DEVICES")]
    NoDevice {
        /// The file that was opened.
        library: String,
    },
}

fn pairs(tried: &[String], reasons: &[String]) -> String {
    let pairs: Vec<_> = tried
        .iter()
        .zip(reasons)
        // The loader's words usually begin with the name already.
        .map(
            |(name, why)| {
                if why.contains(name.as_str()) { why.clone() } else { format!("{name}: {why}") }
            },
        )
        .collect();
    pairs.join("; ")
}

impl LoadError {
    /// What an answer during start means.
    pub(super) fn starting(library: &str, source: DriverError) -> LoadError {
        let library = library.to_owned();
        match source.code() {
            ResultCode::STUB_LIBRARY => LoadError::StubLibrary { library },
            ResultCode::NO_DEVICE => LoadError::NoDevice { library },
            _ => LoadError::Init { library, source },
        }
    }
}

/// A library that has all required entry points.
pub(super) struct Loaded {
    pub(super) entry: EntryPoints,
    /// The file that was opened.
    pub(super) path: String,
}

/// Opens the first of the usual names that can be opened.
pub(super) fn load() -> Result<Loaded, LoadError> {
    load_first(&NAMES)
}

/// Opens the first of `names` that can be opened; what that one lacks is the answer.
pub(super) fn load_first(names: &[&str]) -> Result<Loaded, LoadError> {
    let mut reasons = Vec::with_capacity(names.len());
    for name in names {
        // SAFETY: opening a library runs its initialisers; of a library of this name we expect
        // that it is NVIDIA's driver, whose initialisers are sound.
        match unsafe { Library::new(*name) } {
            Ok(library) => return examine(library, name),
            Err(error) => reasons.push(words_of_the_loader(&error)),
        }
    }
    Err(LoadError::NoLibrary {
        tried: names.iter().map(|&name| name.to_owned()).collect(),
        reasons,
    })
}

/// The loader's own words are the source of libloading's error.
fn words_of_the_loader(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

fn examine(library: Library, name: &str) -> Result<Loaded, LoadError> {
    let path = path_of(&library).unwrap_or_else(|| name.to_owned());
    if path.contains("/stubs/") {
        return Err(LoadError::StubLibrary { library: path });
    }
    check_version(&library, &path)?;
    let entry = EntryPoints::resolve(&library, &path)?;
    // Never closed: the driver has threads of its own and exit handlers, which unloading would
    // pull from under it.
    std::mem::forget(library);
    Ok(Loaded { entry, path })
}

/// The version comes first, so that an old driver is called old and not incomplete. It may be asked
/// before `cuInit`.
fn check_version(library: &Library, path: &str) -> Result<(), LoadError> {
    type GetVersion = extern "C" fn(&mut i32) -> u32;
    // SAFETY: that is the signature of this name.
    let Some(get_version) = (unsafe { symbol::<GetVersion>(library, "cuDriverGetVersion") }) else {
        return Ok(()); // the look-up of all entry points will name it
    };
    let mut version = 0;
    let code = ResultCode(get_version(&mut version));
    if code != ResultCode::SUCCESS {
        return Err(LoadError::starting(path, DriverError::new(Call::DriverGetVersion, code)));
    }
    match u32::try_from(version) {
        Ok(version) if version >= OLDEST_VERSION => Ok(()),
        _ => Err(LoadError::TooOld {
            library: path.to_owned(),
            version: version.max(0).cast_unsigned(),
            oldest: OLDEST_VERSION,
        }),
    }
}

/// The file that a library was opened from, by asking the loader where one of its symbols lies.
fn path_of(library: &Library) -> Option<String> {
    // SAFETY: the address is only looked up, never called or read.
    let address = unsafe { library.get::<*const c_void>("cuInit") }.ok()?;
    // SAFETY: an all-zero Dl_info is valid: null pointers and null addresses.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: dladdr only compares the address with the loaded objects; `info` is writable.
    let found = unsafe { libc::dladdr(*address, &raw mut info) };
    if found == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: dladdr filled in a nul-terminated string that lives as long as the object is loaded,
    // and `library` keeps it loaded.
    Some(unsafe { CStr::from_ptr(info.dli_fname) }.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_names_what_was_tried_and_why() {
        let names = ["libcuda-that-is-not-there.so.1", "/nowhere/libcuda.so"];
        let Err(error) = load_first(&names) else { panic!("something answers to {names:?}") };
        let LoadError::NoLibrary { tried, reasons } = &error else { panic!("{error}") };
        assert_eq!(tried, &names);
        assert!(reasons.iter().all(|why| why.contains("No such file")), "{reasons:?}");
        for name in names {
            assert!(error.to_string().contains(name), "{name} is missing in: {error}");
        }
    }

    #[test]
    fn a_library_without_the_driver_calls_is_named_with_the_first_call_it_lacks() {
        let Err(error) = load_first(&["libc.so.6"]) else { panic!("libc is no driver") };
        let LoadError::MissingSymbol { call, symbol, .. } = &error else { panic!("{error}") };
        assert_eq!((*call, *symbol), (Call::Init, "cuInit"));
    }

    #[test]
    fn answers_at_start_become_the_reason() {
        let answer = |code| LoadError::starting("lib", DriverError::new(Call::Init, code));
        assert!(matches!(answer(ResultCode::STUB_LIBRARY), LoadError::StubLibrary { .. }));
        assert!(matches!(answer(ResultCode::NO_DEVICE), LoadError::NoDevice { .. }));
        let LoadError::Init { source, .. } = answer(ResultCode(4711)) else { panic!() };
        assert_eq!(source.code(), ResultCode(4711));
    }
}
