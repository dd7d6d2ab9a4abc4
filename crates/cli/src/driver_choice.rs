//! The GPU or the simulated device: which one, and why not the other.

use std::sync::Arc;

use vmm_sys::cuda::Cuda;
use vmm_sys::sim::{Sim, TimeMode};
use vmm_sys::{DeviceAttribute, DeviceId, Driver, DriverError};

/// What the user asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum DriverRequest {
    /// The GPU if there is one, else the simulated device.
    Auto,
    /// The GPU.
    Cuda,
    /// The simulated device.
    Sim,
}

/// A driver, and one sentence on how it came to be chosen.
#[derive(Clone, Debug)]
pub struct DriverChoice {
    /// The driver.
    pub driver: Arc<dyn Driver>,
    /// The same, if it is the simulated device.
    pub sim: Option<Arc<Sim>>,
    /// For the user.
    pub why: String,
}

/// No driver that could do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum ChoiceError {
    /// The GPU was asked for by name, and there is none that can be used.
    #[error("--driver cuda: {0}; --driver sim runs without a GPU")]
    NoCuda(String),
    /// The machine has fewer devices.
    #[error("--device {asked}: this machine has {count} device(s), from 0 to {last}")]
    NoSuchDevice {
        /// The ordinal.
        asked: u32,
        /// How many there are.
        count: u32,
        /// The last ordinal.
        last: u32,
    },
    /// The driver answered with an error.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

/// Most devices of a simulated machine.
const SIM_DEVICES_MAX: u32 = 16;

/// Finds the driver for work on `device`.
///
/// # Errors
/// No such device, or no usable GPU where one was insisted on.
pub fn choose(request: DriverRequest, device: DeviceId) -> Result<DriverChoice, ChoiceError> {
    match request {
        DriverRequest::Sim => simulated(device, "as asked"),
        DriverRequest::Cuda => match open_cuda(device)? {
            Ok(driver) => on_gpu(driver, device, "as asked"),
            Err(reason) => Err(ChoiceError::NoCuda(reason)),
        },
        DriverRequest::Auto => match open_cuda(device)? {
            Ok(driver) => on_gpu(driver, device, "there is a GPU; --driver sim would simulate one"),
            Err(reason) => simulated(device, &format!("no usable GPU: {reason}")),
        },
    }
}

/// Finds the driver for work across devices. Where they are simulated there are `sim_devices`, and
/// their work takes its modelled time.
///
/// # Errors
/// As [`choose`].
pub fn choose_all(request: DriverRequest, sim_devices: usize) -> Result<DriverChoice, ChoiceError> {
    let device = DeviceId(0);
    let sim = || Sim::builder().devices(sim_devices).time(TimeMode::Modelled).build();
    match request {
        DriverRequest::Sim => on_sim(sim(), device, "as asked"),
        DriverRequest::Cuda => choose(request, device),
        DriverRequest::Auto => match open_cuda(device)? {
            Ok(driver) => on_gpu(driver, device, "there is a GPU; --driver sim would simulate one"),
            Err(reason) => on_sim(sim(), device, &format!("no usable GPU: {reason}")),
        },
    }
}

/// The GPU's driver, or why it cannot be used. A wrong ordinal is an error, not a reason: falling
/// back would hide a typing mistake.
fn open_cuda(device: DeviceId) -> Result<Result<Arc<dyn Driver>, String>, ChoiceError> {
    let driver: Arc<dyn Driver> = match Cuda::open() {
        Ok(driver) => driver,
        Err(error) => return Ok(Err(error.to_string())),
    };
    check_device(&driver, device)?;
    let attribute = DeviceAttribute::VirtualMemoryManagementSupported;
    if driver.device_attribute(device, attribute)? == 0 {
        return Ok(Err(format!("{device} does not support virtual memory management")));
    }
    Ok(Ok(driver))
}

fn on_gpu(
    driver: Arc<dyn Driver>,
    device: DeviceId,
    reason: &str,
) -> Result<DriverChoice, ChoiceError> {
    let name = driver.device_name(device)?;
    let version = driver.driver_version()?;
    let (major, minor) = (version / 1000, version % 1000 / 10);
    let why = format!("driver: cuda {major}.{minor}, {device} is {name} ({reason})");
    Ok(DriverChoice { driver, sim: None, why })
}

fn simulated(device: DeviceId, reason: &str) -> Result<DriverChoice, ChoiceError> {
    // As many devices as the request needs: they cost nothing until touched.
    let count = device.0.saturating_add(1).min(SIM_DEVICES_MAX);
    on_sim(Sim::builder().devices(count as usize).build(), device, reason)
}

fn on_sim(sim: Arc<Sim>, device: DeviceId, reason: &str) -> Result<DriverChoice, ChoiceError> {
    let driver: Arc<dyn Driver> = sim.clone();
    check_device(&driver, device)?;
    let why = format!("driver: sim, a simulated H200 with modelled driver times ({reason})");
    Ok(DriverChoice { driver, sim: Some(sim), why })
}

fn check_device(driver: &Arc<dyn Driver>, device: DeviceId) -> Result<(), ChoiceError> {
    let count = driver.device_count()?;
    if device.0 < count {
        return Ok(());
    }
    Err(ChoiceError::NoSuchDevice { asked: device.0, count, last: count.saturating_sub(1) })
}

#[cfg(test)]
mod tests {
    use vmm_sys::DriverKind;

    use super::*;

    #[test]
    fn the_simulated_device_is_there_for_the_asking() {
        let choice = choose(DriverRequest::Sim, DeviceId(3)).unwrap();
        assert_eq!(choice.driver.kind(), DriverKind::Sim);
        assert!(choice.driver.device_count().unwrap() > 3);
        assert!(choice.why.contains("modelled"), "{}", choice.why);
    }

    #[test]
    fn across_devices_there_are_as_many_simulated_ones_as_asked() {
        let choice = choose_all(DriverRequest::Sim, 3).unwrap();
        assert_eq!(choice.driver.device_count().unwrap(), 3);
        assert!(choice.sim.is_some() && choice.why.contains("as asked"), "{}", choice.why);
    }

    #[test]
    fn an_ordinal_out_of_range_is_an_error_even_where_devices_are_free() {
        let error = choose(DriverRequest::Sim, DeviceId(99)).unwrap_err();
        assert_eq!(error.to_string(), "--device 99: this machine has 16 device(s), from 0 to 15");
    }

    #[test]
    fn auto_takes_what_there_is_and_says_why() {
        let choice = choose(DriverRequest::Auto, DeviceId(0)).unwrap();
        match Cuda::open() {
            Ok(_) => assert!(choice.why.contains("there is a GPU"), "{}", choice.why),
            Err(reason) => {
                assert_eq!(choice.driver.kind(), DriverKind::Sim);
                assert!(choice.why.contains(&reason.to_string()), "{}", choice.why);
                let error = choose(DriverRequest::Cuda, DeviceId(0)).unwrap_err();
                assert!(error.to_string().starts_with("--driver cuda:"), "{error}");
            }
        }
    }
}
