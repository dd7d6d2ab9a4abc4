//! The environment that the machine is built from. A setting that makes no sense is told on
//! standard error, and `cuInit` refuses: a machine other than the one asked for would teach nothing.

use std::path::PathBuf;
use std::time::Duration;

use vmm_sys::sim::{DEVICES_MAX, Sim, SimBuilder, TimeMode};

/// What the environment says, beside the machine itself.
#[derive(Debug)]
pub(crate) struct Settings {
    /// No device at all: what a machine without a GPU answers.
    pub(crate) no_device: bool,
    /// Kernels that are not known run as ones that do nothing.
    pub(crate) ignore_kernels: bool,
    pub(crate) builder: SimBuilder,
}

const DRIVER_VERSION: u32 = 13_000;
const DEVICES: u64 = 2;

/// Where calls are written down.
pub(crate) fn log_path() -> Option<PathBuf> {
    std::env::var_os("VMM_STANDIN_LOG").map(PathBuf::from)
}

/// What `cuDriverGetVersion` says, which may be asked before `cuInit`.
pub(crate) fn driver_version() -> Result<u32, String> {
    let version = number("VMM_STANDIN_DRIVER_VERSION", u64::from(DRIVER_VERSION))?;
    u32::try_from(version).map_err(|_| {
        format!("VMM_STANDIN_DRIVER_VERSION is 1000 x major + 10 x minor, not {version}")
    })
}

fn number(name: &str, default: u64) -> Result<u64, String> {
    match std::env::var(name) {
        Ok(text) => text.trim().parse().map_err(|_| format!("{name} is a number, not {text:?}")),
        Err(std::env::VarError::NotPresent) => Ok(default),
        Err(error) => Err(format!("{name}: {error}")),
    }
}

/// One of two words.
fn word(name: &str, off: &str, on: &str) -> Result<bool, String> {
    match std::env::var(name) {
        Ok(text) if text == on => Ok(true),
        Ok(text) if text == off => Ok(false),
        Ok(text) => Err(format!("{name} is {off} or {on}, not {text:?}")),
        Err(std::env::VarError::NotPresent) => Ok(false),
        Err(error) => Err(format!("{name}: {error}")),
    }
}

/// Reads all of it.
pub(crate) fn read() -> Result<Settings, String> {
    let devices = number("VMM_STANDIN_DEVICES", DEVICES)?;
    if devices > DEVICES_MAX as u64 {
        return Err(format!("VMM_STANDIN_DEVICES is at most {DEVICES_MAX}, not {devices}"));
    }
    let mut builder = Sim::builder().devices(devices as usize).driver_version(driver_version()?);
    let bytes = number("VMM_STANDIN_DEVICE_BYTES", 0)?;
    if bytes != 0 {
        builder = builder.device_bytes(bytes);
    }
    let blocked_ms = number("VMM_STANDIN_BLOCKED_MS", 0)?;
    if blocked_ms != 0 {
        builder = builder.blocked_limit(Duration::from_millis(blocked_ms));
    }
    if word("VMM_STANDIN_TIME", "instant", "modelled")? {
        builder = builder.time(TimeMode::Modelled);
    }
    Ok(Settings {
        no_device: devices == 0,
        ignore_kernels: word("VMM_STANDIN_KERNELS", "known", "ignore")?,
        builder,
    })
}
