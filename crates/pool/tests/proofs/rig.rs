//! What proofs share: a pool on a small machine, and who owns which addresses.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use shuttle::sync::Mutex;
use vmm_pool::{Buffer, ChunkSize, ElasticBuffer, Lane, Pool, PoolBuilder};
use vmm_sys::object::{Stream, failed_drops, retry_failed_drops};
use vmm_sys::sim::Sim;
use vmm_sys::{DeviceId, Driver};

pub(crate) use shuttle::thread::spawn;
pub(crate) use vmm_sys::sync::prove;

pub(crate) const MIB: u64 = 1 << 20;
/// The length of a chunk, here.
pub(crate) const CHUNK: u64 = 2 * MIB;
pub(crate) const HOME: DeviceId = DeviceId(0);
pub(crate) const AWAY: DeviceId = DeviceId(1);
/// No thread waits for longer than the proof lasts.
pub(crate) const LONG: Duration = Duration::from_secs(1000);

/// A pool on simulated devices, one unless said otherwise; clones share it.
#[derive(Clone)]
pub(crate) struct Rig {
    pub(crate) sim: Arc<Sim>,
    pub(crate) driver: Arc<dyn Driver>,
    pub(crate) pool: Pool,
}

impl Rig {
    /// Without a thread of its own, growing by one chunk.
    pub(crate) fn new(settings: impl FnOnce(PoolBuilder) -> PoolBuilder) -> Rig {
        Rig::on(Sim::builder().build(), settings)
    }

    pub(crate) fn on(sim: Arc<Sim>, settings: impl FnOnce(PoolBuilder) -> PoolBuilder) -> Rig {
        let driver: Arc<dyn Driver> = sim.clone();
        let builder = Pool::builder(driver.clone()).background(false);
        let pool = settings(builder.chunk(ChunkSize::Fixed(CHUNK))).build().unwrap();
        Rig { sim, driver, pool }
    }

    /// On two devices.
    pub(crate) fn two(settings: impl FnOnce(PoolBuilder) -> PoolBuilder) -> Rig {
        let sim = Sim::builder().devices(2).build();
        Rig::on(sim, |pool| settings(pool.device(HOME).device(AWAY)))
    }

    /// A buffer at home, with so many chunks of all that it may have.
    pub(crate) fn elastic(&self, chunks: u64, most_chunks: u64) -> Arc<ElasticBuffer> {
        let builder = self.pool.elastic(HOME).capacity_bytes(most_chunks * CHUNK);
        let buffer = builder.chunk_bytes(CHUNK).build().unwrap();
        buffer.grow_to(chunks * CHUNK).unwrap();
        Arc::new(buffer)
    }

    /// Elastic buffers have no memory any more.
    pub(crate) fn nothing_elastic(&self) {
        self.pool.verify().unwrap();
        for (device, stats) in self.pool.stats().devices {
            let lent = (stats.lent_bytes, stats.borrowed_bytes);
            assert_eq!((stats.elastic_bytes, lent), (0, (0, 0)), "{device}: {stats:?}");
        }
    }

    pub(crate) fn stream(&self) -> Stream {
        Stream::create(&self.driver, HOME).unwrap()
    }

    pub(crate) fn lane(&self) -> Lane {
        self.pool.lane(&self.stream()).unwrap()
    }

    /// Nothing is under way: the figures add up, and the walker finds nothing.
    pub(crate) fn sound(&self) -> vmm_pool::DeviceStats {
        self.pool.verify().unwrap();
        let stats = self.pool.device_stats(HOME).unwrap();
        assert!(stats.adds_up(), "{stats:?}");
        stats
    }

    /// Drops the pool; then the driver must hold nothing of it.
    pub(crate) fn end(self) {
        let Rig { sim, driver, pool } = self;
        drop(pool);
        clean(&sim, driver);
    }
}

/// Waits until nobody but the caller has the driver: other threads have let everything go.
pub(crate) fn wait_for_others(driver: &Arc<dyn Driver>) {
    // The simulated device's own, and the caller's.
    while Arc::strong_count(driver) > 2 {
        shuttle::thread::yield_now();
    }
}

/// Everything was given back.
pub(crate) fn clean(sim: &Sim, driver: Arc<dyn Driver>) {
    assert_eq!(retry_failed_drops(&driver), 0, "{:?}", failed_drops(&driver));
    drop(driver);
    sim.check_clean().unwrap();
}

/// Who owns which addresses, by what buffers say. No two may overlap.
#[derive(Clone, Default)]
pub(crate) struct Owned(Arc<Mutex<BTreeMap<u64, u64>>>);

impl Owned {
    /// Notes what was given out, and marks its first and last byte.
    pub(crate) fn take(&self, buffer: Buffer) -> Held {
        let (address, bytes) = (buffer.address(), buffer.bytes());
        self.note(address, bytes);
        let mark = (address >> 9) as u8 ^ bytes as u8;
        buffer.write(0, &[mark]).unwrap();
        buffer.write(bytes - 1, &[mark]).unwrap();
        Held { owned: self.clone(), buffer: Some(buffer), mark }
    }

    pub(crate) fn note(&self, address: u64, bytes: u64) {
        let mut owned = self.0.lock().unwrap();
        let before = owned.range(..address + bytes).next_back();
        assert!(before.is_none_or(|(at, length)| at + length <= address), "{address:#x} is owned");
        owned.insert(address, bytes);
    }

    pub(crate) fn forget(&self, address: u64) {
        self.0.lock().unwrap().remove(&address).unwrap();
    }
}

/// A buffer that is noted; dropping it checks its marks and forgets it first.
pub(crate) struct Held {
    owned: Owned,
    buffer: Option<Buffer>,
    mark: u8,
}

impl Held {
    pub(crate) fn buffer(&mut self) -> &mut Buffer {
        self.buffer.as_mut().unwrap()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        let buffer = self.buffer.take().unwrap();
        let mut marks = [0; 2];
        buffer.read(0, &mut marks[..1]).unwrap();
        buffer.read(buffer.bytes() - 1, &mut marks[1..]).unwrap();
        let short = buffer.bytes() == 1;
        assert!(short || marks == [self.mark; 2], "somebody else wrote {marks:?}");
        self.owned.forget(buffer.address());
    }
}
