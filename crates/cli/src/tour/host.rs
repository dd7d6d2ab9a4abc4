//! The memory moves to the host and back.

use vmm_pool::Place;

use super::migrate;
use super::stage::{Stage, StepResult};
use super::telling::{Told, mib};

pub(super) fn there_and_back(stage: &mut Stage) -> StepResult {
    let place = match &stage.host {
        Ok(place) => *place,
        Err(why) => return Ok(Told::LeftOut(why.clone())),
    };
    let there = migrate::to(stage, place)?;
    let back = migrate::to(stage, Place::Device(stage.first.device))?;
    Ok(Told::Done(format!(
        "{} went to {place} in {there} us and back in {back} us; a kernel used it there",
        mib(stage.bytes)
    )))
}
