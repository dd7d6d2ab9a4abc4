//! What PyTorch's further hooks take: `CUDAPluggableAllocator.allocator().set_…`.

use std::ffi::{c_char, c_int, c_void};

use vmm_pool::block_of;
use vmm_pool_capi::border::{device_id, guarded, kept, not_forked, status};
use vmm_pool_capi::{Failure, failure, figures, pool, set_fraction};

/// Chooses the driver, so that what is wrong is said before memory is asked for. For set_init_fn.
#[unsafe(no_mangle)]
pub extern "C" fn vmm_pool_torch_init(device_count: c_int) {
    let init = || {
        not_forked()?;
        match u32::try_from(device_count) {
            Ok(0) => Ok(()),
            Ok(count) => vmm_pool_capi::driver_of(vmm_sys::DeviceId(count - 1)).map(|_| ()),
            Err(_) => Err(Failure::argument("device_count", device_count, "0 or more")),
        }
    };
    guarded((), || kept((), init()));
}

/// Gives everything idle back to the driver, as vmm_pool_torch_empty_cache does. For set_reset_fn.
#[unsafe(no_mangle)]
pub extern "C" fn vmm_pool_torch_reset() {
    crate::vmm_pool_torch_empty_cache();
}

/// Lets the process's own pool of a device hold at most this part of the device's memory, 0 to 1, from
/// now on. What it holds beyond stays until it is freed and given back. Answers with a status of
/// vmm_pool.h. For set_memory_fraction_fn, which does not look at it.
#[unsafe(no_mangle)]
pub extern "C" fn vmm_pool_torch_memory_fraction(fraction: f64, device: c_int) -> c_int {
    status(|| device_id(device).and_then(|it| set_fraction(it, fraction)))
}

/// The block that starts at `ptr`: its address, and its length in *size unless that is NULL. NULL for what
/// is no block. For set_base_alloc_fn.
///
/// # Safety
/// `size` is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmm_pool_torch_base_alloc(
    ptr: *mut c_void,
    size: *mut usize,
) -> *mut c_void {
    let block =
        guarded(None, || kept(None, block_of(ptr.addr() as u64).map(Some).map_err(Failure::from)));
    let Some(block) = block else { return std::ptr::null_mut() };
    if !size.is_null() {
        // SAFETY: writable by this function's own condition.
        unsafe { size.write(block.bytes as usize) };
    }
    ptr
}

/// The figures of a device's pool as JSON: the object of vmm_pool_stats_json. Valid until the calling
/// thread's next call of this function or vmm_pool_torch_report. NULL on failure.
#[unsafe(no_mangle)]
pub extern "C" fn vmm_pool_torch_stats_json(device: c_int) -> *const c_char {
    text(|| Ok(figures::json(&pool(device_id(device)?)?)))
}

/// How a device's memory is used, in lines for people. Valid until the calling thread's next call of this
/// function or vmm_pool_torch_stats_json. NULL on failure.
///
/// After a request that failed, vmm_pool_torch_last_error says what was tried to be allocated and what
/// may help; this says what holds the memory.
#[unsafe(no_mangle)]
pub extern "C" fn vmm_pool_torch_report(device: c_int) -> *const c_char {
    text(|| {
        let device = device_id(device)?;
        figures::report(&pool(device)?, device)
    })
}

fn text(make: impl FnOnce() -> Result<String, Failure>) -> *const c_char {
    let keep = || kept(std::ptr::null(), make().map(|text| failure::keep_report(&text)));
    guarded(std::ptr::null(), keep)
}
