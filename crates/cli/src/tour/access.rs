//! The second device is let in: to read, then to write.

use vmm_pool::{ElasticError, Error};
use vmm_sys::Access;

use super::bytes::{check, write_all};
use super::stage::{Stage, StepResult};
use super::telling::{Told, Trouble, expect};

pub(super) fn grant(stage: &mut Stage) -> StepResult {
    let second = match &stage.second {
        Ok(second) => second,
        Err(why) => return Ok(Told::LeftOut(why.clone())),
    };
    let (home, device) = (stage.first.device, second.device);
    let refused = stage.buffer.use_on(&second.stream);
    let refused_right = matches!(refused, Err(Error::Elastic(ElasticError::NoAccess { device: it })) if it == device);
    expect(refused_right, "a use without access to be refused", refused)?;
    match stage.buffer.grant(device, Access::Read) {
        Ok(()) => {}
        Err(Error::Elastic(error @ ElasticError::NoPeer { .. })) => {
            // The machine has two devices that do not work together: for the story that is one.
            stage.second = Err(error.to_string());
            return Ok(Told::LeftOut(error.to_string()));
        }
        Err(error) => return Err(error.into()),
    }
    check(stage, second, stage.bytes)?;
    stage.buffer.grant(device, Access::ReadWrite)?;
    write_all(stage, true)?;
    check(stage, &stage.first, stage.bytes)?;
    let matrix = stage.pool.access_matrix();
    let pair = matrix.pair(home, device);
    let pair = pair.ok_or_else(|| Trouble::wrong("expected the pair in the access matrix"))?;
    expect(pair.buffers == 1, "one buffer in the access matrix", pair)?;
    stage.check_sound()?;
    Ok(Told::Done(format!("{device} read every byte, and wrote every byte; {pair}")))
}
