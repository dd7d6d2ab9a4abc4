//! The thread that does what appending must not: growth ahead of need, memory that sequences left.
//!
//! It is woken once, however many ask, and whoever asks waits for nothing. Where it is not wanted, or
//! cannot be started, or has died, who asks does the work himself.

use std::sync::Arc;

use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::thread::{self, JoinHandle};
use crate::sync::{Condvar, Mutex};

/// What the thread does when it is woken.
pub(crate) trait Chores: Send + Sync + 'static {
    /// Does all that was put off until now.
    fn do_chores(&self);
}

/// How the thread is woken.
#[derive(Debug, Default)]
pub(crate) struct Bell {
    /// Somebody asked, and the thread has not looked since.
    rung: AtomicBool,
    /// The thread is there to hear it.
    heard: AtomicBool,
    stop: Mutex<bool>,
    changed: Condvar,
}

impl Bell {
    /// Wakes the thread. False if there is none: then the caller does the work.
    pub(crate) fn ring(&self) -> bool {
        if !self.heard.load(Ordering::Acquire) {
            return false;
        }
        if !self.rung.swap(true, Ordering::AcqRel) {
            // With the lock, so that it is not missed between the thread's look and its sleep, or its
            // end.
            let _stop = self.stop.lock();
            self.changed.notify_one();
            return self.heard.load(Ordering::Acquire);
        }
        true
    }

    /// Waits until somebody rings. False if the thread is to end, and nobody has rung before.
    fn wait(&self) -> bool {
        let mut stop = self.stop.lock();
        loop {
            if *stop {
                // Before the last look: who rings from now on does the work himself.
                self.heard.store(false, Ordering::Release);
            }
            if self.rung.swap(false, Ordering::AcqRel) {
                return true;
            }
            if *stop {
                return false;
            }
            self.changed.wait(&mut stop);
        }
    }
}

/// Says that nobody hears the bell any more, also if the thread panicked.
struct Deaf(Arc<Bell>);

impl Drop for Deaf {
    fn drop(&mut self) {
        self.0.heard.store(false, Ordering::Release);
    }
}

/// A running thread. Dropping it waits for what the thread does now and was woken for, and ends it.
#[derive(Debug)]
pub(crate) struct Grower {
    bell: Arc<Bell>,
    thread: Option<JoinHandle<()>>,
}

impl Grower {
    /// Starts a thread that works for `worker` whenever `bell` is rung, or says in the log why not.
    pub(crate) fn start(worker: Arc<impl Chores>, bell: Arc<Bell>) -> Grower {
        bell.heard.store(true, Ordering::Release);
        let deaf = Deaf(bell.clone());
        let run = move || {
            let deaf = deaf;
            while deaf.0.wait() {
                worker.do_chores();
            }
        };
        let thread = thread::Builder::new().name("vmm-kv-grow".into()).spawn(run);
        let thread = thread.map_err(|error| {
            vmm_sys::say!(warn, %error, "no thread for growth ahead; who appends does its work");
        });
        Grower { bell, thread: thread.ok() }
    }
}

impl Drop for Grower {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        if vmm_sys::process::is_forked_child() {
            return;
        }
        *self.bell.stop.lock() = true;
        self.bell.changed.notify_one();
        // A callback of the pool may drop the last handle in the thread itself, and a hook in a thread that
        // it waits for, which changes the buffer: then it ends after this.
        let may_wait = thread.thread().id() != thread::current().id() && !vmm_pool::is_operating();
        if may_wait && thread.join().is_err() {
            vmm_sys::say!(warn, "the thread for growth ahead has panicked");
        }
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use std::sync::atomic::AtomicU64;
    use std::time::{Duration, Instant};

    use super::*;

    #[derive(Default)]
    struct Count {
        done: AtomicU64,
        panics: bool,
    }

    impl Chores for Count {
        fn do_chores(&self) {
            self.done.fetch_add(1, Ordering::SeqCst);
            assert!(!self.panics, "as the test wants it");
        }
    }

    fn wait_for(condition: impl Fn() -> bool) {
        let began = Instant::now();
        while !condition() {
            assert!(began.elapsed() < Duration::from_secs(10), "nothing happens");
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn every_ring_is_answered_and_the_end_is_waited_for() {
        let (bell, count) = (Arc::new(Bell::default()), Arc::new(Count::default()));
        assert!(!bell.ring(), "nobody is there yet");
        let grower = Grower::start(count.clone(), bell.clone());
        for round in 1..=100 {
            assert!(bell.ring());
            wait_for(|| count.done.load(Ordering::SeqCst) >= round);
        }
        drop(grower);
        assert!(!bell.ring());
        assert_eq!(Arc::strong_count(&count), 1, "the thread has let it go");
    }

    #[test]
    fn a_thread_that_died_is_not_relied_upon() {
        let bell = Arc::new(Bell::default());
        let count = Arc::new(Count { panics: true, ..Count::default() });
        let grower = Grower::start(count.clone(), bell.clone());
        assert!(bell.ring());
        wait_for(|| !bell.ring());
        assert_eq!(count.done.load(Ordering::SeqCst), 1);
        drop(grower);
    }
}
