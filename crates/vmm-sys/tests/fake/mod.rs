//! Builds the fake `libcuda.so` of this folder with the machine's C compiler, one copy a test, so
//! that tests share no state.

#![allow(dead_code, reason = "each test program uses a part of it")]

use std::ffi::{CStr, CString, c_char};
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use libloading::Library;
use vmm_sys::cuda::Cuda;
use vmm_sys::{AccessGrant, ChunkProps, DeviceId, Driver};

static SKIPPED: AtomicU32 = AtomicU32::new(0);

/// One built copy of the fake driver, and the strings that pull it.
pub(crate) struct Fake {
    pub(crate) path: PathBuf,
    library: Library,
}

/// Compiles C sources of this folder into a library named after the test; `None`, with a counted
/// line on the terminal, where there is no C compiler.
pub(crate) fn compile(test: &str, sources: &[&str], flags: &[&str]) -> Option<PathBuf> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fake");
    // A process id in the name: the same test may run twice at a time.
    let name = format!("lib{test}-{}.so", std::process::id());
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let result = Command::new("cc")
        .args(["-O0", "-shared", "-fPIC", "-Wl,-Bsymbolic", "-o"])
        .arg(&path)
        .args(sources.iter().map(|source| folder.join(source)))
        .args(flags)
        .output();
    let output = match result {
        Ok(output) => output,
        Err(error) => {
            let count = SKIPPED.fetch_add(1, Ordering::Relaxed) + 1;
            // Not `eprintln`: the test runner would swallow the line of a test that passes.
            let line = format!("skipped ({count} so far): {test}: no C compiler: {error}");
            let mut terminal = std::io::stderr();
            writeln!(terminal, "{line}").unwrap();
            return None;
        }
    };
    assert!(output.status.success(), "cc: {}", String::from_utf8_lossy(&output.stderr));
    Some(path)
}

impl Fake {
    /// Builds a copy; `flags` as in the head of fake_cuda.c.
    pub(crate) fn build(test: &str, flags: &[&str]) -> Option<Fake> {
        let path = compile(test, &["fake_cuda.c", "fake_work.c"], flags)?;
        // SAFETY: our own library, without initialisers.
        let library = unsafe { Library::new(&path) }.unwrap();
        Some(Fake { path, library })
    }

    /// Builds a copy, opens the driver on it, and forgets what opening called.
    pub(crate) fn open(test: &str, flags: &[&str]) -> Option<(Fake, Arc<Cuda>)> {
        let fake = Fake::build(test, flags)?;
        let cuda = Cuda::open_from(&fake.path).unwrap();
        fake.log();
        Some((fake, cuda))
    }

    fn call<F: Copy>(&self, name: &str) -> F {
        // SAFETY: the callers below name the types that the C file has.
        *unsafe { self.library.get::<F>(name) }.unwrap()
    }

    /// The calls since the last time, one a line: the ordinal of the context that was current (100
    /// and more for contexts that are no device's primary one, `-` for none), name, arguments.
    pub(crate) fn log(&self) -> Vec<String> {
        let mut text = vec![0_u8; 1 << 16];
        let log: unsafe extern "C" fn(*mut c_char, usize) = self.call("fake_log");
        // SAFETY: the buffer has the length that is passed.
        unsafe { log(text.as_mut_ptr().cast(), text.len()) };
        let text = CStr::from_bytes_until_nul(&text).unwrap().to_str().unwrap();
        text.lines().map(str::to_owned).collect()
    }

    /// The log without the plumbing of contexts.
    pub(crate) fn log_without_contexts(&self) -> Vec<String> {
        let plumbing =
            |line: &String| line.contains("cuCtxGetCurrent") || line.contains("cuCtxSet");
        self.log().into_iter().filter(|line| !plumbing(line)).collect()
    }

    /// The next call of `name` answers `code`.
    pub(crate) fn fail(&self, name: &str, code: u32) {
        let name = CString::new(name).unwrap();
        let fail: unsafe extern "C" fn(*const c_char, u32) = self.call("fake_fail");
        // SAFETY: the name is copied before the call returns.
        unsafe { fail(name.as_ptr(), code) };
    }

    /// What stream and event queries answer from now on: not ready, or ready.
    pub(crate) fn pending(&self, on: bool) {
        let pending: extern "C" fn(i32) = self.call("fake_pending");
        pending(i32::from(on));
    }

    /// From now on no two devices have a link.
    pub(crate) fn refuse_peers(&self) {
        let refuse: extern "C" fn() = self.call("fake_refuse_peers");
        refuse();
    }

    /// Makes a context current that is no device's primary one. It shows as 100 + `device`.
    pub(crate) fn push_other_context(&self, device: i32) {
        let push: extern "C" fn(i32) = self.call("fake_push_other_context");
        push(device);
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        // Loaded libraries stay usable without their file.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Reserved, created, mapped and granted to device 0: an address of `bytes` usable bytes.
pub(crate) fn mapped(cuda: &Cuda, bytes: u64) -> u64 {
    const HOME: DeviceId = DeviceId(0);
    let address = cuda.address_reserve(bytes, 0, 0).unwrap();
    let chunk = cuda.create(bytes, &ChunkProps::on_device(HOME)).unwrap();
    // SAFETY: the chunk was made just now.
    unsafe { cuda.map(address, bytes, 0, chunk) }.unwrap();
    cuda.set_access(address, bytes, &[AccessGrant::read_write(HOME)]).unwrap();
    address
}
