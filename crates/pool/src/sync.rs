//! What threads meet over: every lock, condition variable, atomic and thread of the pool comes from
//! here, but for the lanes' lock.
//!
//! In an ordinary build these are the plain types under their own names. With `--cfg shuttle` they
//! are those of a scheduler that tries interleavings (`vmm_sys::sync`), for the proofs in
//! `tests/proofs`. The lanes' own lock (`vmm-lock`) is then built on its atomics.

#[cfg(not(shuttle))]
pub(crate) use parking_lot::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard};
#[cfg(not(shuttle))]
pub(crate) use std::{sync::atomic, thread, thread_local};

#[cfg(shuttle)]
pub(crate) use vmm_sys::sync::{
    Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, atomic, thread, thread_local,
};

/// A value of the whole process. In a proof each execution has one of its own.
pub(crate) use vmm_sys::global;
