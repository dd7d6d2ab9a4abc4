//! What the process shares: the driver, a pool a device, a lane a stream.
//!
//! All of it is made when it is first needed, and none of it is torn down: at exit the driver may
//! be gone before the last free comes.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use vmm_pool::{Error, Lane, Pool};
use vmm_sys::cuda::Cuda;
use vmm_sys::object::Stream;
use vmm_sys::sim::Sim;
use vmm_sys::{DeviceId, Driver, StreamHandle, process};

use crate::failure::{Failure, tell};
use crate::recent;

/// Chooses the driver.
const DRIVER_VARIABLE: &str = "VMM_POOL_DRIVER";
/// Simulated devices: they cost nothing until they are touched.
const SIM_DEVICES: usize = 8;

static DRIVER: OnceLock<Result<Arc<dyn Driver>, Failure>> = OnceLock::new();
static POOLS: Mutex<BTreeMap<DeviceId, Pool>> = Mutex::new(BTreeMap::new());
static LANES: Mutex<BTreeMap<Key, Lane>> = Mutex::new(BTreeMap::new());

/// A stream as C names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    device: c_int,
    stream: usize,
}

impl Key {
    #[inline]
    pub(crate) fn new(device: c_int, stream: usize) -> Key {
        // Handles 0 and 1 are the same stream.
        Key { device, stream: stream.max(1) }
    }

    #[inline]
    pub(crate) fn handle(self) -> StreamHandle {
        StreamHandle(self.stream as u64)
    }
}

/// The driver was chosen before, by an earlier call or by the first allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the driver was chosen before; expected to be told before the first use")]
pub struct DriverChosen;

/// Takes memory from `driver`, whatever the environment says. For Rust programs that have one;
/// before the first use of anything else here.
///
/// # Errors
/// [`DriverChosen`] if it is too late.
pub fn use_driver(driver: Arc<dyn Driver>) -> Result<(), DriverChosen> {
    DRIVER.set(Ok(driver)).map_err(|_| DriverChosen)
}

fn driver() -> Result<&'static Arc<dyn Driver>, Failure> {
    DRIVER.get_or_init(choose).as_ref().map_err(Clone::clone)
}

fn choose() -> Result<Arc<dyn Driver>, Failure> {
    let name = std::env::var_os(DRIVER_VARIABLE).unwrap_or_default();
    match name.to_str() {
        // A program that asks for the GPU's memory is not helped by a simulated device, so there
        // is no falling back.
        Some("" | "auto" | "cuda") => match Cuda::open() {
            Ok(cuda) => Ok(cuda),
            Err(error) => Err(Failure::NoDriver(format!(
                "no usable GPU: {error} ({DRIVER_VARIABLE}=sim simulates one)"
            ))),
        },
        Some("sim") => Ok(Sim::builder().devices(SIM_DEVICES).build()),
        _ => Err(Failure::NoDriver(format!(
            "{DRIVER_VARIABLE} = {}: expected auto, cuda or sim",
            name.display()
        ))),
    }
}

/// The pool of a device, made now if its memory was not asked for before. For Rust programs in the
/// same process: its statistics, its driver.
///
/// # Errors
/// No driver, no such device, a setting that is refused.
pub fn pool(device: DeviceId) -> Result<Pool, Failure> {
    if process::is_forked_child() {
        // Before any lock: another thread may have held it when the process forked.
        return Err(Error::DriverGone.into());
    }
    let mut pools = POOLS.lock();
    if let Some(pool) = pools.get(&device) {
        return Ok(pool.clone());
    }
    let pool = driver().and_then(|driver| build(driver, device)).inspect_err(tell)?;
    pools.insert(device, pool.clone());
    Ok(pool)
}

fn build(driver: &Arc<dyn Driver>, device: DeviceId) -> Result<Pool, Failure> {
    let count = driver.device_count()?;
    if device.0 >= count {
        return Err(Failure::NoSuchDevice { asked: device.0, count });
    }
    Ok(Pool::builder(driver.clone()).device(device).environment()?.build()?)
}

/// The lane of a stream, made now if it was not used before.
///
/// # Safety
/// The stream is live, and [`close`] is called for it before it is destroyed.
pub(crate) unsafe fn lane(key: Key) -> Result<Lane, Failure> {
    if process::is_forked_child() {
        return Err(Error::DriverGone.into());
    }
    let device = u32::try_from(key.device).map_err(|_| Failure::BadDevice(key.device))?;
    let pool = pool(DeviceId(device))?;
    let mut lanes = LANES.lock();
    if let Some(lane) = lanes.get(&key) {
        return Ok(lane.clone());
    }
    // SAFETY: live by this function's own condition, until `close`.
    let stream = unsafe { Stream::from_raw(pool.driver(), DeviceId(device), key.handle(), None)? };
    let lane = pool.lane(&stream)?;
    // Handle 2 names another stream in each thread: the pool knows them apart.
    if key.handle() != StreamHandle::PER_THREAD {
        lanes.insert(key, lane.clone());
    }
    Ok(lane)
}

/// Ends the lane of a stream that is about to be destroyed, which it must not be while it is captured.
///
/// # Safety
/// The stream is live.
pub(crate) unsafe fn close(key: Key) -> Result<(), Failure> {
    if process::is_forked_child() {
        return Err(Error::DriverGone.into());
    }
    let known = LANES.lock().remove(&key);
    let known = known.or_else(|| recent::with(key, Lane::clone));
    recent::forget(key);
    let Some(lane) = known else { return Ok(()) };
    if pool(lane.device())?.close_lane(lane.stream()) {
        return Ok(());
    }
    // To be asked again.
    LANES.lock().insert(key, lane);
    Err(Failure::StreamCaptured)
}

/// Gives everything idle back.
pub(crate) fn empty() -> Result<(), Failure> {
    if process::is_forked_child() {
        return Err(Error::DriverGone.into());
    }
    let pools: Vec<_> = POOLS.lock().iter().map(|(device, pool)| (*device, pool.clone())).collect();
    for (device, pool) in pools {
        pool.trim(device)?;
    }
    Ok(())
}
