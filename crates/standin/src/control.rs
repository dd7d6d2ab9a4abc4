//! What tests steer and read. Not CUDA's: a program finds these by name in the library it loaded.
//!
//! ```c
//! uint32_t vmm_standin_hold(CUstream stream);    // work enqueued from now on waits
//! uint32_t vmm_standin_release(CUstream stream); // until this; all holds of the stream
//! uint64_t vmm_standin_calls(const char *name);  // how often an entry point was called
//! uint32_t vmm_standin_log(const char *path);    // write each call down from now on
//! uint64_t vmm_standin_live_bytes(void);         // memory taken on all devices
//! ```

use std::collections::BTreeMap;
use std::ffi::{CStr, OsStr, c_char};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use parking_lot::Mutex;
use vmm_sys::sim::HoldId;
use vmm_sys::{Driver, ResultCode, StreamHandle, StreamId};

use crate::door::{Refusal, calls_of, log_to};
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
