//! A pair of fences for one side that is frequent and one that is rare.

use std::sync::OnceLock;
use std::sync::atomic::{Ordering, compiler_fence};
use std::time::Duration;

/// The frequent side: keeps the compiler from moving accesses across. The processor may, until
/// somebody calls [`heavy`].
#[inline(always)]
pub(crate) fn light() {
    compiler_fence(Ordering::SeqCst);
}

/// Whether [`heavy`] works here. Asks the kernel once.
pub(crate) fn is_available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    cfg!(shuttle) || *AVAILABLE.get_or_init(register)
}

/// The rare side: a full fence in this thread and in every other one of the process that runs.
/// Threads that do not run passed one when they were switched off.
pub(crate) fn heavy() {
    if cfg!(shuttle) {
        return; // the scheduler's atomics are sequentially consistent
    }
    std::sync::atomic::fence(Ordering::SeqCst);
    if !barrier() {
        // Only where a sandbox was closed after `is_available` said yes. What is left is to outlast
        // any store buffer: those drain within microseconds.
        std::thread::sleep(Duration::from_millis(10));
    }
    std::sync::atomic::fence(Ordering::SeqCst);
}

#[cfg(target_os = "linux")]
fn register() -> bool {
    let wanted =
        libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED | libc::MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED;
    let offered = membarrier(libc::MEMBARRIER_CMD_QUERY);
    offered >= 0
        && offered & i64::from(wanted) == i64::from(wanted)
        && membarrier(libc::MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED) == 0
}

#[cfg(target_os = "linux")]
fn barrier() -> bool {
    membarrier(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED) == 0
}

#[cfg(target_os = "linux")]
fn membarrier(command: libc::c_int) -> i64 {
    // SAFETY: the call takes plain numbers and touches no memory of ours.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) }
}

#[cfg(not(target_os = "linux"))]
fn register() -> bool {
    false
}

#[cfg(not(target_os = "linux"))]
fn barrier() -> bool {
    false
}
