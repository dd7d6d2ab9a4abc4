//! The pool behind a C ABI: for PyTorch's `CUDAPluggableAllocator`, and whoever else loads a
//! library.
//!
//! ```python
//! alloc = torch.cuda.memory.CUDAPluggableAllocator(
//!     "libvmm_pool.so", "vmm_pool_torch_alloc", "vmm_pool_torch_free")
//! torch.cuda.memory.change_current_allocator(alloc)
//! ```
//!
//! `include/vmm_pool_torch.h` declares the functions. They translate and decide nothing: a
//! device's pool is made when its memory is first asked for, a stream's lane likewise, and a thread
//! finds the lanes it used last without a hash and without a lock of its own.
//!
//! The pools take their settings from the environment (docs/CONFIGURATION.md), the driver from
//! `VMM_POOL_DRIVER`: `auto`, the default, and `cuda` are the GPU, `sim` is simulated devices.
//!
//! Nothing panics across the border: a failure is NULL or nothing done, and its words are kept for
//! vmm_pool_torch_last_error. Bytes of zero are NULL, which C allows and PyTorch, which does
//! not ask for no bytes, never sees; freeing NULL does nothing. In a forked child nothing is given
//! and nothing is taken back. When the process exits, nothing is torn down and nothing is said.
//!
//! # Stream captures
//!
//! No call here harms a capture, in any mode, told of it or not.
//!
//! A graph uses the addresses that were given out while it was captured whenever it is launched,
//! long after their tensors are gone. PyTorch tells an allocator of its kind about captures by C++
//! objects only, so a program has to tell this one, around `torch.cuda.graph`:
//!
//! ```python
//! graph = pool.vmm_pool_torch_capture_begin(device, stream.cuda_stream, 0)
//! with torch.cuda.graph(g, stream=stream):
//!     ...
//! pool.vmm_pool_torch_capture_end(graph)
//! ...                     # launch it, on this stream
//! del g                   # with its executable graph
//! pool.vmm_pool_torch_graph_destroyed(graph)
//! ```
//!
//! Then what the stream asks for in between is the graph's, freed or not, until
//! vmm_pool_torch_graph_destroyed. **Not told**, such memory is ordinary: what is freed is reused
//! by whatever comes next, and a launch of the graph writes over that. Then keep every tensor of
//! the capture as long as the graph, temporary ones too, or do not capture.
//!
//! The context that is current in the calling thread is left as it is: the driver puts it back
//! after each of its own calls.

mod extras;
mod graphs;

use std::ffi::{c_char, c_int, c_void};

pub use extras::*;
use vmm_pool::{Error, free_raw_on};
use vmm_pool_capi::border::{guarded, kept};
use vmm_pool_capi::lanes::Key;
pub use vmm_pool_capi::{DriverChosen, Failure, pool, use_driver};
use vmm_pool_capi::{failure, lanes, recent};

fn length(size: isize) -> Result<u64, Failure> {
    u64::try_from(size).map_err(|_| Failure::BadLength(size))
}

/// `size` bytes of `device`'s memory, aligned to 512, for work enqueued on `stream` from now on.
/// NULL for no bytes, and on failure.
///
/// # Safety
/// `stream` is 0 or 1 (the legacy stream), 2 (the calling thread's own), or a live stream of
/// `device`'s primary context. Before it is destroyed, vmm_pool_torch_stream_destroyed is
/// called for it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmm_pool_torch_alloc(
    size: isize,
    device: c_int,
    stream: *mut c_void,
) -> *mut c_void {
    let key = Key::new(device, stream.addr());
    let address = guarded(0, || {
        // A negative length is more than any hole has. Errors are kept out of the common path.
        match recent::with(key, |lane| lane.alloc_raw_warm(size as u64)) {
            Some(Some(address)) => address,
            // SAFETY: the caller vouches for the stream.
            _ => kept(0, unsafe { alloc(size, key) }),
        }
    });
    // An address of the device: no memory that Rust knows of.
    std::ptr::without_provenance_mut(address as usize)
}

/// # Safety
/// As vmm_pool_torch_alloc.
#[cold]
unsafe fn alloc(size: isize, key: Key) -> Result<u64, Failure> {
    let bytes = length(size)?;
    if bytes == 0 {
        return Ok(0);
    }
    // Not a lane that the thread remembers: its stream may have been declared gone, and then
    // whoever has the handle now has another lane.
    // SAFETY: the caller vouches for the stream.
    let lane = unsafe { lanes::lane(key)? };
    recent::remember(key, &lane);
    Ok(lane.alloc_raw(bytes)?)
}

/// Gives memory back. Work enqueued before, on `stream` and on the stream of the allocation, may
/// still use it.
///
/// NULL is ignored. So is what is no block of this process's pools, was freed before, or has
/// another length; the failure says which.
///
/// # Safety
/// As vmm_pool_torch_alloc for `stream`; if it is the stream of the allocation, it may be gone.
/// The block is not used by work that is enqueued later.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmm_pool_torch_free(
    pointer: *mut c_void,
    size: isize,
    device: c_int,
    stream: *mut c_void,
) {
    let (address, key) = (pointer.addr() as u64, Key::new(device, stream.addr()));
    guarded((), || {
        // A negative length is more than any block has.
        if let Err(error) = free_raw_on(address, size as u64, key.handle()) {
            // SAFETY: the caller vouches for the stream.
            kept((), unsafe { free_otherwise(address, size, key, error) });
        }
    });
}

/// # Safety
/// As vmm_pool_torch_free.
#[cold]
unsafe fn free_otherwise(address: u64, size: isize, key: Key, error: Error) -> Result<(), Failure> {
    let bytes = length(size)?;
    // SAFETY: the caller's own condition.
    unsafe { vmm_pool_capi::free_otherwise(address, bytes, key.handle(), error) }
}

/// Says that work on `stream` uses the block that starts at `pointer`: once freed, it is not reused
/// before the work enqueued on `stream` until then is done.
///
/// The stream is taken for one of the block's own device. For any other the driver refuses the
/// gate, and the block is not reused at all.
///
/// # Safety
/// As vmm_pool_torch_alloc for `stream`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmm_pool_torch_record_stream(pointer: *mut c_void, stream: *mut c_void) {
    let (address, stream) = (pointer.addr() as u64, Key::new(0, stream.addr()).handle());
    // SAFETY: the caller vouches for the stream.
    guarded((), || kept((), unsafe { vmm_pool_capi::record(address, stream) }));
}

/// Gives everything idle back to the driver, of all devices used so far. Waits for the work that
/// may still use it.
#[unsafe(no_mangle)]
pub extern "C" fn vmm_pool_torch_empty_cache() {
    guarded((), || kept((), vmm_pool_capi::empty()));
}

/// Says that `stream` is about to be destroyed: its memory goes back with its last block. While it is
/// being captured it must not be, and the failure says so: then say this again after the capture. The same
/// if the driver refuses, which the failure says too.
///
/// # Safety
/// The stream is live, and no other function is called for it meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmm_pool_torch_stream_destroyed(device: c_int, stream: *mut c_void) {
    // SAFETY: live by this function's own condition.
    guarded((), || kept((), unsafe { lanes::close(device, stream.addr()) }));
}

/// Opens a stream capture: memory that is asked for on `stream` from now on is kept for the graph
/// that it makes. To be called before the capture begins.
///
/// `shared` is 0, or the number of a graph that never runs at the same time and needs nothing of
/// what the other left in its memory: then both have the same. Returns the graph's number, or 0 on
/// failure.
///
/// # Safety
/// As vmm_pool_torch_alloc.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmm_pool_torch_capture_begin(
    device: c_int,
    stream: *mut c_void,
    shared: u64,
) -> u64 {
    let key = Key::new(device, stream.addr());
    // SAFETY: the caller vouches for the stream.
    guarded(0, || kept(0, unsafe { graphs::begin(key, shared) }))
}

/// Says that the open capture spreads to `stream`, before its first request in it. 0, or -1 on
/// failure.
///
/// # Safety
/// As vmm_pool_torch_alloc.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmm_pool_torch_capture_join(
    graph: u64,
    device: c_int,
    stream: *mut c_void,
) -> c_int {
    let key = Key::new(device, stream.addr());
    // SAFETY: the caller vouches for the stream.
    done(|| unsafe { graphs::join(graph, key) })
}

/// Ends an open capture, after it has ended in the driver: its streams ask for ordinary memory
/// again. 0, or -1 on failure.
#[unsafe(no_mangle)]
pub extern "C" fn vmm_pool_torch_capture_end(graph: u64) -> c_int {
    done(|| graphs::end(graph))
}

/// Says that the graph is launched on `stream`, other than those that were captured. 0, or -1 on
/// failure.
///
/// # Safety
/// As vmm_pool_torch_alloc; the stream lives as long as the graph.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmm_pool_torch_graph_launched_on(
    graph: u64,
    device: c_int,
    stream: *mut c_void,
) -> c_int {
    let key = Key::new(device, stream.addr());
    // SAFETY: the caller vouches for the stream.
    done(|| unsafe { graphs::launched_on(graph, key) })
}

/// Says that the graph is not launched any more: its memory goes back once the launches that were
/// enqueued are done. Also for a capture that failed, in place of its end. 0, or -1 on failure.
#[unsafe(no_mangle)]
pub extern "C" fn vmm_pool_torch_graph_destroyed(graph: u64) -> c_int {
    done(|| graphs::destroyed(graph))
}

/// 0 if all went well, else -1 with the failure kept.
fn done(work: impl FnOnce() -> Result<(), Failure>) -> c_int {
    guarded(-1, || kept(-1, work().map(|()| 0)))
}

/// The calling thread's last failure in words, or NULL if there was none. Valid until the thread's
/// next failure.
#[unsafe(no_mangle)]
pub extern "C" fn vmm_pool_torch_last_error() -> *const c_char {
    failure::last()
}
