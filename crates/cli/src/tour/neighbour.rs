//! Memory of the neighbour behind addresses of the buffer, by name.

use vmm_pool::Place;

use super::bytes::{check, write};
use super::stage::{Stage, StepResult};
use super::telling::{Told, expect, mib};

pub(super) fn commit(stage: &mut Stage) -> StepResult {
    let second = match &stage.second {
        Ok(second) => second,
        Err(why) => return Ok(Told::LeftOut(why.clone())),
    };
    let more = stage.buffer.chunk_bytes();
    let (bytes, all) = (stage.bytes, stage.bytes + more);
    let lender = Place::Device(second.device);
    stage.buffer.commit_from(lender, bytes..all)?;
    let by_place = stage.buffer.stats().by_place;
    expect(
        by_place.contains(&(lender, more)),
        format_args!("{more} bytes on {lender}"),
        &by_place,
    )?;
    write(stage, &stage.first, all, stage.value)?;
    stage.first.stream.synchronize()?;
    check(stage, second, all)?;
    check(stage, &stage.first, all)?;
    stage.check_sound()?;
    stage.buffer.shrink_to(bytes)?;
    check(stage, &stage.first, bytes)?;
    let home = stage.first.device;
    Ok(Told::Done(format!(
        "{} of {lender} stood behind the memory of {home}, both wrote and read it, and it went back",
        mib(more)
    )))
}
