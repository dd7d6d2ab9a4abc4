//! Locks that watch their order: what builds with debug assertions use in place of the plain ones.
//!
//! A lock belongs to the class of the place in the source where it was made. Whoever takes a lock while it
//! holds others puts their classes before that lock's. Two orders that contradict each other are a deadlock that
//! needs only its moment, and are found without it; so are locks that are held at a driver call. What was
//! found is kept ([`faults`]): tests ask for it where they look whether a machine is clean, and nobody
//! else is disturbed.

mod order;

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::time::{Duration, Instant};

pub use order::{Class, Held, at_the_driver, faults};

/// A lock.
pub struct Mutex<T> {
    class: Class,
    inner: parking_lot::Mutex<T>,
}

/// A [`Mutex`] that is held at driver calls: nothing that makes none waits for it.
#[track_caller]
pub const fn across_calls<T>(value: T) -> Mutex<T> {
    let class = Class::across_calls_here();
    Mutex { class, inner: parking_lot::Mutex::new(value) }
}

/// A locked [`Mutex`].
pub struct MutexGuard<'a, T> {
    inner: parking_lot::MutexGuard<'a, T>,
    held: Held,
}

impl<T> Mutex<T> {
    /// An open lock.
    #[track_caller]
    pub const fn new(value: T) -> Mutex<T> {
        Mutex { class: Class::here(), inner: parking_lot::Mutex::new(value) }
    }

    /// Takes the lock.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        // Told before: who waits for ever does not tell.
        let held = self.class.hold(true);
        MutexGuard { inner: self.inner.lock(), held }
    }

    /// Takes the lock if it is free.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        let inner = self.inner.try_lock()?;
        Some(MutexGuard { inner, held: self.class.hold(false) })
    }

    /// Takes the lock if it is free before `patience` has passed.
    pub fn try_lock_for(&self, patience: Duration) -> Option<MutexGuard<'_, T>> {
        let held = self.class.hold(true);
        let inner = self.inner.try_lock_for(patience)?;
        Some(MutexGuard { inner, held })
    }

    /// The value, of which nobody else has a reference.
    pub fn get_mut(&mut self) -> &mut T {
        self.inner.get_mut()
    }
}

impl<T: Default> Default for Mutex<T> {
    #[track_caller]
    fn default() -> Mutex<T> {
        Mutex::new(T::default())
    }
}

impl<T: fmt::Debug> fmt::Debug for Mutex<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

impl<T> MutexGuard<'_, T> {
    /// Gives the lock to whoever waited longest.
    pub fn unlock_fair(guard: Self) {
        let MutexGuard { inner, held } = guard;
        parking_lot::MutexGuard::unlock_fair(inner);
        drop(held);
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.inner
    }
}

/// A condition variable.
#[derive(Debug, Default)]
pub struct Condvar(parking_lot::Condvar);

impl Condvar {
    /// Nobody waits.
    pub const fn new() -> Condvar {
        Condvar(parking_lot::Condvar::new())
    }

    /// Waits until it is notified.
    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        self.0.wait(&mut guard.inner);
    }

    /// Waits until it is notified or time has passed.
    pub fn wait_for<T>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        time: Duration,
    ) -> parking_lot::WaitTimeoutResult {
        self.0.wait_for(&mut guard.inner, time)
    }

    /// Waits until it is notified or the deadline has come.
    pub fn wait_until<T>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        deadline: Instant,
    ) -> parking_lot::WaitTimeoutResult {
        self.0.wait_until(&mut guard.inner, deadline)
    }

    /// Ends one wait.
    pub fn notify_one(&self) -> bool {
        self.0.notify_one()
    }

    /// Ends all waits.
    pub fn notify_all(&self) -> usize {
        self.0.notify_all()
    }
}

/// A lock for many readers or one writer. It may be held at a driver call: readers keep no reader waiting.
#[derive(Debug)]
pub struct RwLock<T> {
    class: Class,
    inner: parking_lot::RwLock<T>,
}

/// A read [`RwLock`].
pub struct RwLockReadGuard<'a, T> {
    inner: parking_lot::RwLockReadGuard<'a, T>,
    _held: Held,
}

/// A written [`RwLock`].
pub struct RwLockWriteGuard<'a, T> {
    inner: parking_lot::RwLockWriteGuard<'a, T>,
    _held: Held,
}

impl<T> RwLock<T> {
    /// An open lock.
    #[track_caller]
    pub const fn new(value: T) -> RwLock<T> {
        let class = Class::across_calls_here();
        RwLock { class, inner: parking_lot::RwLock::new(value) }
    }

    /// Takes the lock for reading.
    pub fn read(&self) -> RwLockReadGuard<'_, T> {
        let held = self.class.hold(true);
        RwLockReadGuard { inner: self.inner.read(), _held: held }
    }

    /// Takes the lock for writing.
    pub fn write(&self) -> RwLockWriteGuard<'_, T> {
        let held = self.class.hold(true);
        RwLockWriteGuard { inner: self.inner.write(), _held: held }
    }
}

impl<T> Deref for RwLockReadGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T> Deref for RwLockWriteGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T> DerefMut for RwLockWriteGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.inner
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_knows_what_it_holds() {
        let held = order::held;
        let (one, other, both) = (Mutex::new(1), Mutex::new(2), RwLock::new(3));
        let first = one.lock();
        let (second, third) = (other.try_lock().unwrap(), both.read());
        assert_eq!(held(), [one.class, other.class, both.class]);
        assert!(std::thread::spawn(move || held().is_empty()).join().unwrap());
        drop(first);
        MutexGuard::unlock_fair(second);
        assert_eq!(held(), [both.class]);
        drop(third);
        assert!(held().is_empty());
    }
}
