//! Each test runs in a child process that finds the stand-in as its `libcuda`.
#![allow(clippy::unwrap_used, reason = "helpers of tests are not seen as tests")]

use std::ffi::CString;
use std::process::Command;
use std::sync::Arc;

use cudarc::driver::{
    CudaContext, CudaFunction, CudaStream, DriverError, LaunchArgs, LaunchConfig,
};
use cudarc::nvrtc::Ptx;
use libloading::Library;
use vmm_standin_directory::library_directory;

/// Set in the child process.
const CHILD: &str = "VMM_POOL_CUDARC_TEST_CHILD";
/// What a child that has come to its end says.
const DONE: &str = "the child has come to its end";

/// Runs `body` in a child process with the stand-in: this program, told to run the test `name`.
pub(crate) fn in_child(path: &str, name: &str, body: fn()) {
    // Tests are named without their program.
    let module = path.split_once("::").unwrap().1;
    let name = format!("{module}::{name}");
    if std::env::var_os(CHILD).is_some() {
        body();
        println!("{DONE}");
        return;
    }
    let libcuda = library_directory().unwrap();
    let output = Command::new(std::env::current_exe().unwrap())
        .args([&*name, "--exact", "--nocapture"])
        .env(CHILD, "1")
        .env("LD_LIBRARY_PATH", libcuda.search_path())
        .output()
        .unwrap();
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}\n{out}\n{err}", output.status);
    assert!(out.contains(DONE), "the test did not run: {out}");
    print!("{out}");
}

/// Defines tests that run by [`in_child`].
macro_rules! in_children {
    ($(fn $name:ident() $body:block)*) => {$(
        #[test]
        fn $name() {
            crate::common::in_child(module_path!(), stringify!($name), || $body);
        }
    )*};
}
pub(crate) use in_children;

/// What the stand-in lets tests steer and read.
pub(crate) struct StandIn(Library);

impl StandIn {
    pub(crate) fn open() -> StandIn {
        // SAFETY: the stand-in, which the program has loaded already or is about to.
        let library = unsafe { Library::new("libcuda.so") }.unwrap();
        // SAFETY: of this type, by its documentation.
        unsafe { library.get::<unsafe extern "C" fn(u64) -> u32>(b"vmm_standin_hold") }.unwrap();
        StandIn(library)
    }

    fn on(&self, name: &[u8], stream: &CudaStream) {
        stream.context().bind_to_thread().unwrap();
        // SAFETY: both functions are of this type.
        let call = unsafe { self.0.get::<unsafe extern "C" fn(u64) -> u32>(name) }.unwrap();
        // SAFETY: the stream is live.
        assert_eq!(unsafe { call(stream.cu_stream().addr() as u64) }, 0);
    }

    /// Work enqueued from now on waits.
    pub(crate) fn hold(&self, stream: &CudaStream) {
        self.on(b"vmm_standin_hold", stream);
    }

    pub(crate) fn release(&self, stream: &CudaStream) {
        self.on(b"vmm_standin_release", stream);
    }

    /// How often each of the functions was called.
    pub(crate) fn calls<const N: usize>(&self, names: [&str; N]) -> [u64; N] {
        type Calls = unsafe extern "C" fn(*const std::ffi::c_char) -> u64;
        // SAFETY: of this type, by its documentation.
        let calls = unsafe { self.0.get::<Calls>(b"vmm_standin_calls") }.unwrap();
        names.map(|name| {
            let name = CString::new(name).unwrap();
            // SAFETY: a nul-terminated text.
            unsafe { calls(name.as_ptr()) }
        })
    }
}

impl StandIn {
    /// Of the calls from now on, those from the `at`th on answer `code`, `times` of them.
    pub(crate) fn fail(&self, at: u64, times: u64, code: u32) {
        type Fail = unsafe extern "C" fn(u64, u64, u32) -> u32;
        // SAFETY: of this type, by its documentation.
        let fail = unsafe { self.0.get::<Fail>(b"vmm_standin_fail") }.unwrap();
        // SAFETY: three numbers.
        assert_eq!(unsafe { fail(at, times, code) }, 0);
    }

    /// Which did since.
    pub(crate) fn failed(&self) -> Vec<String> {
        type Failed = unsafe extern "C" fn(*mut u8, u64) -> u64;
        // SAFETY: of this type, by its documentation.
        let failed = unsafe { self.0.get::<Failed>(b"vmm_standin_failed") }.unwrap();
        // SAFETY: nothing is written.
        let mut names = vec![0; unsafe { failed(std::ptr::null_mut(), 0) } as usize + 1];
        // SAFETY: as many bytes as there are.
        unsafe { failed(names.as_mut_ptr(), names.len() as u64) };
        names.pop();
        let names = String::from_utf8(names).unwrap();
        names.split_whitespace().map(str::to_owned).collect()
    }

    /// Bytes, and objects beside them, that the driver has given out.
    pub(crate) fn live(&self) -> (u64, u64) {
        let count = |name: &[u8]| {
            // SAFETY: both are of this type, by their documentation.
            let count = unsafe { self.0.get::<unsafe extern "C" fn() -> u64>(name) }.unwrap();
            // SAFETY: it takes nothing.
            unsafe { count() }
        };
        (count(b"vmm_standin_live_bytes"), count(b"vmm_standin_live_objects"))
    }
}

/// The kernels that the stand-in knows, over `u32`.
pub(crate) struct Kernels {
    /// `(dst, value, n)`
    pub(crate) fill: CudaFunction,
    /// `(dst, src, n)`
    pub(crate) copy: CudaFunction,
    /// `(dst, a, b, n)`
    pub(crate) add: CudaFunction,
}

const PTX: &str = ".version 7.0
.target sm_70
.address_size 64
.visible .entry fill_u32(.param .u64 a, .param .u32 b, .param .u64 c) { ret; }
.visible .entry copy_u32(.param .u64 a, .param .u64 b, .param .u64 c) { ret; }
.visible .entry add_u32(.param .u64 a, .param .u64 b, .param .u64 c, .param .u64 d) { ret; }
";

impl Kernels {
    pub(crate) fn load(context: &Arc<CudaContext>) -> Kernels {
        let module = context.load_module(Ptx::from_src(PTX)).unwrap();
        let get = |name| module.load_function(name).unwrap();
        Kernels { fill: get("fill_u32"), copy: get("copy_u32"), add: get("add_u32") }
    }
}

/// Launches.
pub(crate) fn go(args: &mut LaunchArgs<'_>) -> Result<(), DriverError> {
    // SAFETY: the tests pass what the kernels take.
    unsafe { args.launch(LaunchConfig::for_num_elems(1)) }.map(drop)
}
