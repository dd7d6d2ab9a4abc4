//! The driver's structs and constants, written out by hand for the few that we use.
//!
//! Own types and not cudarc's: the shape of `CUmemLocation` in cudarc depends on the CUDA version
//! of whoever builds it, and its enums make an unknown value from a newer driver undefined
//! behaviour. Here everything that crosses is a plain integer. `layout_tests` compares size,
//! alignment and byte image with `cudarc::driver::sys`.

use std::ffi::c_void;

use crate::error::{DriverError, DriverResult, ResultCode};
use crate::types::{Access, AccessGrant, ChunkProps, DeviceId, HandleTypes, Location};
use crate::{Call, CaptureMode, CaptureStatus};

// Handles of the driver are pointers that nobody but the driver follows: plain u64 here.
#[cfg(not(target_pointer_width = "64"))]
compile_error!("CUDA's virtual memory management exists on 64-bit machines only");

/// `CUmemLocation`. `kind` says what `id` counts.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct MemLocation {
    /// `CUmemLocationType`.
    pub kind: u32,
    /// Device ordinal or NUMA node.
    pub id: i32,
}

/// `CU_MEM_LOCATION_TYPE_DEVICE`
const LOCATION_DEVICE: u32 = 1;
/// `CU_MEM_LOCATION_TYPE_HOST`
const LOCATION_HOST: u32 = 2;
/// `CU_MEM_LOCATION_TYPE_HOST_NUMA`
const LOCATION_HOST_NUMA: u32 = 3;

impl From<Location> for MemLocation {
    fn from(location: Location) -> MemLocation {
        // Ordinals beyond i32 wrap to negative ones, which the driver refuses like any other that
        // does not exist.
        match location {
            Location::Device(device) => {
                MemLocation { kind: LOCATION_DEVICE, id: device.0.cast_signed() }
            }
            Location::Host => MemLocation { kind: LOCATION_HOST, id: 0 },
            Location::HostNuma(node) => {
                MemLocation { kind: LOCATION_HOST_NUMA, id: node.cast_signed() }
            }
        }
    }
}

impl MemLocation {
    /// Back to our word for it; `None` for a kind newer than this list.
    pub(super) fn location(self) -> Option<Location> {
        match self.kind {
            LOCATION_DEVICE => Some(Location::Device(DeviceId(self.id.cast_unsigned()))),
            LOCATION_HOST => Some(Location::Host),
            LOCATION_HOST_NUMA => Some(Location::HostNuma(self.id.cast_unsigned())),
            _ => None,
        }
    }
}

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct MemAllocationProp {
    /// `CUmemAllocationType`: always [`ALLOCATION_PINNED`].
    pub kind: u32,
    /// `CUmemAllocationHandleType`, a bit set.
    pub requested_handle_types: u32,
    /// Where the memory lies.
    pub location: MemLocation,
    /// Windows only.
    pub win32_handle_meta_data: *mut c_void,
    /// `allocFlags`.
    pub flags: MemAllocationFlags,
}

/// The unnamed struct inside `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct MemAllocationFlags {
    /// 0: none.
    pub compression_type: u8,
    /// 1: a NIC may read the memory.
    pub gpu_direct_rdma_capable: u8,
    /// 0: nothing special.
    pub usage: u16,
    /// Zero.
    pub reserved: [u8; 4],
}

/// `CU_MEM_ALLOCATION_TYPE_PINNED`
pub(super) const ALLOCATION_PINNED: u32 = 1;

impl From<&ChunkProps> for MemAllocationProp {
    fn from(props: &ChunkProps) -> MemAllocationProp {
        MemAllocationProp {
            kind: ALLOCATION_PINNED,
            requested_handle_types: props.handle_types.bits(),
            location: props.location.into(),
            win32_handle_meta_data: std::ptr::null_mut(),
            flags: MemAllocationFlags {
                gpu_direct_rdma_capable: u8::from(props.rdma),
                ..Default::default()
            },
        }
    }
}

impl MemAllocationProp {
    /// All zero, for the driver to fill in.
    pub(super) fn zeroed() -> MemAllocationProp {
        MemAllocationProp {
            kind: 0,
            requested_handle_types: 0,
            location: MemLocation::default(),
            win32_handle_meta_data: std::ptr::null_mut(),
            flags: MemAllocationFlags::default(),
        }
    }

    /// Back to our words.
    pub(super) fn props(&self) -> DriverResult<ChunkProps> {
        let location = self.location.location().ok_or_else(|| {
            let MemLocation { kind, id } = self.location;
            newer_than_us(Call::MemGetAllocationProperties, "location type", kind)
                .because(format_args!("location id {id}"))
        })?;
        Ok(ChunkProps {
            location,
            handle_types: HandleTypes::from_bits(self.requested_handle_types),
            rdma: self.flags.gpu_direct_rdma_capable != 0,
        })
    }
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MemAccessDesc {
    /// Who is granted.
    pub location: MemLocation,
    /// `CUmemAccess_flags`.
    pub flags: u32,
}

impl MemAccessDesc {
    /// All zero: grants nothing to nowhere.
    pub(super) const NONE: MemAccessDesc =
        MemAccessDesc { location: MemLocation { kind: 0, id: 0 }, flags: 0 };
}

impl From<&AccessGrant> for MemAccessDesc {
    fn from(grant: &AccessGrant) -> MemAccessDesc {
        let flags = match grant.access {
            Access::None => 0,
            Access::Read => 1,
            Access::ReadWrite => 3,
        };
        MemAccessDesc { location: grant.location.into(), flags }
    }
}

/// Reads `CUmemAccess_flags`.
pub(super) fn access_from_flags(flags: u64) -> DriverResult<Access> {
    match flags {
        0 => Ok(Access::None),
        1 => Ok(Access::Read),
        3 => Ok(Access::ReadWrite),
        other => Err(newer_than_us(Call::MemGetAccess, "access flags", other)),
    }
}

/// `CUuuid`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct DeviceUuid {
    /// The identity, in the order in which it is written.
    pub bytes: [u8; 16],
}

/// `CUipcMemHandle`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct IpcMemHandle {
    /// Opaque.
    pub reserved: [u8; 64],
}

/// `CUipcEventHandle`. The driver takes it by value.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct IpcEvent {
    /// Opaque.
    pub reserved: [u8; 64],
}

/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`
pub(super) const RANGE_HANDLE_DMA_BUF_FD: u32 = 1;

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`
pub(super) const HANDLE_TYPE_POSIX_FD: u32 = 1;

/// `CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP`
pub(super) const HOST_ALLOC_PORTABLE_MAPPED: u32 = 1 | 2;
/// `CU_STREAM_DEFAULT`
pub(super) const STREAM_DEFAULT: u32 = 0;
/// `CU_STREAM_NON_BLOCKING`
pub(super) const STREAM_NON_BLOCKING: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`
pub(super) const EVENT_DISABLE_TIMING: u32 = 2;
/// `CU_EVENT_INTERPROCESS`, which the driver takes only beside [`EVENT_DISABLE_TIMING`].
pub(super) const EVENT_INTERPROCESS: u32 = 4;
/// `CU_STREAM_WAIT_VALUE_GEQ`
pub(super) const WAIT_VALUE_GEQ: u32 = 0;
/// `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`
pub(super) const POOL_RELEASE_THRESHOLD: u32 = 4;

/// `CU_POINTER_ATTRIBUTE_CONTEXT`
pub(super) const POINTER_CONTEXT: u32 = 1;
/// `CU_POINTER_ATTRIBUTE_MEMORY_TYPE`
pub(super) const POINTER_MEMORY_TYPE: u32 = 2;
/// `CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL`
pub(super) const POINTER_DEVICE_ORDINAL: u32 = 9;
/// `CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE`
pub(super) const POINTER_LEGACY_IPC_CAPABLE: u32 = 10;

/// `CUstreamCaptureMode` of our word.
pub(super) fn capture_mode_to_driver(mode: CaptureMode) -> u32 {
    match mode {
        CaptureMode::Global => 0,
        CaptureMode::ThreadLocal => 1,
        CaptureMode::Relaxed => 2,
    }
}

/// Our word for a `CUstreamCaptureMode`.
pub(super) fn capture_mode_from_driver(mode: u32) -> DriverResult<CaptureMode> {
    match mode {
        0 => Ok(CaptureMode::Global),
        1 => Ok(CaptureMode::ThreadLocal),
        2 => Ok(CaptureMode::Relaxed),
        other => Err(newer_than_us(Call::ThreadExchangeStreamCaptureMode, "capture mode", other)),
    }
}

/// Our word for a `CUstreamCaptureStatus`.
pub(super) fn capture_status_from_driver(status: u32) -> DriverResult<CaptureStatus> {
    match status {
        0 => Ok(CaptureStatus::None),
        1 => Ok(CaptureStatus::Active),
        2 => Ok(CaptureStatus::Invalidated),
        other => Err(newer_than_us(Call::StreamGetCaptureInfo, "capture status", other)),
    }
}

/// The call succeeded, but answered a value that this crate has no word for.
fn newer_than_us(call: Call, what: &str, value: impl std::fmt::Display) -> DriverError {
    DriverError::new(call, ResultCode::UNKNOWN)
        .because(format_args!("the driver's {what} {value} is newer than this program"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn properties_and_locations_survive_the_way_there_and_back() {
        let locations = [Location::Device(DeviceId(3)), Location::Host, Location::HostNuma(1)];
        for location in locations {
            for handle_types in [HandleTypes::NONE, HandleTypes::POSIX_FD, HandleTypes::FABRIC] {
                for rdma in [false, true] {
                    let props = ChunkProps { location, handle_types, rdma };
                    assert_eq!(MemAllocationProp::from(&props).props(), Ok(props));
                }
            }
        }
    }

    #[test]
    fn access_survives_the_way_there_and_back() {
        for access in [Access::None, Access::Read, Access::ReadWrite] {
            let desc = MemAccessDesc::from(&AccessGrant { location: Location::Host, access });
            assert_eq!(access_from_flags(u64::from(desc.flags)), Ok(access));
        }
    }

    #[test]
    fn values_of_a_newer_driver_are_errors_that_name_them() {
        let mut prop = MemAllocationProp::zeroed();
        prop.location.kind = 17;
        let texts = [
            prop.props().unwrap_err().to_string(),
            access_from_flags(17).unwrap_err().to_string(),
            capture_mode_from_driver(17).unwrap_err().to_string(),
            capture_status_from_driver(17).unwrap_err().to_string(),
        ];
        for text in texts {
            assert!(text.contains("17") && text.contains("newer"), "{text}");
        }
    }
}
