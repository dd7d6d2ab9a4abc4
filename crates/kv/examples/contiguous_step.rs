//! What a step of a contiguous cache costs the host: one token for each of 256 sequences.
//!
//! On the simulated device: `cargo run --release -p vmm-kv --example contiguous_step`. First with all memory
//! there, then with the cache's thread growing ahead, in steps of 2 ms.
#![allow(clippy::unwrap_used, reason = "a failure ends the measurement")]

use std::time::{Duration, Instant};

use vmm_kv::{ContiguousCache, Dtype, KvShape, Sequence};
use vmm_pool::Pool;
use vmm_sys::object::Stream;
use vmm_sys::sim::Sim;
use vmm_sys::{DeviceId, Driver};

const SEQUENCES: u64 = 256;
const STEPS: u64 = 2000;
/// What a step takes on the GPU.
const PAUSE: Duration = Duration::from_millis(2);

fn main() {
    let driver: std::sync::Arc<dyn Driver> = Sim::builder().build();
    let stream = Stream::create(&driver, DeviceId(0)).unwrap();
    let pool = Pool::builder(driver.clone()).build().unwrap();
    // Llama 3 8B, one of eight devices: 16 KiB a token.
    let shape = KvShape::new(32, 8, 128, Dtype::Bf16).unwrap().shard(0, 8).unwrap();
    let cache = ContiguousCache::builder(&pool, &stream, shape)
        .max_tokens(131_072)
        .max_sequences(SEQUENCES as u32)
        .build()
        .unwrap();
    // So much that nothing is asked for in the first round.
    let open = || cache.open_ahead(STEPS + 512).unwrap();
    let mut sequences: Vec<Sequence> = (0..SEQUENCES).map(|_| open()).collect();
    // The first append finds out what there is.
    cache.append_all(&mut sequences, 1).unwrap();
    cache.settle().unwrap();
    report("memory ahead", Duration::ZERO, &driver, &cache, &mut sequences);
    // From here on the thread grows ahead of the steps.
    report("growing ahead", PAUSE, &driver, &cache, &mut sequences);
    let stats = cache.stats();
    println!(
        "growths: {} ahead, {} waited for",
        stats.background_growths, stats.foreground_growths
    );
}

fn report(
    what: &str,
    pause: Duration,
    driver: &std::sync::Arc<dyn Driver>,
    cache: &ContiguousCache,
    sequences: &mut [Sequence],
) {
    let calls = driver.ledger().snapshot();
    let mut steps_ns: Vec<u64> = (0..STEPS)
        .map(|_| {
            std::thread::sleep(pause);
            let began = Instant::now();
            cache.append_all(sequences.iter_mut(), 1).unwrap();
            began.elapsed().as_nanos() as u64
        })
        .collect();
    let calls = driver.ledger().snapshot().since(&calls).total();
    steps_ns.sort_unstable();
    let at = |per_mille: u64| steps_ns[(STEPS * per_mille / 1000) as usize];
    println!(
        "{what}: a step of {SEQUENCES} takes {} ns, 99 %: {} ns, 99.9 %: {} ns; {calls} driver calls",
        at(500),
        at(990),
        at(999),
    );
}
