//! [`ThreadKey`]: which thread, and whether it still runs.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::sync::thread_local;

static NEXT: AtomicU64 = AtomicU64::new(1);

/// Says that its thread has ended, when the thread drops it.
struct Life(Arc<AtomicBool>);

impl Drop for Life {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

thread_local! {
    // Without a destructor, so that it can be asked for while the thread's other values are
    // dropped; `std::thread::current` panics there.
    static NUMBER: Cell<u64> = const { Cell::new(0) };
    static LIFE: Life = Life(Arc::new(AtomicBool::new(false)));
}

/// The calling thread's number, never given out twice in a process.
fn number() -> u64 {
    NUMBER.with(|number| {
        if number.get() == 0 {
            number.set(NEXT.fetch_add(1, Ordering::Relaxed));
        }
        number.get()
    })
}

/// A thread of this process.
#[derive(Debug)]
pub(super) struct ThreadKey {
    number: u64,
    ended: Arc<AtomicBool>,
}

impl ThreadKey {
    /// The calling thread.
    pub(super) fn current() -> ThreadKey {
        let ended = LIFE.try_with(|life| life.0.clone());
        // While the thread drops its values it is as good as ended.
        let ended = ended.unwrap_or_else(|_| Arc::new(AtomicBool::new(true)));
        ThreadKey { number: number(), ended }
    }

    /// Whether this is the calling thread.
    pub(super) fn is_current(&self) -> bool {
        self.number == number()
    }

    /// Whether the thread has ended, or is dropping its values.
    pub(super) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_told_apart_and_known_to_have_ended() {
        let mine = ThreadKey::current();
        let theirs = std::thread::spawn(ThreadKey::current).join().unwrap();
        assert!(mine.is_current() && !theirs.is_current());
        assert!(!mine.has_ended() && theirs.has_ended());
    }

    #[test]
    fn a_thread_is_known_to_itself_while_it_drops_its_values() {
        struct Last(ThreadKey, Arc<AtomicBool>);
        impl Drop for Last {
            fn drop(&mut self) {
                self.1.store(self.0.is_current(), Ordering::Release);
            }
        }
        thread_local! { static LAST: Cell<Option<Last>> = const { Cell::new(None) } }
        let known = Arc::new(AtomicBool::new(false));
        let told = known.clone();
        let work = move || LAST.set(Some(Last(ThreadKey::current(), told)));
        std::thread::spawn(work).join().unwrap();
        assert!(known.load(Ordering::Acquire));
    }
}
