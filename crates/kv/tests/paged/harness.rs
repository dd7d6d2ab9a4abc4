//! A cache over simulated devices, and bytes that say whose they are.

use std::sync::Arc;

use vmm_kv::{Dtype, KvShape, PagedBuilder, PagedCache, PagedSequence, Part};
use vmm_pool::{Pool, PoolBuilder};
use vmm_sys::object::Stream;
use vmm_sys::sim::{Sim, SimBuilder};
use vmm_sys::{DeviceId, Driver};

/// The granularity of the device.
pub(crate) const G: u64 = 2 << 20;

/// A token takes 128 KiB: with four tokens, four blocks fill a chunk.
pub(crate) fn shape() -> KvShape {
    KvShape::new(2, 2, 8192, Dtype::F16).unwrap()
}

pub(crate) struct Machine {
    pub(crate) sim: Arc<Sim>,
    pub(crate) driver: Arc<dyn Driver>,
    pub(crate) pool: Pool,
    pub(crate) stream: Stream,
}

impl Machine {
    /// Two devices and a node of the host; pool and caches without threads.
    pub(crate) fn new(
        sim: impl FnOnce(SimBuilder) -> SimBuilder,
        settings: impl FnOnce(PoolBuilder) -> PoolBuilder,
    ) -> Machine {
        let sim = sim(Sim::builder().devices(2)).build();
        let driver: Arc<dyn Driver> = sim.clone();
        let builder = Pool::builder(driver.clone()).background(false);
        let builder = builder.device(DeviceId(0)).device(DeviceId(1));
        let pool = settings(builder).build().unwrap();
        let stream = Stream::create(&driver, DeviceId(0)).unwrap();
        Machine { sim, driver, pool, stream }
    }

    /// With so many chunks on device 0.
    pub(crate) fn small(chunks: u64) -> Machine {
        Machine::new(|sim| sim.device_bytes_of(0, chunks * G), |pool| pool)
    }

    /// Blocks of four tokens, four of them a chunk; nothing is kept or grown ahead.
    pub(crate) fn builder(&self) -> PagedBuilder {
        let builder = PagedCache::builder(&self.pool, &self.stream, shape());
        builder.block_tokens(4).max_blocks(256).ahead_blocks(0).background(false)
    }

    pub(crate) fn calls(&self) -> u64 {
        self.driver.ledger().snapshot().total()
    }

    /// Everything was given back.
    pub(crate) fn end(self) {
        let Machine { sim, driver, pool, stream } = self;
        pool.verify().unwrap();
        for device in pool.devices() {
            let stats = pool.device_stats(device).unwrap();
            assert!(stats.adds_up(), "{stats:?}");
            assert_eq!(stats.elastic_bytes, 0, "{stats:?}");
        }
        drop((pool, driver, stream));
        sim.check_clean().unwrap();
    }
}

/// What a token of a sequence holds in one row.
fn mark(stamp: u64, layer: u32, part: Part) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&stamp.to_le_bytes());
    bytes[8..].copy_from_slice(&(u64::from(layer) * 2 + part.index() + 1).to_le_bytes());
    bytes
}

fn rows(cache: &PagedCache) -> impl Iterator<Item = (u32, Part)> + use<> {
    let layers = cache.layout().shape().layers();
    (0..layers).flat_map(|layer| [(layer, Part::Key), (layer, Part::Value)])
}

/// Writes a token, as a kernel does in each layer.
pub(crate) fn write(cache: &PagedCache, sequence: &PagedSequence, token: u64, stamp: u64) {
    let last_head = cache.layout().shape().kv_heads() - 1;
    for (layer, part) in rows(cache) {
        let offset = sequence.offset(layer, part, token, last_head).unwrap();
        cache.buffer().write(offset, &mark(stamp, layer, part)).unwrap();
    }
}

/// The stamp that a token has in one of its rows.
pub(crate) fn read_row(
    cache: &PagedCache,
    sequence: &PagedSequence,
    token: u64,
    row: usize,
) -> Option<u64> {
    let last_head = cache.layout().shape().kv_heads() - 1;
    let (layer, part) = rows(cache).nth(row % rows(cache).count()).unwrap();
    let offset = sequence.offset(layer, part, token, last_head).unwrap();
    let mut found = [0; 16];
    cache.buffer().read(offset, &mut found).unwrap();
    let stamp = u64::from_le_bytes(found[..8].try_into().unwrap());
    (found == mark(stamp, layer, part)).then_some(stamp)
}

/// Every token of a sequence holds its stamp, in every row.
pub(crate) fn check(cache: &PagedCache, sequence: &PagedSequence, stamps: &[u64]) {
    assert_eq!(sequence.tokens(), stamps.len() as u64);
    for (token, stamp) in stamps.iter().enumerate() {
        for row in 0..rows(cache).count() {
            let found = read_row(cache, sequence, token as u64, row);
            assert_eq!(found, Some(*stamp), "token {token}, row {row} of {sequence:?}");
        }
    }
}

/// A sequence whose tokens hold `first`, `first + 1`, ….
pub(crate) fn written(cache: &PagedCache, tokens: u64, first: u64) -> (PagedSequence, Vec<u64>) {
    let sequence = cache.open(tokens).unwrap();
    (0..tokens).for_each(|token| write(cache, &sequence, token, first + token));
    (sequence, (first..first + tokens).collect())
}

/// Appends and writes tokens.
pub(crate) fn extend(
    cache: &PagedCache,
    (sequence, stamps): &mut (PagedSequence, Vec<u64>),
    tokens: u64,
    first: u64,
) {
    let begins = sequence.append(tokens).unwrap();
    assert_eq!(begins, stamps.len() as u64);
    for token in 0..tokens {
        write(cache, sequence, begins + token, first + token);
        stamps.push(first + token);
    }
}
