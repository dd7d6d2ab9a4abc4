//! Whether this process can still talk to a driver: not in a forked child (row D-K1), not once
//! exit has begun.
//!
//! Two flags set by hooks that are installed once, so that asking costs a relaxed load and never a
//! `getpid`.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Once};

static FORKED: AtomicBool = AtomicBool::new(false);
static EXITING: AtomicBool = AtomicBool::new(false);
static INSTALL: Once = Once::new();

extern "C" fn in_forked_child() {
    FORKED.store(true, Ordering::Relaxed);
}

extern "C" fn at_exit() {
    EXITING.store(true, Ordering::Relaxed);
}

/// Installs the hooks. Every driver calls it when it is made; later calls do nothing.
pub(crate) fn install_hooks() {
    INSTALL.call_once(|| {
        // SAFETY: the handlers only store to an atomic, which is async-signal-safe, and functions
        // live as long as the program. A failure (no memory for the handler) leaves the flag
        // unset, which costs a late error message and nothing else.
        unsafe {
            libc::pthread_atfork(None, None, Some(in_forked_child));
            libc::atexit(at_exit);
        }
    });
}

/// Whether this process is the child of a fork made after a driver was opened.
#[inline]
pub fn is_forked_child() -> bool {
    FORKED.load(Ordering::Relaxed)
}

/// In a forked child: keeps what a handle that is dropped there would take apart. Another thread may have
/// been in the middle of a change of it when the process forked. Elsewhere it does nothing.
#[inline]
pub fn keep_in_forked_child<T>(shared: &Arc<T>) {
    if is_forked_child() {
        std::mem::forget(shared.clone());
    }
}

/// Whether `exit` has begun.
#[inline]
pub fn is_exiting() -> bool {
    EXITING.load(Ordering::Relaxed)
}
