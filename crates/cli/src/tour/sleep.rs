//! The buffer sleeps: its memory goes back to the driver, its addresses stay.

use std::time::Duration;

use vmm_pool::{Contents, ElasticError, Error, Place};

use super::bytes::{check_all, write_all};
use super::graph::replay;
use super::stage::{Stage, StepResult, TAG};
use super::telling::{Told, Trouble, expect, mib};

pub(super) fn dropped(stage: &mut Stage) -> StepResult {
    let text = sleep_and_wake(stage, Contents::Dropped)?;
    write_all(stage, false)?;
    check_all(stage)?;
    replay(stage)?;
    Ok(Told::Done(format!("{text}, for other contents")))
}

pub(super) fn kept(stage: &mut Stage) -> StepResult {
    let node = match &stage.host {
        Ok(Place::HostNuma(node)) => *node,
        Ok(place) => return Err(Trouble::Wrong(format!("expected a host node, found {place}"))),
        Err(why) => return Ok(Told::LeftOut(why.clone())),
    };
    write_all(stage, false)?;
    let text = sleep_and_wake(stage, Contents::Kept { node })?;
    check_all(stage)?;
    replay(stage)?;
    Ok(Told::Done(format!("{text}, with every byte that was kept on the host")))
}

fn sleep_and_wake(stage: &Stage, contents: Contents) -> Result<String, Trouble> {
    let (home, bytes) = (stage.first.device, stage.bytes);
    let awake = taken(stage)?;
    let slept = stage.pool.sleep(TAG, contents, Duration::ZERO)?;
    expect(slept.buffers == 1 && slept.bytes == bytes, format_args!("{bytes} bytes back"), slept)?;
    let asleep = taken(stage)?;
    let back = awake.saturating_sub(asleep);
    // The driver keeps page tables of what is mapped on the host, 8 MiB for 4 GiB.
    let least = bytes - bytes / 256;
    expect(back >= least, format_args!("{least} bytes more free at the driver"), back)?;
    let refused = stage.buffer.use_on(&stage.first.stream);
    let refused_right = matches!(refused, Err(Error::Elastic(ElasticError::Asleep)));
    expect(refused_right, "a use of a sleeping buffer to be refused", refused)?;
    stage.check_sound()?;
    let woken = stage.pool.wake(TAG)?;
    expect(woken.bytes == bytes, format_args!("{bytes} bytes again"), woken)?;
    stage.check_place(Place::Device(home))?;
    stage.check_sound()?;
    Ok(format!("{} of {home} went back to the driver; it woke at the same address", mib(back)))
}

/// What the driver has given out on the first device, in bytes.
fn taken(stage: &Stage) -> Result<u64, Trouble> {
    let info = stage.driver.mem_info(stage.first.device)?;
    Ok(info.total_bytes - info.free_bytes)
}
