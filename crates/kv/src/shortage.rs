//! Who is asked for room when memory is short: hooks of the caller, which evict.

use std::sync::Arc;

use vmm_sys::DeviceId;
use vmm_sys::caught::thrown;
use vmm_sys::registry::{Registered, Registry};

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

type Hook = dyn Fn(&KvShortage) -> bool + Send + Sync;

/// The hooks of a cache.
#[derive(Debug, Default)]
pub(crate) struct Hooks(Registry<Hook>);

/// Keeps a hook for short memory registered; dropping it ends that. A call that has begun in another
/// thread is not waited for.
#[must_use = "dropping it unregisters the hook"]
#[derive(Debug)]
pub struct EvictionHook {
    _registered: Registered<Hook>,
}

impl Hooks {
    pub(crate) fn add(
        &self,
        hook: impl Fn(&KvShortage) -> bool + Send + Sync + 'static,
    ) -> EvictionHook {
        EvictionHook { _registered: self.0.register(Arc::new(hook)) }
    }

    /// Asks each, the oldest first, until one says that something was freed. No lock is held
    /// meanwhile. One that panics has freed nothing.
    pub(crate) fn ask(&self, shortage: &KvShortage) -> bool {
        self.0.all().iter().any(|hook| {
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
