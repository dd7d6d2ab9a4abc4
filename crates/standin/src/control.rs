//! What tests steer and read. Not CUDA's: a program finds these by name in the library it loaded.
//!
//! ```c
//! uint32_t vmm_standin_hold(CUstream stream);    // work enqueued from now on waits
//! uint32_t vmm_standin_release(CUstream stream); // until this; all holds of the stream
//! uint64_t vmm_standin_calls(const char *name);  // how often an entry point was called
//! uint32_t vmm_standin_log(const char *path);    // write each call down from now on
//! uint64_t vmm_standin_live_bytes(void);         // memory taken on all devices
//! uint64_t vmm_standin_live_objects(void);       // handles, mappings, ranges, streams, events
//! uint32_t vmm_standin_fail(uint64_t at, uint64_t times, uint32_t code); // calls from the at-th on
//! uint64_t vmm_standin_failed(char *to, uint64_t capacity);              // which did, in their order
//! ```

use std::collections::BTreeMap;
use std::ffi::{CStr, OsStr, c_char};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use parking_lot::Mutex;
use vmm_sys::sim::{HoldId, LedgerSummary};
use vmm_sys::{Driver, ResultCode, StreamHandle, StreamId};

use crate::door::{Refusal, calls_of, log_to};
use crate::faults;
use crate::machine::{current, sim};

/// The holds of each stream. By identity, as handle values come back for other streams.
static HOLDS: Mutex<BTreeMap<StreamId, Vec<HoldId>>> = Mutex::new(BTreeMap::new());

fn stream_id(stream: u64) -> Result<StreamId, Refusal> {
    let (sim, device) = current()?;
    // SAFETY: the simulated device checks the handle.
    Ok(unsafe { sim.stream_id(device, StreamHandle(stream)) }?)
}

/// A text of the caller.
fn text_at<'a>(place: *const c_char) -> Option<&'a CStr> {
    // SAFETY: not null, and the caller has a nul-terminated text there for the length of the call.
    (!place.is_null()).then(|| unsafe { CStr::from_ptr(place) })
}

entries! {
    /// Holds a stream of the current context: what is enqueued from now on waits, until it is
    /// released. A call that waits for a held stream gives up after `VMM_STANDIN_BLOCKED_MS`.
    fn vmm_standin_hold(stream: u64) {
        let (sim, device) = current()?;
        let id = stream_id(stream)?;
        let hold = sim.hold(device, StreamHandle(stream))?;
        HOLDS.lock().entry(id).or_default().push(hold);
        Ok(())
    }

    /// Lets a stream of the current context go on. One that is not held is left as it is.
    fn vmm_standin_release(stream: u64) {
        let id = stream_id(stream)?;
        let holds = HOLDS.lock().remove(&id).unwrap_or_default();
        for hold in holds {
            sim()?.release_hold(hold);
        }
        Ok(())
    }

    /// Writes the name and the code of every call to a file from now on, at its end.
    fn vmm_standin_log(path: *const c_char) {
        let Some(path) = text_at(path) else {
            return Err(Refusal::new(ResultCode::INVALID_VALUE, "null in the place of a path"));
        };
        let path = Path::new(OsStr::from_bytes(path.to_bytes()));
        log_to(path).map_err(|error| Refusal::new(ResultCode::OPERATING_SYSTEM, error))
    }
}

/// How often an entry point was called, by its exported name; 0 for one that there is not.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vmm_standin_calls(name: *const c_char) -> u64 {
    text_at(name).and_then(|name| name.to_str().ok()).map_or(0, calls_of)
}

/// Memory taken on all devices, in bytes: chunks, allocations, and what pools keep. 0 before
/// `cuInit`.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn vmm_standin_live_bytes() -> u64 {
    sim().map_or(0, |sim| sim.ledger_summary().devices.iter().map(|it| it.used_bytes).sum())
}

/// What there is beside memory: handles and mappings of chunks, ranges, streams, events, page-locked
/// memory. 0 before `cuInit`.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn vmm_standin_live_objects() -> u64 {
    let count = |it: LedgerSummary| {
        it.handle_references
            + it.mappings
            + it.ranges
            + it.streams
            + it.events
            + it.pinned_allocations
    };
    sim().map_or(0, |sim| count(sim.ledger_summary()))
}

/// Of the calls from now on, those from the `at`th on, counted from 1, answer `code` and do nothing, `times`
/// of them. A code of 0 lets them pass, and notes them; `times` of 0 ends it. Calls that tell of errors, find
/// functions and say the version do not count.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn vmm_standin_fail(at: u64, times: u64, code: u32) -> u32 {
    faults::set(at, times, code);
    0
}

/// The names of the calls that `vmm_standin_fail` was for, in their order, with spaces between them and a 0
/// at the end, as far as they fit. Answers with the length of all.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vmm_standin_failed(to: *mut c_char, capacity: u64) -> u64 {
    let names = faults::hit();
    if !to.is_null() && capacity > 0 {
        let bytes = names.len().min(capacity as usize - 1);
        // SAFETY: not null, and the caller says that there is room for `capacity` bytes.
        unsafe {
            to.cast::<u8>().copy_from_nonoverlapping(names.as_ptr(), bytes);
            to.add(bytes).write(0);
        }
    }
    names.len() as u64
}
