//! The pool as CuPy's `CFunctionAllocator` takes it.
//!
//! ```python
//! allocator = cupy.cuda.CFunctionAllocator(0, malloc_address, free_address, library)
//! cupy.cuda.set_allocator(allocator.malloc)
//! ```
//!
//! CuPy tells such an allocator no stream: neither which one the memory is for, nor which ones have
//! used it. So memory comes from a lane that no stream of the program shares, and what is freed is put aside
//! until the host has waited once for all work of the device; then nothing that was enqueued before the
//! free can still use it, on whatever stream. That wait is made when memory that is mapped does not
//! suffice, for all that was put aside until then, instead of making more memory. An allocator in
//! Python that passes the current stream to `vmm_pool_alloc` need not wait at all, and is the better
//! way where it can be used.

mod aside;
mod own;

use std::ffi::{c_int, c_void};

use vmm_pool::block_of;
use vmm_pool_capi::Failure;
use vmm_pool_capi::border::{device_id, guarded, kept, not_forked, status};

/// Memory of a device, aligned to 512, that is ordered with nothing: usable on any stream at once. NULL for
/// no bytes, and on failure: vmm_pool_last_error says why. `param` is ignored.
///
/// May wait for all work of the device, if memory was freed that some of it may still use.
#[unsafe(no_mangle)]
pub extern "C" fn vmm_pool_cupy_malloc(
    param: *mut c_void,
    size: usize,
    device: c_int,
) -> *mut c_void {
    let _ = param;
    let address = guarded(0, || kept(0, alloc(size as u64, device)));
    // An address of the device: no memory that Rust knows of.
    std::ptr::without_provenance_mut(address as usize)
}

fn alloc(bytes: u64, device: c_int) -> Result<u64, Failure> {
    not_forked()?;
    own::alloc(device_id(device)?, bytes)
}

/// Gives memory back. Work enqueued before, on any stream of any device that was used with it, may still
/// use it. NULL is ignored; what is no block is ignored too, and vmm_pool_last_error says so. `param` is
/// ignored.
#[unsafe(no_mangle)]
pub extern "C" fn vmm_pool_cupy_free(param: *mut c_void, ptr: *mut c_void, device: c_int) {
    let _ = (param, device);
    let address = ptr.addr() as u64;
    guarded((), || kept((), free(address)));
}

fn free(address: u64) -> Result<(), Failure> {
    if address == 0 {
        return Ok(());
    }
    not_forked()?;
    aside::put(block_of(address)?)
}

/// Waits for all work of a device, and gives what was freed before to the pool: then vmm_pool_trim can
/// give it back to the driver. Does nothing while a stream is being captured. Answers with a status of
/// vmm_pool.h.
#[unsafe(no_mangle)]
pub extern "C" fn vmm_pool_cupy_synchronize(device: c_int) -> c_int {
    status(|| {
        not_forked()?;
        aside::give_back(device_id(device)?).map(|_| ())
    })
}

/// For tests in Rust: gives back what is put aside, and the streams that blocks come from.
///
/// # Errors
/// The driver's; what could not be given back stays.
#[doc(hidden)]
pub fn end_own() -> Result<(), Failure> {
    for device in own::devices() {
        aside::end(device)?;
    }
    own::end();
    Ok(())
}
