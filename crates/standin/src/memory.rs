//! The driver's own allocators, and page-locked host memory.

use std::ffi::c_void;

use vmm_sys::{Call, DeviceId, Driver, DriverError, PinnedAddress, ResultCode, StreamHandle};

use crate::door::{Out, Refusal};
use crate::machine::{current, device_id, sim};

/// `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`
const RELEASE_THRESHOLD: u32 = 4;
/// `CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED`: page-locked
/// memory is all of that here.
const HOST_FLAGS: u32 = 1 | 2 | 4;
/// `CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP`
const REGISTER_FLAGS: u32 = 1 | 2;
/// Handles of default pools are made from the ordinal.
const POOL_BASE: u64 = 0x9001_0000_0000;
const POOL_STEP: u64 = 0x100;

fn pool_of(device: DeviceId) -> u64 {
    POOL_BASE + u64::from(device.0) * POOL_STEP
}

fn device_of_pool(pool: u64) -> Result<DeviceId, Refusal> {
    let count = sim()?.device_count()?;
    (0..count)
        .map(DeviceId)
        .find(|device| pool_of(*device) == pool)
        .ok_or_else(|| Refusal::new(ResultCode::INVALID_VALUE, format_args!("no pool {pool:#x}")))
}

fn place_of(address: PinnedAddress) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(address.0 as usize)
}

/// No bytes in stream order are nothing, at the address 0. (Nobody measured it; cudarc's empty slices
/// rely on it.)
fn alloc_async(address: Out<u64>, bytes: u64, stream: u64) -> Result<(), Refusal> {
    let (sim, device) = current()?;
    match bytes {
        0 => address.set(0),
        // SAFETY: the simulated device checks the handle.
        _ => address.set(unsafe { sim.mem_alloc_async(device, bytes, StreamHandle(stream)) }?),
    }
}

fn host_alloc(place: *mut *mut c_void, bytes: u64) -> Result<(), Refusal> {
    let out = Out::new(place)?;
    let (sim, device) = current()?;
    out.set(place_of(sim.host_alloc(device, bytes)?))
}

entries! {
    fn cuMemGetInfo_v2(free: *mut u64, total: *mut u64) {
        let (free, total) = (Out::new(free)?, Out::new(total)?);
        let (sim, device) = current()?;
        let info = sim.mem_info(device)?;
        free.set(info.free_bytes)?;
        total.set(info.total_bytes)
    }

    fn cuMemAlloc_v2(address: *mut u64, bytes: u64) {
        let out = Out::new(address)?;
        let (sim, device) = current()?;
        out.set(sim.mem_alloc(device, bytes)?)
    }

    fn cuMemFree_v2(address: u64) {
        let (sim, device) = current()?;
        Ok(sim.mem_free(device, address)?)
    }

    fn cuMemAllocAsync(address: *mut u64, bytes: u64, stream: u64) {
        alloc_async(Out::new(address)?, bytes, stream)
    }

    /// There are default pools only.
    fn cuMemAllocFromPoolAsync(address: *mut u64, bytes: u64, pool: u64, stream: u64) {
        let out = Out::new(address)?;
        let (_, device) = current()?;
        match device_of_pool(pool)? == device {
            true => alloc_async(out, bytes, stream),
            false => Err(DriverError::new(Call::MemAllocAsync, ResultCode::INVALID_VALUE)
                .because("the pool belongs to another device")
                .into()),
        }
    }

    fn cuMemFreeAsync(address: u64, stream: u64) {
        let (sim, device) = current()?;
        match address {
            0 => Ok(()),
            // SAFETY: the simulated device checks the handle.
            _ => Ok(unsafe { sim.mem_free_async(device, address, StreamHandle(stream)) }?),
        }
    }

    fn cuDeviceGetDefaultMemPool(pool: *mut u64, device: i32) {
        let out = Out::new(pool)?;
        let device = device_id(device);
        sim()?.device_total_bytes(device)?;
        out.set(pool_of(device))
    }

    /// The current pool of a device is always its default one.
    fn cuDeviceGetMemPool(pool: *mut u64, device: i32) {
        let out = Out::new(pool)?;
        let device = device_id(device);
        sim()?.device_total_bytes(device)?;
        out.set(pool_of(device))
    }

    /// The release threshold is the one attribute that there is.
    fn cuMemPoolSetAttribute(pool: u64, attribute: u32, value: *mut c_void) {
        Out::new(value)?;
        let device = device_of_pool(pool)?;
        if attribute != RELEASE_THRESHOLD {
            let why = format_args!("pool attribute {attribute}");
            return Err(Refusal::new(ResultCode::NOT_SUPPORTED, why));
        }
        // SAFETY: not null, and of this attribute the caller passes a u64.
        let bytes = unsafe { value.cast::<u64>().read() };
        Ok(sim()?.mem_pool_set_release_threshold(device, bytes)?)
    }

    fn cuMemHostAlloc(place: *mut *mut c_void, bytes: u64, flags: u32) {
        match flags & !HOST_FLAGS {
            0 => host_alloc(place, bytes),
            _ => Err(Refusal::new(ResultCode::INVALID_VALUE, format_args!("flags {flags:#x}"))),
        }
    }

    fn cuMemAllocHost_v2(place: *mut *mut c_void, bytes: u64) {
        host_alloc(place, bytes)
    }

    fn cuMemFreeHost(place: *mut c_void) {
        let (sim, device) = current()?;
        let address = PinnedAddress(place.expose_provenance() as u64);
        // SAFETY: the simulated device checks the address; that nothing uses the memory any more is
        // the caller's promise.
        Ok(unsafe { sim.host_free(device, address) }?)
    }

    fn cuMemHostRegister_v2(place: *mut c_void, bytes: u64, flags: u32) {
        let (sim, device) = current()?;
        if flags & !REGISTER_FLAGS != 0 {
            return Err(Refusal::new(ResultCode::NOT_SUPPORTED, format_args!("flags {flags:#x}")));
        }
        let address = PinnedAddress(place.expose_provenance() as u64);
        // SAFETY: the caller keeps the memory until it is registered no more.
        Ok(unsafe { sim.host_register(device, address, bytes) }?)
    }

    fn cuMemHostUnregister(place: *mut c_void) {
        let (sim, device) = current()?;
        Ok(sim.host_unregister(device, PinnedAddress(place.expose_provenance() as u64))?)
    }

    /// With unified addressing the address is the same.
    fn cuMemHostGetDevicePointer_v2(address: *mut u64, place: *mut c_void, flags: u32) {
        let out = Out::new(address)?;
        let (sim, _) = current()?;
        let host = place.expose_provenance() as u64;
        match flags == 0 && sim.is_page_locked(host, 1) {
            true => out.set(host),
            false => {
                let why = format_args!("{host:#x} is no page-locked memory, or flags {flags:#x}");
                Err(Refusal::new(ResultCode::INVALID_VALUE, why))
            }
        }
    }
}
