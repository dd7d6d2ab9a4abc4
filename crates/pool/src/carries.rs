//! [`Carries`]: who has memory of a device in hand.
//!
//! Between a lane and the shelf, or the shelf and the driver, memory is in a thread's hands for the
//! time of some driver calls. Sums taken meanwhile are of two moments, and a request that finds
//! nothing may have missed just that.

use std::cell::Cell;
use std::marker::PhantomData;
use std::time::Duration;

use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{thread, thread_local};

thread_local! {
    /// How often the calling thread carries memory now, of whatever place.
    static IN_HAND: Cell<u32> = const { Cell::new(0) };
}

/// Whether the calling thread carries memory: then it must not wait for those who do.
pub(crate) fn in_hand() -> bool {
    IN_HAND.with(Cell::get) > 0
}

/// How often memory was taken into a thread's hands, and put down.
#[derive(Debug, Default)]
pub(crate) struct Carries {
    begun: AtomicU64,
    ended: AtomicU64,
}

/// While it lives, memory is in a thread's hands: booked, but neither in a lane nor on the shelf, or
/// in a lane's limbo on its way to the shelf.
#[derive(Debug)]
pub(crate) struct Carrying<'a> {
    carries: &'a Carries,
    /// Counted in this thread, so it ends there.
    _thread: PhantomData<*const ()>,
}

impl Drop for Carrying<'_> {
    fn drop(&mut self) {
        IN_HAND.with(|it| it.set(it.get() - 1));
        self.carries.ended.fetch_add(1, Ordering::AcqRel);
    }
}

impl Carries {
    /// Says that the calling thread takes memory into its hands. It waits for no work of a stream
    /// until it has put it down.
    pub(crate) fn begin(&self) -> Carrying<'_> {
        IN_HAND.with(|it| it.set(it.get() + 1));
        self.begun.fetch_add(1, Ordering::AcqRel);
        Carrying { carries: self, _thread: PhantomData }
    }

    /// How often memory was carried; `None` while some thread does. What was seen between two equal
    /// answers is of one moment.
    pub(crate) fn settled(&self) -> Option<u64> {
        let ended = self.ended.load(Ordering::Acquire);
        (self.begun.load(Ordering::Acquire) == ended).then_some(ended)
    }

    /// Waits until as many were put down as are in hand now or were before.
    pub(crate) fn wait(&self) {
        let begun = self.begun.load(Ordering::Acquire);
        while self.ended.load(Ordering::Acquire) < begun {
            // About one driver call.
            thread::sleep(Duration::from_micros(20));
        }
    }
}
