//! Growth in place: the address stays, and what is there already.

use vmm_pool::AheadState;

use super::bytes::{LONG, check, write, write_all};
use super::stage::{Stage, StepResult};
use super::telling::{Told, expect, mib};

/// The first half comes from what was made ahead.
pub(super) fn in_place(stage: &mut Stage) -> StepResult {
    let (half, quarter) = (stage.bytes / 2, stage.bytes / 4);
    let grown = stage.buffer.grow_to(quarter)?;
    expect(grown == quarter, format_args!("{quarter} bytes more"), grown)?;
    write(stage, &stage.first, quarter, stage.value)?;
    stage.first.stream.synchronize()?;
    stage.buffer.grow_to(half)?;
    check(stage, &stage.first, quarter)?;
    write(stage, &stage.first, half, stage.value)?;
    stage.first.stream.synchronize()?;
    check(stage, &stage.first, half)?;
    stage.check_sound()?;
    let stocked = stage.buffer.stats().from_stock_bytes;
    Ok(Told::Done(format!(
        "grew to {} and to {} at one address, {} of it from what was made ahead",
        mib(quarter),
        mib(half),
        mib(stocked)
    )))
}

/// The second half is brought by the pool's thread.
pub(super) fn ahead(stage: &mut Stage) -> StepResult {
    let growth = stage.buffer.grow_ahead(stage.bytes)?;
    match growth.wait(LONG) {
        AheadState::Done => {}
        AheadState::Failed(error) => return Err(error.into()),
        state => expect(false, "growth that ends", state)?,
    }
    expect(
        stage.buffer.committed_bytes() == stage.bytes,
        format_args!("{} bytes", stage.bytes),
        stage.buffer.committed_bytes(),
    )?;
    check(stage, &stage.first, stage.bytes / 2)?;
    write_all(stage, false)?;
    check(stage, &stage.first, stage.bytes)?;
    stage.check_sound()?;
    Ok(Told::Done(format!("a thread of the pool brought it to {}", mib(stage.bytes))))
}
