//! The lanes that the calling thread used last: found by comparing a few keys.

use std::cell::RefCell;

use vmm_pool::Lane;

use crate::lanes::Key;

/// Streams that a thread goes back and forth between.
const LANES_MAX: usize = 4;

struct Recent {
    lanes: [Option<(Key, Lane)>; LANES_MAX],
    /// Which one gives way to the next.
    oldest: usize,
}

thread_local! {
    static RECENT: RefCell<Recent> =
        const { RefCell::new(Recent { lanes: [const { None }; LANES_MAX], oldest: 0 }) };
}

/// Does `work` with the lane of `key`, if the thread used it of late.
#[inline]
pub(crate) fn with<T>(key: Key, work: impl FnOnce(&Lane) -> T) -> Option<T> {
    let found = RECENT.try_with(|recent| {
        let recent = recent.try_borrow().ok()?;
        let known = recent.lanes.iter().flatten().find(|(known, _)| *known == key);
        known.map(|(_, lane)| work(lane))
    });
    // A thread that is dropping its values remembers nothing any more.
    found.ok().flatten()
}

/// Remembers a lane, in the place of an older one of the same key if there is one.
pub(crate) fn remember(key: Key, lane: &Lane) {
    let _ended = RECENT.try_with(|recent| {
        let Ok(mut recent) = recent.try_borrow_mut() else { return };
        let known = |entry: &Option<(Key, Lane)>| entry.as_ref().is_some_and(|it| it.0 == key);
        let place = recent.lanes.iter().position(known).unwrap_or_else(|| {
            let oldest = recent.oldest;
            recent.oldest = (oldest + 1) % LANES_MAX;
            oldest
        });
        recent.lanes[place] = Some((key, lane.clone()));
    });
}

/// Forgets a lane.
pub(crate) fn forget(key: Key) {
    let _ended = RECENT.try_with(|recent| {
        let Ok(mut recent) = recent.try_borrow_mut() else { return };
        for entry in &mut recent.lanes {
            if entry.as_ref().is_some_and(|it| it.0 == key) {
                *entry = None;
            }
        }
    });
}
