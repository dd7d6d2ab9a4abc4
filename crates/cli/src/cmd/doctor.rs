//! `vmm-pool doctor`: can a pool work on this machine?

use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::Arc;

use vmm_pool_cli::doctor::{self, Finding};
use vmm_pool_cli::driver_choice::DriverRequest;
use vmm_sys::Driver;
use vmm_sys::cuda::Cuda;
use vmm_sys::sim::Sim;

use super::Failure;

/// The exit code of a machine that a pool cannot work on.
const NOT_USABLE: u8 = 2;

/// Devices of the simulated machine: enough for a pair.
const SIM_DEVICES: usize = 2;

/// Examine the machine: what the driver says, and what really works.
#[derive(Debug, clap::Args)]
#[command(after_long_help = HOW)]
pub(crate) struct Args {
    /// Which driver to examine. `auto` and `cuda` are the GPU's: a machine without one is not
    /// usable. `sim` is the simulated one, with two devices.
    #[arg(long, value_enum, hide_possible_values = true, default_value = "auto")]
    driver: DriverRequest,
    /// One JSON object a line: finding, status, device, text, advice, detail.
    #[arg(long)]
    json: bool,
}

const HOW: &str = "\
Each line is `ok|warn|fail  WHAT: what it means; what to do`. `ok`: it works. `warn`: something is
missing that a pool can do without. `fail`: a pool cannot work there. The last line is the verdict.

Everything is tried on memory of one granule, which is given back. Attributes and free memory are
shown, but decide nothing, except that a device which denies virtual memory management is not used.
Every GPU that the process sees is touched: hide others with CUDA_VISIBLE_DEVICES.

Exit code: 0 a pool works on at least one device; 2 it does not, or bytes came back wrong.";

/// Runs the command.
pub(crate) fn run(args: &Args) -> ExitCode {
    match examine(args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(NOT_USABLE),
        Err(failure) => failure.report(),
    }
}

/// Whether the machine is usable.
fn examine(args: &Args) -> Result<bool, Failure> {
    let mut written = Ok(());
    let mut tell = |finding: &Finding| {
        if written.is_ok() {
            written = write(finding, args.json);
        }
    };
    let usable = match args.driver {
        DriverRequest::Sim => {
            tell(&doctor::simulated());
            let driver: Arc<dyn Driver> = Sim::builder().devices(SIM_DEVICES).build();
            doctor::examine(&driver, &mut tell).is_usable()
        }
        DriverRequest::Auto | DriverRequest::Cuda => match Cuda::open() {
            Ok(cuda) => {
                tell(&doctor::opened(&cuda));
                let driver: Arc<dyn Driver> = cuda;
                doctor::examine(&driver, &mut tell).is_usable()
            }
            Err(error) => {
                let finding = doctor::no_driver(&error);
                tell(&finding);
                tell(&doctor::unusable(finding.text()));
                false
            }
        },
    };
    match written {
        Ok(()) => Ok(usable),
        // The exit code still says what was found.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(usable),
        Err(error) => Err(error.into()),
    }
}

fn write(finding: &Finding, json: bool) -> io::Result<()> {
    let mut out = io::stdout().lock();
    if json {
        serde_json::to_writer(&mut out, finding)?;
        writeln!(out)?;
    } else {
        writeln!(out, "{finding}")?;
    }
    // Line by line: should a driver call hang, the last line says after what.
    out.flush()
}
