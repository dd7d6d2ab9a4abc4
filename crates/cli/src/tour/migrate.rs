//! The memory moves to the second device and back, and the graph goes on working.

use vmm_pool::Place;

use super::bytes::{check_all, write_all};
use super::graph::replay;
use super::stage::{Stage, StepResult};
use super::telling::{Moment, Told, Trouble, expect, mib};

pub(super) fn there_and_back(stage: &mut Stage) -> StepResult {
    let device = match &stage.second {
        Ok(second) => second.device,
        Err(why) => return Ok(Told::LeftOut(why.clone())),
    };
    let there = to(stage, Place::Device(device))?;
    let back = to(stage, Place::Device(stage.first.device))?;
    Ok(Told::Done(format!(
        "{} went to {device} in {there} us and back in {back} us; each time every byte was right, \
         and so was the graph",
        mib(stage.bytes)
    )))
}

/// One move, with everything checked. How long it took, in microseconds of the tour's clock.
pub(super) fn to(stage: &mut Stage, place: Place) -> Result<u64, Trouble> {
    write_all(stage, false)?;
    let begun = Moment::now(stage.sim.as_deref());
    let moved = stage.buffer.migrate(place)?;
    let us = begun.elapsed_us(stage.sim.as_deref());
    expect(moved.bytes == stage.bytes, format_args!("{} bytes to move", stage.bytes), moved)?;
    stage.check_place(place)?;
    check_all(stage)?;
    replay(stage)?;
    stage.check_sound()?;
    Ok(us)
}
