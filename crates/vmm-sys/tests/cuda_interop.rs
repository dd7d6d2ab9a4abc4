//! Contexts and streams of cudarc, on the fake driver: cudarc finds it as `libcuda.so` on the
//! library path of a child process.

#![cfg(feature = "cudarc")]
#![allow(clippy::unwrap_used, reason = "helpers of tests are not seen as tests")]

mod fake;

use std::process::Command;
use std::sync::{Arc, OnceLock};

use cudarc::driver::CudaContext;
use fake::Fake;
use vmm_sys::cuda::{Cuda, interop};
use vmm_sys::{DeviceId, Driver, ResultCode, StreamHandle, StreamId};

/// Set in the child process.
const CHILD: &str = "VMM_SYS_TEST_INTEROP_CHILD";

/// A context of somebody else's in cudarc's clothes. Its drop would give back what nobody retained.
static FOREIGN: OnceLock<Arc<CudaContext>> = OnceLock::new();

fn child() {
    // Our driver and cudarc have opened the same library, so they share its contexts.
    let cuda = Cuda::open().unwrap();
    let context = CudaContext::new(1).unwrap();
    assert_eq!(interop::device_of(&context), Ok(DeviceId(1)));
    let ours = cuda.primary_context_retain(DeviceId(1)).unwrap();
    assert_eq!(ours.0, context.cu_ctx().expose_provenance() as u64);

    let stream = context.new_stream().unwrap();
    let (device, handle) = interop::stream_of(&stream).unwrap();
    assert_eq!(device, DeviceId(1));
    // SAFETY: `stream` keeps it alive.
    assert_eq!(unsafe { cuda.stream_id(device, handle) }, Ok(StreamId(10)));
    let null = interop::stream_of(&context.default_stream()).unwrap();
    assert_eq!(null, (DeviceId(1), StreamHandle::NULL));

    // SAFETY: the device's context is live; what cudarc does to it at its drop is prevented.
    let foreign =
        unsafe { CudaContext::from_raw_context(1, context.cu_device(), context.cu_ctx()) }.unwrap();
    let error = interop::device_of(&foreign).unwrap_err();
    assert_eq!(error.code(), ResultCode::INVALID_CONTEXT);
    assert!(error.to_string().contains("use CudaContext::new"), "{error}");
    // Kept and not forgotten: whoever looks for lost memory finds it.
    assert!(FOREIGN.set(foreign).is_ok());
    println!("the child has seen it all");
}

#[test]
fn contexts_and_streams_of_cudarc_are_taken_as_they_are() {
    if std::env::var_os(CHILD).is_some() {
        return child();
    }
    let Some(fake) = Fake::build("interop", &["-Wl,-soname,libcuda.so.1"]) else { return };
    let folder = fake.path.with_extension("d");
    std::fs::create_dir_all(&folder).unwrap();
    for name in ["libcuda.so", "libcuda.so.1"] {
        let link = folder.join(name);
        let _ = std::fs::remove_file(&link);
        std::os::unix::fs::symlink(&fake.path, link).unwrap();
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["contexts_and_streams_of_cudarc_are_taken_as_they_are", "--exact", "--nocapture"])
        .env(CHILD, "1")
        .env("LD_LIBRARY_PATH", &folder)
        .output()
        .unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{out}\n{err}");
    assert!(out.contains("the child has seen it all"), "{out}");
}
