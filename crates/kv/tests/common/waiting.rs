//! Threads that do something in their own time.

use std::time::{Duration, Instant};

/// Waits for what another thread is to do.
pub(crate) fn wait_for(condition: impl Fn() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < Duration::from_secs(20), "nothing happens");
        std::thread::sleep(Duration::from_millis(1));
    }
}
