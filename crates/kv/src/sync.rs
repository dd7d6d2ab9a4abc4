//! What threads meet over: every lock, condition variable, atomic and thread of the caches comes from
//! here.
//!
//! In an ordinary build these are the plain types under their own names; with `--cfg shuttle` those of a
//! scheduler that tries interleavings (`vmm_sys::sync`, tests/simulate.sh).

#[cfg(not(shuttle))]
pub(crate) use parking_lot::{Condvar, Mutex, MutexGuard};
#[cfg(not(shuttle))]
pub(crate) use std::{sync::atomic, thread, thread_local};

#[cfg(shuttle)]
pub(crate) use vmm_sys::sync::{Condvar, Mutex, MutexGuard, atomic, thread, thread_local};
