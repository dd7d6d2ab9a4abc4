//! [`Hands`]: one thread at a time changes the memory of a cache, as the pool has it for a buffer.
//!
//! Books are kept behind other locks, which are held for a moment and never at the driver.

use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;
use std::time::{Duration, Instant};

use vmm_pool::{ElasticError, Error};
use vmm_sys::process::is_forked_child;

use crate::sync::{Condvar, Mutex, thread_local};

thread_local! {
    /// Caches that this thread is changing: more than one where a callback of the pool begins another.
    static HELD: Cell<u32> = const { Cell::new(0) };
}

/// The right to change a cache's memory.
#[derive(Default)]
pub(crate) struct Hands {
    taken: Mutex<bool>,
    freed: Condvar,
}

impl fmt::Debug for Hands {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hands").finish_non_exhaustive()
    }
}

impl Hands {
    /// Waits for the thread that has them, unless this one is changing some cache's memory: two that
    /// wait for each other would wait for ever.
    ///
    /// # Errors
    /// [`ElasticError::Busy`].
    pub(crate) fn take(&self) -> Result<Held<'_>, Error> {
        if is_forked_child() {
            return Err(Error::DriverGone);
        }
        let mut taken = self.taken.lock();
        while *taken {
            if is_holding() {
                return Err(ElasticError::Busy.into());
            }
            self.freed.wait(&mut taken);
        }
        *taken = true;
        drop(taken);
        Ok(Held::new(self))
    }

    /// The same for who does not wait.
    pub(crate) fn try_take(&self) -> Option<Held<'_>> {
        self.take_within(Duration::ZERO)
    }

    /// The same for who waits no longer than `patience`, and not at all if this thread is changing some
    /// cache's memory.
    pub(crate) fn take_within(&self, patience: Duration) -> Option<Held<'_>> {
        if is_forked_child() {
            return None;
        }
        let deadline = Instant::now() + patience;
        let mut taken = self.taken.lock();
        while *taken {
            if patience.is_zero() || is_holding() {
                return None;
            }
            if self.freed.wait_until(&mut taken, deadline).timed_out() && *taken {
                return None;
            }
        }
        *taken = true;
        drop(taken);
        Some(Held::new(self))
    }
}

/// Whether the calling thread is changing some cache's memory.
pub(crate) fn is_holding() -> bool {
    HELD.with(Cell::get) > 0
}

/// The right, as long as it is held. It stays in its thread.
#[derive(Debug)]
pub(crate) struct Held<'a>(&'a Hands, PhantomData<*const ()>);

impl<'a> Held<'a> {
    fn new(hands: &'a Hands) -> Held<'a> {
        HELD.with(|held| held.set(held.get() + 1));
        Held(hands, PhantomData)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        HELD.with(|held| held.set(held.get() - 1));
        *self.0.taken.lock() = false;
        self.0.freed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_holds_some_does_not_wait_for_others() {
        let (one, other) = (Hands::default(), Hands::default());
        let held = one.take().unwrap();
        assert!(is_holding());
        assert!(matches!(one.take(), Err(Error::Elastic(ElasticError::Busy))));
        assert!(one.try_take().is_none());
        let second = other.take().unwrap();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| drop(one.take().unwrap()));
            assert!(matches!(other.take(), Err(Error::Elastic(ElasticError::Busy))));
            assert!(other.take_within(Duration::from_secs(3600)).is_none(), "not even a little");
            drop((second, held));
            waits.join().unwrap();
        });
        assert!(!is_holding());
        assert!(one.try_take().is_some() && other.try_take().is_some());
    }

    #[test]
    fn patience_ends() {
        let hands = Hands::default();
        let held = hands.take().unwrap();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| hands.take_within(Duration::from_millis(5)).is_none());
            assert!(waits.join().unwrap());
            let waits = scope.spawn(|| hands.take_within(Duration::from_secs(20)).is_some());
            drop(held);
            assert!(waits.join().unwrap());
        });
    }
}
