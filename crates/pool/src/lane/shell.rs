//! [`LaneCell`]: the shell of a lane, which outlives it.

use std::sync::{Arc, OnceLock};

use crossbeam::utils::CachePadded;
use vmm_heap::{Heap, HeapConfig};
use vmm_lock::BiasedMutex;
use vmm_sys::object::Stream;

use super::wreck::{OnUnwind, Wreck};
use super::{Figures, LaneGuard, LaneState, Limbo, Live, Marks};
use crate::buffer::Home;
use crate::config::DebugMode;
use crate::device::Device;
use crate::directory;
use crate::idle::Seen;
use crate::lanes::LaneRef;
use crate::region::Region;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Class, Mutex, global};
use crate::trace::{LaneTrace, Recorder};

/// The shell of a lane, padded so that no two lanes share a cache line.
#[derive(Debug)]
pub(crate) struct LaneCell {
    /// Where the directory finds it.
    number: u32,
    state: CachePadded<BiasedMutex<Option<LaneState>>>,
    pub(crate) figures: CachePadded<Figures>,
    /// Of a lane that broke: then the shell is not used again.
    pub(super) wreck: OnceLock<Arc<Wreck>>,
}

global! {
    /// Shells of lanes that retired.
    static VACANT: Mutex<Vec<&'static LaneCell>> = Mutex::new(Vec::new());
}

global! {
    /// Tells a lane from an earlier one in the same shell.
    static NEXT_LANE: AtomicU64 = AtomicU64::new(1);
}

/// All of them: a thread that takes several does so under the lock of their list.
const LANE_LOCKS: Class = Class::here();

impl LaneCell {
    /// A shell without a lane; the directory makes them.
    pub(crate) fn vacant(number: u32) -> LaneCell {
        LaneCell {
            number,
            state: CachePadded::new(BiasedMutex::new(None)),
            figures: CachePadded::default(),
            wreck: OnceLock::new(),
        }
    }

    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    pub(crate) fn lock(&'static self) -> LaneGuard {
        let taken = LANE_LOCKS.taken();
        LaneGuard::new(self, self.state.lock(), taken)
    }

    /// Does `work` under the lock. What throws in there leaves a wreck; that it may costs nothing until
    /// then.
    #[inline(always)]
    pub(crate) fn with<R>(&'static self, work: impl FnOnce(&mut Option<LaneState>) -> R) -> R {
        let _held = LANE_LOCKS.taken();
        let mut guard = self.state.lock();
        let watch = OnUnwind { cell: self, state: &mut guard };
        let answer = work(&mut *watch.state);
        std::mem::forget(watch);
        answer
    }

    /// A shell with a new, empty lane in it.
    pub(crate) fn open(
        device: Arc<Device>,
        stream: Stream,
        recorder: Option<&Arc<Recorder>>,
    ) -> LaneRef {
        let id = NEXT_LANE.fetch_add(1, Ordering::Relaxed);
        let guards = (device.plan.debug_mode == DebugMode::Guard).then(Box::default);
        let special = guards.is_some() || stream.is_per_thread();
        let home = Home { device: device.plan.device, special };
        let vacant = VACANT.lock().pop();
        let cell = vacant.unwrap_or_else(directory::new_shell);
        cell.figures.tell_live(0);
        let state = LaneState {
            id,
            heap: Heap::new(HeapConfig { placement: device.plan.placement, ..Default::default() }),
            region: Region::new(device.plan.granularity_bytes, &cell.figures),
            live: Live::default(),
            earlier_peak_bytes: 0,
            mark: None,
            trace: recorder.map(|recorder| LaneTrace::new(recorder, id, home.device, stream.id())),
            limbo: Limbo::default(),
            device,
            home,
            last: None,
            drained_tick: 0,
            seen: Seen::default(),
            closing: false,
            open_id: id,
            diverted: None,
            is_private: false,
            launches: Vec::new(),
            busy: 0,
            marks: if stream.is_per_thread() { Marks::of_one_thread() } else { Marks::default() },
            guards,
            stream,
            is_listed: false,
        };
        *cell.lock() = Some(state);
        LaneRef { cell, id }
    }

    pub(super) fn give_back_shell(&'static self) {
        VACANT.lock().push(self);
    }
}
