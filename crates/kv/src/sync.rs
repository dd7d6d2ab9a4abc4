//! What threads meet over: every lock, condition variable, atomic and thread of the caches comes from
//! here.
//!
//! In a build without debug assertions these are the plain types under their own names; with them, locks
//! watch their order (`vmm_sys::sync::watched`); with `--cfg shuttle` they are those of a scheduler that
//! tries interleavings (`vmm_sys::sync`, tests/proofs.sh and tests/simulate.sh).

#[cfg(not(any(shuttle, debug_assertions)))]
pub(crate) use parking_lot::{Condvar, Mutex, MutexGuard};
#[cfg(not(shuttle))]
pub(crate) use std::{sync::atomic, thread, thread_local};
#[cfg(all(not(shuttle), debug_assertions))]
pub(crate) use vmm_sys::sync::watched::{Condvar, Mutex, MutexGuard, across_calls};

/// A lock that is held at driver calls: nothing that makes none waits for it.
#[cfg(any(shuttle, not(debug_assertions)))]
pub(crate) const fn across_calls<T>(value: T) -> Mutex<T> {
    Mutex::new(value)
}

#[cfg(shuttle)]
pub(crate) use vmm_sys::sync::{Condvar, Mutex, MutexGuard, atomic, thread, thread_local};

/// A value of the whole process. In a proof each execution has one of its own.
pub(crate) use vmm_sys::global;
