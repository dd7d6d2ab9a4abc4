//! Names and words of result codes.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char};

use parking_lot::Mutex;
use vmm_sys::ResultCode;

use crate::door::{Done, Out, Refusal};

/// The names that were asked for. They live as long as the process: callers keep the pointers.
static NAMES: Mutex<BTreeMap<String, &'static CStr>> = Mutex::new(BTreeMap::new());

fn kept(text: String) -> Result<&'static CStr, Refusal> {
    let mut names = NAMES.lock();
    if let Some(name) = names.get(&text) {
        return Ok(name);
    }
    let name =
        CString::new(text.clone()).map_err(|error| Refusal::new(ResultCode::UNKNOWN, error))?;
    let name: &'static CStr = Box::leak(name.into_boxed_c_str());
    names.insert(text, name);
    Ok(name)
}

/// Null for a code that has no name.
fn tell(place: *mut *const c_char, code: u32, words: impl FnOnce(&str) -> String) -> Done {
    let out = Out::new(place)?;
    match ResultCode(code).name() {
        Some(name) => out.set(kept(words(name))?.as_ptr()),
        None => {
            out.set(std::ptr::null())?;
            Err(Refusal::new(ResultCode::INVALID_VALUE, format_args!("code {code} has no name")))
        }
    }
}

entries! {
    fn cuGetErrorName(code: u32, place: *mut *const c_char) {
        tell(place, code, str::to_owned)
    }

    /// Made of the name; NVIDIA's sentences are longer.
    fn cuGetErrorString(code: u32, place: *mut *const c_char) {
        tell(place, code, |name| {
            let name = name.trim_start_matches("CUDA_").trim_start_matches("ERROR_");
            name.to_lowercase().replace('_', " ")
        })
    }
}
