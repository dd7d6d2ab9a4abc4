//! A pool on simulated devices for caches, and the bytes of tokens.
#![allow(dead_code, reason = "each test binary uses its part")]
#![allow(clippy::unwrap_used, reason = "a failure ends the story")]

pub(crate) mod rng;
pub(crate) mod waiting;

use std::sync::Arc;

use vmm_kv::{ContiguousBuilder, ContiguousCache, Dtype, KvShape, Order, Part, Sequence};
use vmm_pool::{DeviceStats, Pool, PoolBuilder};
use vmm_sys::object::Stream;
use vmm_sys::sim::{HoldId, Sim, SimBuilder};
use vmm_sys::{CallCounts, DeviceId, Driver};

/// The granularity of these machines: short, so that few tokens fill a chunk.
pub(crate) const G: u64 = 4096;
pub(crate) const HOME: DeviceId = DeviceId(0);
/// The home of a cache in a test, and a neighbour.
pub(crate) const NEIGHBOUR: DeviceId = DeviceId(1);

pub(crate) struct Machine {
    pub(crate) sim: Arc<Sim>,
    pub(crate) driver: Arc<dyn Driver>,
    pub(crate) pool: Pool,
    pub(crate) stream: Stream,
}

/// A pool over all of `devices` simulated ones, without a thread of its own.
pub(crate) fn machine(
    devices: u32,
    sim: impl FnOnce(SimBuilder) -> SimBuilder,
    settings: impl FnOnce(PoolBuilder) -> PoolBuilder,
) -> Machine {
    let sim = sim(Sim::builder().devices(devices as usize).granularity(G, G)).build();
    let driver: Arc<dyn Driver> = sim.clone();
    let mut builder = Pool::builder(driver.clone()).background(false);
    for device in 0..devices {
        builder = builder.device(DeviceId(device));
    }
    let pool = settings(builder).build().unwrap();
    let stream = Stream::create(&driver, HOME).unwrap();
    Machine { sim, driver, pool, stream }
}

/// One device with so many chunks of memory.
pub(crate) fn one(chunks: u64) -> Machine {
    machine(1, |sim| sim.device_bytes(chunks * G), |pool| pool)
}

/// 2 layers, one head of 64 elements, 16 bits: 512 bytes a token, 8 tokens a chunk; 128 bytes in one part
/// of a layer, 32 tokens a chunk.
pub(crate) fn shape() -> KvShape {
    KvShape::new(2, 1, 64, Dtype::F16).unwrap()
}

/// Tokens of a chunk of [`shape`], in [`Order::TokenMajor`].
pub(crate) const T: u64 = 8;

impl Machine {
    /// A cache for 256 tokens each, that does everything in the calling thread and keeps nothing idle.
    pub(crate) fn builder(&self) -> ContiguousBuilder {
        ContiguousCache::builder(&self.pool, &self.stream, shape())
            .max_tokens(256)
            .max_sequences(64)
            .keep_idle_bytes(0)
            .ahead_tokens(0)
            .background(false)
    }

    pub(crate) fn cache(&self) -> ContiguousCache {
        self.builder().build().unwrap()
    }

    /// What `work` cost at the driver.
    pub(crate) fn calls(&self, work: impl FnOnce()) -> CallCounts {
        let before = self.driver.ledger().snapshot();
        work();
        self.driver.ledger().snapshot().since(&before)
    }

    pub(crate) fn stats(&self, device: u32) -> DeviceStats {
        self.pool.verify().unwrap();
        let stats = self.pool.device_stats(DeviceId(device)).unwrap();
        assert!(stats.adds_up(), "{stats:?}");
        stats
    }

    /// Drops everything and asks the simulated machine whether something was left behind.
    pub(crate) fn end(self) {
        let Machine { sim, driver, pool, stream } = self;
        pool.verify().unwrap();
        // What the driver did not take back at a call that was made to fail.
        pool.trim(HOME).unwrap();
        drop((stream, pool, driver));
        sim.check_clean().unwrap();
    }
}

/// Everything that must hold at any time.
pub(crate) fn check(cache: &ContiguousCache) {
    cache.verify().unwrap();
    let stats = cache.stats();
    assert!(stats.adds_up(), "{stats:?}");
    let elastic = cache.buffer().stats();
    if elastic.asleep.is_none() {
        let at_addresses = stats.live_bytes + stats.slack_bytes + stats.idle_bytes;
        assert_eq!(elastic.committed_bytes, at_addresses, "{stats:?}");
        assert_eq!(elastic.physical_bytes, stats.committed_bytes, "{stats:?}");
    }
}

/// The bytes of one head of a token.
fn head(seed: u64, token: u64, layer: u32, part: Part) -> Vec<u8> {
    let mut rng = rng::Rng::new(seed.wrapping_mul(1 << 32) ^ token << 8 ^ u64::from(layer) << 1);
    let first = rng.next_u64() ^ part.index();
    (0..shape().head_bytes()).map(|at| (first >> (at % 8 * 8)) as u8 ^ at as u8).collect()
}

/// Writes the tokens of a sequence as a kernel would.
pub(crate) fn write(
    machine: &Machine,
    cache: &ContiguousCache,
    sequence: &Sequence,
    tokens: std::ops::Range<u64>,
    seed: u64,
) {
    each_head(cache, sequence, tokens, |address, token, layer, part| {
        machine.sim.poke(address, &head(seed, token, layer, part)).unwrap();
    });
}

/// The tokens of a sequence are those that were written with `seed`.
pub(crate) fn read(
    machine: &Machine,
    cache: &ContiguousCache,
    sequence: &Sequence,
    tokens: std::ops::Range<u64>,
    seed: u64,
) {
    each_head(cache, sequence, tokens, |address, token, layer, part| {
        let expected = head(seed, token, layer, part);
        let found = machine.sim.peek(address, expected.len()).unwrap();
        assert!(found == expected, "token {token} of layer {layer} at {address:#x} is another");
    });
}

fn each_head(
    cache: &ContiguousCache,
    sequence: &Sequence,
    tokens: std::ops::Range<u64>,
    mut visit: impl FnMut(u64, u64, u32, Part),
) {
    let stride = cache.layout().token_stride_bytes();
    for token in tokens {
        for layer in 0..shape().layers() {
            for part in [Part::Key, Part::Value] {
                let address = sequence.layer_address(layer, part) + token * stride;
                visit(address, token, layer, part);
            }
        }
    }
}

/// Appends tokens and writes them.
pub(crate) fn append(
    machine: &Machine,
    cache: &ContiguousCache,
    sequence: &mut Sequence,
    tokens: u64,
    seed: u64,
) {
    let first = sequence.append(tokens).unwrap();
    write(machine, cache, sequence, first..first + tokens, seed);
}

pub(crate) const ORDERS: [Order; 2] = [Order::TokenMajor, Order::LayerMajor];

/// A held stream, let go at the latest when a failed story ends: else the pool's end would wait.
pub(crate) struct Held<'a>(&'a Machine, HoldId);

pub(crate) fn hold<'a>(machine: &'a Machine, stream: &Stream) -> Held<'a> {
    Held(machine, machine.sim.hold(stream.device(), stream.handle()).unwrap())
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.sim.release_hold(self.1);
    }
}
