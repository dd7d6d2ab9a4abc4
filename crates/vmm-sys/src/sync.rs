//! What threads meet over: locks, condition variables, threads, and values of a thread or of the
//! whole process.
//!
//! In an ordinary build these are the plain types under their own names. With `--cfg shuttle` they
//! are those of a scheduler that tries interleavings and can repeat each by its seed: see
//! `tests/proofs.sh`. Whatever two threads of a proof touch has to come from here: a lock that the
//! scheduler does not know would stop all of its threads.
//!
//! With debug assertions the locks of the pool and of the caches watch their order ([`watched`]).

#[cfg(shuttle)]
mod scheduled;
#[cfg(not(shuttle))]
pub mod watched;

#[cfg(shuttle)]
pub use scheduled::{
    Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, WaitTimeoutResult, prove, settings, thread,
};
#[cfg(shuttle)]
pub use shuttle::{lazy_static, sync::atomic, thread_local};

#[cfg(not(shuttle))]
pub(crate) use parking_lot::{Condvar, Mutex, MutexGuard};
#[cfg(not(shuttle))]
pub(crate) use std::{thread, thread_local};

/// A value of the whole process. In a proof each execution has one of its own, so that every
/// execution starts from the same state.
#[cfg(not(shuttle))]
#[macro_export]
#[doc(hidden)]
macro_rules! global {
    ($(#[$attribute:meta])* static $name:ident: $type:ty = $value:expr;) => {
        $(#[$attribute])*
        static $name: $type = $value;
    };
}
#[cfg(shuttle)]
#[macro_export]
#[doc(hidden)]
macro_rules! global {
    ($(#[$attribute:meta])* static $name:ident: $type:ty = $value:expr;) => {
        $crate::sync::lazy_static! {
            $(#[$attribute])*
            static ref $name: $type = $value;
        }
    };
}
pub(crate) use global;
