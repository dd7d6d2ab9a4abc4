//! The out-of-memory ladder: what is tried before a request fails, a rung a failure, cheapest first.
//!
//! Each rung runs with no lock held. What helped is counted, so that the statistics show how a pool
//! lives at its limit.

use std::cell::Cell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use vmm_sys::DeviceId;

use crate::device::Device;
use crate::lane::{Wait, sweep, trim};
use crate::lanes::LaneRef;
use crate::request::Request;
use crate::turn::Turn;

/// How often the callbacks may say that they freed something, for one request.
const CALLBACK_ROUNDS_MAX: u32 = 8;

/// A rung. The first is where every request starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rung {
    /// Create what is missing, in whole growth chunks.
    Create,
    /// Create no more than is missing, in shorter chunks where need be.
    Exact,
    /// The driver has nothing left: use what the lane and the stock hold.
    OwnOnly,
    /// Wait for what is in the lane's limbo, and for what ended lanes left.
    WaitLimbo,
    /// Empty the device's other lanes into the stock.
    OtherLanes,
    /// Give the stock and the lane's own free chunks back: they have the wrong length.
    ReleaseStock,
    /// Empty this process's other pools on the device.
    OtherPools,
    /// Ask the caller's callbacks.
    Callbacks,
}

/// The rungs after the first, in order.
const RUNGS: [Rung; 7] = [
    Rung::Exact,
    Rung::OwnOnly,
    Rung::WaitLimbo,
    Rung::OtherLanes,
    Rung::ReleaseStock,
    Rung::OtherPools,
    Rung::Callbacks,
];

/// How often each rung was climbed on one device, and how often all of them did not suffice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LadderStats {
    /// Requests that the driver's refusal or the limit made be content with shorter chunks.
    pub exact: u64,
    /// Those that it sent to what the lane and the stock hold.
    pub own_only: u64,
    /// Waits for a lane's limbo, and for what ended lanes left.
    pub waited: u64,
    /// Other lanes emptied.
    pub other_lanes: u64,
    /// Stock given back.
    pub stock_released: u64,
    /// Other pools emptied.
    pub other_pools: u64,
    /// Callbacks asked.
    pub callbacks: u64,
    /// Requests that failed after all.
    pub failed: u64,
}

/// The counters behind [`LadderStats`]. Cold: shared atomics are fine here.
#[derive(Debug, Default)]
pub(crate) struct LadderCounts {
    climbed: [AtomicU64; RUNGS.len()],
    failed: AtomicU64,
}

impl LadderCounts {
    pub(crate) fn stats(&self) -> LadderStats {
        let [exact, own_only, waited, other_lanes, stock_released, other_pools, callbacks] =
            self.climbed.each_ref().map(|count| count.load(Ordering::Relaxed));
        LadderStats {
            exact,
            own_only,
            waited,
            other_lanes,
            stock_released,
            other_pools,
            callbacks,
            failed: self.failed.load(Ordering::Relaxed),
        }
    }
}

/// What a caller can do when memory is short: free some, and say whether it did.
///
/// Called with the device and the bytes asked for, with no lock of the pool held: it may allocate
/// and free. A callback that panics counts as one that did not help.
#[derive(Clone)]
pub(crate) struct Callback(pub(crate) Arc<dyn Fn(DeviceId, u64) -> bool + Send + Sync>);

impl fmt::Debug for Callback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Callback")
    }
}

/// Every device of every pool of the process, so that one pool's idle memory can serve another's
/// shortage.
static DEVICES: Mutex<Vec<Weak<Device>>> = Mutex::new(Vec::new());

/// Makes a device's idle memory available to other pools' shortages.
pub(crate) fn register(device: &Arc<Device>) {
    let mut devices = DEVICES.lock();
    devices.retain(|known| known.strong_count() > 0);
    devices.push(Arc::downgrade(device));
}

/// The same GPU in the other pools of this process.
fn elsewhere(device: &Device) -> Vec<Arc<Device>> {
    let all: Vec<Arc<Device>> = DEVICES.lock().iter().filter_map(Weak::upgrade).collect();
    let same_driver =
        |other: &Device| std::ptr::addr_eq(Arc::as_ptr(&other.driver), Arc::as_ptr(&device.driver));
    all.into_iter()
        .filter(|other| !std::ptr::eq(&**other, device))
        .filter(|other| other.plan.device == device.plan.device && same_driver(other))
        .collect()
}

thread_local! {
    /// A callback of this thread is running: its own requests must not ask callbacks again.
    static IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
}

/// One request's way up.
#[derive(Debug)]
pub(crate) struct Climb {
    /// How many of [`RUNGS`] were climbed.
    climbed: usize,
    callback_rounds: u32,
}

impl Climb {
    pub(crate) fn new() -> Climb {
        Climb { climbed: 0, callback_rounds: 0 }
    }

    /// The rung the request stands on.
    pub(crate) fn rung(&self) -> Rung {
        self.climbed.checked_sub(1).map_or(Rung::Create, |last| RUNGS[last])
    }

    /// Climbs one rung and does what it stands for. False if none is left: the request fails.
    pub(crate) fn next(&mut self, device: &Device, lane: LaneRef, request: &Request) -> bool {
        if self.climbed == RUNGS.len() {
            device.ladder.failed.fetch_add(1, Ordering::Relaxed);
            return false;
        }
        let rung = RUNGS[self.climbed];
        device.ladder.climbed[self.climbed].fetch_add(1, Ordering::Relaxed);
        self.climbed += 1;
        let span = tracing::debug_span!(
            "vmm_pool.reclaim",
            device = device.plan.device.0,
            bytes = request.bytes(),
            ?rung
        );
        let _entered = span.enter();
        let wait = if request.may_wait() { Wait::Yes } else { Wait::No };
        match rung {
            Rung::Create | Rung::Exact | Rung::OwnOnly => {}
            Rung::WaitLimbo => {
                sweep(lane.cell, wait, Turn::Requester);
                device.leaving.sweep(device, wait, Turn::Requester);
            }
            Rung::OtherLanes => empty_lanes(device, Some(lane), wait),
            Rung::ReleaseStock => {
                trim(lane, wait, Turn::Requester);
                device.release_stock(0, Turn::Requester);
            }
            Rung::OtherPools => {
                for other in elsewhere(device) {
                    empty_lanes(&other, None, wait);
                    other.release_stock(0, Turn::Requester);
                }
            }
            Rung::Callbacks => {
                let helped = ask(device, request.bytes());
                if helped && self.callback_rounds < CALLBACK_ROUNDS_MAX {
                    // What was freed may lie anywhere: the way starts again.
                    self.callback_rounds += 1;
                    self.climbed = 0;
                }
            }
        }
        true
    }
}

fn empty_lanes(device: &Device, except: Option<LaneRef>, wait: Wait) {
    let lanes = device.lanes.lock().all();
    for lane in lanes {
        if except.is_none_or(|own| own.id != lane.id) {
            trim(lane, wait, Turn::Requester);
        }
    }
    device.leaving.sweep(device, wait, Turn::Requester);
}

/// Asks the callbacks in order until one says that it freed something.
fn ask(device: &Device, bytes: u64) -> bool {
    if IN_CALLBACK.replace(true) {
        return false;
    }
    let helped = device.callbacks.iter().any(|callback| {
        catch_unwind(AssertUnwindSafe(|| (callback.0)(device.plan.device, bytes))).unwrap_or_else(
            |_| {
                tracing::warn!("a callback for short memory panicked");
                false
            },
        )
    });
    IN_CALLBACK.set(false);
    helped
}
