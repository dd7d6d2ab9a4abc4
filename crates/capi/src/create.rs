//! Pools: made, looked at, given back.

use std::ffi::c_char;

use vmm_pool::{ChunkSize, Contents, DebugMode, Pool};
use vmm_sys::DeviceId;

use crate::border::{device_id, not_forked, status};
use crate::driver::{device_count, driver};
use crate::failure::{self, Failure};
use crate::handle::{VmmPool, handle};
use crate::pointers::{give_text, put, required, text};
use crate::structs::{
    VMM_POOL_EXPORTABLE, VMM_POOL_GUARD, VMM_POOL_NO_BACKGROUND, VMM_POOL_USE_ENVIRONMENT,
    VmmPoolOptions, check_flags, read,
};
use crate::{figures, patience, pools};

/// The version of this header. A library of another one has another name (its soname).
pub const VMM_POOL_ABI_VERSION: u32 = 1;

/// vmm_pool_sleep: what the buffers hold is kept, in the host's memory.
pub const VMM_POOL_KEEP: i32 = 0;
/// vmm_pool_sleep: what the buffers hold is lost.
pub const VMM_POOL_DROP: i32 = 1;

const FLAGS: u32 =
    VMM_POOL_USE_ENVIRONMENT | VMM_POOL_EXPORTABLE | VMM_POOL_NO_BACKGROUND | VMM_POOL_GUARD;
/// More devices than any machine has.
const DEVICES_MAX: u64 = 1024;

/// VMM_POOL_ABI_VERSION of the library.
#[unsafe(no_mangle)]
pub extern "C" fn vmm_pool_abi_version() -> u32 {
    VMM_POOL_ABI_VERSION
}

/// The version of the library in words, as "0.1.0". Valid for ever.
#[unsafe(no_mangle)]
pub extern "C" fn vmm_pool_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// The calling thread's last failure in words, or NULL if there was none. Valid until the thread's
/// next failure. A call that succeeds does not change it.
#[unsafe(no_mangle)]
pub extern "C" fn vmm_pool_last_error() -> *const c_char {
    failure::last()
}

/// The status of the calling thread's last failure, VMM_POOL_OK if there was none: for functions that
/// answer with an address. A call that succeeds does not change it.
#[unsafe(no_mangle)]
pub extern "C" fn vmm_pool_last_status() -> i32 {
    failure::last_status()
}

/// Makes a pool. The driver is chosen by VMM_POOL_DRIVER when it is first needed: auto (default) and
/// cuda are the GPU, sim is simulated devices. *out is NULL on failure.
///
/// With options of NULL it has all devices, and its settings from the VMM_POOL_ variables.
///
/// # Safety
/// options is NULL, or as many readable bytes as it says, devices included; out is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmm_pool_create(
    options: *const VmmPoolOptions,
    out: *mut *mut VmmPool,
) -> i32 {
    status(|| {
        required(out, "out")?;
        // SAFETY: writable by this function's own condition, here and below.
        unsafe { put(out, std::ptr::null_mut()) };
        not_forked()?;
        // SAFETY: the caller vouches for the options.
        let (pool, host_node) = unsafe { create(options)? };
        let number = pools::enter(pool, host_node)?;
        // SAFETY: as above.
        unsafe { put(out, handle(number)) };
        Ok(())
    })
}

/// # Safety
/// As [`vmm_pool_create`] for the options.
unsafe fn create(options: *const VmmPoolOptions) -> Result<(Pool, Option<u32>), Failure> {
    if options.is_null() {
        let mut builder = Pool::builder(driver()?.clone());
        for device in all_devices()? {
            builder = builder.device(device);
        }
        return Ok((builder.environment()?.build()?, None));
    }
    // SAFETY: the caller's own condition.
    let options = unsafe { read(options)? };
    check_flags(options.flags, FLAGS, options.reserved)?;
    // SAFETY: as above.
    let devices = unsafe { devices(&options)? };
    let has = |flag| options.flags & flag != 0;
    let mut builder = Pool::builder(driver()?.clone())
        .exportable(has(VMM_POOL_EXPORTABLE))
        .background(!has(VMM_POOL_NO_BACKGROUND));
    for device in devices {
        builder = builder.device(device);
    }
    if options.chunk_bytes > 0 {
        builder = builder.chunk(ChunkSize::Fixed(options.chunk_bytes));
    }
    if options.limit_bytes > 0 {
        builder = builder.limit_bytes(options.limit_bytes);
    }
    let high_bytes = if options.stock_high_bytes > 0 { options.stock_high_bytes } else { u64::MAX };
    builder = builder.stock_marks(options.stock_low_bytes, high_bytes);
    if has(VMM_POOL_GUARD) {
        builder = builder.debug_mode(DebugMode::Guard);
    }
    let host_node = (options.host_bytes > 0).then_some(options.host_node);
    if let Some(node) = host_node {
        builder = builder.host_memory(node, options.host_bytes, 0);
    }
    if has(VMM_POOL_USE_ENVIRONMENT) {
        builder = builder.environment()?;
    }
    Ok((builder.build()?, host_node))
}

fn all_devices() -> Result<Vec<DeviceId>, Failure> {
    Ok((0..device_count()?).map(DeviceId).collect())
}

/// # Safety
/// As [`vmm_pool_create`] for the options.
unsafe fn devices(options: &VmmPoolOptions) -> Result<Vec<DeviceId>, Failure> {
    let count = options.device_count;
    match (options.devices.is_null(), count) {
        (true, 0) => return all_devices(),
        (true, _) => return Err(Failure::argument("devices", "NULL", "a device_count of 0")),
        (false, 1..=DEVICES_MAX) => {}
        (false, _) => {
            return Err(Failure::argument("device_count", count, format!("1 to {DEVICES_MAX}")));
        }
    }
    let machine = device_count()?;
    let named = |at| {
        // SAFETY: the caller vouches for `device_count` ordinals.
        let device = device_id(unsafe { options.devices.add(at).read_unaligned() })?;
        match device.0 < machine {
            true => Ok(device),
            false => Err(Failure::NoSuchDevice { asked: device.0, count: machine }),
        }
    };
    (0..count as usize).map(named).collect()
}

/// Ends a pool, and waits for work that still uses what it frees by that. Blocks that are alive stay
/// valid until they are freed. Refused while elastic buffers of the pool are alive or a stream that uses
/// it is being captured (VMM_POOL_BUSY), and for a pool of vmm_pool_default.
#[unsafe(no_mangle)]
pub extern "C" fn vmm_pool_destroy(pool: *mut VmmPool) -> i32 {
    status(|| pools::destroy(pool))
}

/// The process's own pool of one device, made now if it was not used before, with its settings from the
/// VMM_POOL_ variables. The entry points for PyTorch and CuPy take their memory from it. It is never
/// destroyed.
///
/// # Safety
/// out is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmm_pool_default(device: i32, out: *mut *mut VmmPool) -> i32 {
    status(|| {
        required(out, "out")?;
        // SAFETY: writable by this function's own condition, here and below.
        unsafe { put(out, std::ptr::null_mut()) };
        let (number, _) = pools::own(device_id(device)?)?;
        // SAFETY: as above.
        unsafe { put(out, handle(number)) };
        Ok(())
    })
}

/// The pool's figures, as one JSON object: "devices", "hosts" and "elastic", a list each. Fields may be
/// added; null stands for no limit.
///
/// The text is given in the manner of snprintf: as much as fits into capacity, always with a 0 behind
/// it, and VMM_POOL_TRUNCATED if it was cut. *needed, unless that is NULL, becomes its whole length
/// without the 0. With a capacity of 0, buffer may be NULL.
///
/// # Safety
/// buffer has capacity writable bytes; needed is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmm_pool_stats_json(
    pool: *mut VmmPool,
    buffer: *mut c_char,
    capacity: usize,
    needed: *mut usize,
) -> i32 {
    status(|| {
        let (_, pool) = pools::by_handle(pool)?;
        // SAFETY: the caller's own condition.
        unsafe { give_text(&figures::json(&pool), buffer, capacity, needed) }
    })
}

/// How a device's memory is used, in lines for people. The text is given as by vmm_pool_stats_json.
///
/// # Safety
/// As vmm_pool_stats_json.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmm_pool_report(
    pool: *mut VmmPool,
    device: i32,
    buffer: *mut c_char,
    capacity: usize,
    needed: *mut usize,
) -> i32 {
    status(|| {
        let (_, pool) = pools::by_handle(pool)?;
        let report = figures::report(&pool, device_id(device)?)?;
        // SAFETY: the caller's own condition.
        unsafe { give_text(&report, buffer, capacity, needed) }
    })
}

/// Gives everything idle on a device back to the driver. Waits for work that may still use it.
/// *freed_bytes, unless that is NULL, becomes the bytes given back.
///
/// # Safety
/// freed_bytes is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmm_pool_trim(
    pool: *mut VmmPool,
    device: i32,
    freed_bytes: *mut u64,
) -> i32 {
    status(|| {
        let (_, pool) = pools::by_handle(pool)?;
        let bytes = pool.trim(device_id(device)?)?;
        // SAFETY: the caller's own condition.
        unsafe { put(freed_bytes, bytes) };
        Ok(())
    })
}

/// Puts the elastic buffers with a tag to sleep: their memory goes back to the driver, their addresses
/// stay. contents is VMM_POOL_KEEP, for which the pool needs host_bytes, or VMM_POOL_DROP. Uses that are
/// open are waited for, patience_us microseconds at most. *bytes, unless that is NULL, becomes what
/// devices gave back. Stops at the first buffer that cannot; ask again.
///
/// # Safety
/// tag ends with a 0 within 256 bytes; bytes is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmm_pool_sleep(
    pool: *mut VmmPool,
    tag: *const c_char,
    contents: i32,
    patience_us: u64,
    bytes: *mut u64,
) -> i32 {
    status(|| {
        let (number, pool) = pools::by_handle(pool)?;
        // SAFETY: the caller's own condition, here and below.
        let tag = unsafe { tag_of(tag)? };
        let contents = match (contents, pools::host_node(number)?) {
            (VMM_POOL_DROP, _) => Contents::Dropped,
            (VMM_POOL_KEEP, Some(node)) => Contents::Kept { node },
            (VMM_POOL_KEEP, None) => {
                let expected = "VMM_POOL_DROP (1), or a pool that was created with host_bytes";
                return Err(Failure::argument("contents", "VMM_POOL_KEEP", expected));
            }
            _ => {
                let expected = "VMM_POOL_KEEP (0) or VMM_POOL_DROP (1)";
                return Err(Failure::argument("contents", contents, expected));
            }
        };
        let slept = pool.sleep(&tag, contents, patience(patience_us))?;
        // SAFETY: as above.
        unsafe { put(bytes, slept.bytes) };
        Ok(())
    })
}

/// Wakes the elastic buffers with a tag: their memory comes back to where it lay. *bytes, unless that is
/// NULL, becomes what devices gave. Stops at the first that cannot wake, which sleeps on; ask again.
///
/// # Safety
/// As vmm_pool_sleep.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmm_pool_wake(
    pool: *mut VmmPool,
    tag: *const c_char,
    bytes: *mut u64,
) -> i32 {
    status(|| {
        let (_, pool) = pools::by_handle(pool)?;
        // SAFETY: the caller's own condition, here and below.
        let tag = unsafe { tag_of(tag)? };
        let slept = pool.wake(&tag)?;
        // SAFETY: as above.
        unsafe { put(bytes, slept.bytes) };
        Ok(())
    })
}

/// # Safety
/// As [`vmm_pool_sleep`].
unsafe fn tag_of(tag: *const c_char) -> Result<String, Failure> {
    // SAFETY: the caller's own condition.
    unsafe { text(tag, "tag")? }.ok_or_else(|| Failure::argument("tag", "NULL", "a tag"))
}
