//! What lies idle: [`Pool::prefill`] makes it, [`Pool::trim`] and [`Pool::trim_idle`] give it back.

use std::time::Duration;

use vmm_sys::object::retry_failed_drops;
use vmm_sys::{DeviceId, DriverError};

use super::Pool;
use crate::depot::Shortage;
use crate::device::Device;
use crate::error::Error;
use crate::idle;
use crate::lane::{self, Wait};
use crate::out_of_memory::{Asked, OutOfMemory};
use crate::place::Place;
use crate::policy;
use crate::turn::Turn;

impl Pool {
    /// Makes chunks ahead of need until the stock of a device, or of a node of the host, holds
    /// `bytes`: on a device no more than these and the stock's high mark want. Returns the bytes made.
    /// Host memory is slow to make: 246 ms a GiB.
    ///
    /// # Errors
    /// Out of memory, of the limit or of the driver; what was made stays in the stock.
    /// [`Error::UnknownDevice`], [`ElasticError::UnknownPlace`](crate::ElasticError::UnknownPlace).
    pub fn prefill(&self, place: impl Into<Place>, bytes: u64) -> Result<u64, Error> {
        match place.into() {
            Place::Device(device) => {
                let device = self.device(device)?;
                fill(device, bytes, bytes.max(device.plan.stock_high_bytes))
            }
            Place::HostNuma(_) if vmm_sys::process::is_forked_child() => Err(Error::DriverGone),
            place @ Place::HostNuma(_) => self.0.places.site(place)?.fill(bytes),
        }
    }

    /// Gives everything idle on `device` back to the driver: free chunks of every lane, and the
    /// stock. Waits for the work that may still use it. Returns the bytes given back.
    ///
    /// # Errors
    /// [`Error::UnknownDevice`]; [`Error::DriverGone`].
    pub fn trim(&self, device: DeviceId) -> Result<u64, Error> {
        let device = self.device(device)?;
        if device.driver.is_gone() {
            return Err(Error::DriverGone);
        }
        let _within = vmm_sys::within!("vmm_pool.trim", device = device.plan.device.0);
        let before = device.depot.held_bytes();
        let lanes = device.lanes.lock().all();
        for lane in lanes {
            lane::trim(lane, Wait::Yes, Turn::Requester);
        }
        device.sweep_leaving(Wait::Yes, Turn::Requester);
        device.release_stock(0, Turn::Requester);
        // What earlier ends and changes could not give back.
        policy::settle_debts(device);
        Turn::Requester.with(|| retry_failed_drops(&device.driver));
        Ok(before.saturating_sub(device.depot.held_bytes()))
    }

    /// Gives idle memory of `device` back to the driver by its age: chunks that have lain in the
    /// stock for `min_idle` or longer, down to the low mark, and the wholly free chunks of lanes that
    /// were not used for so long. Waits for nothing: what unfinished work may still use goes to the
    /// stock later. Returns the bytes given back.
    ///
    /// Since when a lane is idle is found by looking, so that its warm path need not say it: this
    /// call looks, and so does the background thread, four times in [`PoolBuilder::idle_lane_ms`](crate::PoolBuilder::idle_lane_ms).
    ///
    /// # Errors
    /// [`Error::UnknownDevice`]; [`Error::DriverGone`].
    pub fn trim_idle(&self, device: DeviceId, min_idle: Duration) -> Result<u64, Error> {
        let device = self.device(device)?;
        if device.driver.is_gone() {
            return Err(Error::DriverGone);
        }
        let _within = vmm_sys::within!("vmm_pool.trim", device = device.plan.device.0);
        let turn = Turn::Requester;
        let min_ms = u64::try_from(min_idle.as_millis()).unwrap_or(u64::MAX);
        let now_ms = device.watch.now_ms();
        let mut given = 0;
        if let Some(since_ms) = now_ms.checked_sub(min_ms) {
            given += device.release_old_stock(since_ms, device.plan.stock_low_bytes, turn);
        }
        let shelf_bytes = device.depot.stock.lock().bytes();
        idle::empty_idle(device, now_ms, min_ms, turn, &|| false);
        // What the lanes gave was idle for as long, though it comes to the shelf now.
        given += device.release_stock(shelf_bytes, turn);
        Ok(given)
    }
}

/// Makes chunks until the shelf holds `bytes`. Returns the bytes made.
pub(super) fn fill(device: &Device, bytes: u64, most_bytes: u64) -> Result<u64, Error> {
    if bytes == 0 {
        return Ok(0);
    }
    let _within = vmm_sys::within!("vmm_pool.stock", device = device.plan.device.0, bytes);
    // A chunk that could not be unmapped the last time is made already.
    device.sweep_leaving(Wait::No, Turn::Requester);
    device.depot.stock_up(bytes, most_bytes, Turn::Requester, &|| false).map_err(|shortage| {
        match shortage {
            Shortage::Limit => stock_shortage(device, bytes, None),
            Shortage::Driver(error) if error.is_out_of_memory() => {
                stock_shortage(device, bytes, Some(error))
            }
            Shortage::Driver(error) => error.into(),
        }
    })
}

/// The device is not asked for its free memory: it may have no context yet, and asking would make
/// one, which takes memory.
fn stock_shortage(device: &Device, bytes: u64, cause: Option<DriverError>) -> Error {
    let granularity_bytes = device.plan.granularity_bytes;
    let rounded_bytes = bytes.checked_next_multiple_of(granularity_bytes).unwrap_or(bytes);
    let asked = Asked { bytes, rounded_bytes, may_wait: true };
    Error::OutOfMemory(Box::new(OutOfMemory::new(device, asked, None, None, cause)))
}
