//! The driver object and the life of the process: a forked child, the exit, panics that abort.

#![allow(clippy::unwrap_used, reason = "helpers of tests are not seen as tests")]

mod fake;

use std::path::Path;
use std::process::{Command, Output};
use std::sync::{Arc, OnceLock};

use fake::Fake;
use vmm_sys::cuda::Cuda;
use vmm_sys::{DeviceId, Driver, ResultCode};

const ZERO: DeviceId = DeviceId(0);

#[test]
fn a_forked_child_gets_an_answer_without_a_call() {
    let Some((fake, cuda)) = Fake::open("fork", &[]) else { return };
    cuda.mem_info(ZERO).unwrap();
    fake.log();
    // SAFETY: the child touches only what fork leaves whole (its own memory, and an allocator that
    // the C library keeps usable), and ends without running exit handlers.
    let child = unsafe { libc::fork() };
    assert_ne!(child, -1, "fork failed");
    if child == 0 {
        let checks = [
            cuda.is_gone(),
            cuda.driver_version().is_err_and(|error| error.code() == ResultCode::NOT_INITIALIZED),
            cuda.mem_info(ZERO).is_err_and(|error| error.is_driver_gone()),
            {
                drop(cuda);
                true
            },
            fake.log().is_empty(),
        ];
        let failed = checks.iter().position(|&ok| !ok).map_or(0, |index| index as i32 + 1);
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(failed) };
    }
    let mut status = 0;
    // SAFETY: waits for our own child.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(libc::WEXITSTATUS(status), 0, "number of the check that failed in the child");
    assert!(!cuda.is_gone(), "the parent goes on");
    assert!(cuda.mem_info(ZERO).is_ok());
}

/// Set in the child process of the exit test: the library to open.
const EXIT_CHILD: &str = "VMM_SYS_TEST_EXIT_CHILD";
static OPENED: OnceLock<Arc<Cuda>> = OnceLock::new();

extern "C" fn after_exit_began() {
    let Some(cuda) = OPENED.get() else { return };
    let calls = cuda.ledger().snapshot().total();
    let refused = cuda.mem_info(ZERO).is_err_and(|e| e.code() == ResultCode::DEINITIALIZED);
    let silent = cuda.ledger().snapshot().total() == calls;
    println!("at exit: gone {}, refused {refused}, silent {silent}", cuda.is_gone());
}

#[test]
fn nothing_is_called_once_the_process_exits() {
    if let Some(path) = std::env::var_os(EXIT_CHILD) {
        // The child: registered first, so run last, after the driver's own note of the exit.
        // SAFETY: the handler lives as long as the program.
        assert_eq!(unsafe { libc::atexit(after_exit_began) }, 0);
        let cuda = Cuda::open_from(path).unwrap();
        cuda.mem_info(ZERO).unwrap();
        assert!(!cuda.is_gone() && OPENED.set(cuda).is_ok());
        return;
    }
    let Some(fake) = Fake::build("exit", &[]) else { return };
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["nothing_is_called_once_the_process_exits", "--exact", "--nocapture"])
        .env(EXIT_CHILD, &fake.path)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("at exit: gone true, refused true, silent true"), "{text}");
}

/// Builds the example with panics that abort, and what it is linked to, not optimised: little of that is
/// built already, for other packages ask for more of it.
fn build_aborting_program() -> std::path::PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    let output = Command::new(env!("CARGO"))
        .args(["rustc", "--offline", "--example", "open_driver", "--target-dir"])
        .arg(folder)
        .args(["--", "-C", "panic=abort"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    folder.join("debug/examples/open_driver")
}

#[test]
fn what_is_missing_is_a_value_in_programs_whose_panics_abort() {
    let program = build_aborting_program();
    let run = |library: &Path| -> Output { Command::new(&program).arg(library).output().unwrap() };
    let refused = |library: &Path, part: &str| {
        let output = run(library);
        let (out, err) = (output.stdout, output.stderr);
        let (out, err) = (String::from_utf8_lossy(&out), String::from_utf8_lossy(&err));
        assert!(out.contains("panics abort"), "not the program that was meant: {out}");
        assert_eq!(output.status.code(), Some(2), "{err}");
        assert!(err.contains(part), "{part} is missing in: {err}");
    };
    refused(Path::new("/nowhere/libcuda.so"), "no CUDA driver library");
    let flags = "-DcuMemCreate=lacking";
    let Some(lacking) = Fake::build("abort_lacking", &[flags]) else { return };
    refused(&lacking.path, "has no cuMemCreate");
    let Some(stub) = Fake::build("abort_stub", &["-DFAKE_INIT=34"]) else { return };
    refused(&stub.path, "is a stub");
    let flags = "-DcuDeviceGetUuid_v2=lacking";
    let Some(old) = Fake::build("abort_old", &[flags]) else { return };
    let output = run(&old.path);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("this driver lacks cuDeviceGetUuid"), "{text}");
    assert!(text.contains("device 1: Fake GPU 1, 141 GiB"), "{text}");
}
