//! The lanes that the calling thread used last: found by comparing a few keys.

use std::cell::RefCell;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, Ordering};

use vmm_pool::Lane;

use crate::lanes::{Key, Seat};

/// Streams that a thread goes back and forth between.
const LANES_MAX: usize = 4;

/// How many pools were destroyed. Written then, and only read on the warm path.
static DESTROYED: AtomicU32 = AtomicU32::new(0);

struct Recent {
    lanes: [Option<(Key, Seat)>; LANES_MAX],
    /// Which one gives way to the next.
    oldest: usize,
    /// [`DESTROYED`] when the thread last looked: what it remembers may be of a pool that is gone if
    /// that has grown.
    destroyed: u32,
}

thread_local! {
    static RECENT: RefCell<Recent> = const {
        RefCell::new(Recent { lanes: [const { None }; LANES_MAX], oldest: 0, destroyed: 0 })
    };
}

impl Recent {
    #[inline]
    fn find(&self, key: Key) -> Option<&Lane> {
        let known = self.lanes.iter().flatten().find(|(known, _)| *known == key);
        known.map(|(_, seat)| seat.lane())
    }

    fn forget(&mut self, which: impl Fn(Key) -> bool) {
        for entry in &mut self.lanes {
            if entry.as_ref().is_some_and(|(key, _)| which(*key)) {
                *entry = None;
            }
        }
    }
}

/// Does `work` with the lane of `key`, if the thread used it of late. For the process's own pools,
/// which are not destroyed.
#[inline]
pub fn with<T>(key: Key, work: impl FnOnce(&Lane) -> T) -> Option<T> {
    let found = RECENT.try_with(|recent| recent.try_borrow().ok()?.find(key).map(work));
    // A thread that is dropping its values remembers nothing any more.
    found.ok().flatten()
}

/// The same for every pool, unless one was destroyed since.
#[inline]
pub(crate) fn with_any<T>(key: Key, work: impl FnOnce(&Lane) -> T) -> Option<T> {
    let found = RECENT.try_with(|recent| {
        let recent = recent.try_borrow().ok()?;
        match recent.destroyed == DESTROYED.load(Ordering::Relaxed) {
            true => recent.find(key).map(work),
            false => None,
        }
    });
    found.ok().flatten()
}

/// Remembers a lane, in the place of an older one of the same key if there is one.
pub fn remember(key: Key, seat: &Seat) {
    let _ended = RECENT.try_with(|recent| {
        let Ok(mut recent) = recent.try_borrow_mut() else { return };
        let destroyed = DESTROYED.load(Ordering::Relaxed);
        if recent.destroyed != destroyed {
            recent.forget(|_| true);
            recent.destroyed = destroyed;
        }
        let known = |entry: &Option<(Key, Seat)>| entry.as_ref().is_some_and(|it| it.0 == key);
        let place = recent.lanes.iter().position(known).unwrap_or_else(|| {
            let oldest = recent.oldest;
            recent.oldest = (oldest + 1) % LANES_MAX;
            oldest
        });
        recent.lanes[place] = Some((key, seat.clone()));
    });
}

/// Forgets the lanes of a stream.
pub(crate) fn forget_stream(device: c_int, stream: usize) {
    forget(|key| key.is_of(device, stream));
}

fn forget(which: impl Fn(Key) -> bool) {
    let _ended = RECENT.try_with(|recent| {
        if let Ok(mut recent) = recent.try_borrow_mut() {
            recent.forget(which);
        }
    });
}

/// A pool is destroyed: no thread uses what it remembers of it any more.
pub(crate) fn forget_pool(number: u32) {
    DESTROYED.fetch_add(1, Ordering::Relaxed);
    forget(|key| key.pool_number() == number);
}
