//! The allocators that can be replayed.

mod context;
mod driver_alloc;
mod gates;
mod held;
mod late;
mod pool;

use std::sync::Arc;

use vmm_sys::object::Stream;
use vmm_sys::{DeviceId, Driver, DriverResult, ThreadTime};

use crate::replay::DriverTime;

pub use context::CurrentContext;
pub use driver_alloc::{AsyncBlock, CudaMalloc, CudaMallocAsync};
pub use late::{Late, LateBlock, LateDriver};
pub use pool::{IdleLanes, PoolOptions, PoolTarget};

fn create_streams(
    driver: &Arc<dyn Driver>,
    device: DeviceId,
    count: usize,
) -> DriverResult<Vec<Stream>> {
    (0..count).map(|_| Stream::create(driver, device)).collect()
}

/// What the calling thread's driver calls took: the replay is one thread, and work that a pool
/// does in the background is no part of an operation's time.
fn driver_time() -> DriverTime {
    let ThreadTime { spent_nanos, charged_nanos } = ThreadTime::now();
    DriverTime { spent_ns: spent_nanos, charged_ns: charged_nanos }
}

#[cfg(test)]
mod tests;
