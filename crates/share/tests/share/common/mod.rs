//! The two processes of a test.

mod clog;
pub(crate) mod keeper;
pub(crate) mod owner;
pub(crate) mod reader;
pub(crate) mod second;
pub(crate) mod worker;

use std::fs;
use std::path::PathBuf;
use std::process;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use vmm_share::{Address, Importer, ImporterOptions};
use vmm_sys::Driver;
use vmm_sys::sim::Sim;

/// The length of a chunk.
pub(crate) const G: u64 = 2 << 20;
/// Time for what should take none.
pub(crate) const SOON: Duration = Duration::from_secs(10);

/// A path for a socket that no other test uses.
pub(crate) fn socket_path() -> PathBuf {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("vmm-share-test-{}-{number}.sock", process::id()))
}

/// A simulated machine with so many GPUs, and its driver.
pub(crate) fn machine(devices: usize) -> (Arc<Sim>, Arc<dyn Driver>) {
    let sim = Sim::builder().devices(devices).device_bytes(1 << 30).build();
    (sim.clone(), sim)
}

pub(crate) fn connect(address: &Address, driver: &Arc<dyn Driver>) -> Importer {
    Importer::connect(address, ImporterOptions::new(driver.clone()).timeout(SOON)).unwrap()
}

/// The first byte of chunk `slot` in a buffer that [`owner`] has filled.
pub(crate) fn pattern(slot: u64) -> u8 {
    (slot * 7 + 1) as u8
}

/// What is left of a machine, in one line, as an answer is one.
pub(crate) fn left(sim: &Sim) -> String {
    let left = sim.check_clean().err().map(|left| left.replace('\n', "; "));
    left.unwrap_or_else(|| "clean".to_owned())
}

/// What the second process may open, if its environment says so.
fn limit_descriptors() {
    let Ok(most) = std::env::var("VMM_SHARE_TEST_NOFILE") else { return };
    let most = Some(most.parse().unwrap());
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let limit = rustix::process::Rlimit { current: most, maximum: limit.maximum };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
}

/// Has every system call that the environment names refused in this thread and those that it begins.
/// Says whether the system took the filter.
fn forbid_calls() -> bool {
    let Ok(names) = std::env::var("VMM_SHARE_TEST_FORBID") else { return false };
    let number = |name: &str| match name {
        "pidfd_getfd" => libc::SYS_pidfd_getfd,
        "ptrace" => libc::SYS_ptrace,
        "process_vm_readv" => libc::SYS_process_vm_readv,
        "socket" => libc::SYS_socket,
        "recvmsg" => libc::SYS_recvmsg,
        other => panic!("no such call: {other}"),
    };
    let step = |code: u32, jt: u8, k: u32| libc::sock_filter { code: code as u16, jt, jf: 0, k };
    // The number of the call; then for each one that is forbidden, its refusal behind a comparison.
    let mut filter = vec![step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0)];
    for name in names.split_whitespace() {
        let equal = step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, number(name) as u32);
        filter.push(libc::sock_filter { jf: 1, ..equal });
        let refusal = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
        filter.push(step(libc::BPF_RET | libc::BPF_K, 0, refusal));
    }
    filter.push(step(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ALLOW));
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the program lives during the calls, which copy it.
    unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) == 0
    }
}

/// The descriptors of a process.
pub(crate) fn descriptors(pid: u32) -> usize {
    fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

/// Forks a child that has all that this process has open, but its streams, and does nothing for longer
/// than any test waits.
pub(crate) fn leave_a_fork() {
    // SAFETY: the child makes nothing but system calls, and ends without the parent's clean-up.
    unsafe {
        match libc::fork() {
            0 => {
                // Nobody is to wait for an end of these.
                (0..3).for_each(|stream| assert_eq!(libc::close(stream), 0));
                libc::sleep(2 * SOON.as_secs() as u32);
                libc::_exit(0)
            }
            child => assert!(child > 0, "no fork: {}", std::io::Error::last_os_error()),
        }
    }
}

/// Runs something in a forked child of this process. Says whether the child ended well.
pub(crate) fn in_fork(run: impl FnOnce()) -> String {
    // SAFETY: the child runs `run` and ends without the parent's clean-up; locks that other threads
    // hold at the fork would hang it, which the test would show.
    match unsafe { libc::fork() } {
        0 => {
            let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(i32::from(done.is_err())) }
        }
        -1 => panic!("no fork: {}", std::io::Error::last_os_error()),
        child => {
            let mut status = -1;
            // SAFETY: `status` is writable, and the child is this process's own.
            unsafe { libc::waitpid(child, &raw mut status, 0) };
            match status {
                0 => "well".to_owned(),
                other => format!("child ended with {other}"),
            }
        }
    }
}
