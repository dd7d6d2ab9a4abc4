//! The host's clock, injected so that tests own the time.

use std::time::Instant;

/// A monotonic clock.
pub trait Clock {
    /// Nanoseconds since some fixed moment.
    fn now_ns(&self) -> u64;
}

/// The machine's monotonic clock.
#[derive(Debug)]
pub struct HostClock(Instant);

impl HostClock {
    /// A clock that starts at 0.
    pub fn new() -> HostClock {
        HostClock(Instant::now())
    }
}

impl Default for HostClock {
    fn default() -> Self {
        HostClock::new()
    }
}

impl Clock for HostClock {
    fn now_ns(&self) -> u64 {
        // Fits for 584 years of run time.
        self.0.elapsed().as_nanos() as u64
    }
}
