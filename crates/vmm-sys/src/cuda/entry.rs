//! The entry points of `libcuda`, each looked up on its own by its exported name.
//!
//! Every entry returns a plain integer: a code that no header knows yet is a number like any other.
//! Names carry the version suffix of the ABI that the signature belongs to; the unsuffixed
//! `cuMemAlloc` and friends are a 32-bit ABI that nobody may call.
//!
//! An entry is an ordinary `fn` where any argument is sound (numbers that the driver checks, and
//! places that references keep alive), and an `unsafe fn` where the driver follows a handle or a
//! host pointer.

use std::ffi::c_void;

use libloading::Library;

use super::ffi::{
    DeviceUuid, IpcEvent, IpcMemHandle, MemAccessDesc, MemAllocationProp, MemLocation,
};
use super::load::LoadError;
use crate::call::Call;

macro_rules! entry_points {
    (
        required { $($needed:ident: $needed_call:ident [$needed_name:literal] $needed_type:ty;)* }
        optional { $($extra:ident: $extra_call:ident [$($extra_name:literal),+] $extra_type:ty;)* }
    ) => {
        /// The entry points found in one library. Optional ones came with later drivers.
        pub(super) struct EntryPoints {
            $(pub $needed: $needed_type,)*
            $(pub $extra: Option<$extra_type>,)*
        }

        impl EntryPoints {
            /// Looks all of them up.
            pub(super) fn resolve(library: &Library, path: &str) -> Result<EntryPoints, LoadError> {
                Ok(EntryPoints {
                    // SAFETY: the type beside each name is the driver's signature of that name,
                    // with handles and sizes as the 64-bit integers they are passed as.
                    $($needed: unsafe { symbol::<$needed_type>(library, $needed_name) }
                        .ok_or_else(|| LoadError::MissingSymbol {
                            call: Call::$needed_call,
                            symbol: $needed_name,
                            library: path.to_owned(),
                        })?,)*
                    // SAFETY: as above; all names of one entry have the same signature.
                    $($extra: unsafe {
                        None$(.or_else(|| symbol::<$extra_type>(library, $extra_name)))+
                    },)*
                })
            }

            /// The calls that this driver lacks.
            pub(super) fn missing(&self) -> Vec<Call> {
                let mut missing = Vec::new();
                $(if self.$extra.is_none() {
                    missing.push(Call::$extra_call);
                })*
                missing
            }
        }
    };
}

/// Finds one symbol.
///
/// # Safety
/// `F` is the function pointer type of that symbol, and the library stays loaded while it is used.
pub(super) unsafe fn symbol<F: Copy>(library: &Library, name: &str) -> Option<F> {
    // SAFETY: the caller vouches for the type.
    unsafe { library.get::<F>(name) }.ok().map(|found| *found)
}

entry_points! {
    required {
        init: Init ["cuInit"] extern "C" fn(u32) -> u32;
        driver_get_version: DriverGetVersion ["cuDriverGetVersion"] extern "C" fn(&mut i32) -> u32;
        device_get_count: DeviceGetCount ["cuDeviceGetCount"] extern "C" fn(&mut i32) -> u32;
        device_get: DeviceGet ["cuDeviceGet"] extern "C" fn(&mut i32, i32) -> u32;
        // The buffer has to have as many bytes as the length says.
        device_get_name: DeviceGetName ["cuDeviceGetName"]
            unsafe extern "C" fn(*mut u8, i32, i32) -> u32;
        device_total_mem: DeviceTotalMem ["cuDeviceTotalMem_v2"]
            extern "C" fn(&mut u64, i32) -> u32;
        device_get_attribute: DeviceGetAttribute ["cuDeviceGetAttribute"]
            extern "C" fn(&mut i32, i32, i32) -> u32;
        primary_ctx_retain: DevicePrimaryCtxRetain ["cuDevicePrimaryCtxRetain"]
            extern "C" fn(&mut u64, i32) -> u32;
        primary_ctx_release: DevicePrimaryCtxRelease ["cuDevicePrimaryCtxRelease_v2"]
            extern "C" fn(i32) -> u32;
        ctx_get_current: CtxGetCurrent ["cuCtxGetCurrent"] extern "C" fn(&mut u64) -> u32;
        ctx_set_current: CtxSetCurrent ["cuCtxSetCurrent"] unsafe extern "C" fn(u64) -> u32;
        ctx_synchronize: CtxSynchronize ["cuCtxSynchronize"] extern "C" fn() -> u32;
        mem_get_info: MemGetInfo ["cuMemGetInfo_v2"] extern "C" fn(&mut u64, &mut u64) -> u32;

        mem_granularity: MemGetAllocationGranularity ["cuMemGetAllocationGranularity"]
            extern "C" fn(&mut u64, &MemAllocationProp, u32) -> u32;
        mem_address_reserve: MemAddressReserve ["cuMemAddressReserve"]
            extern "C" fn(&mut u64, u64, u64, u64, u64) -> u32;
        mem_address_free: MemAddressFree ["cuMemAddressFree"] extern "C" fn(u64, u64) -> u32;
        mem_create: MemCreate ["cuMemCreate"]
            extern "C" fn(&mut u64, u64, &MemAllocationProp, u64) -> u32;
        mem_release: MemRelease ["cuMemRelease"] unsafe extern "C" fn(u64) -> u32;
        mem_map: MemMap ["cuMemMap"] unsafe extern "C" fn(u64, u64, u64, u64, u64) -> u32;
        mem_unmap: MemUnmap ["cuMemUnmap"] extern "C" fn(u64, u64) -> u32;
        // The array has to have as many entries as the count says.
        mem_set_access: MemSetAccess ["cuMemSetAccess"]
            unsafe extern "C" fn(u64, u64, *const MemAccessDesc, u64) -> u32;

        memcpy_htod: MemcpyHtoD ["cuMemcpyHtoD_v2"]
            unsafe extern "C" fn(u64, *const u8, u64) -> u32;
        memcpy_dtoh: MemcpyDtoH ["cuMemcpyDtoH_v2"] unsafe extern "C" fn(*mut u8, u64, u64) -> u32;
        memcpy_dtod: MemcpyDtoD ["cuMemcpyDtoD_v2"] unsafe extern "C" fn(u64, u64, u64) -> u32;
        memset_d8: MemsetD8 ["cuMemsetD8_v2"] unsafe extern "C" fn(u64, u8, u64) -> u32;
        memcpy_htod_async: MemcpyHtoDAsync ["cuMemcpyHtoDAsync_v2"]
            unsafe extern "C" fn(u64, *const u8, u64, u64) -> u32;
        memcpy_dtoh_async: MemcpyDtoHAsync ["cuMemcpyDtoHAsync_v2"]
            unsafe extern "C" fn(*mut u8, u64, u64, u64) -> u32;
        memcpy_dtod_async: MemcpyDtoDAsync ["cuMemcpyDtoDAsync_v2"]
            unsafe extern "C" fn(u64, u64, u64, u64) -> u32;
        memset_d8_async: MemsetD8Async ["cuMemsetD8Async"]
            unsafe extern "C" fn(u64, u8, u64, u64) -> u32;

        stream_create: StreamCreate ["cuStreamCreate"] extern "C" fn(&mut u64, u32) -> u32;
        stream_destroy: StreamDestroy ["cuStreamDestroy_v2"] unsafe extern "C" fn(u64) -> u32;
        stream_query: StreamQuery ["cuStreamQuery"] unsafe extern "C" fn(u64) -> u32;
        stream_synchronize: StreamSynchronize ["cuStreamSynchronize"]
            unsafe extern "C" fn(u64) -> u32;
        stream_wait_event: StreamWaitEvent ["cuStreamWaitEvent"]
            unsafe extern "C" fn(u64, u64, u32) -> u32;
        event_create: EventCreate ["cuEventCreate"] extern "C" fn(&mut u64, u32) -> u32;
        event_destroy: EventDestroy ["cuEventDestroy_v2"] unsafe extern "C" fn(u64) -> u32;
        event_record: EventRecord ["cuEventRecord"] unsafe extern "C" fn(u64, u64) -> u32;
        event_query: EventQuery ["cuEventQuery"] unsafe extern "C" fn(u64) -> u32;
        event_synchronize: EventSynchronize ["cuEventSynchronize"] unsafe extern "C" fn(u64) -> u32;
    }
    optional {
        // The first form knows nothing of MIG instances; CUDA 13 headers dropped it.
        device_get_uuid: DeviceGetUuid ["cuDeviceGetUuid_v2", "cuDeviceGetUuid"]
            extern "C" fn(&mut DeviceUuid, i32) -> u32;
        device_can_access_peer: DeviceCanAccessPeer ["cuDeviceCanAccessPeer"]
            extern "C" fn(&mut i32, i32, i32) -> u32;
        device_p2p_attribute: DeviceGetP2pAttribute ["cuDeviceGetP2PAttribute"]
            extern "C" fn(&mut i32, i32, i32, i32) -> u32;

        mem_retain: MemRetainAllocationHandle ["cuMemRetainAllocationHandle"]
            extern "C" fn(&mut u64, u64) -> u32;
        mem_properties: MemGetAllocationProperties ["cuMemGetAllocationPropertiesFromHandle"]
            unsafe extern "C" fn(&mut MemAllocationProp, u64) -> u32;
        mem_get_access: MemGetAccess ["cuMemGetAccess"]
            extern "C" fn(&mut u64, &MemLocation, u64) -> u32;
        // What is written depends on the handle type: an int for descriptors.
        mem_export: MemExportToShareableHandle ["cuMemExportToShareableHandle"]
            unsafe extern "C" fn(*mut c_void, u64, u32, u64) -> u32;
        // A descriptor is passed as a pointer-sized number.
        mem_import: MemImportFromShareableHandle ["cuMemImportFromShareableHandle"]
            unsafe extern "C" fn(&mut u64, u64, u32) -> u32;
        mem_address_range: MemGetAddressRange ["cuMemGetAddressRange_v2"]
            extern "C" fn(&mut u64, &mut u64, u64) -> u32;
        pointer_attributes: PointerGetAttributes ["cuPointerGetAttributes"]
            unsafe extern "C" fn(u32, *const u32, *const *mut c_void, u64) -> u32;
        ipc_get_mem_handle: IpcGetMemHandle ["cuIpcGetMemHandle"]
            extern "C" fn(&mut IpcMemHandle, u64) -> u32;
        // What is written depends on the handle type: an int for dma-bufs.
        mem_range_handle: MemGetHandleForAddressRange ["cuMemGetHandleForAddressRange"]
            unsafe extern "C" fn(*mut c_void, u64, u64, u32, u64) -> u32;
        ipc_get_event_handle: IpcGetEventHandle ["cuIpcGetEventHandle"]
            unsafe extern "C" fn(&mut IpcEvent, u64) -> u32;
        ipc_open_event_handle: IpcOpenEventHandle ["cuIpcOpenEventHandle"]
            extern "C" fn(&mut u64, IpcEvent) -> u32;

        mem_alloc: MemAlloc ["cuMemAlloc_v2"] extern "C" fn(&mut u64, u64) -> u32;
        mem_free: MemFree ["cuMemFree_v2"] extern "C" fn(u64) -> u32;
        mem_alloc_async: MemAllocAsync ["cuMemAllocAsync"]
            unsafe extern "C" fn(&mut u64, u64, u64) -> u32;
        mem_free_async: MemFreeAsync ["cuMemFreeAsync"] unsafe extern "C" fn(u64, u64) -> u32;
        default_mem_pool: DeviceGetDefaultMemPool ["cuDeviceGetDefaultMemPool"]
            extern "C" fn(&mut u64, i32) -> u32;
        mem_pool_set_attribute: MemPoolSetAttribute ["cuMemPoolSetAttribute"]
            unsafe extern "C" fn(u64, u32, *mut c_void) -> u32;
        mem_host_alloc: MemHostAlloc ["cuMemHostAlloc"]
            extern "C" fn(&mut *mut c_void, u64, u32) -> u32;
        mem_free_host: MemFreeHost ["cuMemFreeHost"] unsafe extern "C" fn(*mut c_void) -> u32;
        memcpy_peer: MemcpyPeer ["cuMemcpyPeer"]
            unsafe extern "C" fn(u64, u64, u64, u64, u64) -> u32;
        memcpy_peer_async: MemcpyPeerAsync ["cuMemcpyPeerAsync"]
            unsafe extern "C" fn(u64, u64, u64, u64, u64, u64) -> u32;

        stream_get_id: StreamGetId ["cuStreamGetId"] unsafe extern "C" fn(u64, &mut u64) -> u32;
        stream_wait_value32: StreamWaitValue32 ["cuStreamWaitValue32_v2"]
            unsafe extern "C" fn(u64, u64, u32, u32) -> u32;
        stream_begin_capture: StreamBeginCapture ["cuStreamBeginCapture_v2"]
            unsafe extern "C" fn(u64, u32) -> u32;
        stream_end_capture: StreamEndCapture ["cuStreamEndCapture"]
            unsafe extern "C" fn(u64, &mut u64) -> u32;
        // The last three are lists of the capture's graph; null asks for none of them.
        stream_capture_info: StreamGetCaptureInfo ["cuStreamGetCaptureInfo_v2"]
            unsafe extern "C" fn(
                u64, &mut u32, &mut u64, *mut c_void, *mut c_void, *mut c_void
            ) -> u32;
        exchange_capture_mode: ThreadExchangeStreamCaptureMode
            ["cuThreadExchangeStreamCaptureMode"] extern "C" fn(&mut u32) -> u32;
        launch_host_func: LaunchHostFunc ["cuLaunchHostFunc"]
            unsafe extern "C" fn(u64, extern "C" fn(*mut c_void), *mut c_void) -> u32;
        launch_kernel: LaunchKernel ["cuLaunchKernel"]
            unsafe extern "C" fn(
                u64, u32, u32, u32, u32, u32, u32, u32, u64, *const *mut c_void, *mut c_void
            ) -> u32;
        module_load_data: ModuleLoadData ["cuModuleLoadData"]
            unsafe extern "C" fn(&mut u64, *const u8) -> u32;
        module_get_function: ModuleGetFunction ["cuModuleGetFunction"]
            unsafe extern "C" fn(&mut u64, u64, *const u8) -> u32;
        module_unload: ModuleUnload ["cuModuleUnload"] unsafe extern "C" fn(u64) -> u32;
        graph_instantiate: GraphInstantiate ["cuGraphInstantiateWithFlags"]
            unsafe extern "C" fn(&mut u64, u64, u64) -> u32;
        graph_launch: GraphLaunch ["cuGraphLaunch"] unsafe extern "C" fn(u64, u64) -> u32;
        graph_destroy: GraphDestroy ["cuGraphDestroy"] unsafe extern "C" fn(u64) -> u32;
        graph_exec_destroy: GraphExecDestroy ["cuGraphExecDestroy"]
            unsafe extern "C" fn(u64) -> u32;
    }
}
