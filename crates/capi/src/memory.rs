//! Blocks: given out and taken back by plain address.

use std::ffi::c_void;

use vmm_pool::{Error, block_of, free_raw, free_raw_on, record_stream_raw};
use vmm_sys::StreamHandle;

use crate::border::{guarded, status, told};
use crate::failure::Failure;
use crate::handle::{self, VmmPool};
use crate::lanes::{self, Key};
use crate::pointers::{put, required};
use crate::recent;
use crate::status::vmm_pool_status;
use crate::structs::{Answer, VmmPoolBlockInfo};

const OK: i32 = vmm_pool_status::VMM_POOL_OK as i32;
const PANICKED: i32 = vmm_pool_status::VMM_POOL_PANICKED as i32;

/// Memory of a device for work that is enqueued on stream from now on; *out becomes its address, aligned
/// to 512, and NULL for no bytes and on failure.
///
/// stream is a CUstream or cudaStream_t of the device's primary context: NULL and 1 are the legacy
/// default stream, 2 the calling thread's own. Before it is destroyed, vmm_pool_stream_destroyed is to
/// be called.
///
/// # Safety
/// stream is live; out is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmm_pool_alloc(
    pool: *mut VmmPool,
    device: i32,
    bytes: u64,
    stream: *mut c_void,
    out: *mut *mut c_void,
) -> i32 {
    guarded(PANICKED, || {
        let number = handle::number(pool).filter(|_| !out.is_null());
        let warm = number.and_then(|number| {
            let key = Key::of(number, device, stream.addr());
            recent::with_any(key, |lane| lane.alloc_raw_warm(bytes))?
        });
        let address = match warm {
            Some(address) => address,
            // SAFETY: the caller vouches for the stream.
            None => match unsafe { alloc(pool, device, bytes, stream, out) } {
                Ok(address) => address,
                Err(failure) => return told(Err(failure)),
            },
        };
        // SAFETY: writable by this function's own condition; `alloc` refuses NULL. An address of the
        // device is no memory that Rust knows of.
        unsafe { out.write_unaligned(std::ptr::without_provenance_mut(address as usize)) };
        OK
    })
}

/// # Safety
/// As [`vmm_pool_alloc`].
#[cold]
unsafe fn alloc(
    pool: *mut VmmPool,
    device: i32,
    bytes: u64,
    stream: *mut c_void,
    out: *mut *mut c_void,
) -> Result<u64, Failure> {
    required(out, "out")?;
    // SAFETY: writable by this function's own condition.
    unsafe { put(out, std::ptr::null_mut()) };
    let key = Key::of(handle::checked(pool)?, device, stream.addr());
    // Not a lane that the thread remembers: its stream or its pool may be gone.
    // SAFETY: the caller vouches for the stream.
    let lane = unsafe { lanes::lane(key)? };
    recent::remember(key, &lane);
    Ok(lane.alloc_raw(bytes)?)
}

/// Gives a block back, whichever pool it came from. bytes is what was asked for. Work enqueued before, on
/// stream and on the stream of the allocation, may still use it. NULL is ignored. A block that was freed
/// before, or is none, is VMM_POOL_NOT_A_BLOCK, another length VMM_POOL_INVALID; then nothing is
/// changed.
///
/// # Safety
/// stream is live; if it is the stream of the allocation, it may be gone. The block is not used by work
/// that is enqueued later.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmm_pool_free(ptr: *mut c_void, bytes: u64, stream: *mut c_void) -> i32 {
    guarded(PANICKED, || {
        let (address, stream) = (ptr.addr() as u64, Key::new(0, stream.addr()).handle());
        match free_raw_on(address, bytes, stream) {
            Ok(()) => OK,
            // SAFETY: the caller vouches for the stream.
            Err(error) => told(unsafe { free_otherwise(address, bytes, stream, error) }),
        }
    })
}

/// What is not the block of the stream: on another stream than that of the allocation, whose work
/// is waited for too, or no block.
///
/// # Safety
/// As [`vmm_pool_free`].
///
/// # Errors
/// What is wrong with the block.
#[cold]
pub unsafe fn free_otherwise(
    address: u64,
    bytes: u64,
    stream: StreamHandle,
    error: Error,
) -> Result<(), Failure> {
    if !matches!(error, Error::OtherStream { .. }) {
        return Err(error.into());
    }
    // SAFETY: not the stream of the allocation, so it is live: the caller vouches for it.
    unsafe { record(address, stream)? };
    Ok(free_raw(address, bytes)?)
}

/// Says that work on a stream, one of the block's own device, uses the block.
///
/// # Safety
/// As [`vmm_pool_record_stream`].
///
/// # Errors
/// What is wrong with the block; the driver's.
pub unsafe fn record(address: u64, stream: StreamHandle) -> Result<(), Failure> {
    let device = block_of(address)?.device;
    // SAFETY: the caller vouches for the stream.
    let stream = unsafe { lanes::stream(device, stream)? };
    Ok(record_stream_raw(address, &stream)?)
}

/// Says that work on stream, one of the block's own device, uses the block that starts at ptr: once
/// freed, it is not reused before the work enqueued on stream until then is done.
///
/// # Safety
/// stream is live, and vmm_pool_stream_destroyed is called before it is destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmm_pool_record_stream(ptr: *mut c_void, stream: *mut c_void) -> i32 {
    // SAFETY: the caller vouches for the stream.
    status(|| unsafe { record(ptr.addr() as u64, Key::new(0, stream.addr()).handle()) })
}

/// Says that stream is about to be destroyed, to all pools of the process: its memory goes back with its
/// last block. On failure the stream must not be destroyed: say this again, after the capture if it is being
/// captured (VMM_POOL_BUSY).
///
/// # Safety
/// stream is live, and no other function is called for it meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmm_pool_stream_destroyed(device: i32, stream: *mut c_void) -> i32 {
    // SAFETY: live by this function's own condition.
    status(|| unsafe { lanes::close(device, stream.addr()) })
}

/// What is known of the block that starts at ptr, of any pool of the process. An address inside of a
/// block is VMM_POOL_NOT_A_BLOCK.
///
/// # Safety
/// out has as many writable bytes as its first field says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmm_pool_block(ptr: *const c_void, out: *mut VmmPoolBlockInfo) -> i32 {
    status(|| {
        // SAFETY: the caller's own condition.
        let answer = unsafe { Answer::to(out)? };
        let block = block_of(ptr.addr() as u64)?;
        let (address, bytes, device) = (block.address, block.bytes, block.device.0 as i32);
        answer.give(&VmmPoolBlockInfo { struct_bytes: 0, device, address, bytes });
        Ok(())
    })
}
