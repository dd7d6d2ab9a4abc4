//! Mappings that outlived their pool: a capture was in the way of knowing when their users are done.
//!
//! A stream that is being captured cannot be waited for, and an event recorded on it would become
//! part of the graph; but the work enqueued before the capture began may still be running. So what
//! such work may use cannot be given back at the end of a pool. It stays here until a pool of the
//! same driver comes by after the capture: at a miss, at a trim, at its end.

use std::sync::Arc;

use vmm_sys::Driver;
use vmm_sys::object::RelaxedCapture;

use crate::events::Events;
use crate::leaving::{Entry, sweep_entries};
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::{Mutex, global};
use crate::turn::Turn;

/// What one pool left on one device.
#[derive(Debug)]
struct Stranded {
    events: Arc<Events>,
    entries: Vec<Entry>,
}

global! {
    static STRANDED: Mutex<Vec<Stranded>> = Mutex::new(Vec::new());
}

global! {
    /// How many entries of the list there are: misses ask, and mostly there are none.
    static COUNT: AtomicUsize = AtomicUsize::new(0);
}

/// Keeps mappings until their gates have passed.
pub(crate) fn keep(events: Arc<Events>, entries: Vec<Entry>) {
    let mut stranded = STRANDED.lock();
    stranded.push(Stranded { events, entries });
    COUNT.store(stranded.len(), Ordering::Relaxed);
}

/// Gives back what has passed its gates meanwhile, of this driver.
pub(crate) fn sweep(driver: &Arc<dyn Driver>, turn: Turn) {
    if COUNT.load(Ordering::Relaxed) == 0 {
        return;
    }
    let same =
        |it: &mut Stranded| std::ptr::addr_eq(Arc::as_ptr(&it.events.driver), Arc::as_ptr(driver));
    // Taken out, so that no driver call is made under the lock.
    let mut in_hand = {
        let mut stranded = STRANDED.lock();
        let mine = stranded.extract_if(.., same).collect();
        COUNT.store(stranded.len(), Ordering::Relaxed);
        InHand(mine)
    };
    for Stranded { events, entries } in &mut in_hand.0 {
        // Without the relaxed mode a query could end somebody's capture: then nothing is asked.
        let Ok(_relaxed) = RelaxedCapture::enter(&events.driver) else { continue };
        // The last mapping of a chunk lets it go, and its booking with it.
        sweep_entries(events, entries, turn, |chunk| turn.with(|| drop(chunk)));
    }
}

/// What a sweep has in its hands. What is left goes back when it is dropped, whatever happened.
struct InHand(Vec<Stranded>);

impl Drop for InHand {
    fn drop(&mut self) {
        let left = self.0.drain(..).filter(|it| !it.entries.is_empty());
        left.for_each(|Stranded { events, entries }| keep(events, entries));
    }
}
