//! What was freed while work may still use it, of which nobody said on which stream.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use vmm_pool::{Error, RawBlock, ShortageHook, free_raw};
use vmm_pool_capi::{Failure, driver_of, pool};
use vmm_sys::object::{RelaxedCapture, Stream};
use vmm_sys::{CaptureStatus, DeviceId, ResultCode};

#[derive(Default)]
struct Aside {
    /// By address: the length, and the number of the free.
    blocks: BTreeMap<u64, (u64, u64)>,
    /// Has what is here given back when the pool is short of memory, whoever asks.
    hook: Option<ShortageHook>,
}

struct All {
    devices: BTreeMap<DeviceId, Aside>,
    /// Frees so far: a block may have come back, been given out and freed again meanwhile.
    frees: u64,
}

static ALL: Mutex<All> = Mutex::new(All { devices: BTreeMap::new(), frees: 0 });

/// Puts a block aside.
///
/// # Errors
/// [`Error::NotAllocated`] if it was freed before.
pub(crate) fn put(block: RawBlock) -> Result<(), Failure> {
    let device = block.device;
    let pool = pool(device)?;
    let mut all = ALL.lock();
    all.frees += 1;
    let number = all.frees;
    let aside = all.devices.entry(device).or_default();
    if aside.blocks.contains_key(&block.address) {
        return Err(Error::NotAllocated { address: block.address }.into());
    }
    aside.blocks.insert(block.address, (block.bytes, number));
    let give = |short: DeviceId, _| give_back(short).unwrap_or(0) > 0;
    aside.hook.get_or_insert_with(|| pool.on_shortage(give));
    Ok(())
}

/// Waits for all work of the device, and gives back what was put aside before. Returns the bytes.
/// While a stream is being captured this would harm the capture, and nothing is done. A capture on a stream that is
/// not ordered with the legacy one is not seen.
///
/// # Errors
/// The driver's; the blocks stay aside.
pub(crate) fn give_back(device: DeviceId) -> Result<u64, Failure> {
    let known = |all: &All| Some(all.devices.get(&device)?.blocks.clone());
    let Some(blocks) = known(&ALL.lock()).filter(|blocks| !blocks.is_empty()) else { return Ok(0) };
    if !wait(device)? {
        return Ok(0);
    }
    let mut freed = 0;
    for (address, (bytes, number)) in blocks {
        let mut all = ALL.lock();
        let Some(aside) = all.devices.get_mut(&device) else { continue };
        if aside.blocks.get(&address).is_some_and(|(_, now)| *now == number) {
            // Under the lock: a second free must find it in one place or the other.
            aside.blocks.remove(&address);
            free_raw(address, bytes)?;
            freed += bytes;
        }
    }
    Ok(freed)
}

/// Waits for all work of the device. Returns whether that could be done.
fn wait(device: DeviceId) -> Result<bool, Failure> {
    let driver = driver_of(device)?;
    let _relaxed = RelaxedCapture::enter(driver)?;
    // The legacy stream says so if a stream is captured that it is ordered with.
    match Stream::legacy(driver, device)?.capture_info() {
        Ok(info) if info.status == CaptureStatus::None => {}
        Ok(_) => return Ok(false),
        Err(error) if error.code() == ResultCode::STREAM_CAPTURE_IMPLICIT => return Ok(false),
        Err(error) => return Err(error.into()),
    }
    driver.device_synchronize(device)?;
    Ok(true)
}

/// Gives back what is put aside of a device, and asks the pool nothing any more: only tests do.
///
/// # Errors
/// As [`give_back`].
pub(crate) fn end(device: DeviceId) -> Result<(), Failure> {
    give_back(device)?;
    let aside = ALL.lock().devices.remove(&device);
    // Without the lock, which the hook takes.
    drop(aside);
    Ok(())
}
