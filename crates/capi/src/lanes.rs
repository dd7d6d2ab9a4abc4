//! A lane a stream, of each pool; and the streams as C names them.
//!
//! None of it is torn down: at exit the driver may be gone before the last free comes.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::ops::Deref;

use parking_lot::Mutex;
use vmm_pool::Lane;
use vmm_sys::object::Stream;
use vmm_sys::{CaptureStatus, DeviceId, StreamHandle};

use crate::border::{device_id, not_forked};
use crate::driver::driver_of;
use crate::failure::Failure;
use crate::pools::{self, Owner};
use crate::recent;

static LANES: Mutex<BTreeMap<Key, Lane>> = Mutex::new(BTreeMap::new());
static STREAMS: Mutex<BTreeMap<(DeviceId, u64), Stream>> = Mutex::new(BTreeMap::new());

/// A stream as C names it, and the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// The pool's number above the device's: one comparison tells both.
    place: u64,
    stream: usize,
}

impl Key {
    /// A stream in the process's own pool of its device.
    #[inline]
    pub fn new(device: c_int, stream: usize) -> Key {
        Key::of(0, device, stream)
    }

    /// A stream in the pool with this number; 0 stands for the process's own pool of the device.
    #[inline]
    pub(crate) fn of(pool_number: u32, device: c_int, stream: usize) -> Key {
        // Handles 0 and 1 are the same stream.
        Key {
            place: u64::from(pool_number) << 32 | u64::from(device as u32),
            stream: stream.max(1),
        }
    }

    /// The device, as it was named.
    pub fn device(self) -> c_int {
        self.place as u32 as c_int
    }

    /// The stream.
    #[inline]
    pub fn handle(self) -> StreamHandle {
        StreamHandle(self.stream as u64)
    }

    pub(crate) fn pool_number(self) -> u32 {
        (self.place >> 32) as u32
    }

    pub(crate) fn is_of(self, device: c_int, stream: usize) -> bool {
        self.device() == device && self.stream == stream.max(1)
    }
}

/// A lane, and what keeps its pool's end from falling to whoever holds the lane last.
#[derive(Clone, Debug)]
pub struct Seat {
    lane: Lane,
    /// Dropped after the lane.
    _owner: Owner,
}

impl Seat {
    #[inline]
    pub(crate) fn lane(&self) -> &Lane {
        &self.lane
    }
}

impl Deref for Seat {
    type Target = Lane;

    fn deref(&self) -> &Lane {
        &self.lane
    }
}

/// The stream with this handle, the same object until it is said to be gone.
///
/// # Safety
/// The stream is live, and [`close`] is called for it before it is destroyed.
///
/// # Errors
/// No such device or driver.
pub unsafe fn stream(device: DeviceId, handle: StreamHandle) -> Result<Stream, Failure> {
    let driver = driver_of(device)?;
    // Handle 2 names another stream in each thread.
    if handle == StreamHandle::PER_THREAD {
        return Ok(Stream::per_thread(driver, device)?);
    }
    let mut streams = STREAMS.lock();
    if let Some(stream) = streams.get(&(device, handle.0)) {
        return Ok(stream.clone());
    }
    // SAFETY: live by this function's own condition, until `close`.
    let stream = unsafe { Stream::from_raw(driver, device, handle, None)? };
    streams.insert((device, handle.0), stream.clone());
    Ok(stream)
}

/// The lane of a stream, made now if it was not used before.
///
/// # Safety
/// As [`stream`].
///
/// # Errors
/// No such device, pool or driver; a setting that is refused; a forked child.
pub unsafe fn lane(key: Key) -> Result<Seat, Failure> {
    not_forked()?;
    let device = device_id(key.device())?;
    let (number, pool) = pools::of(key.pool_number(), device)?;
    let key = Key::of(number, key.device(), key.stream);
    // SAFETY: the caller's own condition.
    let stream = unsafe { stream(device, key.handle())? };
    let mut lanes = LANES.lock();
    // Under the lock, so that no lane is made for a pool that is just being destroyed.
    let owner = pools::owner(number, device)?;
    if let Some(lane) = lanes.get(&key) {
        return Ok(Seat { lane: lane.clone(), _owner: owner });
    }
    let lane = pool.lane(&stream)?;
    // Lanes of the threads' own streams are told apart by the pool.
    if key.handle() != StreamHandle::PER_THREAD {
        lanes.insert(key, lane.clone());
    }
    Ok(Seat { lane, _owner: owner })
}

/// Ends the lanes of a stream that is about to be destroyed, which it must not be while it is
/// captured.
///
/// # Safety
/// The stream is live.
///
/// # Errors
/// [`Failure::StreamCaptured`]: to be called again after the capture; the driver's: to be called again; a
/// forked child.
pub unsafe fn close(ordinal: c_int, stream: usize) -> Result<(), Failure> {
    not_forked()?;
    let device = device_id(ordinal)?;
    let pools = pools::with_device(device);
    let handle = Key::new(ordinal, stream).handle();
    let known = match pools.first() {
        Some(pool) if handle == StreamHandle::PER_THREAD => {
            Some(Stream::per_thread(pool.driver(), device)?)
        }
        _ => STREAMS.lock().get(&(device, handle.0)).cloned(),
    };
    // Nobody used it here.
    let Some(known) = known else { return Ok(()) };
    take(&mut LANES.lock(), |key| key.is_of(ordinal, stream));
    recent::forget_stream(ordinal, stream);
    // Of every pool, whatever the others say.
    let mut answer = Ok(());
    for pool in pools {
        match pool.try_close_lane(&known) {
            Ok(true) => {}
            Ok(false) => answer = Err(Failure::StreamCaptured),
            Err(refused) => answer = Err(refused.into()),
        }
    }
    answer?;
    STREAMS.lock().remove(&(device, handle.0));
    Ok(())
}

/// Takes the lanes of a pool out of the table once `end` has agreed, under the table's lock: no lane is
/// made for the pool meanwhile.
///
/// # Errors
/// Those of `end`; [`Failure::StreamCaptured`].
pub(crate) fn take_all<T>(
    number: u32,
    end: impl FnOnce() -> Result<T, Failure>,
) -> Result<(T, Vec<Lane>), Failure> {
    let mut lanes = LANES.lock();
    let is_mine = |key: &Key| key.pool_number() == number;
    let is_captured = |lane: &Lane| {
        lane.stream().capture_info().is_ok_and(|info| info.status != CaptureStatus::None)
    };
    // Nothing could be recorded on it, and nobody would ask again.
    if lanes.iter().any(|(key, lane)| is_mine(key) && is_captured(lane)) {
        return Err(Failure::StreamCaptured);
    }
    let ended = end()?;
    Ok((ended, take(&mut lanes, is_mine).into_values().collect()))
}

fn take(lanes: &mut BTreeMap<Key, Lane>, which: impl Fn(&Key) -> bool) -> BTreeMap<Key, Lane> {
    let (taken, left) = std::mem::take(lanes).into_iter().partition(|(key, _)| which(key));
    *lanes = left;
    taken
}
