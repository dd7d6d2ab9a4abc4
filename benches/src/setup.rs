//! What every benchmark starts with: a driver, the facts of the machine, and a file for figures.

use std::ffi::OsStr;
use std::fmt::Display;
use std::path::PathBuf;
use std::sync::Arc;

use serde::Serialize;
use vmm_pool_cli::driver_choice::{ChoiceError, DriverChoice, DriverRequest, choose};
use vmm_pool_cli::replay::Cause;
use vmm_sys::sim::Sim;
use vmm_sys::{DeviceId, Driver, DriverKind};

use crate::facts::Facts;
use crate::record::{OUT_VAR, Recorder, default_path};

/// `auto` (default: the GPU if there is one), `cuda` or `sim`.
pub const DRIVER_VAR: &str = "VMM_BENCH_DRIVER";
/// How often a program repeats what it measures; each has a default of its own.
pub const REPETITIONS_VAR: &str = "VMM_BENCH_REPS";
/// The ordinal of the device; default 0.
pub const DEVICE_VAR: &str = "VMM_BENCH_DEVICE";

/// A driver to measure on, and where the figures go.
#[derive(Debug)]
pub struct Setup {
    /// The driver.
    pub driver: Arc<dyn Driver>,
    /// The device.
    pub device: DeviceId,
    /// The driver, if it is the simulated device.
    sim: Option<Arc<Sim>>,
    recorder: Recorder,
}

impl Setup {
    /// Reads the environment, opens a driver, and prints which one and why.
    ///
    /// # Errors
    /// A variable that cannot be understood; no such driver or device; a file that cannot be
    /// written.
    pub fn start(bench: &'static str) -> Result<Setup, Cause> {
        let (setup, why) = Setup::open(bench)?;
        println!("{bench}: {why}\n{}", setup.recorder.facts());
        Ok(setup)
    }

    /// As [`Setup::start`], for a program that only adds to what another began.
    ///
    /// # Errors
    /// As [`Setup::start`].
    pub fn start_silent(bench: &'static str) -> Result<Setup, Cause> {
        Ok(Setup::open(bench)?.0)
    }

    /// As [`Setup::start`], for a program about two devices: the other one is in the answer if the
    /// machine has it. `request` goes before the environment.
    ///
    /// # Errors
    /// As [`Setup::start`]; `peer` is the device itself.
    pub fn start_pair(
        bench: &'static str,
        request: Option<DriverRequest>,
        peer: Option<DeviceId>,
    ) -> Result<(Setup, Option<DeviceId>), Cause> {
        let request = request.map_or_else(|| driver_request(&variable(DRIVER_VAR)), Ok)?;
        let device = device_of(&variable(DEVICE_VAR))?;
        if peer == Some(device) {
            return Err(format!("{device} is no neighbour of itself").into());
        }
        // The simulated machine gets as many devices as are asked for; a real one has what it has.
        let (choice, peer) = match choose(request, peer.map_or(device, |peer| peer.max(device))) {
            Err(ChoiceError::NoSuchDevice { count, .. }) if device.0 < count => {
                let peer = peer.filter(|peer| peer.0 < count);
                (choose(request, device).map_err(in_our_words)?, peer)
            }
            choice => (choice.map_err(in_our_words)?, peer),
        };
        let (setup, why) = Setup::with(bench, choice, device)?;
        println!("{bench}: {why}\n{}", setup.recorder.facts());
        Ok((setup, peer))
    }

    fn open(bench: &'static str) -> Result<(Setup, String), Cause> {
        let request = driver_request(&variable(DRIVER_VAR))?;
        let device = device_of(&variable(DEVICE_VAR))?;
        Setup::with(bench, choose(request, device).map_err(in_our_words)?, device)
    }

    fn with(
        bench: &'static str,
        choice: DriverChoice,
        device: DeviceId,
    ) -> Result<(Setup, String), Cause> {
        let driver = choice.driver;
        // Clock reads around each driver call would be part of what is measured.
        driver.ledger().set_timing(false);
        let facts = Facts::collect(&*driver, device)?;
        let path = std::env::var_os(OUT_VAR).map_or_else(default_path, PathBuf::from);
        let recorder = Recorder::open(path, bench, facts)?;
        Ok((Setup { driver, device, sim: choice.sim, recorder }, choice.why))
    }

    /// Whether there is a GPU: then the driver's own allocators are measured beside the pool. On
    /// the simulated device they would be as fast as the model says.
    pub fn is_gpu(&self) -> bool {
        self.driver.kind() == DriverKind::Cuda
    }

    /// Whether everything was given back, as far as it can be known: the simulated device tells.
    ///
    /// # Errors
    /// What was left.
    pub fn check_clean(&self) -> Result<(), Cause> {
        Ok(self.sim.as_ref().map_or(Ok(()), |sim| sim.check_clean())?)
    }

    /// Appends one line to the record.
    ///
    /// # Errors
    /// The disk's.
    pub fn record<T: Serialize>(&mut self, row: &T) -> Result<(), Cause> {
        self.recorder.write(row)
    }

    /// Says where the record went.
    pub fn say_where(&self) {
        println!("recorded in {}", self.recorder.path().display());
    }
}

/// How often to repeat: what the environment says, else `default`.
///
/// # Errors
/// The variable is no count of at least 1.
pub fn repetitions(default: u32) -> Result<u32, Cause> {
    repetitions_of(&variable(REPETITIONS_VAR), default)
}

fn repetitions_of(text: &str, default: u32) -> Result<u32, Cause> {
    if text.is_empty() {
        return Ok(default);
    }
    let count = text.parse().ok().filter(|count| *count > 0);
    Ok(count.ok_or_else(|| format!("{REPETITIONS_VAR}={text}: expected a count from 1"))?)
}

/// For a program that is set by variables alone: what it is given is not overlooked.
///
/// # Errors
/// An argument, `--help` too.
pub fn no_arguments() -> Result<(), Cause> {
    refuse(std::env::args_os().nth(1).as_deref())
}

fn refuse(argument: Option<&OsStr>) -> Result<(), Cause> {
    let Some(argument) = argument else { return Ok(()) };
    let argument = argument.to_string_lossy();
    Err(format!(
        "{argument}: expected no argument; {DRIVER_VAR} (auto, cuda, sim), {DEVICE_VAR}, \
         {REPETITIONS_VAR} and {OUT_VAR} set it: docs/BENCHMARKS.md"
    )
    .into())
}

/// Ends the program: a benchmark that failed has no figures.
pub fn fail(what: impl Display, error: impl Display) -> ! {
    eprintln!("{what}: {error}");
    std::process::exit(1)
}

fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_default()
}

fn driver_request(text: &str) -> Result<DriverRequest, Cause> {
    match text {
        "" | "auto" => Ok(DriverRequest::Auto),
        "cuda" => Ok(DriverRequest::Cuda),
        "sim" => Ok(DriverRequest::Sim),
        other => Err(format!("{DRIVER_VAR}={other}: expected auto, cuda or sim").into()),
    }
}

fn device_of(text: &str) -> Result<DeviceId, Cause> {
    if text.is_empty() {
        return Ok(DeviceId(0));
    }
    let ordinal = text.parse().map(DeviceId);
    Ok(ordinal.map_err(|_| format!("{DEVICE_VAR}={text}: expected a device ordinal"))?)
}

/// The choice is made for a command line too, whose options do not exist here.
fn in_our_words(error: ChoiceError) -> Cause {
    match error {
        ChoiceError::NoCuda(reason) => {
            format!("{DRIVER_VAR}=cuda: {reason}; {DRIVER_VAR}=sim runs without a GPU").into()
        }
        ChoiceError::NoSuchDevice { asked, count, .. } => {
            format!("{DEVICE_VAR}={asked}: this machine has {count} device(s), from 0").into()
        }
        ChoiceError::Driver(error) => error.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_understood_or_refused_by_name() {
        assert_eq!(driver_request("").unwrap(), DriverRequest::Auto);
        assert_eq!(driver_request("cuda").unwrap(), DriverRequest::Cuda);
        assert_eq!(device_of("").unwrap(), DeviceId(0));
        assert_eq!(device_of("3").unwrap(), DeviceId(3));
        assert_eq!(repetitions_of("", 9).unwrap(), 9);
        assert_eq!(repetitions_of("3", 9).unwrap(), 3);
        let zero = repetitions_of("0", 9).unwrap_err();
        assert_eq!(zero.to_string(), "VMM_BENCH_REPS=0: expected a count from 1");
        let wrong = [driver_request("gpu").unwrap_err(), device_of("one").unwrap_err()];
        assert_eq!(wrong[0].to_string(), "VMM_BENCH_DRIVER=gpu: expected auto, cuda or sim");
        assert_eq!(wrong[1].to_string(), "VMM_BENCH_DEVICE=one: expected a device ordinal");
    }

    #[test]
    fn a_refused_choice_names_the_variables() {
        let error = in_our_words(ChoiceError::NoCuda("no library".into()));
        assert!(error.to_string().starts_with("VMM_BENCH_DRIVER=cuda: no library"), "{error}");
        let error = in_our_words(ChoiceError::NoSuchDevice { asked: 7, count: 1, last: 0 });
        assert!(error.to_string().starts_with("VMM_BENCH_DEVICE=7: "), "{error}");
    }
}
