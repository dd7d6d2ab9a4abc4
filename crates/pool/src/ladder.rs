//! The out-of-memory ladder: what is tried before a request fails, a rung a failure, cheapest first.
//!
//! Each rung runs with no lock held. What helped is counted, so that the statistics show how a pool
//! lives at its limit.
//!
//! The last two rungs lie beyond the device: whoever can make room on it by means of a neighbour or of
//! the host fills them ([`Relief`]), and the pool itself, by moving elastic buffers. They are for
//! requests that may borrow. One that nobody fills is not there: it is neither climbed nor counted.

mod callbacks;
mod help;
mod stats;

use std::sync::{Arc, Weak};

use vmm_sys::DeviceId;
use vmm_sys::object::retry_failed_drops;

use crate::carries;
use crate::device::Device;
use crate::elastic::commit::How;
use crate::lane::{Wait, sweep, trim};
use crate::lanes::LaneRef;
use crate::obstacle;
use crate::places::Site;
use crate::request::Request;
use crate::sync::{Mutex, global};
use crate::turn::Turn;
pub(crate) use callbacks::Callbacks;
pub use callbacks::ShortageHook;
pub use help::Relief;
pub(crate) use help::Reliefs;
use help::{ask, is_filled, relieve};

pub(crate) use stats::LadderCounts;
pub use stats::LadderStats;

/// How often callbacks and reliefs may say that they made room, for one request.
const HELP_ROUNDS_MAX: u32 = 8;
/// How often a request begins anew since another thread had memory in its hands.
const RESTARTS_MAX: u32 = 16;

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
    /// Give the lane's own free chunks and the stock back, as much as is lacking: they have the wrong
    /// length. And what the driver did not take back before.
    ReleaseStock,
    /// Empty the stock and this process's other pools on the device.
    OtherPools,
    /// Ask the caller's callbacks.
    Callbacks,
    /// Have a neighbour make room.
    Neighbour,
    /// Have the host make room.
    Host,
}

/// The rungs after the first, in order.
const RUNGS: [Rung; 9] = [
    Rung::Exact,
    Rung::OwnOnly,
    Rung::WaitLimbo,
    Rung::OtherLanes,
    Rung::ReleaseStock,
    Rung::OtherPools,
    Rung::Callbacks,
    Rung::Neighbour,
    Rung::Host,
];

/// So many of them find memory of the pool's own; those behind ask others.
const OWN_RUNGS: usize = 6;

/// One device of a pool: which GPU, and whose side.
struct Known {
    gpu: (usize, DeviceId),
    device: Weak<Device>,
}

/// Tells GPUs apart. The driver's address is its own while a pool lives that uses it.
fn gpu(device: &Device) -> (usize, DeviceId) {
    (Arc::as_ptr(&device.driver).addr(), device.plan.device)
}

global! {
    /// Every device of every pool of the process, so that one pool's idle memory can serve another's
    /// shortage.
    static DEVICES: Mutex<Vec<Known>> = Mutex::new(Vec::new());
}

/// Makes a device's idle memory available to other pools' shortages.
pub(crate) fn register(device: &Arc<Device>) {
    let mut devices = DEVICES.lock();
    devices.retain(|known| known.device.strong_count() > 0);
    devices.push(Known { gpu: gpu(device), device: Arc::downgrade(device) });
}

/// The same GPU in the other pools of this process. Pools of other GPUs are not even touched: one
/// that is held for a moment would end later than its last handle.
fn elsewhere(device: &Device) -> Vec<Arc<Device>> {
    let gpu = gpu(device);
    DEVICES
        .lock()
        .iter()
        .filter(|known| known.gpu == gpu && !std::ptr::eq(known.device.as_ptr(), device))
        .filter_map(|known| known.device.upgrade())
        .collect()
}

/// One request's way up.
#[derive(Debug)]
pub(crate) struct Climb {
    /// How many of [`RUNGS`] were climbed.
    climbed: usize,
    /// How many the way starts above.
    first: usize,
    help_rounds: u32,
    restarts: u32,
}

impl Climb {
    pub(crate) fn new() -> Climb {
        obstacle::forget();
        Climb { climbed: 0, first: 0, help_rounds: 0, restarts: 0 }
    }

    /// For whole chunks that belong to no lane: what makes chunks shorter, or takes a lane's own,
    /// is no help.
    pub(crate) fn for_chunks() -> Climb {
        obstacle::forget();
        let first = RUNGS.iter().take_while(|rung| **rung != Rung::WaitLimbo).count();
        Climb { climbed: first, first, help_rounds: 0, restarts: 0 }
    }

    /// The rung the request stands on.
    pub(crate) fn rung(&self) -> Rung {
        self.climbed.checked_sub(1).map_or(Rung::Create, |last| RUNGS[last])
    }

    /// The next rung that is there.
    fn step(&mut self, device: &Device, request: &Request) -> Option<Rung> {
        loop {
            let rung = *RUNGS.get(self.climbed)?;
            self.climbed += 1;
            let is_there = match rung {
                Rung::Neighbour | Rung::Host => is_filled(device, rung, request),
                _ => true,
            };
            if is_there {
                device.ladder.climbed(self.climbed - 1);
                return Some(rung);
            }
        }
    }

    /// Climbs one rung and does what it stands for. False if none is left: the request fails.
    ///
    /// The pool has nothing left only if it was seen so for sure: with no memory in other threads'
    /// hands, on its way to where this request looked before. `lack_bytes` are lacking at most.
    pub(crate) fn next(
        &mut self,
        device: &Device,
        lane: LaneRef,
        request: &Request,
        is_sure: bool,
        lack_bytes: u64,
    ) -> bool {
        let may_wait = request.may_wait() && self.restarts < RESTARTS_MAX;
        // One that a callback makes may stand within an operation that has memory in hand itself.
        if self.climbed >= OWN_RUNGS && !is_sure && may_wait && !carries::in_hand() {
            device.depot.carries.wait();
            self.restarts += 1;
            self.climbed = 0;
        }
        self.climb(device, Some(lane), request, lack_bytes)
    }

    /// The same for whole chunks that belong to no lane. In the background nobody outside of the
    /// pool is asked: a callback may end the pool, and with it the thread that it runs in.
    pub(crate) fn next_for_chunks(
        &mut self,
        device: &Device,
        request: &Request,
        turn: Turn,
    ) -> bool {
        let next = RUNGS.get(self.climbed);
        if turn == Turn::Background && next == Some(&Rung::Callbacks) {
            self.climbed = RUNGS.len();
        }
        self.climb(device, None, request, request.bytes())
    }

    /// The same on a node of the host: what leaves is waited for, and the stock has the wrong
    /// length.
    pub(crate) fn next_on_host(&mut self, site: &Site<'_>, how: How) -> bool {
        self.climbed += 1;
        match self.climbed - self.first {
            1 => site.sweep(how.wait, how.turn),
            2 => drop(site.depot.release_stock(0, how.turn)),
            _ => return false,
        }
        true
    }

    fn climb(
        &mut self,
        device: &Device,
        lane: Option<LaneRef>,
        request: &Request,
        lack_bytes: u64,
    ) -> bool {
        let Some(rung) = self.step(device, request) else {
            device.ladder.failed();
            return false;
        };
        let _within = vmm_sys::within!(
            "vmm_pool.reclaim",
            device = device.plan.device.0,
            bytes = request.bytes(),
            ?rung
        );
        let wait = if request.may_wait() { Wait::Yes } else { Wait::No };
        match rung {
            Rung::Create | Rung::Exact | Rung::OwnOnly => {}
            Rung::WaitLimbo => {
                if let Some(lane) = lane {
                    sweep(lane.cell, wait, Turn::Requester);
                }
                device.sweep_leaving(wait, Turn::Requester);
            }
            Rung::OtherLanes => empty_lanes(device, lane, wait),
            Rung::ReleaseStock => {
                lane.into_iter().for_each(|lane| trim(lane, wait, Turn::Requester));
                device.sweep_leaving(Wait::No, Turn::Requester);
                device.depot.release_for(lack_bytes, 0, Turn::Requester);
                Turn::Requester.with(|| retry_failed_drops(&device.driver));
            }
            Rung::OtherPools => {
                // Chunks of other kinds, and what others took of that which was given back.
                device.release_stock(0, Turn::Requester);
                for other in elsewhere(device) {
                    empty_lanes(&other, None, wait);
                    other.release_stock(0, Turn::Requester);
                }
            }
            Rung::Callbacks => {
                let (home, bytes) = (device.plan.device, request.bytes());
                self.helped(ask(|| device.callbacks.ask(home, bytes)));
            }
            Rung::Neighbour | Rung::Host => self.helped(relieve(device, rung, request)),
        }
        true
    }

    /// Somebody made room, or did not. What was freed may lie anywhere: the way starts again.
    fn helped(&mut self, has_helped: bool) {
        if has_helped && self.help_rounds < HELP_ROUNDS_MAX {
            self.help_rounds += 1;
            self.climbed = self.first;
        }
    }
}

fn empty_lanes(device: &Device, except: Option<LaneRef>, wait: Wait) {
    let lanes = device.lanes.lock().all();
    for lane in lanes {
        if except.is_none_or(|own| own.id != lane.id) {
            trim(lane, wait, Turn::Requester);
        }
    }
    device.sweep_leaving(wait, Turn::Requester);
}
