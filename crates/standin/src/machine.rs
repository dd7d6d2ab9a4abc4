//! The one simulated machine of the process, made by `cuInit`.

use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use vmm_sys::sim::Sim;
use vmm_sys::{DeviceId, Driver, ResultCode};

use crate::door::{Done, Refusal};
use crate::module::Modules;
use crate::settings;

/// What there is besides the simulated device.
pub(crate) struct Machine {
    pub(crate) sim: Arc<Sim>,
    pub(crate) ignore_kernels: bool,
    pub(crate) modules: Mutex<Modules>,
}

static MACHINE: OnceLock<Result<Machine, (ResultCode, String)>> = OnceLock::new();

fn build() -> Result<Machine, (ResultCode, String)> {
    let settings = settings::read().map_err(|text| {
        // The code alone would not say which setting is meant.
        eprintln!("vmm-standin: {text}");
        (ResultCode::INVALID_VALUE, text)
    })?;
    if settings.no_device {
        return Err((ResultCode::NO_DEVICE, "VMM_STANDIN_DEVICES is 0".to_owned()));
    }
    Ok(Machine {
        sim: settings.builder.build(),
        ignore_kernels: settings.ignore_kernels,
        modules: Mutex::default(),
    })
}

/// `cuInit`: makes the machine, once.
pub(crate) fn start() -> Done {
    match MACHINE.get_or_init(build) {
        Ok(machine) => match machine.sim.is_gone() {
            // Asked for its code.
            true => Ok(machine.sim.device_count().map(drop)?),
            false => Ok(()),
        },
        Err((code, why)) => Err(Refusal::new(*code, why)),
    }
}

/// The machine, for entry points that need `cuInit` to have been called.
pub(crate) fn machine() -> Result<&'static Machine, Refusal> {
    match MACHINE.get() {
        Some(Ok(machine)) => Ok(machine),
        _ => Err(Refusal::new(ResultCode::NOT_INITIALIZED, "cuInit was not called, or failed")),
    }
}

/// The simulated device.
pub(crate) fn sim() -> Result<&'static Sim, Refusal> {
    machine().map(|machine| &*machine.sim)
}

/// The simulated device, and the one whose context is current in the calling thread.
pub(crate) fn current() -> Result<(&'static Sim, DeviceId), Refusal> {
    let sim = sim()?;
    let Some(context) = sim.context_current()? else {
        return Err(Refusal::new(ResultCode::INVALID_CONTEXT, "no context is current"));
    };
    match sim.context_device(context) {
        Some(device) => Ok((sim, device)),
        None => {
            Err(Refusal::new(ResultCode::CONTEXT_IS_DESTROYED, "the current context has ended"))
        }
    }
}

/// The device that an ordinal of C names; one that does not exist is the simulated device's to
/// refuse.
pub(crate) fn device_id(ordinal: i32) -> DeviceId {
    DeviceId(ordinal.cast_unsigned())
}
