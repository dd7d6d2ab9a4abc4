//! [`Clock`]: what time it is for an engine, and who waits while modelled work takes its time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use vmm_sys::sim::Sim;

/// A clock in microseconds from some start.
pub trait Clock: Send + Sync {
    /// The time, in microseconds.
    fn now_us(&self) -> f64;

    /// Modelled work takes so long.
    fn pass(&self, us: f64);

    /// Nothing can be done for so long, but other threads may do something.
    fn idle(&self, us: f64) {
        self.pass(us);
    }
}

/// The clock of the simulated device: driver calls take their modelled cost on it too, so an engine
/// of one thread takes the same times in every run.
#[derive(Clone, Debug)]
pub struct SimClock(pub Arc<Sim>);

impl Clock for SimClock {
    fn now_us(&self) -> f64 {
        self.0.now_ns() as f64 / 1000.0
    }

    fn pass(&self, us: f64) {
        // Never negative; beyond 2^64 it saturates.
        self.0.advance(us.round() as u64);
    }
}

/// The wall clock.
#[derive(Clone, Debug)]
pub struct WallClock {
    begun: Instant,
    sleeps: bool,
}

impl WallClock {
    /// With `paced`, modelled work takes its time; otherwise none.
    pub fn new(paced: bool) -> WallClock {
        WallClock { begun: Instant::now(), sleeps: paced }
    }
}

impl Clock for WallClock {
    fn now_us(&self) -> f64 {
        self.begun.elapsed().as_secs_f64() * 1e6
    }

    fn pass(&self, us: f64) {
        if self.sleeps {
            self.idle(us);
        }
    }

    fn idle(&self, us: f64) {
        std::thread::sleep(Duration::from_nanos((us * 1000.0) as u64));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_simulated_clock_moves_by_what_passes_only() {
        let clock = SimClock(Sim::builder().build());
        let before = clock.now_us();
        clock.pass(1500.4);
        assert_eq!(clock.now_us() - before, 1500.0);
        clock.idle(2.0);
        assert_eq!(clock.now_us() - before, 1502.0);
    }

    #[test]
    fn the_wall_clock_sleeps_only_if_paced() {
        let fast = WallClock::new(false);
        fast.pass(1e9);
        assert!(fast.now_us() < 1e8);
        let paced = WallClock::new(true);
        let before = paced.now_us();
        paced.pass(2000.0);
        assert!(paced.now_us() - before >= 2000.0);
    }
}
