//! The driver that the process uses, chosen once.

use std::sync::{Arc, OnceLock};

use vmm_sys::cuda::Cuda;
use vmm_sys::sim::Sim;
use vmm_sys::{DeviceId, Driver};

use crate::failure::Failure;

/// Chooses the driver.
const DRIVER_VARIABLE: &str = "VMM_POOL_DRIVER";
/// Simulated devices: they cost nothing until they are touched.
const SIM_DEVICES: usize = 8;

static DRIVER: OnceLock<Result<Arc<dyn Driver>, Failure>> = OnceLock::new();

/// The driver was chosen before, by an earlier call or by the first allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the driver was chosen before; expected to be told before the first use")]
pub struct DriverChosen;

/// Takes memory from `driver`, whatever the environment says. For Rust programs that have one;
/// before the first use of anything else here.
///
/// # Errors
/// [`DriverChosen`] if it is too late.
pub fn use_driver(driver: Arc<dyn Driver>) -> Result<(), DriverChosen> {
    DRIVER.set(Ok(driver)).map_err(|_| DriverChosen)
}

/// The driver, chosen now if it was not before. It is never torn down: at exit it may be gone before
/// the last free comes.
///
/// # Errors
/// [`Failure::NoDriver`], the same each time.
pub fn driver() -> Result<&'static Arc<dyn Driver>, Failure> {
    DRIVER.get_or_init(choose).as_ref().map_err(Clone::clone)
}

/// How many devices the machine has. The driver is asked once.
///
/// # Errors
/// As [`driver`].
pub fn device_count() -> Result<u32, Failure> {
    static COUNT: OnceLock<u32> = OnceLock::new();
    match COUNT.get() {
        Some(count) => Ok(*count),
        None => {
            let count = driver()?.device_count()?;
            Ok(*COUNT.get_or_init(|| count))
        }
    }
}

/// The driver, if the machine has the device.
///
/// # Errors
/// [`Failure::NoSuchDevice`]; as [`driver`].
pub fn driver_of(device: DeviceId) -> Result<&'static Arc<dyn Driver>, Failure> {
    let (driver, count) = (driver()?, device_count()?);
    match device.0 < count {
        true => Ok(driver),
        false => Err(Failure::NoSuchDevice { asked: device.0, count }),
    }
}

fn choose() -> Result<Arc<dyn Driver>, Failure> {
    let name = std::env::var_os(DRIVER_VARIABLE).unwrap_or_default();
    match name.to_str() {
        // A program that asks for the GPU's memory is not helped by a simulated device, so there
        // is no falling back.
        Some("" | "auto" | "cuda") => match Cuda::open() {
            Ok(cuda) => Ok(cuda),
            Err(error) => Err(Failure::NoDriver(format!(
                "no usable GPU: {error} ({DRIVER_VARIABLE}=sim simulates one)"
            ))),
        },
        Some("sim") => Ok(Sim::builder().devices(SIM_DEVICES).build()),
        _ => Err(Failure::NoDriver(format!(
            "{DRIVER_VARIABLE} = {}: expected auto, cuda or sim",
            name.display()
        ))),
    }
}
