//! The hand that lets time pass: it lets held streams go, and moves the clocks.

use std::sync::atomic::Ordering::Relaxed;

use crate::rng::Rng;
use crate::world::World;

/// Until the actors are done.
pub(crate) fn pass(world: &World, seed: u64) {
    let mut rng = Rng::new(seed ^ 0x71E);
    while !world.is_over() {
        for _ in 0..1 + rng.below(6) {
            shuttle::thread::yield_now();
        }
        match rng.below(4) {
            0 | 1 => world.release_a_hold(),
            2 => world.sim.advance(1 + rng.below(200)),
            _ => {
                world.clock_ms.fetch_add(1 + rng.below(60), Relaxed);
            }
        }
    }
    while world.has_holds() {
        world.release_a_hold();
    }
}
