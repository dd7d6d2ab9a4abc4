//! The virtual memory management calls.

use std::ffi::{c_int, c_void};
use std::os::fd::{BorrowedFd, IntoRawFd};

use vmm_sys::{
    Access, AccessGrant, ChunkHandle, ChunkProps, DeviceId, Driver, GranularityKind, HandleTypes,
    Location, ResultCode,
};

use crate::door::{Out, Refusal};
use crate::machine::{current, sim};

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct MemLocation {
    kind: u32,
    id: i32,
}

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct MemAllocationProp {
    kind: u32,
    handle_types: u32,
    location: MemLocation,
    win32: *mut c_void,
    compression: u8,
    rdma: u8,
    usage: u16,
    reserved: [u8; 4],
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct MemAccessDesc {
    location: MemLocation,
    flags: u32,
}

/// `CU_MEM_ALLOCATION_TYPE_PINNED`
const PINNED: u32 = 1;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`
const POSIX_FD: u32 = 1;
/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`
const DMA_BUF_FD: u32 = 1;

fn invalid(why: impl std::fmt::Display) -> Refusal {
    Refusal::new(ResultCode::INVALID_VALUE, why)
}

impl MemLocation {
    fn location(self) -> Result<Location, Refusal> {
        match self.kind {
            1 => Ok(Location::Device(DeviceId(self.id.cast_unsigned()))),
            2 => Ok(Location::Host),
            3 => Ok(Location::HostNuma(self.id.cast_unsigned())),
            kind => Err(invalid(format_args!("location type {kind}"))),
        }
    }
}

impl From<Location> for MemLocation {
    fn from(location: Location) -> MemLocation {
        match location {
            Location::Device(device) => MemLocation { kind: 1, id: device.0.cast_signed() },
            Location::Host => MemLocation { kind: 2, id: 0 },
            Location::HostNuma(node) => MemLocation { kind: 3, id: node.cast_signed() },
        }
    }
}

impl MemAllocationProp {
    fn props(&self) -> Result<ChunkProps, Refusal> {
        if self.kind != PINNED {
            return Err(invalid(format_args!("allocation type {}", self.kind)));
        }
        if self.compression != 0 || self.usage != 0 {
            return Err(Refusal::new(ResultCode::NOT_SUPPORTED, "compression, or a special usage"));
        }
        Ok(ChunkProps {
            location: self.location.location()?,
            handle_types: HandleTypes::from_bits(self.handle_types),
            rdma: self.rdma != 0,
        })
    }
}

/// Reads properties that a caller passes.
fn props_at(place: *const MemAllocationProp) -> Result<ChunkProps, Refusal> {
    if place.is_null() {
        return Err(invalid("null in the place of properties"));
    }
    // SAFETY: not null, and the caller of the entry point has properties there.
    unsafe { place.read() }.props()
}

fn access_from(flags: u32) -> Result<Access, Refusal> {
    match flags {
        0 => Ok(Access::None),
        1 => Ok(Access::Read),
        3 => Ok(Access::ReadWrite),
        _ => Err(invalid(format_args!("access flags {flags}"))),
    }
}

entries! {
    fn cuMemGetAllocationGranularity(bytes: *mut u64, props: *const MemAllocationProp, option: u32) {
        let out = Out::new(bytes)?;
        let props = props_at(props)?;
        let kind = match option {
            0 => GranularityKind::Minimum,
            1 => GranularityKind::Recommended,
            _ => return Err(invalid(format_args!("granularity option {option}"))),
        };
        out.set(sim()?.granularity(&props, kind)?)
    }

    fn cuMemAddressReserve(address: *mut u64, bytes: u64, align: u64, hint: u64, flags: u64) {
        let out = Out::new(address)?;
        match flags {
            0 => out.set(sim()?.address_reserve(bytes, align, hint)?),
            _ => Err(invalid(format_args!("flags {flags:#x}"))),
        }
    }

    fn cuMemAddressFree(address: u64, bytes: u64) {
        Ok(sim()?.address_free(address, bytes)?)
    }

    fn cuMemCreate(handle: *mut u64, bytes: u64, props: *const MemAllocationProp, flags: u64) {
        let out = Out::new(handle)?;
        let props = props_at(props)?;
        match flags {
            0 => out.set(sim()?.create(bytes, &props)?.0),
            _ => Err(invalid(format_args!("flags {flags:#x}"))),
        }
    }

    fn cuMemRelease(handle: u64) {
        // SAFETY: the simulated device checks the handle.
        Ok(unsafe { sim()?.release(ChunkHandle(handle)) }?)
    }

    fn cuMemRetainAllocationHandle(handle: *mut u64, address: u64) {
        let out = Out::new(handle)?;
        out.set(sim()?.retain(address)?.0)
    }

    fn cuMemGetAllocationPropertiesFromHandle(props: *mut MemAllocationProp, handle: u64) {
        let out = Out::new(props)?;
        // SAFETY: the simulated device checks the handle.
        let props = unsafe { sim()?.properties(ChunkHandle(handle)) }?;
        out.set(MemAllocationProp {
            kind: PINNED,
            handle_types: props.handle_types.bits(),
            location: props.location.into(),
            win32: std::ptr::null_mut(),
            compression: 0,
            rdma: u8::from(props.rdma),
            usage: 0,
            reserved: [0; 4],
        })
    }

    fn cuMemMap(address: u64, bytes: u64, offset: u64, handle: u64, flags: u64) {
        if flags != 0 {
            return Err(invalid(format_args!("flags {flags:#x}")));
        }
        // SAFETY: the simulated device checks the handle.
        Ok(unsafe { sim()?.map(address, bytes, offset, ChunkHandle(handle)) }?)
    }

    fn cuMemUnmap(address: u64, bytes: u64) {
        Ok(sim()?.unmap(address, bytes)?)
    }

    fn cuMemSetAccess(address: u64, bytes: u64, grants: *const MemAccessDesc, count: u64) {
        if grants.is_null() && count > 0 {
            return Err(invalid("null in the place of grants"));
        }
        let read = |index: usize| {
            // SAFETY: the caller has `count` grants there.
            let MemAccessDesc { location, flags } = unsafe { grants.add(index).read() };
            Ok(AccessGrant { location: location.location()?, access: access_from(flags)? })
        };
        let grants = (0..count as usize).map(read).collect::<Result<Vec<_>, Refusal>>()?;
        Ok(sim()?.set_access(address, bytes, &grants)?)
    }

    fn cuMemGetAccess(flags: *mut u64, location: *const MemLocation, address: u64) {
        let out = Out::new(flags)?;
        if location.is_null() {
            return Err(invalid("null in the place of a location"));
        }
        // SAFETY: not null, and the caller has a location there.
        let location = unsafe { location.read() }.location()?;
        out.set(match sim()?.get_access(address, location)? {
            Access::None => 0,
            Access::Read => 1,
            Access::ReadWrite => 3,
        })
    }

    /// As a POSIX descriptor, the one kind that the simulated device has.
    fn cuMemExportToShareableHandle(place: *mut c_void, handle: u64, kind: u32, flags: u64) {
        let out = Out::new(place.cast::<c_int>())?;
        if kind != POSIX_FD || flags != 0 {
            return Err(invalid(format_args!("handle type {kind}, flags {flags:#x}")));
        }
        // SAFETY: the simulated device checks the handle.
        let descriptor = unsafe { sim()?.export_fd(ChunkHandle(handle)) }?;
        out.set(descriptor.into_raw_fd())
    }

    fn cuMemGetHandleForAddressRange(place: *mut c_void, address: u64, bytes: usize, kind: u32, flags: u64) {
        let out = Out::new(place.cast::<c_int>())?;
        if kind != DMA_BUF_FD || flags != 0 {
            return Err(invalid(format_args!("range handle type {kind}, flags {flags:#x}")));
        }
        let (sim, device) = current()?;
        out.set(sim.dma_buf(device, address, bytes as u64)?.into_raw_fd())
    }

    /// The descriptor is passed as a number in the place of a pointer, and stays the caller's.
    fn cuMemImportFromShareableHandle(handle: *mut u64, descriptor: u64, kind: u32) {
        let out = Out::new(handle)?;
        let number = i32::try_from(descriptor.cast_signed()).ok().filter(|number| *number >= 0);
        let Some(number) = number.filter(|_| kind == POSIX_FD) else {
            let why = format_args!("descriptor {}, type {kind}", descriptor.cast_signed());
            return Err(invalid(why));
        };
        // SAFETY: a number of no open descriptor gives an error in every system call made with it, and
        // the borrow ends with this call.
        let descriptor = unsafe { BorrowedFd::borrow_raw(number) };
        out.set(sim()?.import_fd(descriptor)?.0)
    }

    /// Null means not wanted.
    fn cuMemGetAddressRange_v2(base: *mut u64, bytes: *mut u64, address: u64) {
        let (sim, device) = current()?;
        let range = sim.address_range(device, address)?;
        for (place, value) in [(base, range.0), (bytes, range.1)] {
            if !place.is_null() {
                Out::new(place)?.set(value)?;
            }
        }
        Ok(())
    }
}
