//! Looking up functions: what CUDA's runtime does instead of `dlsym`.
//!
//! A base name and a CUDA version together name one ABI: the newest whose version is no later. The
//! unsuffixed forms of calls that have a `_v2` are a 32-bit ABI, so an older version finds nothing.

use std::ffi::{CStr, c_char, c_void};

use vmm_sys::ResultCode;

use crate::context::*;
use crate::copy::*;
use crate::device::*;
use crate::door::{Done, Out, Refusal};
use crate::errors::*;
use crate::event::*;
use crate::function::*;
use crate::graph::*;
use crate::launch::*;
use crate::memory::*;
use crate::module::*;
use crate::pointer::*;
use crate::stream::*;
use crate::vmm::*;

/// One ABI of a function.
struct Entry {
    base: &'static str,
    since: i32,
    /// The exported name.
    #[cfg(test)]
    symbol: &'static str,
    address: *const c_void,
}

macro_rules! table {
    ($($since:literal $base:literal $symbol:ident;)*) => {
        fn table() -> Vec<Entry> {
            vec![$(Entry {
                base: $base,
                since: $since,
                #[cfg(test)]
                symbol: stringify!($symbol),
                address: $symbol as *const c_void,
            },)*]
        }
    };
}

table! {
    2000 "cuInit" cuInit;
    2020 "cuDriverGetVersion" cuDriverGetVersion;
    2000 "cuDeviceGet" cuDeviceGet;
    2000 "cuDeviceGetCount" cuDeviceGetCount;
    2000 "cuDeviceGetName" cuDeviceGetName;
    9020 "cuDeviceGetUuid" cuDeviceGetUuid;
    11040 "cuDeviceGetUuid" cuDeviceGetUuid_v2;
    3020 "cuDeviceTotalMem" cuDeviceTotalMem_v2;
    2000 "cuDeviceGetAttribute" cuDeviceGetAttribute;
    4000 "cuDeviceCanAccessPeer" cuDeviceCanAccessPeer;
    8000 "cuDeviceGetP2PAttribute" cuDeviceGetP2PAttribute;
    7000 "cuDevicePrimaryCtxRetain" cuDevicePrimaryCtxRetain;
    11000 "cuDevicePrimaryCtxRelease" cuDevicePrimaryCtxRelease_v2;
    11000 "cuDevicePrimaryCtxReset" cuDevicePrimaryCtxReset_v2;
    7000 "cuDevicePrimaryCtxGetState" cuDevicePrimaryCtxGetState;
    4000 "cuCtxGetCurrent" cuCtxGetCurrent;
    4000 "cuCtxSetCurrent" cuCtxSetCurrent;
    4000 "cuCtxPushCurrent" cuCtxPushCurrent_v2;
    4000 "cuCtxPopCurrent" cuCtxPopCurrent_v2;
    2000 "cuCtxGetDevice" cuCtxGetDevice;
    2000 "cuCtxSynchronize" cuCtxSynchronize;
    5050 "cuCtxGetStreamPriorityRange" cuCtxGetStreamPriorityRange;
    4000 "cuCtxEnablePeerAccess" cuCtxEnablePeerAccess;
    4000 "cuCtxDisablePeerAccess" cuCtxDisablePeerAccess;
    3020 "cuMemGetInfo" cuMemGetInfo_v2;
    3020 "cuMemAlloc" cuMemAlloc_v2;
    3020 "cuMemFree" cuMemFree_v2;
    11020 "cuMemAllocAsync" cuMemAllocAsync;
    11020 "cuMemAllocFromPoolAsync" cuMemAllocFromPoolAsync;
    11020 "cuMemFreeAsync" cuMemFreeAsync;
    11020 "cuDeviceGetDefaultMemPool" cuDeviceGetDefaultMemPool;
    11020 "cuDeviceGetMemPool" cuDeviceGetMemPool;
    11020 "cuMemPoolSetAttribute" cuMemPoolSetAttribute;
    2020 "cuMemHostAlloc" cuMemHostAlloc;
    3020 "cuMemAllocHost" cuMemAllocHost_v2;
    2000 "cuMemFreeHost" cuMemFreeHost;
    3020 "cuMemHostGetDevicePointer" cuMemHostGetDevicePointer_v2;
    6050 "cuMemHostRegister" cuMemHostRegister_v2;
    4000 "cuMemHostUnregister" cuMemHostUnregister;
    3020 "cuMemGetAddressRange" cuMemGetAddressRange_v2;
    4000 "cuMemcpy" cuMemcpy;
    4000 "cuMemcpyAsync" cuMemcpyAsync;
    3020 "cuMemcpyHtoD" cuMemcpyHtoD_v2;
    3020 "cuMemcpyDtoH" cuMemcpyDtoH_v2;
    3020 "cuMemcpyDtoD" cuMemcpyDtoD_v2;
    4000 "cuMemcpyPeer" cuMemcpyPeer;
    3020 "cuMemcpyHtoDAsync" cuMemcpyHtoDAsync_v2;
    3020 "cuMemcpyDtoHAsync" cuMemcpyDtoHAsync_v2;
    3020 "cuMemcpyDtoDAsync" cuMemcpyDtoDAsync_v2;
    4000 "cuMemcpyPeerAsync" cuMemcpyPeerAsync;
    3020 "cuMemsetD8" cuMemsetD8_v2;
    3020 "cuMemsetD16" cuMemsetD16_v2;
    3020 "cuMemsetD32" cuMemsetD32_v2;
    3020 "cuMemsetD8Async" cuMemsetD8Async;
    3020 "cuMemsetD16Async" cuMemsetD16Async;
    3020 "cuMemsetD32Async" cuMemsetD32Async;
    2000 "cuStreamCreate" cuStreamCreate;
    5050 "cuStreamCreateWithPriority" cuStreamCreateWithPriority;
    4000 "cuStreamDestroy" cuStreamDestroy_v2;
    12000 "cuStreamGetId" cuStreamGetId;
    5050 "cuStreamGetFlags" cuStreamGetFlags;
    5050 "cuStreamGetPriority" cuStreamGetPriority;
    9020 "cuStreamGetCtx" cuStreamGetCtx;
    12080 "cuStreamGetDevice" cuStreamGetDevice;
    2000 "cuStreamQuery" cuStreamQuery;
    2000 "cuStreamSynchronize" cuStreamSynchronize;
    3020 "cuStreamWaitEvent" cuStreamWaitEvent;
    11070 "cuStreamWaitValue32" cuStreamWaitValue32_v2;
    10000 "cuLaunchHostFunc" cuLaunchHostFunc;
    10010 "cuThreadExchangeStreamCaptureMode" cuThreadExchangeStreamCaptureMode;
    10010 "cuStreamBeginCapture" cuStreamBeginCapture_v2;
    10000 "cuStreamEndCapture" cuStreamEndCapture;
    10000 "cuStreamIsCapturing" cuStreamIsCapturing;
    10010 "cuStreamGetCaptureInfo" cuStreamGetCaptureInfo;
    11030 "cuStreamGetCaptureInfo" cuStreamGetCaptureInfo_v2;
    12030 "cuStreamGetCaptureInfo" cuStreamGetCaptureInfo_v3;
    11040 "cuGraphInstantiateWithFlags" cuGraphInstantiateWithFlags;
    12000 "cuGraphInstantiate" cuGraphInstantiateWithFlags;
    10000 "cuGraphLaunch" cuGraphLaunch;
    10000 "cuGraphDestroy" cuGraphDestroy;
    10000 "cuGraphExecDestroy" cuGraphExecDestroy;
    2000 "cuEventCreate" cuEventCreate;
    4000 "cuEventDestroy" cuEventDestroy_v2;
    2000 "cuEventRecord" cuEventRecord;
    2000 "cuEventQuery" cuEventQuery;
    2000 "cuEventSynchronize" cuEventSynchronize;
    2000 "cuEventElapsedTime" cuEventElapsedTime;
    12080 "cuEventElapsedTime" cuEventElapsedTime_v2;
    2000 "cuModuleLoad" cuModuleLoad;
    2000 "cuModuleLoadData" cuModuleLoadData;
    2010 "cuModuleLoadDataEx" cuModuleLoadDataEx;
    2000 "cuModuleUnload" cuModuleUnload;
    2000 "cuModuleGetFunction" cuModuleGetFunction;
    11000 "cuFuncGetModule" cuFuncGetModule;
    2020 "cuFuncGetAttribute" cuFuncGetAttribute;
    9000 "cuFuncSetAttribute" cuFuncSetAttribute;
    3000 "cuFuncSetCacheConfig" cuFuncSetCacheConfig;
    4000 "cuLaunchKernel" cuLaunchKernel;
    9000 "cuLaunchCooperativeKernel" cuLaunchCooperativeKernel;
    11060 "cuLaunchKernelEx" cuLaunchKernelEx;
    4000 "cuPointerGetAttribute" cuPointerGetAttribute;
    7000 "cuPointerGetAttributes" cuPointerGetAttributes;
    4010 "cuIpcGetMemHandle" cuIpcGetMemHandle;
    4010 "cuIpcGetEventHandle" cuIpcGetEventHandle;
    4010 "cuIpcOpenEventHandle" cuIpcOpenEventHandle;
    11070 "cuMemGetHandleForAddressRange" cuMemGetHandleForAddressRange;
    10020 "cuMemGetAllocationGranularity" cuMemGetAllocationGranularity;
    10020 "cuMemAddressReserve" cuMemAddressReserve;
    10020 "cuMemAddressFree" cuMemAddressFree;
    10020 "cuMemCreate" cuMemCreate;
    10020 "cuMemRelease" cuMemRelease;
    11000 "cuMemRetainAllocationHandle" cuMemRetainAllocationHandle;
    10020 "cuMemGetAllocationPropertiesFromHandle" cuMemGetAllocationPropertiesFromHandle;
    10020 "cuMemMap" cuMemMap;
    10020 "cuMemUnmap" cuMemUnmap;
    10020 "cuMemSetAccess" cuMemSetAccess;
    10020 "cuMemGetAccess" cuMemGetAccess;
    10020 "cuMemExportToShareableHandle" cuMemExportToShareableHandle;
    10020 "cuMemImportFromShareableHandle" cuMemImportFromShareableHandle;
    6000 "cuGetErrorName" cuGetErrorName;
    6000 "cuGetErrorString" cuGetErrorString;
    11030 "cuGetProcAddress" cuGetProcAddress;
    12000 "cuGetProcAddress" cuGetProcAddress_v2;
    3000 "cuGetExportTable" cuGetExportTable;
}

/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`
const PER_THREAD: u64 = 2;
/// `CU_GET_PROC_ADDRESS_SUCCESS`
const STATUS_SUCCESS: u32 = 0;
/// `CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND`
const STATUS_NO_SYMBOL: u32 = 1;
/// `CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT`
const STATUS_OLD_VERSION: u32 = 2;

/// Whether there is another form of a function for the per-thread default stream, which this library
/// does not have. By the families that take a stream, or use the default one.
fn has_per_thread_form(base: &str) -> bool {
    let families =
        ["cuMemcpy", "cuMemset", "cuStream", "cuLaunch", "cuGraphLaunch", "cuEventRecord"];
    let others = ["cuMemAllocAsync", "cuMemAllocFromPoolAsync", "cuMemFreeAsync"];
    let without = ["cuStreamCreate", "cuStreamCreateWithPriority", "cuStreamDestroy"];
    let takes = families.iter().any(|family| base.starts_with(family)) || others.contains(&base);
    takes && !without.contains(&base)
}

/// The function, or the status that says why there is none.
fn find(base: &str, version: i32, flags: u64) -> Result<*const c_void, u32> {
    let named = table().into_iter().filter(|entry| entry.base == base);
    let entries: Vec<Entry> = named.collect();
    if entries.is_empty() || (flags & PER_THREAD != 0 && has_per_thread_form(base)) {
        return Err(STATUS_NO_SYMBOL);
    }
    let fitting = entries.iter().filter(|entry| entry.since <= version);
    let newest = fitting.max_by_key(|entry| entry.since).ok_or(STATUS_OLD_VERSION)?;
    Ok(newest.address)
}

fn look_up(
    name: *const c_char,
    function: *mut *const c_void,
    version: i32,
    flags: u64,
    status: *mut u32,
) -> Done {
    let out = Out::new(function)?;
    if name.is_null() {
        return Err(Refusal::new(ResultCode::INVALID_VALUE, "null in the place of a name"));
    }
    // SAFETY: not null, and the caller has a nul-terminated text there during the call.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
    let found = find(&name, version, flags);
    // Null means not wanted.
    if !status.is_null() {
        Out::new(status)?.set(found.err().unwrap_or(STATUS_SUCCESS))?;
    }
    match found {
        Ok(address) => out.set(address),
        Err(_) => {
            out.set(std::ptr::null())?;
            let why = format_args!("{name} of {version}, flags {flags}");
            Err(Refusal::new(ResultCode::NOT_FOUND, why))
        }
    }
}

entries! {
    fn cuGetProcAddress(name: *const c_char, function: *mut *const c_void, version: i32, flags: u64) {
        look_up(name, function, version, flags, std::ptr::null_mut())
    }

    fn cuGetProcAddress_v2(
        name: *const c_char, function: *mut *const c_void, version: i32, flags: u64, status: *mut u32,
    ) {
        look_up(name, function, version, flags, status)
    }

    /// There are no private tables. The function has to be there: CUDA's runtime asks.
    fn cuGetExportTable(table: *mut *const c_void, _id: *const c_void) {
        Out::new(table)?.set(std::ptr::null())?;
        Err(Refusal::new(ResultCode::NOT_FOUND, "no private tables"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_finds_the_newest_form_that_it_knows() {
        let form = |base: &str, version| {
            let found = find(base, version, 0)?;
            let mut entries = table().into_iter();
            Ok(entries.find(|entry| entry.address == found).map(|entry| entry.symbol))
        };
        assert_eq!(form("cuMemAlloc", 3020), Ok(Some("cuMemAlloc_v2")));
        assert_eq!(form("cuMemAlloc", 2000), Err(STATUS_OLD_VERSION), "the 32-bit form");
        assert_eq!(form("cuGetProcAddress", 11030), Ok(Some("cuGetProcAddress")));
        assert_eq!(form("cuGetProcAddress", 13000), Ok(Some("cuGetProcAddress_v2")));
        assert_eq!(form("cuStreamGetCaptureInfo", 12000), Ok(Some("cuStreamGetCaptureInfo_v2")));
        assert_eq!(form("cuMemAllocManaged", 13000), Err(STATUS_NO_SYMBOL));
        assert_eq!(find("cuMemAllocAsync", 11020, PER_THREAD), Err(STATUS_NO_SYMBOL));
        assert!(find("cuMemAlloc", 11020, PER_THREAD).is_ok(), "takes no stream");
    }

    #[test]
    fn exported_names_are_base_names_with_at_most_a_version() {
        for entry in table() {
            let rest = entry.symbol.strip_prefix(entry.base);
            let versioned = rest.is_some_and(|rest| rest.is_empty() || rest.starts_with("_v"));
            // The one name that CUDA 12 gave to another function.
            assert!(versioned || entry.base == "cuGraphInstantiate", "{}", entry.symbol);
        }
    }
}
