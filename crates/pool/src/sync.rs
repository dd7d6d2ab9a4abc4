//! What threads meet over: every lock, condition variable, atomic and thread of the pool comes from
//! here, but for the lanes' lock.
//!
//! In a build without debug assertions these are the plain types under their own names; with them, locks
//! watch their order (`vmm_sys::sync::watched`). With `--cfg shuttle` they
//! are those of a scheduler that tries interleavings (`vmm_sys::sync`), for the proofs in
//! `tests/proofs`. The lanes' own lock (`vmm-lock`) is then built on its atomics.

#[cfg(not(any(shuttle, debug_assertions)))]
pub(crate) use parking_lot::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard};
#[cfg(not(shuttle))]
pub(crate) use std::{sync::atomic, thread, thread_local};
#[cfg(all(not(shuttle), debug_assertions))]
pub(crate) use vmm_sys::sync::watched::{
    Class, Condvar, Held, Mutex, MutexGuard, RwLock, RwLockReadGuard, across_calls,
};

/// A lock that is held at driver calls: nothing that makes none waits for it.
#[cfg(any(shuttle, not(debug_assertions)))]
pub(crate) const fn across_calls<T>(value: T) -> Mutex<T> {
    Mutex::new(value)
}

/// A class of locks that are not of here.
#[cfg(any(shuttle, not(debug_assertions)))]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Class;

/// A lock of a class that is held.
#[cfg(any(shuttle, not(debug_assertions)))]
#[derive(Debug)]
pub(crate) struct Held;

#[cfg(any(shuttle, not(debug_assertions)))]
impl Class {
    pub(crate) const fn here() -> Class {
        Class
    }

    #[inline(always)]
    pub(crate) fn taken(self) -> Held {
        Held
    }
}

#[cfg(shuttle)]
pub(crate) use vmm_sys::sync::{
    Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, atomic, thread, thread_local,
};

/// A value of the whole process. In a proof each execution has one of its own.
pub(crate) use vmm_sys::global;
