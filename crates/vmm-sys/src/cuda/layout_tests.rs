//! Our structs against cudarc's: the same size, alignment and bytes, whichever CUDA version cudarc
//! was told to speak (`CUDARC_CUDA_VERSION`).
//!
//! cudarc's `CUmemLocation` is a struct up to 13.1 and holds a union from 13.2 on, so no field of
//! it is named here: values are compared as the bytes that the driver would read.

use std::mem::{align_of, offset_of, size_of};

use cudarc::driver::sys;

use super::ffi::{
    self, DeviceUuid, IpcEvent, IpcMemHandle, MemAccessDesc, MemAllocationFlags, MemAllocationProp,
    MemLocation,
};
use crate::types::{Access, AccessGrant, ChunkProps, DeviceId, HandleTypes, Location};
use crate::{CaptureMode, CaptureStatus, DeviceAttribute, PeerAttribute};

/// The bytes of a value without padding.
fn bytes_of<T: Copy>(value: &T) -> Vec<u8> {
    // SAFETY: the types compared here have no padding (checked by their sizes below), so all bytes
    // are initialised.
    unsafe { std::slice::from_raw_parts((&raw const *value).cast::<u8>(), size_of::<T>()) }.to_vec()
}

/// A zeroed struct of cudarc with 32-bit words written over it from byte `offset` on.
fn with_words<T: Copy>(mut value: T, offset: usize, words: &[u32]) -> T {
    assert!(offset + words.len() * 4 <= size_of::<T>());
    for (index, word) in words.iter().enumerate() {
        // SAFETY: within the value by the assertion; the words written are valid enum values.
        unsafe {
            (&raw mut value)
                .cast::<u8>()
                .add(offset + index * 4)
                .cast::<u32>()
                .write_unaligned(*word);
        }
    }
    value
}

fn same_layout<Ours, Theirs>(name: &str, bytes: usize) {
    assert_eq!(size_of::<Ours>(), bytes, "size of {name}");
    assert_eq!(size_of::<Theirs>(), bytes, "size of cudarc's {name}");
    assert_eq!(align_of::<Ours>(), align_of::<Theirs>(), "alignment of {name}");
}

#[test]
fn sizes_and_alignments() {
    same_layout::<MemLocation, sys::CUmemLocation>("CUmemLocation", 8);
    same_layout::<MemAllocationProp, sys::CUmemAllocationProp>("CUmemAllocationProp", 32);
    same_layout::<MemAllocationFlags, sys::CUmemAllocationProp_st__bindgen_ty_1>("allocFlags", 8);
    same_layout::<MemAccessDesc, sys::CUmemAccessDesc>("CUmemAccessDesc", 12);
    same_layout::<DeviceUuid, sys::CUuuid>("CUuuid", 16);
    same_layout::<IpcMemHandle, sys::CUipcMemHandle>("CUipcMemHandle", 64);
    same_layout::<IpcEvent, sys::CUipcEventHandle>("CUipcEventHandle", 64);
}

#[test]
fn offsets_of_the_outer_fields() {
    type Theirs = sys::CUmemAllocationProp;
    assert_eq!(
        [
            offset_of!(MemAllocationProp, kind),
            offset_of!(MemAllocationProp, requested_handle_types),
            offset_of!(MemAllocationProp, location),
            offset_of!(MemAllocationProp, win32_handle_meta_data),
            offset_of!(MemAllocationProp, flags),
        ],
        [
            offset_of!(Theirs, type_),
            offset_of!(Theirs, requestedHandleTypes),
            offset_of!(Theirs, location),
            offset_of!(Theirs, win32HandleMetaData),
            offset_of!(Theirs, allocFlags),
        ]
    );
    assert_eq!(offset_of!(MemAccessDesc, location), offset_of!(sys::CUmemAccessDesc, location));
    assert_eq!(offset_of!(MemAccessDesc, flags), offset_of!(sys::CUmemAccessDesc, flags));
}

/// A location as cudarc would hold it.
fn their_location(kind: sys::CUmemLocationType, id: i32) -> sys::CUmemLocation {
    // SAFETY: all zero is valid: kind 0 is CU_MEM_LOCATION_TYPE_INVALID.
    let zero: sys::CUmemLocation = unsafe { std::mem::zeroed() };
    with_words(zero, 0, &[kind as u32, id.cast_unsigned()])
}

#[test]
fn byte_image_of_locations() {
    use sys::CUmemLocationType as Kind;
    let cases = [
        (Location::Device(DeviceId(99)), Kind::CU_MEM_LOCATION_TYPE_DEVICE, 99),
        (Location::Host, Kind::CU_MEM_LOCATION_TYPE_HOST, 0),
        (Location::HostNuma(1), Kind::CU_MEM_LOCATION_TYPE_HOST_NUMA, 1),
    ];
    for (location, kind, id) in cases {
        let ours = MemLocation::from(location);
        assert_eq!(bytes_of(&ours), bytes_of(&their_location(kind, id)), "{location}");
    }
}

#[test]
fn byte_image_of_allocation_properties() {
    let ours = MemAllocationProp::from(&ChunkProps {
        location: Location::Device(DeviceId(1)),
        handle_types: HandleTypes::POSIX_FD,
        rdma: true,
    });
    // SAFETY: all zero is valid: both enums have a zero value, the pointer is null.
    let mut theirs: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
    theirs.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    theirs.requestedHandleTypes =
        sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    theirs.location = their_location(sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, 1);
    theirs.allocFlags.gpuDirectRDMACapable = 1;
    assert_eq!(bytes_of(&ours), bytes_of(&theirs));
    // CU_MEM_HANDLE_TYPE_FABRIC came with 12.3: not in the oldest bindings.
    let fd = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.0;
    assert_eq!((ffi::HANDLE_TYPE_POSIX_FD, HandleTypes::POSIX_FD.bits()), (fd, fd));
}

#[test]
fn byte_image_of_grants() {
    use sys::CUmemAccess_flags as Flags;
    let cases = [
        (Access::None, Flags::CU_MEM_ACCESS_FLAGS_PROT_NONE),
        (Access::Read, Flags::CU_MEM_ACCESS_FLAGS_PROT_READ),
        (Access::ReadWrite, Flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE),
    ];
    for (access, flags) in cases {
        let location = Location::Device(DeviceId(7));
        let ours = MemAccessDesc::from(&AccessGrant { location, access });
        let kind = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        let theirs = sys::CUmemAccessDesc { location: their_location(kind, 7), flags };
        assert_eq!(bytes_of(&ours), bytes_of(&theirs), "{access:?}");
    }
}

#[test]
fn constants() {
    use sys::{CUmemPool_attribute as Pool, CUpointer_attribute as Pointer};
    let pairs = [
        (ffi::STREAM_DEFAULT, sys::CUstream_flags::CU_STREAM_DEFAULT as u32),
        (ffi::STREAM_NON_BLOCKING, sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32),
        (ffi::EVENT_DISABLE_TIMING, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32),
        (ffi::EVENT_INTERPROCESS, sys::CUevent_flags::CU_EVENT_INTERPROCESS as u32),
        (
            ffi::RANGE_HANDLE_DMA_BUF_FD,
            sys::CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD as u32,
        ),
        (ffi::WAIT_VALUE_GEQ, sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32),
        (ffi::POOL_RELEASE_THRESHOLD, Pool::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD as u32),
        (ffi::POINTER_CONTEXT, Pointer::CU_POINTER_ATTRIBUTE_CONTEXT as u32),
        (ffi::POINTER_MEMORY_TYPE, Pointer::CU_POINTER_ATTRIBUTE_MEMORY_TYPE as u32),
        (ffi::POINTER_DEVICE_ORDINAL, Pointer::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL as u32),
        (
            ffi::POINTER_LEGACY_IPC_CAPABLE,
            Pointer::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE as u32,
        ),
        (
            ffi::HOST_ALLOC_PORTABLE_MAPPED,
            sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP,
        ),
        (ffi::ALLOCATION_PINNED, sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED as u32),
    ];
    for (index, (ours, theirs)) in pairs.into_iter().enumerate() {
        assert_eq!(ours, theirs, "pair {index}");
    }
}

#[test]
fn capture_words() {
    use sys::{CUstreamCaptureMode as Mode, CUstreamCaptureStatus as Status};
    let modes = [
        (CaptureMode::Global, Mode::CU_STREAM_CAPTURE_MODE_GLOBAL),
        (CaptureMode::ThreadLocal, Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),
        (CaptureMode::Relaxed, Mode::CU_STREAM_CAPTURE_MODE_RELAXED),
    ];
    for (ours, theirs) in modes {
        assert_eq!(ffi::capture_mode_to_driver(ours), theirs as u32);
        assert_eq!(ffi::capture_mode_from_driver(theirs as u32), Ok(ours));
    }
    let states = [
        (CaptureStatus::None, Status::CU_STREAM_CAPTURE_STATUS_NONE),
        (CaptureStatus::Active, Status::CU_STREAM_CAPTURE_STATUS_ACTIVE),
        (CaptureStatus::Invalidated, Status::CU_STREAM_CAPTURE_STATUS_INVALIDATED),
    ];
    for (ours, theirs) in states {
        assert_eq!(ffi::capture_status_from_driver(theirs as u32), Ok(ours));
    }
}

#[test]
fn attributes() {
    use sys::CUdevice_P2PAttribute as Peer;
    use sys::CUdevice_attribute::*;
    // HandleTypeFabricSupported (128, from 12.3) and HostNumaVmmSupported (141, from 12.8) are not
    // in the oldest bindings that this test is run with.
    let device = [
        (DeviceAttribute::MultiprocessorCount, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
        (DeviceAttribute::Integrated, CU_DEVICE_ATTRIBUTE_INTEGRATED),
        (DeviceAttribute::PciBusId, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID),
        (DeviceAttribute::PciDeviceId, CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID),
        (DeviceAttribute::UnifiedAddressing, CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING),
        (DeviceAttribute::PciDomainId, CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID),
        (DeviceAttribute::ComputeCapabilityMajor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
        (DeviceAttribute::ComputeCapabilityMinor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
        (
            DeviceAttribute::VirtualMemoryManagementSupported,
            CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED,
        ),
        (
            DeviceAttribute::HandleTypePosixFdSupported,
            CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
        ),
        (
            DeviceAttribute::GpuDirectRdmaWithVmmSupported,
            CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
        ),
        (DeviceAttribute::MemoryPoolsSupported, CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED),
        (DeviceAttribute::GpuDirectRdmaSupported, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED),
        (DeviceAttribute::DmaBufSupported, CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED),
        (DeviceAttribute::HostNumaId, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID),
    ];
    for (ours, theirs) in device {
        assert_eq!(ours as i32, theirs as i32, "{ours:?}");
    }
    let peer = [
        (PeerAttribute::PerformanceRank, Peer::CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK),
        (PeerAttribute::AccessSupported, Peer::CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED),
        (
            PeerAttribute::NativeAtomicSupported,
            Peer::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED,
        ),
    ];
    for (ours, theirs) in peer {
        assert_eq!(ours as i32, theirs as i32, "{ours:?}");
    }
}
