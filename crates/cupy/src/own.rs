//! The lane that blocks for CuPy come from: of a stream that nobody else has.
//!
//! In the lane of a stream that others use too, free memory is ordered with that stream only: what another
//! framework freed there may be in use by work that is enqueued, and CuPy uses its blocks on whatever
//! stream. Here a block is freed when the device has done all work before, and the lane's stream has none
//! but waits for other lanes' work, behind memory that came from those. They are waited for before such
//! memory is handed out.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use vmm_pool::{Lane, free_raw};
use vmm_pool_capi::{Failure, driver_of, pool};
use vmm_sys::DeviceId;
use vmm_sys::object::{RelaxedCapture, Stream};

use crate::aside;

/// The lane of a device. Locked while a block is taken, so that none is of memory that another thread is
/// still waiting for.
struct Own {
    lane: Lane,
    /// Memory came to the lane, and the waits behind it were not waited for.
    unsettled: bool,
}

static OWN: Mutex<BTreeMap<DeviceId, Arc<Mutex<Own>>>> = Mutex::new(BTreeMap::new());

fn of(device: DeviceId) -> Result<Arc<Mutex<Own>>, Failure> {
    let mut all = OWN.lock();
    if let Some(own) = all.get(&device) {
        return Ok(own.clone());
    }
    let pool = pool(device)?;
    let lane = pool.lane(&Stream::create(driver_of(device)?, device)?)?;
    let own = Arc::new(Mutex::new(Own { lane, unsettled: false }));
    all.insert(device, own.clone());
    Ok(own)
}

impl Own {
    /// Waits for what memory of other lanes stands behind.
    fn settle(&mut self) -> Result<(), Failure> {
        if self.unsettled {
            let _relaxed = RelaxedCapture::enter(self.lane.stream().driver());
            self.lane.stream().synchronize()?;
            self.unsettled = false;
        }
        Ok(())
    }
}

/// A block for any stream. What was freed and put aside is waited for before memory is made.
///
/// # Errors
/// No such device or driver; the pool's; the driver's, and nothing is taken then.
pub(crate) fn alloc(device: DeviceId, bytes: u64) -> Result<u64, Failure> {
    if bytes == 0 {
        return Ok(0);
    }
    let own = of(device)?;
    let mut own = own.lock();
    own.settle()?;
    if let Some(address) = own.lane.alloc_raw_warm(bytes) {
        return Ok(address);
    }
    // If that cannot be, memory is made: the request need not fail for it.
    let _not_now = aside::give_back(device);
    if let Some(address) = own.lane.alloc_raw_warm(bytes) {
        return Ok(address);
    }
    own.unsettled = true;
    let address = own.lane.alloc_raw(bytes)?;
    own.settle().inspect_err(|_| {
        let freed = free_raw(address, bytes);
        debug_assert!(freed.is_ok(), "{freed:?}");
    })?;
    Ok(address)
}
