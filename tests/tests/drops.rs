//! Caches, and memory that is shared, end in every order: nothing panics, and the machine is clean afterwards. Lanes
//! and devices: `tests/src/stories/drops.rs`; elastic buffers and captures: `crates/pool/tests/lifecycle/drops.rs`.

#![allow(clippy::unwrap_used, reason = "a failure ends the story")]

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use vmm_kv::{ContiguousCache, Dtype, KvShape, PagedCache};
use vmm_pool::Pool;
use vmm_pool_tests::orders::in_every_order;
use vmm_share::{Access, Address, Exporter, Importer, ImporterOptions, Offered};
use vmm_sys::object::Stream;
use vmm_sys::sim::Sim;
use vmm_sys::{DeviceId, Driver};

const HOME: DeviceId = DeviceId(0);
const CHUNK_BYTES: u64 = 2 << 20;

type Thing = Box<dyn Any>;

fn pool() -> (Arc<Sim>, Pool, Stream) {
    let sim = Sim::builder().build();
    let driver: Arc<dyn Driver> = sim.clone();
    let pool = Pool::builder(driver.clone()).host_memory(0, 1 << 30, 0).build().unwrap();
    let stream = Stream::create(&driver, HOME).unwrap();
    (sim, pool, stream)
}

fn things<A: Any, B: Any, C: Any, D: Any, E: Any>(a: A, b: B, c: C, d: D, e: E) -> [Thing; 5] {
    [Box::new(a), Box::new(b), Box::new(c), Box::new(d), Box::new(e)]
}

fn shape() -> KvShape {
    KvShape::new(2, 2, 128, Dtype::F16).unwrap()
}

#[test]
fn paged_caches_and_their_sequences_end_in_every_order() {
    in_every_order(|| {
        let (sim, pool, stream) = pool();
        let cache = PagedCache::builder(&pool, &stream, shape()).block_tokens(16);
        let cache = cache.max_blocks(256).ahead_blocks(16).build().unwrap();
        let mut sequence = cache.open(100).unwrap();
        let fork = sequence.fork().unwrap();
        let others = (cache.use_now().unwrap(), cache.on_shortage(|_| false));
        (vec![sim], things((pool, stream), cache, sequence, fork, others))
    });
}

#[test]
fn contiguous_caches_and_their_sequences_end_in_every_order() {
    in_every_order(|| {
        let (sim, pool, stream) = pool();
        let cache = ContiguousCache::builder(&pool, &stream, shape()).max_tokens(4096);
        let cache = cache.max_sequences(8).ahead_tokens(64).build().unwrap();
        let mut sequence = cache.open(100).unwrap();
        let fork = sequence.fork().unwrap();
        let others = (cache.use_now().unwrap(), cache.on_shortage(|_| false));
        (vec![sim], things((pool, stream), cache, sequence, fork, others))
    });
}

#[test]
fn shared_memory_and_its_users_end_in_every_order() {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    in_every_order(|| {
        let (sim, pool, stream) = pool();
        let buffer = pool.elastic(HOME).capacity_bytes(64 * CHUNK_BYTES).chunk_bytes(CHUNK_BYTES);
        let buffer = Arc::new(buffer.exportable(true).build().unwrap());
        buffer.grow_to(2 * CHUNK_BYTES).unwrap();
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("vmm-pool-drops-{}-{number}", std::process::id());
        let address = Address::Abstract(name);
        let exporter = Exporter::builder().bind(address.clone()).unwrap();
        let offer = exporter.offer("buffer", &buffer, Offered::Read).unwrap();
        let away = Sim::builder().build();
        let importer = Importer::connect(&address, ImporterOptions::new(away.clone())).unwrap();
        let import = importer.open("buffer", Access::Read).unwrap();
        (vec![sim, away], things((pool, stream), buffer, (exporter, offer), importer, import))
    });
}
