//! A pool on a simulated device, ready for a story.
#![allow(dead_code, reason = "each test binary uses its part")]
#![allow(clippy::unwrap_used, reason = "a failure ends the story")]

pub(crate) mod elastic;
pub(crate) mod graph;

use std::sync::Arc;
use std::time::Duration;

use vmm_pool::{Lane, Pool, PoolBuilder};
use vmm_sys::object::Stream;
use vmm_sys::sim::{HoldId, Sim};
use vmm_sys::{CallCounts, DeviceId, Driver, StreamHandle};

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const HOME: DeviceId = DeviceId(0);

pub(crate) struct Rig {
    pub(crate) sim: Arc<Sim>,
    pub(crate) driver: Arc<dyn Driver>,
    pub(crate) pool: Pool,
    pub(crate) stream: Stream,
    pub(crate) lane: Lane,
}

/// A clock that stands still: on a slow machine a look for idle lanes could otherwise fall among calls
/// that a test counts. Who tests looks brings a clock.
pub(crate) fn still() -> Duration {
    Duration::ZERO
}

impl Rig {
    pub(crate) fn new(settings: impl FnOnce(PoolBuilder) -> PoolBuilder) -> Rig {
        Rig::on(Sim::builder().build(), settings)
    }

    pub(crate) fn on(sim: Arc<Sim>, settings: impl FnOnce(PoolBuilder) -> PoolBuilder) -> Rig {
        let driver: Arc<dyn Driver> = sim.clone();
        let builder = Pool::builder(driver.clone()).background(false).clock(still);
        let pool = settings(builder).build().unwrap();
        let stream = Stream::create(&driver, HOME).unwrap();
        let lane = pool.lane(&stream).unwrap();
        Rig { sim, driver, pool, stream, lane }
    }

    /// What `work` cost at the driver.
    pub(crate) fn calls(&self, work: impl FnOnce()) -> CallCounts {
        let before = self.driver.ledger().snapshot();
        work();
        self.driver.ledger().snapshot().since(&before)
    }

    pub(crate) fn stats(&self) -> vmm_pool::DeviceStats {
        let stats = self.pool.device_stats(HOME).unwrap();
        assert!(stats.adds_up(), "{stats:?}");
        self.pool.verify().unwrap();
        stats
    }

    /// Drops everything and asks the simulated device whether something was left behind.
    pub(crate) fn end(self) {
        let Rig { sim, driver, pool, stream, lane } = self;
        drop((lane, stream, pool, driver));
        sim.check_clean().unwrap();
    }
}

/// A held stream, let go at the latest when a failed story ends: else the pool's end would wait.
pub(crate) struct Held(Arc<Sim>, HoldId);

impl Held {
    pub(crate) fn new(sim: &Arc<Sim>, stream: StreamHandle) -> Held {
        Held(sim.clone(), sim.hold(HOME, stream).unwrap())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.0.release_hold(self.1);
    }
}
