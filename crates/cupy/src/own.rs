//! The lane that blocks for CuPy come from: of a stream that nobody else has.
//!
//! In the lane of a stream that others use too, free memory is ordered with that stream only: what another
//! framework freed there may be in use by work that is enqueued, and CuPy uses its blocks on whatever
//! stream. Here a block is freed when the device has done all work before; and memory that comes from
//! other lanes comes when their work is done, which the pool waits for on the host.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use vmm_pool::Lane;
use vmm_pool_capi::{Failure, driver_of, pool};
use vmm_sys::DeviceId;
use vmm_sys::object::Stream;

use crate::aside;

static LANES: Mutex<BTreeMap<DeviceId, Lane>> = Mutex::new(BTreeMap::new());

fn lane(device: DeviceId) -> Result<Lane, Failure> {
    let mut lanes = LANES.lock();
    if let Some(lane) = lanes.get(&device) {
        return Ok(lane.clone());
    }
    let lane = pool(device)?.lane(&Stream::create(driver_of(device)?, device)?)?;
    lanes.insert(device, lane.clone());
    Ok(lane)
}

/// A block for any stream. What was freed and put aside is waited for before memory is made.
///
/// # Errors
/// No such device or driver; the pool's.
pub(crate) fn alloc(device: DeviceId, bytes: u64) -> Result<u64, Failure> {
    if bytes == 0 {
        return Ok(0);
    }
    let lane = lane(device)?;
    if let Some(address) = lane.alloc_raw_warm(bytes) {
        return Ok(address);
    }
    // If that cannot be, memory is made: the request need not fail for it.
    let _not_now = aside::give_back(device);
    Ok(lane.alloc_raw(bytes)?)
}

/// The devices that have such a lane.
pub(crate) fn devices() -> Vec<DeviceId> {
    LANES.lock().keys().copied().collect()
}

/// Drops the lanes, which only tests do.
pub(crate) fn end() {
    let lanes = std::mem::take(&mut *LANES.lock());
    // Without the lock: the pool may wait.
    drop(lanes);
}
