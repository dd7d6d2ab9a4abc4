//! Many threads, one cache.

use std::sync::atomic::{AtomicU64, Ordering};

use vmm_pool::Place;

use crate::harness::*;

#[test]
fn threads_append_fork_park_and_end_while_others_pack_and_release() {
    let machine =
        Machine::new(|sim| sim.device_bytes_of(0, 96 * G), |pool| pool.host_memory(0, 64 * G, 0));
    let builder = machine.builder().ahead_blocks(8).keep_idle_bytes(G).background(true);
    let cache = builder.host_blocks(Place::HostNuma(0), 128).build().unwrap();
    let running = AtomicU64::new(3);
    std::thread::scope(|scope| {
        for thread in 0..3_u64 {
            let (cache, running) = (&cache, &running);
            scope.spawn(move || {
                for round in 0..40 {
                    let stamp = (thread * 1000 + round) * 1000;
                    // Written and checked while nothing moves but in copies of whole blocks.
                    let mut one = cache.open(1 + (round * 5 + thread) % 17).unwrap();
                    let mut two = one.fork().unwrap();
                    one.append(3).unwrap();
                    two.append(1 + stamp % 5).unwrap();
                    if round % 4 == thread {
                        one.park().unwrap();
                        one.resume().unwrap();
                    }
                    two.truncate(two.tokens() / 2);
                    assert_eq!(one.blocks().len() as u64, cache.layout().blocks_for(one.tokens()));
                    drop(one);
                    two.append(2).unwrap();
                }
                running.fetch_sub(1, Ordering::SeqCst);
            });
        }
        scope.spawn(|| {
            while running.load(Ordering::SeqCst) > 0 {
                cache.pack(16).unwrap();
                cache.release_idle(0).unwrap();
                cache.verify().unwrap();
                assert!(cache.stats().adds_up());
            }
        });
    });
    assert_eq!((cache.stats().sequences, cache.stats().tokens), (0, 0));
    drop(cache);
    machine.end();
}
