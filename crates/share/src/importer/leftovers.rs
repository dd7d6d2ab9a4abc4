//! What ended while a GPU still worked on it: kept mapped until that work is done.

use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

use super::space::Space;
use super::uses::Uses;

static LEFT: Mutex<Vec<(Space, Arc<Uses>)>> = Mutex::new(Vec::new());

/// Unmaps at once if nothing uses it, else waits until the deadline, else keeps it for a later try.
pub(super) fn end(space: Space, uses: &Arc<Uses>, deadline: Instant) {
    if uses.wait(deadline) {
        drop(space);
    } else {
        vmm_sys::say!(
            warn,
            "an import ended under work of a GPU; its memory stays until that is done"
        );
        LEFT.lock().push((space, uses.clone()));
    }
}

/// Unmaps what imports that ended under work of a GPU have left, as far as that work is done. Says how
/// many are still left. Every import that is opened does this too.
pub fn retry_leftovers() -> usize {
    // Asked and unmapped without the lock.
    let all = std::mem::take(&mut *LEFT.lock());
    let left: Vec<_> = all.into_iter().filter(|(_, uses)| !uses.are_done()).collect();
    let mut list = LEFT.lock();
    list.extend(left);
    list.len()
}
