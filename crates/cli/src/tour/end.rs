//! The figures add up, and everything goes back to the driver.

use std::time::Instant;

use vmm_sys::object::{failed_drops, retry_failed_drops};
use vmm_sys::{DeviceId, Driver};

use super::bytes::LONG;
use super::stage::{Actor, Stage, StepResult};
use super::telling::{Told, Trouble, expect};

/// Of one chunk the driver may keep a part for itself.
const TOLERANCE: u64 = 2 << 20;

pub(super) fn give_back(stage: Stage) -> StepResult {
    stage.check_sound()?;
    let elastic = elastic_bytes(&stage);
    expect(elastic == stage.bytes, format_args!("{} elastic bytes", stage.bytes), elastic)?;
    let free = |actor: &Actor| (actor.device, actor.free_bytes);
    let before: Vec<(DeviceId, u64)> = stage.actors().map(free).collect();
    let (driver, sim) = (stage.driver.clone(), stage.sim.clone());
    drop(stage);
    let left = retry_failed_drops(&driver);
    expect(left == 0, "everything given back", failed_drops(&driver))?;
    if let Some(sim) = sim {
        sim.check_clean().map_err(Trouble::Wrong)?;
    }
    let begun = Instant::now();
    for (device, free_bytes) in before {
        // Other programs come and go: a moment, and then it is said.
        while free_now(&*driver, device)? + TOLERANCE < free_bytes && begun.elapsed() < LONG / 20 {
            std::thread::yield_now();
        }
        let now = free_now(&*driver, device)?;
        let expected = format_args!(
            "{free_bytes} bytes free on {device} as at the start, unless another program took some"
        );
        expect(now + TOLERANCE >= free_bytes, expected, now)?;
    }
    Ok(Told::Done("the figures added up, and the driver has everything back".into()))
}

/// What stands in elastic buffers.
fn elastic_bytes(stage: &Stage) -> u64 {
    let of = |device| stage.pool.device_stats(device).unwrap_or_default().elastic_bytes;
    stage.actors().map(|actor| of(actor.device)).sum()
}

fn free_now(driver: &dyn Driver, device: DeviceId) -> Result<u64, Trouble> {
    Ok(driver.mem_info(device)?.free_bytes)
}
