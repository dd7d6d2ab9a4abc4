//! The library itself: what it exports, how its functions are found, what its settings do.

use std::ffi::{CStr, CString, c_void};
use std::ptr::null_mut;

use cudarc::driver::sys::CUresult;
use cudarc::driver::{CudaContext, DriverError, sys};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW, Symbol};

use crate::control::{calls, log};

fn code<T>(result: Result<T, DriverError>) -> CUresult {
    result.err().map_or(CUresult::CUDA_SUCCESS, |DriverError(code)| code)
}

fn current() -> sys::CUcontext {
    let mut context = null_mut();
    // SAFETY: the place is live.
    unsafe { sys::cuCtxGetCurrent(&raw mut context) }.result().unwrap();
    context
}

pub(crate) fn contexts() {
    let [first, second] = [0, 1].map(|ordinal| CudaContext::new(ordinal).unwrap());
    assert_eq!(current(), second.cu_ctx());
    let mut popped = null_mut();
    // SAFETY: the contexts are live, and the places too.
    unsafe {
        sys::cuCtxPushCurrent_v2(first.cu_ctx()).result().unwrap();
        assert_eq!(current(), first.cu_ctx());
        sys::cuCtxPopCurrent_v2(&raw mut popped).result().unwrap();
        assert_eq!((popped, current()), (first.cu_ctx(), second.cu_ctx()));
        sys::cuCtxSetCurrent(null_mut()).result().unwrap();
        assert_eq!(current(), null_mut());
        let none = sys::cuCtxPopCurrent_v2(&raw mut popped);
        assert_eq!(none, CUresult::CUDA_ERROR_INVALID_CONTEXT);
        let (mut free, mut total) = (0, 0);
        let refused = sys::cuMemGetInfo_v2(&raw mut free, &raw mut total);
        assert_eq!(refused, CUresult::CUDA_ERROR_INVALID_CONTEXT, "none is current");
    }
    let others = std::thread::scope(|scope| scope.spawn(|| current().is_null()).join().unwrap());
    assert!(others, "each thread has its own");
    let ended = first.cu_ctx();
    drop(first);
    // SAFETY: the library checks the handle, which no live context has.
    let refused = unsafe { sys::cuCtxSetCurrent(ended) };
    assert_eq!(refused, CUresult::CUDA_ERROR_INVALID_CONTEXT, "the last release ended it");
    assert_ne!(CudaContext::new(0).unwrap().cu_ctx(), ended);
}

/// As the loader opens a library that nobody else shall see.
fn local() -> Library {
    // SAFETY: the library has no initialisers that matter.
    unsafe { Library::open(Some("libcuda.so"), RTLD_NOW | RTLD_LOCAL) }.unwrap()
}

fn has(library: &Library, name: &str) -> bool {
    // SAFETY: the symbol is looked up, never used.
    unsafe { library.get::<*const c_void>(name) }.is_ok()
}

pub(crate) fn symbols() {
    let library = local();
    for name in ["cuInit", "cuGetProcAddress_v2", "cuGetExportTable", "cuMemAlloc_v2", "cuMemMap"] {
        assert!(has(&library, name), "{name}");
        let global = Library::this();
        assert!(!has(&global, name), "{name} is seen by others");
    }
    // Not supported, or the 32-bit form of a call.
    for name in
        ["cuMemAllocManaged", "cuCtxCreate_v4", "cuMemAlloc", "cuMemcpyHtoD", "cuTexRefCreate"]
    {
        assert!(!has(&library, name), "{name}");
    }
    type ExportTable = unsafe extern "C" fn(*mut *const c_void, *const c_void) -> u32;
    // SAFETY: that is its signature.
    let get: Symbol<ExportTable> = unsafe { library.get("cuGetExportTable") }.unwrap();
    let (mut table, id) = (std::ptr::null(), [0_u8; 16]);
    // SAFETY: the places are live.
    assert_eq!(unsafe { get(&raw mut table, id.as_ptr().cast()) }, 500);
    // Before cuInit most calls are refused, and a few are not.
    let (mut count, mut version) = (0, 0);
    // SAFETY: the places are live.
    unsafe {
        assert_eq!(sys::cuDeviceGetCount(&raw mut count), CUresult::CUDA_ERROR_NOT_INITIALIZED);
        assert_eq!(sys::cuDriverGetVersion(&raw mut version), CUresult::CUDA_SUCCESS);
    }
    assert_eq!(version, 13_000);
}

pub(crate) fn look_up() {
    let library = local();
    let find = |name: &str, version, flags| {
        let name = CString::new(name).unwrap();
        let (mut function, mut status) = (null_mut(), 9_u32);
        // SAFETY: the text and the places are live; the status has the size of a u32.
        let code = unsafe {
            let status = (&raw mut status).cast();
            sys::cuGetProcAddress_v2(name.as_ptr(), &raw mut function, version, flags, status)
        };
        (code == CUresult::CUDA_SUCCESS, status, function)
    };
    let exported = |name: &str| {
        // SAFETY: the symbol's address is taken, and nothing else done with it.
        unsafe { library.get::<*mut c_void>(name) }.unwrap().into_raw().cast::<c_void>()
    };
    assert_eq!(find("cuMemAlloc", 3020, 0), (true, 0, exported("cuMemAlloc_v2")));
    assert_eq!(find("cuMemAlloc", 2000, 0), (false, 2, null_mut()), "the 32-bit form");
    assert_eq!(find("cuMemAllocManaged", 13_000, 0), (false, 1, null_mut()));
    assert_eq!(find("cuMemAllocAsync", 11_020, 2), (false, 1, null_mut()), "per thread");
    let form = find("cuGetProcAddress", 12_000, 0);
    assert_eq!(form, (true, 0, exported("cuGetProcAddress_v2")));
}

pub(crate) fn errors() {
    let error = DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    assert_eq!(error.error_name().unwrap(), c"CUDA_ERROR_OUT_OF_MEMORY");
    assert_eq!(error.error_string().unwrap(), c"out of memory");
    let (mut name, mut again) = (std::ptr::null(), std::ptr::null());
    let lost = CUresult::CUDA_ERROR_ILLEGAL_ADDRESS;
    // SAFETY: the places are live.
    unsafe {
        sys::cuGetErrorName(lost, &raw mut name).result().unwrap();
        sys::cuGetErrorName(lost, &raw mut again).result().unwrap();
        assert_eq!((CStr::from_ptr(name), name), (c"CUDA_ERROR_ILLEGAL_ADDRESS", again));
    }
    // What nobody has words for is said to have none.
    type GetName = unsafe extern "C" fn(u32, *mut *const std::ffi::c_char) -> u32;
    let library = local();
    // SAFETY: that is its signature; the place is live.
    unsafe {
        let get: Symbol<GetName> = library.get("cuGetErrorName").unwrap();
        assert_eq!((get(4711, &raw mut name), name), (1, std::ptr::null()));
    }
}

pub(crate) fn counted() {
    let path = std::env::temp_dir().join(format!("vmm-standin-log-{}", std::process::id()));
    log(&path);
    let context = CudaContext::new(0).unwrap();
    let stream = context.default_stream();
    let slice = stream.clone_htod(&[1_u32, 2]).unwrap();
    drop(slice);
    assert_eq!(code(CudaContext::new(7)), CUresult::CUDA_ERROR_INVALID_DEVICE);
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    for line in ["cuInit 0\n", "cuMemAllocAsync 0\n", "cuMemcpyHtoDAsync_v2 0\n"] {
        assert!(text.contains(line), "{line} is missing in:\n{text}");
    }
    assert!(text.contains("cuDeviceGet 101: "), "with the reason:\n{text}");
    assert_eq!((calls("cuInit"), calls("cuMemAllocAsync"), calls("cuSomething")), (2, 1, 0));
}

pub(crate) fn no_device() {
    assert_eq!(code(CudaContext::new(0)), CUresult::CUDA_ERROR_NO_DEVICE);
    let error = vmm_sys::cuda::Cuda::open().unwrap_err();
    assert!(matches!(error, vmm_sys::cuda::LoadError::NoDevice { .. }), "{error}");
}

pub(crate) fn wrong_setting() {
    assert_eq!(code(CudaContext::new(0)), CUresult::CUDA_ERROR_INVALID_VALUE);
}

pub(crate) fn many_devices() {
    assert_eq!(CudaContext::device_count().unwrap_or(0), 16);
    let context = CudaContext::new(15).unwrap();
    assert_eq!(context.ordinal(), 15);
    assert_eq!(code(CudaContext::new(16)), CUresult::CUDA_ERROR_INVALID_DEVICE);
    assert_eq!(
        context
            .default_stream()
            .clone_dtoh(&context.default_stream().clone_htod(&[5_u8]).unwrap())
            .unwrap(),
        [5]
    );
}
