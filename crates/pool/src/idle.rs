//! Idle lanes: found by looking, and emptied for others.
//!
//! A warm operation reads no clock and tells nobody that it happened: it moves the tick of its
//! lane's own heap. A lane whose tick has not moved between two looks was not used between them. The
//! background thread looks; while there is none, requests that find no mapped hole do.
//!
//! What an idle lane gives is wholly free chunks. Their mappings retire behind the lane's stream and
//! all that it waits for, and a chunk comes to the stock when the last of them is gone: so whoever
//! takes it from there is ordered after each of its earlier users.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmm_sys::caught::thrown;

use crate::device::Device;
use crate::lane::{Wait, sweep, trim_if_idle};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::turn::Turn;

/// Looks in the time after which a lane counts as idle: it is found at most a quarter late.
const LOOKS: u64 = 4;

/// Where the time comes from.
#[derive(Clone)]
pub(crate) struct Clock(pub(crate) Arc<dyn Fn() -> Duration + Send + Sync>);

impl Default for Clock {
    fn default() -> Clock {
        let start = Instant::now();
        Clock(Arc::new(move || start.elapsed()))
    }
}

impl Clock {
    /// The time, in milliseconds since some fixed moment.
    pub(crate) fn now_ms(&self) -> u64 {
        // One that throws stands still: nothing is idle by it. Asked under the lock of a stock, too.
        let time = thrown(|| (self.0)()).unwrap_or_default();
        u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Clock")
    }
}

/// What looks know of one lane. Kept with it, under its lock.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Seen {
    tick: u64,
    since_ms: u64,
}

impl Seen {
    /// Notes what a look finds. Returns since when the tick is known to be this.
    pub(crate) fn note(&mut self, tick: u64, now_ms: u64) -> u64 {
        if self.tick != tick {
            *self = Seen { tick, since_ms: now_ms };
        }
        self.since_ms
    }
}

/// One device's time, and when its lanes are looked at.
#[derive(Debug)]
pub(crate) struct Watch {
    clock: Clock,
    due_ms: AtomicU64,
    /// A background thread looks.
    is_kept: AtomicBool,
    emptied: AtomicU64,
}

impl Watch {
    pub(crate) fn new(clock: Clock) -> Watch {
        Watch {
            clock,
            due_ms: AtomicU64::new(0),
            is_kept: AtomicBool::new(false),
            emptied: AtomicU64::new(0),
        }
    }

    /// The time, in milliseconds since some fixed moment.
    pub(crate) fn now_ms(&self) -> u64 {
        self.clock.now_ms()
    }

    /// Says whether there is a thread that looks.
    pub(crate) fn keep(&self, is_kept: bool) {
        self.is_kept.store(is_kept, Ordering::Relaxed);
    }

    /// How often a lane was found idle and gave something.
    pub(crate) fn emptied(&self) -> u64 {
        self.emptied.load(Ordering::Relaxed)
    }

    /// Whether it is time for a look; for one thread only.
    fn is_due(&self, now_ms: u64, idle_ms: u64) -> bool {
        let next_ms = now_ms.saturating_add((idle_ms / LOOKS).max(1));
        let relaxed = Ordering::Relaxed;
        self.due_ms
            .fetch_update(relaxed, relaxed, |due_ms| (due_ms <= now_ms).then_some(next_ms))
            .is_ok()
    }
}

/// The look of the background thread, if it is time.
pub(crate) fn look(device: &Device, stopped: &dyn Fn() -> bool) {
    let Some(idle_ms) = device.plan.idle_lane_ms else { return };
    let now_ms = device.watch.now_ms();
    if device.watch.is_due(now_ms, idle_ms) {
        empty_idle(device, now_ms, idle_ms, Turn::Background, stopped);
    }
}

/// The look of a request that found no mapped hole: only while no thread does it.
pub(crate) fn look_in_passing(device: &Device) {
    let Some(idle_ms) = device.plan.idle_lane_ms else { return };
    if device.watch.is_kept.load(Ordering::Relaxed) {
        return;
    }
    let now_ms = device.watch.now_ms();
    if device.watch.is_due(now_ms, idle_ms) {
        empty_idle(device, now_ms, idle_ms, Turn::Requester, &|| false);
    }
}

/// Looks at every lane, and empties into the stock those that were idle for `idle_ms` or longer.
/// Waits for nothing: what unfinished work may still use comes later.
pub(crate) fn empty_idle(
    device: &Device,
    now_ms: u64,
    idle_ms: u64,
    turn: Turn,
    stopped: &dyn Fn() -> bool,
) {
    let lanes = device.lanes.lock().all();
    for lane in lanes {
        if stopped() {
            return;
        }
        // What comes back from limbo is a use of the lane, so it comes first.
        sweep(lane.cell, Wait::No, turn);
        let tick = {
            let Some(mut state) = lane.lock() else { continue };
            let tick = state.heap.tick();
            let since_ms = state.seen.note(tick, now_ms);
            (now_ms.saturating_sub(since_ms) >= idle_ms).then_some(tick)
        };
        if tick.is_some_and(|tick| trim_if_idle(lane, tick, turn)) {
            device.watch.emptied.fetch_add(1, Ordering::Relaxed);
            vmm_sys::say!(
                debug,
                device = device.plan.device.0,
                lane = lane.id,
                "an idle lane was emptied"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lane_is_idle_since_the_look_that_found_its_tick() {
        let mut seen = Seen::default();
        assert_eq!(seen.note(5, 100), 100);
        assert_eq!(seen.note(5, 130), 100);
        assert_eq!(seen.note(6, 140), 140);
        assert_eq!(seen.note(6, 1000), 140);
    }

    #[test]
    fn one_thread_looks_and_not_before_it_is_time() {
        let watch = Watch::new(Clock::default());
        let due: Vec<u64> = (0..100).filter(|now_ms| watch.is_due(*now_ms, 100)).collect();
        assert_eq!(due, [0, 25, 50, 75]);
        assert!(!watch.is_due(99, 100));
        // The shortest time, and the longest.
        assert!(watch.is_due(100, 1) && !watch.is_due(100, 1) && watch.is_due(101, u64::MAX));
        assert!(!watch.is_due(1 << 40, 1));
    }
}
