//! The bell that wakes a cache's thread.

use std::sync::Arc;

use shuttle::sync::Mutex;

use crate::grower::{Bell, Chores, Grower};
use crate::rig::{prove, spawn};

/// Work that was put off, and work that is done.
#[derive(Default)]
struct Work(Mutex<(u32, u32)>);

impl Work {
    fn put_off(&self) {
        self.0.lock().unwrap().0 += 1;
    }

    fn counts(&self) -> (u32, u32) {
        *self.0.lock().unwrap()
    }
}

impl Chores for Work {
    fn do_chores(&self) {
        let (put_off, done) = &mut *self.0.lock().unwrap();
        *done += std::mem::take(put_off);
    }
}

/// Two threads put work off and ring, while the thread that they ring for starts, works, sleeps and ends:
/// none of it is forgotten, and the thread lets go of what it worked for.
///
/// Found: work of who rang while the thread was on its way out, which nobody did (`Bell::wait`,
/// `Bell::ring`). Caught: the same again, on either side; an end that is not waited for (`Grower::drop`).
#[test]
fn nothing_that_was_put_off_is_forgotten() {
    prove("nothing_that_was_put_off_is_forgotten", || {
        let (work, bell) = (Arc::<Work>::default(), Arc::<Bell>::default());
        let grower = Grower::start(work.clone(), bell.clone());
        let rings = [0, 1].map(|_| {
            let (work, bell) = (work.clone(), bell.clone());
            spawn(move || {
                for _ in 0..2 {
                    work.put_off();
                    if !bell.ring() {
                        work.do_chores();
                    }
                }
            })
        });
        drop(grower);
        rings.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(work.counts(), (0, 4));
        assert_eq!(Arc::strong_count(&work), 1);
    });
}

/// Who rings is heard, whatever the thread does at that moment: nothing but the ring wakes it.
///
/// Caught: a ring that does not notify, or not under the lock (`Bell::ring`); a sleep without a look
/// (`Bell::wait`).
#[test]
fn every_ring_is_heard() {
    prove("every_ring_is_heard", || {
        let (work, bell) = (Arc::<Work>::default(), Arc::<Bell>::default());
        let grower = Grower::start(work.clone(), bell.clone());
        let rings = [0, 1].map(|_| {
            let (work, bell) = (work.clone(), bell.clone());
            spawn(move || {
                work.put_off();
                assert!(bell.ring());
            })
        });
        rings.into_iter().for_each(|thread| thread.join().unwrap());
        while work.counts() != (0, 2) {
            shuttle::thread::yield_now();
        }
        drop(grower);
    });
}
