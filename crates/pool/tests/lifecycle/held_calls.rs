//! A call that stands still keeps nobody waiting who needs no call: warm operations of the same lane and of
//! others, figures, plain addresses. For every kind of call that an operation makes.

use vmm_sys::Call;
use vmm_sys::sim::{CallGate, FaultPlan};

use crate::common::HOME;
use crate::scene::{LONG, OPERATIONS, SECOND, Scene, Work};

const ROUNDS: usize = 500;

impl Scene {
    /// Everything that must not wait for a call of another thread. `own`: the lane that the other thread
    /// uses serves this one from warm memory too.
    fn go_on(&self, own: bool) {
        let before = self.driver.ledger().snapshot();
        let lanes = [&self.other, &self.far, &self.lane];
        for lane in &lanes[..if own { 3 } else { 2 }] {
            for _ in 0..ROUNDS {
                drop(lane.alloc(1000).unwrap());
            }
            // Looks under the lane's lock, whatever it finds.
            let _found = lane.largest_free_bytes();
        }
        let stats = self.pool.stats();
        assert!(stats.devices.iter().all(|(_, stats)| stats.adds_up()), "{stats:?}");
        assert_eq!(self.pool.elastic_stats().len(), 1);
        assert!(self.elastic.generation() > 0 && !self.elastic.pieces().is_empty());
        self.pool.reset_peaks();
        let calls = self.driver.ledger().snapshot().since(&before);
        assert_eq!(calls.total(), 0, "{calls}");
    }

    /// Warm holes in each lane, also for plain addresses, beside blocks that stay.
    fn warm(&self) -> Vec<vmm_pool::Buffer> {
        let lanes = [&self.other, &self.far, &self.lane];
        lanes
            .iter()
            .flat_map(|lane| {
                let kept = [500, 1000].map(|bytes| lane.alloc(bytes).unwrap());
                drop(lane.alloc(1000).unwrap());
                kept
            })
            .collect()
    }
}

/// The kinds of calls that an operation makes.
fn kinds(work: Work) -> Vec<Call> {
    let scene = Scene::new(|pool| pool);
    let _kept = scene.warm();
    let before = scene.driver.ledger().snapshot();
    work(&scene).unwrap();
    let calls = scene.driver.ledger().snapshot().since(&before);
    calls.nonzero().map(|(call, _)| call).collect()
}

#[test]
fn a_call_that_stands_still_keeps_nobody_warm_waiting() {
    let mut held = std::collections::BTreeSet::new();
    for (name, work) in OPERATIONS {
        for call in kinds(*work) {
            let scene = Scene::new(|pool| pool);
            let kept = scene.warm();
            let gate = CallGate::new();
            scene.sim.inject(FaultPlan::stop_at(&gate).on(call).once());
            std::thread::scope(|scope| {
                let worker = scope.spawn(|| work(&scene));
                assert!(gate.wait_for(1, LONG), "{name}: {call} was not made");
                // Requests of a lane that is captured go to another one, which is empty.
                scene.go_on(*name != "a capture");
                assert!(!gate.gave_up(), "{name}: somebody waited for {call}");
                gate.open();
                worker.join().unwrap().unwrap_or_else(|error| panic!("{name}, {call}: {error}"));
            });
            held.insert(call.name());
            drop(kept);
            scene.end(&format!("{name}, {call}"));
        }
    }
    // Each of those that a pool makes; a shorter list would be a smaller test.
    for call in [
        Call::MemCreate,
        Call::MemRelease,
        Call::MemAddressReserve,
        Call::MemMap,
        Call::MemUnmap,
        Call::MemSetAccess,
        Call::MemExportToShareableHandle,
        Call::MemGetHandleForAddressRange,
        Call::EventCreate,
        Call::EventRecord,
        Call::EventQuery,
        Call::StreamGetCaptureInfo,
        Call::ThreadExchangeStreamCaptureMode,
        Call::MemcpyDtoDAsync,
    ] {
        assert!(held.contains(call.name()), "{call} is not among {held:?}");
    }
}

#[test]
fn a_call_of_the_pools_thread_that_stands_still_keeps_nobody_warm_waiting() {
    for call in [Call::MemCreate, Call::MemMap, Call::MemSetAccess, Call::MemUnmap] {
        let scene = Scene::new(|pool| pool.background(true).stock_marks(16 << 20, 64 << 20));
        let kept = scene.warm();
        // Until the thread has filled the stock of both devices.
        let full = |device| scene.pool.device_stats(device).unwrap().stock_bytes >= 16 << 20;
        let deadline = std::time::Instant::now() + LONG;
        while !(full(HOME) && full(SECOND)) {
            assert!(std::time::Instant::now() < deadline, "{:?}", scene.pool.stats());
            std::thread::yield_now();
        }
        let gate = CallGate::new();
        scene.sim.inject(FaultPlan::stop_at(&gate).on(call));
        // Takes from the stock by calls of its own, which stand still too: in a thread.
        std::thread::scope(|scope| {
            let taker = scope.spawn(|| scene.other.alloc(30 << 20).map(drop));
            assert!(gate.wait_for(1, LONG), "{call} was not made");
            let lanes = [&scene.far, &scene.lane];
            for lane in lanes {
                (0..ROUNDS).for_each(|_| drop(lane.alloc(1000).unwrap()));
            }
            assert!(scene.pool.stats().devices.iter().all(|(_, stats)| stats.adds_up()));
            assert!(!gate.gave_up(), "somebody waited for {call}");
            gate.open();
            taker.join().unwrap().unwrap();
        });
        drop(kept);
        scene.end(call.name());
    }
}
