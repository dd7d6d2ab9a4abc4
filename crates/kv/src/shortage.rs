//! Who is asked for room when memory is short: hooks of the caller, which evict.

use std::fmt;
use std::sync::{Arc, Weak};

use vmm_sys::DeviceId;
use vmm_sys::caught::thrown;

use crate::sync::Mutex;

/// A shortage that idle memory of the cache did not end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KvShortage {
    /// Where memory is short.
    pub device: DeviceId,
    /// What was asked for, in bytes.
    pub bytes: u64,
    /// Whether the cache itself is short; else somebody else in the pool is.
    pub is_own: bool,
}

type Hook = Arc<dyn Fn(&KvShortage) -> bool + Send + Sync>;

/// The hooks of a cache.
#[derive(Default)]
pub(crate) struct Hooks(Arc<Mutex<List>>);

#[derive(Default)]
struct List {
    hooks: Vec<(u64, Hook)>,
    last_number: u64,
}

impl fmt::Debug for Hooks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Hooks({})", self.0.lock().hooks.len())
    }
}

/// Keeps a hook for short memory registered; dropping it ends that. A call that has begun in another
/// thread is not waited for.
#[must_use = "dropping it unregisters the hook"]
pub struct EvictionHook {
    list: Weak<Mutex<List>>,
    number: u64,
}

impl fmt::Debug for EvictionHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EvictionHook({})", self.number)
    }
}

impl Drop for EvictionHook {
    fn drop(&mut self) {
        let alive = self.list.upgrade().filter(|_| !vmm_sys::process::is_forked_child());
        let Some(list) = alive else { return };
        let mut list = list.lock();
        let at = list.hooks.iter().position(|(number, _)| *number == self.number);
        let hook = at.map(|at| list.hooks.remove(at));
        drop(list);
        // What the hook holds, sequences for example, may do anything when it is dropped.
        drop(hook);
    }
}

impl Hooks {
    pub(crate) fn add(
        &self,
        hook: impl Fn(&KvShortage) -> bool + Send + Sync + 'static,
    ) -> EvictionHook {
        let mut list = self.0.lock();
        list.last_number += 1;
        let number = list.last_number;
        list.hooks.push((number, Arc::new(hook)));
        EvictionHook { list: Arc::downgrade(&self.0), number }
    }

    /// Asks each, the oldest first, until one says that something was freed. No lock is held
    /// meanwhile. One that panics has freed nothing.
    pub(crate) fn ask(&self, shortage: &KvShortage) -> bool {
        let hooks = self.0.lock().hooks.clone();
        hooks.iter().any(|(_, hook)| {
            thrown(|| hook(shortage)).unwrap_or_else(|_| {
                vmm_sys::say!(warn, ?shortage, "a hook for short memory panicked");
                false
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    const SHORTAGE: KvShortage = KvShortage { device: DeviceId(0), bytes: 5, is_own: true };

    #[test]
    fn hooks_are_asked_in_order_until_one_helps() {
        let hooks = Hooks::default();
        assert!(!hooks.ask(&SHORTAGE));
        let asked = Arc::new(AtomicU64::new(0));
        let note = |digit: u64, answer: bool| {
            let asked = asked.clone();
            move |shortage: &KvShortage| {
                assert_eq!(*shortage, SHORTAGE);
                let number = asked.load(Ordering::SeqCst) * 10 + digit;
                asked.store(number, Ordering::SeqCst);
                answer
            }
        };
        let _first = hooks.add(note(1, false));
        let _panics = hooks.add(|_| panic!("as the test wants it"));
        let second = hooks.add(note(2, true));
        let _third = hooks.add(note(3, true));
        assert!(hooks.ask(&SHORTAGE));
        drop(second);
        assert!(hooks.ask(&SHORTAGE));
        assert_eq!(asked.load(Ordering::SeqCst), 1213);
    }
}
