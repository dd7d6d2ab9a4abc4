//! The machine and the pool of a run, from its seed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use vmm_pool::{Balance, ChunkSize, DebugMode, Error, Placement, Pool};
use vmm_sys::sim::{Sim, SimBuilder, TimeMode};
use vmm_sys::{Access, DeviceId, Driver};

use crate::rng::Rng;

const MIB: u64 = 1 << 20;

/// What a run is made on.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) devices: u32,
    pub(crate) granularity_bytes: u64,
    pub(crate) chunk_bytes: u64,
    /// So little memory that requests are refused.
    pub(crate) tight: bool,
    pub(crate) device_bytes: u64,
    pub(crate) limit_bytes: Option<u64>,
    pub(crate) soft_limit: Option<f64>,
    pub(crate) first_fit: bool,
    pub(crate) stock_low_bytes: u64,
    pub(crate) stock_high_bytes: u64,
    pub(crate) background: bool,
    pub(crate) idle_lane_ms: Option<u64>,
    pub(crate) guard: bool,
    pub(crate) host_bytes: Option<u64>,
    pub(crate) lends_bytes: Option<u64>,
    pub(crate) peers: bool,
    pub(crate) balance: bool,
    pub(crate) scrubs: bool,
    pub(crate) modelled_time: bool,
    pub(crate) actors: usize,
    pub(crate) steps: usize,
    /// Calls are made to fail.
    pub(crate) faulty: bool,
    /// A context may be lost.
    pub(crate) may_lose: bool,
    /// The length of the elastic buffers' chunks.
    pub(crate) slot_bytes: u64,
}

impl Setup {
    pub(crate) fn of(seed: u64) -> Setup {
        let mut rng = Rng::new(seed ^ 0x5E70);
        let granularity_bytes = rng.pick(&[4 << 10, 64 << 10, 2 * MIB]);
        let chunk_bytes = rng.pick(&[512 << 10, MIB, 2 * MIB, 4 * MIB]).max(granularity_bytes);
        let slot_bytes = granularity_bytes * rng.pick(&[1, 1, 2]);
        let tight = rng.chance(450);
        let guard = rng.chance(80);
        // Room for the context and some chunks; slabs are of 2 MiB.
        let few_bytes = chunk_bytes.max(2 * MIB) * (6 + rng.below(12));
        let limited = tight && rng.chance(500);
        let devices = rng.pick(&[1, 2, 2, 2, 3, 4]);
        let background = rng.chance(500);
        Setup {
            devices,
            granularity_bytes,
            chunk_bytes,
            tight,
            device_bytes: if tight && !limited { few_bytes } else { 64 << 30 },
            limit_bytes: limited.then_some(few_bytes),
            soft_limit: rng.pick(&[None, Some(0.0), Some(0.01), Some(0.1)]),
            first_fit: rng.chance(500),
            stock_low_bytes: rng.pick(&[0, 0, chunk_bytes]),
            stock_high_bytes: rng
                .pick(&[u64::MAX, 2 * chunk_bytes, 0].map(|it: u64| it.max(chunk_bytes))),
            background,
            idle_lane_ms: rng.pick(&[None, Some(20), Some(200)]).filter(|_| background),
            guard,
            host_bytes: rng.chance(600).then(|| if tight { 8 * slot_bytes } else { 1 << 30 }),
            lends_bytes: (devices > 1 && rng.chance(800)).then(|| slot_bytes * (4 + rng.below(30))),
            peers: devices > 1 && rng.chance(400),
            balance: devices > 1 && rng.chance(200),
            scrubs: rng.chance(200),
            modelled_time: rng.chance(400),
            actors: rng.pick(&[2, 3, 3, 4, 5]),
            steps: 20 + rng.below(60) as usize,
            faulty: rng.chance(400),
            may_lose: rng.chance(60),
            slot_bytes,
        }
    }

    fn machine(&self) -> SimBuilder {
        let granularity = self.granularity_bytes;
        let time = if self.modelled_time { TimeMode::Modelled } else { TimeMode::Instant };
        Sim::builder()
            .devices(self.devices as usize)
            .granularity(granularity, granularity)
            .context_bytes(0)
            .device_bytes(self.device_bytes)
            .time(time)
    }

    pub(crate) fn sim(&self, seed: u64) -> Arc<Sim> {
        self.machine().seed(seed).build()
    }

    /// The same GPUs as another process sees them.
    pub(crate) fn other_process(&self) -> Arc<Sim> {
        self.machine().device_bytes(64 << 30).build()
    }

    pub(crate) fn devices(&self) -> impl Iterator<Item = DeviceId> + use<> {
        (0..self.devices).map(DeviceId)
    }

    pub(crate) fn pool(
        &self,
        driver: Arc<dyn Driver>,
        clock: Arc<AtomicU64>,
    ) -> Result<Pool, Error> {
        let placement = if self.first_fit { Placement::FirstFit } else { Placement::Buddy };
        let mut builder = Pool::builder(driver)
            .chunk(ChunkSize::Fixed(self.chunk_bytes))
            .placement(placement)
            .soft_limit(self.soft_limit)
            .stock_marks(self.stock_low_bytes, self.stock_high_bytes)
            .background(self.background)
            .idle_lane_ms(self.idle_lane_ms)
            .debug_mode(if self.guard { DebugMode::Guard } else { DebugMode::Off })
            .scrub_between_tags(self.scrubs)
            .clock(move || Duration::from_millis(clock.load(Relaxed)));
        for device in self.devices() {
            builder = builder.device(device);
            if let Some(bytes) = self.lends_bytes {
                builder = builder.lend(device, bytes);
            }
        }
        for (owner, accessor) in self.pairs() {
            builder = builder.access(owner, accessor, Access::ReadWrite);
        }
        if let Some(bytes) = self.limit_bytes {
            builder = builder.limit_bytes(bytes);
        }
        if let Some(bytes) = self.host_bytes {
            builder = builder.host_memory(0, bytes, 0);
        }
        if self.balance {
            let balance = Balance { full: 0.5, empty: 0.4, cold_ms: 50, bytes_per_s: 1 << 40 };
            builder = builder.balance(balance);
        }
        builder.build()
    }

    /// Pairs of devices of which the second uses the memory of the first, by the pool's policy.
    fn pairs(&self) -> Vec<(DeviceId, DeviceId)> {
        let all = self.devices().flat_map(|a| self.devices().map(move |b| (a, b)));
        all.filter(|(a, b)| self.peers && a != b).collect()
    }
}
