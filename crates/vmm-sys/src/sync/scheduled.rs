//! The same shapes over the scheduler's primitives.
//!
//! Time: a wait with a period may end at any moment or last until it is notified; a wait with a
//! deadline, which is there for what never happens (a driver that is stuck), ends only when it is
//! notified. So a hand-over that relies on a time-out shows as a deadlock.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use shuttle::rand::Rng;
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::{Config, FailurePersistence, MaxSteps, Runner};

/// Stack of a thread, in bytes: the whole pool runs on it.
const STACK_BYTES: usize = 4 << 20;
/// Steps after which an execution counts as endless.
const STEPS_MAX: usize = 2_000_000;
/// Where priorities change, in an execution of the second scheduler.
const PRIORITY_CHANGES: usize = 3;

/// Runs `body` in many interleavings of its threads: half of them chosen step by step at random,
/// half with random priorities that change a few times, which finds what needs one thread to stand
/// still for long.
///
/// `VMM_PROOFS_RUNS` is how many executions of each kind there are, `VMM_PROOFS_SEED` what they are
/// made from; both are printed. A failed execution of the first kind prints its own seed: with that
/// in `SHUTTLE_RANDOM_SEED` the first execution repeats it.
///
/// # Panics
/// As `body` does in some execution; if threads wait for each other; if an execution does not end.
pub fn prove(name: &str, body: impl Fn() + Send + Sync + 'static) {
    let number = |variable: &str, default| {
        std::env::var(variable).map_or(default, |text| {
            text.parse().unwrap_or_else(|_| panic!("{variable}={text}: expected a number"))
        })
    };
    let (runs, seed) = (number("VMM_PROOFS_RUNS", 300), number("VMM_PROOFS_SEED", 1));
    println!("proof {name}: VMM_PROOFS_SEED={seed} VMM_PROOFS_RUNS={runs}");
    let config = settings();
    let body = Arc::new(body);
    let executions = runs as usize;
    let random = RandomScheduler::new_from_seed(seed, executions);
    let priorities = PctScheduler::new_from_seed(seed, PRIORITY_CHANGES, executions);
    let (again, settings) = (body.clone(), config.clone());
    Runner::new(random, settings).run(move || again());
    Runner::new(priorities, config).run(move || body());
}

/// What every execution has: stacks that the whole pool runs on, and an end.
pub fn settings() -> Config {
    let mut config = Config::new();
    config.stack_size = STACK_BYTES;
    config.max_steps = MaxSteps::FailAfter(STEPS_MAX);
    config.failure_persistence = FailurePersistence::None;
    config.silence_warnings = true;
    config
}

/// Threads of the scheduler.
pub mod thread {
    pub use shuttle::thread::{Builder, JoinHandle, ThreadId, current, yield_now};

    /// Lets others go first: there is no time.
    pub fn sleep(_: std::time::Duration) {
        yield_now();
    }
}

/// A lock, without poison: a thread that panics fails the proof anyway.
pub struct Mutex<T>(shuttle::sync::Mutex<T>);

/// A locked [`Mutex`].
pub struct MutexGuard<'a, T> {
    mutex: &'a Mutex<T>,
    /// None only while the lock is given up for a moment.
    inner: Option<shuttle::sync::MutexGuard<'a, T>>,
}

impl<T> Mutex<T> {
    /// An open lock.
    pub const fn new(value: T) -> Mutex<T> {
        Mutex(shuttle::sync::Mutex::new(value))
    }

    /// Takes the lock.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        let inner = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        MutexGuard { mutex: self, inner: Some(inner) }
    }

    /// Takes the lock if it is free.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        self.0.try_lock().ok().map(|inner| MutexGuard { mutex: self, inner: Some(inner) })
    }

    /// The value, of which nobody else has a reference.
    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Default> Default for Mutex<T> {
    fn default() -> Mutex<T> {
        Mutex::new(T::default())
    }
}

impl<T> fmt::Debug for Mutex<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Mutex")
    }
}

impl<T> MutexGuard<'_, T> {
    /// Gives the lock up. Who gets it next is the scheduler's choice.
    pub fn unlock_fair(guard: Self) {
        drop(guard);
    }

    /// Gives the lock up for the time of a call.
    pub fn unlocked<U>(guard: &mut Self, call: impl FnOnce() -> U) -> U {
        guard.inner = None;
        let result = call();
        *guard = guard.mutex.lock();
        result
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.inner.as_ref().expect("the lock is held")
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.inner.as_mut().expect("the lock is held")
    }
}

impl<T> fmt::Debug for MutexGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MutexGuard")
    }
}

/// A condition variable.
#[derive(Debug, Default)]
pub struct Condvar(shuttle::sync::Condvar);

/// Whether a wait ended by time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitTimeoutResult(bool);

impl WaitTimeoutResult {
    /// It did.
    pub fn timed_out(self) -> bool {
        self.0
    }
}

impl Condvar {
    /// Nobody waits.
    pub const fn new() -> Condvar {
        Condvar(shuttle::sync::Condvar::new())
    }

    /// Waits until it is notified.
    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        if let Some(inner) = guard.inner.take() {
            guard.inner = Some(self.0.wait(inner).unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// Waits until it is notified or time has passed, which it may have at any moment.
    pub fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, _: Duration) -> WaitTimeoutResult {
        let times_out = shuttle::rand::thread_rng().gen_bool(0.75);
        if times_out {
            MutexGuard::unlocked(guard, thread::yield_now);
        } else {
            self.wait(guard);
        }
        WaitTimeoutResult(times_out)
    }

    /// Waits until it is notified: the deadline is too far away to come.
    pub fn wait_until<T>(&self, guard: &mut MutexGuard<'_, T>, _: Instant) -> WaitTimeoutResult {
        self.wait(guard);
        WaitTimeoutResult(false)
    }

    /// Ends one wait.
    pub fn notify_one(&self) {
        self.0.notify_one();
    }

    /// Ends all waits.
    pub fn notify_all(&self) {
        self.0.notify_all();
    }
}

/// A lock for many readers or one writer.
pub struct RwLock<T>(shuttle::sync::RwLock<T>);

/// A read [`RwLock`].
pub type RwLockReadGuard<'a, T> = shuttle::sync::RwLockReadGuard<'a, T>;

impl<T> RwLock<T> {
    /// An open lock.
    pub const fn new(value: T) -> RwLock<T> {
        RwLock(shuttle::sync::RwLock::new(value))
    }

    /// Waits for the writer.
    pub fn read(&self) -> RwLockReadGuard<'_, T> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for everybody.
    pub fn write(&self) -> shuttle::sync::RwLockWriteGuard<'_, T> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}
