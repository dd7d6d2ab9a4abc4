//! Locks that watch their order: what builds with debug assertions use in place of the plain ones.
//!
//! A lock belongs to the class of the place in the source where it was made. Whoever takes a lock while it
//! holds others puts their classes before that lock's. Two orders that contradict each other are a deadlock that
//! needs only its moment, and are found without it; so are locks that are held at a driver call. What was
//! found is kept ([`faults`]): tests ask for it where they look whether a machine is clean, and nobody
//! else is disturbed.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::panic::Location;
use std::time::{Duration, Instant};

use crate::call::Call;

/// Where locks of a class are made, and whether they may be held at a driver call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Class {
    made_at: &'static Location<'static>,
    across_calls: bool,
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let file = self.made_at.file();
        let file = file.rsplit_once("crates/").map_or(file, |(_, file)| file);
        write!(f, "{file}:{}", self.made_at.line())
    }
}

impl Class {
    /// The class of what is made where this is called.
    #[track_caller]
    pub const fn here() -> Class {
        Class { made_at: Location::caller(), across_calls: false }
    }

    /// A lock of this class is taken; the answer is dropped when it is let go.
    pub fn taken(self) -> Held {
        self.hold(true)
    }

    /// `waits`: the thread may have waited for it, so its place in the order counts.
    fn hold(self, waits: bool) -> Held {
        // In a forked child nobody knows what the others held.
        if !crate::process::is_forked_child() {
            let known = HELD.try_with(|held| {
                let mut held = held.borrow_mut();
                if waits {
                    held.iter().for_each(|before| before.comes_before(self));
                }
                held.push(self);
            });
            // Values of a thread that end after this one take locks too.
            let _unknown = known;
        }
        Held(self)
    }
}

impl Class {
    fn key(self) -> usize {
        std::ptr::from_ref(self.made_at).addr()
    }

    fn comes_before(self, after: Class) {
        let new =
            |known: &RefCell<HashSet<_>>| known.borrow_mut().insert((self.key(), after.key()));
        if KNOWN.try_with(new).unwrap_or(true) {
            ORDER.lock().follows(self, after);
        }
    }
}

/// A lock that the calling thread holds.
#[derive(Debug)]
pub struct Held(Class);

impl Drop for Held {
    fn drop(&mut self) {
        let _unknown = HELD.try_with(|held| {
            let mut held = held.borrow_mut();
            if let Some(at) = held.iter().rposition(|class| *class == self.0) {
                held.remove(at);
            }
        });
    }
}

thread_local! {
    static HELD: RefCell<Vec<Class>> = const { RefCell::new(Vec::new()) };
    /// Pairs that this thread need not tell again.
    static KNOWN: RefCell<HashSet<(usize, usize)>> = RefCell::new(HashSet::new());
}

static ORDER: parking_lot::Mutex<Order> =
    parking_lot::Mutex::new(Order { after: BTreeMap::new(), faults: Vec::new() });

/// Which class was taken while which was held.
#[derive(Debug)]
struct Order {
    after: BTreeMap<Class, Vec<Class>>,
    faults: Vec<String>,
}

impl Order {
    fn follows(&mut self, before: Class, after: Class) {
        let known = self.after.get(&before).is_some_and(|all| all.contains(&after));
        // Many lanes at once are taken under the lock of their list.
        if known || before == after {
            return;
        }
        if let Some(way) = self.way(after, before) {
            let way: Vec<String> = way.iter().map(Class::to_string).collect();
            let thread = std::thread::current();
            let name = thread.name().unwrap_or("without a name").to_owned();
            self.faults.push(format!(
                "thread {name:?} takes the lock of {after} while it holds that of {before}; elsewhere: {}",
                way.join(", then ")
            ));
        }
        self.after.entry(before).or_default().push(after);
    }

    fn at_the_driver(&mut self, held: &[Class], call: Call) {
        for class in held.iter().filter(|class| !class.across_calls) {
            let fault = format!("{call} is made under the lock of {class}");
            if !self.faults.contains(&fault) {
                self.faults.push(fault);
            }
        }
    }

    /// How `to` is reached from `from`, both included.
    fn way(&self, from: Class, to: Class) -> Option<Vec<Class>> {
        let mut ways = vec![vec![from]];
        let mut seen = vec![from];
        while let Some(way) = ways.pop() {
            let last = *way.last()?;
            if last == to {
                return Some(way);
            }
            for next in self.after.get(&last).into_iter().flatten() {
                if !seen.contains(next) {
                    seen.push(*next);
                    ways.push(way.iter().copied().chain([*next]).collect());
                }
            }
        }
        None
    }
}

/// The contradictions that were found in this process so far, and locks that were held at driver calls.
pub fn faults() -> Vec<String> {
    ORDER.lock().faults.clone()
}

/// The order of locks as it was seen in this process: pairs of a class that was held and one that was taken.
pub fn order() -> Vec<(Class, Class)> {
    let order = ORDER.lock();
    let pairs = order.after.iter();
    pairs.flat_map(|(before, all)| all.iter().map(|after| (*before, *after))).collect()
}

/// The calling thread makes a driver call: whoever waits for what it holds waits for the driver.
pub fn at_the_driver(call: Call) {
    let held = HELD.try_with(|held| held.borrow().clone()).unwrap_or_default();
    if held.iter().any(|class| !class.across_calls) {
        ORDER.lock().at_the_driver(&held, call);
    }
}

/// A lock.
pub struct Mutex<T> {
    class: Class,
    inner: parking_lot::Mutex<T>,
}

/// A [`Mutex`] that is held at driver calls: nothing that makes none waits for it.
#[track_caller]
pub const fn across_calls<T>(value: T) -> Mutex<T> {
    let class = Class { made_at: Location::caller(), across_calls: true };
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

    /// The value.
    pub fn into_inner(self) -> T {
        self.inner.into_inner()
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

impl<T: fmt::Debug> fmt::Debug for MutexGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
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
        let class = Class { made_at: Location::caller(), across_calls: true };
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

    // On an order of its own: the process's is what the other tests are measured by.
    fn order() -> Order {
        Order { after: BTreeMap::new(), faults: Vec::new() }
    }

    #[test]
    fn orders_that_contradict_each_other_are_found_once() {
        let (first, second, third) = (Class::here(), Class::here(), Class::here());
        assert!(first != second, "of one line, and of two columns");
        let mut order = order();
        for (before, after) in [(first, second), (second, third), (first, third), (first, first)] {
            order.follows(before, after);
        }
        assert_eq!(order.faults, [""; 0]);
        order.follows(third, first);
        order.follows(third, first);
        assert_eq!(order.faults.len(), 1);
        let fault = format!("takes the lock of {first} while it holds that of {third}");
        assert!(order.faults[0].contains(&fault), "{:?}", order.faults);
    }

    #[test]
    fn a_lock_at_the_driver_is_found_unless_it_is_made_for_that() {
        let (plain, across) = (Mutex::new(()).class, across_calls(()).class);
        let mut order = order();
        order.at_the_driver(&[across], Call::EventQuery);
        assert_eq!(order.faults, [""; 0]);
        order.at_the_driver(&[across, plain], Call::EventQuery);
        order.at_the_driver(&[plain], Call::EventQuery);
        assert_eq!(order.faults, [format!("cuEventQuery is made under the lock of {plain}")]);
    }

    #[test]
    fn a_thread_knows_what_it_holds() {
        let held = || HELD.with(|held| held.borrow().clone());
        let (one, other, both) = (Mutex::new(1), Mutex::new(2), RwLock::new(3));
        let first = one.lock();
        let (second, third) = (other.try_lock().unwrap(), both.read());
        assert_eq!(held(), [one.class, other.class, both.class]);
        assert!(std::thread::spawn(move || held().is_empty()).join().unwrap());
        drop(first);
        MutexGuard::unlock_fair(second);
        assert_eq!(HELD.with(|held| held.borrow().clone()), [both.class]);
        drop(third);
        assert!(HELD.with(|held| held.borrow().is_empty()));
    }
}
