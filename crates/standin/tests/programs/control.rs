//! The stand-in's own functions, found by name in the library that the program runs on.

use std::ffi::CString;

use cudarc::driver::CudaStream;
use libloading::{Library, Symbol};

/// The library that this process runs on: the loader gives the same one to everybody.
pub(crate) fn library() -> Library {
    // SAFETY: the stand-in has no initialisers that matter, and stays loaded.
    unsafe { Library::new("libcuda.so.1") }.unwrap()
}

fn stream_call(name: &str, stream: &CudaStream) {
    let library = library();
    // SAFETY: that is the signature of both.
    let call: Symbol<'_, unsafe extern "C" fn(u64) -> u32> = unsafe { library.get(name) }.unwrap();
    stream.context().bind_to_thread().unwrap();
    // SAFETY: the stream is live.
    assert_eq!(unsafe { call(stream.cu_stream().expose_provenance() as u64) }, 0, "{name}");
}

/// Work enqueued from now on waits.
pub(crate) fn hold(stream: &CudaStream) {
    stream_call("vmm_standin_hold", stream);
}

/// Until now.
pub(crate) fn release(stream: &CudaStream) {
    stream_call("vmm_standin_release", stream);
}

/// How often an entry point was called.
pub(crate) fn calls(name: &str) -> u64 {
    let library = library();
    // SAFETY: that is its signature.
    let call: Symbol<'_, unsafe extern "C" fn(*const std::ffi::c_char) -> u64> =
        unsafe { library.get("vmm_standin_calls") }.unwrap();
    let name = CString::new(name).unwrap();
    // SAFETY: the name is a nul-terminated text.
    unsafe { call(name.as_ptr()) }
}

/// Memory taken on all devices, in bytes.
pub(crate) fn live_bytes() -> u64 {
    let library = library();
    // SAFETY: that is its signature.
    let call: Symbol<'_, unsafe extern "C" fn() -> u64> =
        unsafe { library.get("vmm_standin_live_bytes") }.unwrap();
    // SAFETY: it takes nothing.
    unsafe { call() }
}

/// Writes calls down from now on.
pub(crate) fn log(path: &std::path::Path) {
    let library = library();
    // SAFETY: that is its signature.
    let call: Symbol<'_, unsafe extern "C" fn(*const std::ffi::c_char) -> u32> =
        unsafe { library.get("vmm_standin_log") }.unwrap();
    let path = CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: the path is a nul-terminated text.
    assert_eq!(unsafe { call(path.as_ptr()) }, 0);
}
