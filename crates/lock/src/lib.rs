//! A mutex for data that one thread uses most of the time, and any thread may use.
//!
//! An uncontended lock and unlock of an ordinary mutex is at least one atomic read-modify-write,
//! which on x86 drains the store buffer: 20 to 25 cycles, as much as the whole of a small
//! allocation. [`BiasedMutex`] leaves it out for the thread that has taken it many times in a row:
//! the lock is *biased* towards it, and that thread enters with two plain stores. The first other
//! thread that comes takes the bias back, which costs it a system call once; from then on the lock
//! is an ordinary spin lock until some thread has earned the bias anew, with more patience each
//! time.
//!
//! # How it works
//!
//! Two threads may meet in one way only: the owner enters while another one takes the bias back.
//!
//! ```text
//! owner                                another thread, holding `locked`
//! held = true                          owner = nobody
//! light fence                          heavy fence
//! enter only if owner is still me      wait until held is false, then enter
//! ```
//!
//! It is Dekker's protocol: with a full fence on both sides one of them sees what the other wrote.
//! The fence of the owner is a compiler fence; that of the other thread is `membarrier(2)`, which
//! makes every running thread of the process pass a full fence: "asymmetric fences" (Dice, Huang,
//! Yang: *Asymmetric Dekker Synchronization*, 2001; Linux `Documentation`, `membarrier(2)`,
//! `MEMBARRIER_CMD_PRIVATE_EXPEDITED`). Where the kernel has no such call no bias is ever given.

mod fence;
mod token;

use std::cell::UnsafeCell;
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
#[cfg(not(shuttle))]
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

// With the atomics of a scheduler, for the proofs of the pool: crates/vmm-sys/src/sync.rs.
#[cfg(shuttle)]
use shuttle::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// No thread's token.
const NOBODY: u64 = 0;

/// How often in a row a thread has to take a new lock before it is biased. Taking the bias back
/// costs some microseconds, and a biased entry saves some ten nanoseconds.
const STREAK_FIRST: u32 = if cfg!(shuttle) { 2 } else { 1 << 10 };
/// The longest such streak. It doubles each time the bias is taken back, so that threads which
/// alternate pay little for it.
const STREAK_MAX: u32 = 1 << 16;

/// Who took the lock of late.
#[derive(Clone, Copy)]
struct Streak {
    thread: u64,
    count: u32,
    needed: u32,
}

/// A spin lock with a bias towards the thread that takes it most. See the [crate page](crate).
///
/// Not reentrant: a thread that takes it twice waits for itself. What is done under it should be
/// short, for a waiting thread keeps asking, giving up its processor in between.
pub struct BiasedMutex<T> {
    /// The token of the thread that may enter by `held`, or `NOBODY`. Written by a thread that
    /// holds `locked`.
    owner: AtomicU64,
    /// The owner is inside, by its bias.
    held: AtomicBool,
    /// Somebody is inside, or about to be once the owner has left.
    locked: AtomicBool,
    /// Guarded by `locked`.
    streak: UnsafeCell<Streak>,
    value: UnsafeCell<T>,
}

// SAFETY: a guard is the only way to the value, and there is at most one at a time: see `lock`.
// `streak` is only touched between taking and clearing `locked`. So a shared mutex hands the value
// from thread to thread, which `Send` allows.
unsafe impl<T: Send> Sync for BiasedMutex<T> {}
// SAFETY: as an owned value it is its parts, and those can go to another thread: a token in `owner`
// keeps its meaning, since tokens are never given out twice.
unsafe impl<T: Send> Send for BiasedMutex<T> {}

/// The way to the value; leaves the mutex when it is dropped.
pub struct Guard<'a, T> {
    mutex: &'a BiasedMutex<T>,
    /// What says that this thread is inside.
    flag: &'a AtomicBool,
    /// Not `Send`: the flag of the owner is cleared by the owner.
    own_thread: PhantomData<*mut ()>,
}

// SAFETY: a shared guard gives out shared references to the value and nothing else.
unsafe impl<T: Sync> Sync for Guard<'_, T> {}

impl<T> BiasedMutex<T> {
    /// A mutex that nobody holds, without a bias.
    pub const fn new(value: T) -> Self {
        Self::with_streak(value, STREAK_FIRST)
    }

    /// As [`new`](Self::new), but a thread is biased once it has taken the mutex `needed` times in
    /// a row.
    pub const fn with_streak(value: T, needed: u32) -> Self {
        Self {
            owner: AtomicU64::new(NOBODY),
            held: AtomicBool::new(false),
            locked: AtomicBool::new(false),
            streak: UnsafeCell::new(Streak { thread: NOBODY, count: 0, needed }),
            value: UnsafeCell::new(value),
        }
    }

    /// Waits until nobody else is inside, and enters.
    #[inline]
    pub fn lock(&self) -> Guard<'_, T> {
        let me = token::of_this_thread();
        // `held` is set already if this very thread is inside: then it has to wait like any other.
        if self.owner.load(Ordering::Relaxed) == me && !self.held.load(Ordering::Relaxed) {
            self.held.store(true, Ordering::Relaxed);
            fence::light();
            if self.owner.load(Ordering::Relaxed) == me {
                // Only this thread makes itself the owner, and whoever enters otherwise ends that
                // first. So nobody has entered since this thread last was inside, and nobody does
                // before `held` is cleared: whoever takes the bias away waits for that.
                return self.guard(&self.held);
            }
            self.held.store(false, Ordering::Release);
        }
        self.lock_among_all(me)
    }

    fn guard<'a>(&'a self, flag: &'a AtomicBool) -> Guard<'a, T> {
        Guard { mutex: self, flag, own_thread: PhantomData }
    }

    /// Enters as any thread may.
    #[inline]
    fn lock_among_all(&self, me: u64) -> Guard<'_, T> {
        while self
            .locked
            .compare_exchange_weak(false, true, Ordering::Acquire, Ordering::Relaxed)
            .is_err()
        {
            wait_while(&self.locked);
        }
        let owner = self.owner.load(Ordering::Relaxed);
        if owner != NOBODY {
            self.take_bias_back();
        }
        // SAFETY: guarded by `locked`, which this thread has set.
        let streak = unsafe { &mut *self.streak.get() };
        if streak.thread == me {
            streak.count += 1;
            if streak.count >= streak.needed {
                self.give_bias(me, streak);
            }
        } else {
            streak.thread = me;
            streak.count = 0;
        }
        self.guard(&self.locked)
    }

    /// Lets this thread, which has set `locked`, enter by `held` from the next time on.
    #[cold]
    fn give_bias(&self, me: u64, streak: &mut Streak) {
        streak.count = 0;
        if fence::is_available() {
            self.owner.store(me, Ordering::Relaxed);
        }
    }

    /// Ends the owner's right to enter by `held`, and waits until it is outside. This thread has set
    /// `locked`.
    #[cold]
    fn take_bias_back(&self) {
        self.owner.store(NOBODY, Ordering::Relaxed);
        fence::heavy();
        // Acquire: what the owner did inside comes before what this thread will do.
        while self.held.load(Ordering::Acquire) {
            relax();
        }
        // SAFETY: guarded by `locked`, which this thread has set.
        let streak = unsafe { &mut *self.streak.get() };
        streak.needed = streak.needed.saturating_mul(2).min(STREAK_MAX);
    }

    /// Whether some thread has the bias at this moment.
    pub fn is_biased(&self) -> bool {
        self.owner.load(Ordering::Relaxed) != NOBODY
    }
}

#[cold]
fn wait_while(flag: &AtomicBool) {
    while flag.load(Ordering::Relaxed) {
        relax();
    }
}

/// Whoever is inside may be waiting for a processor: this one.
fn relax() {
    std::hint::spin_loop();
    #[cfg(not(shuttle))]
    std::thread::yield_now();
    #[cfg(shuttle)]
    shuttle::thread::yield_now();
}

impl<T> Drop for Guard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.flag.store(false, Ordering::Release);
    }
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this guard is the only one, see `BiasedMutex::lock`, and borrowed shared.
        unsafe { &*self.mutex.value.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this guard is the only one, see `BiasedMutex::lock`, and borrowed mutably.
        unsafe { &mut *self.mutex.value.get() }
    }
}

impl<T> fmt::Debug for BiasedMutex<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Not the value: looking at it would take the lock.
        f.debug_struct("BiasedMutex").field("is_biased", &self.is_biased()).finish_non_exhaustive()
    }
}

impl<T: fmt::Debug> fmt::Debug for Guard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}
