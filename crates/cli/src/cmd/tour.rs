//! `vmm-pool tour`: what the pool does across devices, told step by step.

use std::io::{self, Write};
use std::process::ExitCode;

use vmm_pool::text;
use vmm_pool_cli::driver_choice::{DriverChoice, DriverRequest, choose_all};
use vmm_pool_cli::tour::{BYTES_MAX, GPU_BYTES, Plan, SIM_BYTES, Telling, tour};
use vmm_sys::DeviceId;

use super::{Failure, say};

/// The exit code of a step that failed.
const FAILED: u8 = 1;

/// Grow, share, move and put to sleep one buffer across two devices, and check every byte of it.
#[derive(Debug, clap::Args)]
#[command(after_long_help = HOW)]
pub(crate) struct Args {
    /// Which driver: the GPU's, the simulated device's, or the GPU's if there is one.
    #[arg(long, value_enum, default_value = "auto")]
    driver: DriverRequest,
    /// How many devices have parts. Left out: two, if there are as many.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=2))]
    devices: Option<u32>,
    /// Length of the buffer: bytes, or 64M, 4GiB, ...; rounded up to whole chunks. Left out: 256 MiB
    /// on a GPU, 16 MiB on the simulated device.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    bytes: Option<u64>,
    /// One JSON object a line: step, outcome (ok, left-out, failed), text, us, modelled.
    #[arg(long)]
    json: bool,
}

const HOW: &str = "\
Each line is a step: what it did and how long it took, with all its checks. Kernels write every word
of the buffer and compare every word. On the simulated device times are modelled: what the calls,
copies and kernels of the step cost on an H200. A step that the machine cannot do is left out, and
says why; the first that fails says what was expected and what was found, and ends the tour.

The first device holds the buffer and, for a moment, a chunk more; while memory moves, the other
place holds as much: the buffer's length is taken on each device, and on the host if it gives memory.
One step starts this program once more, as the process that a buffer is shared with.

Exit code: 0 every step that this machine can do went well; 1 one did not; 2 bad usage, or no such
driver or device.";

fn parse_bytes(text: &str) -> Result<u64, String> {
    match text::bytes(text)? {
        bytes @ 1..=BYTES_MAX => Ok(bytes),
        _ => Err(format!("expected 1 to {BYTES_MAX} bytes")),
    }
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> ExitCode {
    match go(args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(FAILED),
        Err(failure) => failure.report(),
    }
}

/// Whether all went well.
fn go(args: &Args) -> Result<bool, Failure> {
    let sim_devices = args.devices.unwrap_or(2) as usize;
    let choice = choose_all(args.driver, sim_devices).map_err(Failure::refused)?;
    say(&choice.why);
    let plan = plan(args, choice)?;
    let mut written = Ok(());
    let well = tour(&plan, &mut |telling| {
        if written.is_ok() {
            written = write(telling, args.json);
        }
    });
    match written {
        Ok(()) => Ok(well),
        // The exit code still says how it went.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(well),
        Err(error) => Err(error.into()),
    }
}

fn plan(args: &Args, choice: DriverChoice) -> Result<Plan, Failure> {
    let DriverChoice { driver, sim, .. } = choice;
    let count = driver.device_count().map_err(Failure::refused)?;
    let devices = args.devices.unwrap_or(count.min(2));
    if devices > count {
        let why = format!("--devices {devices}: this machine has {count} device(s)");
        return Err(Failure::refused(why));
    }
    let bytes = args.bytes.unwrap_or(if sim.is_some() { SIM_BYTES } else { GPU_BYTES });
    let devices = (0..devices).map(DeviceId).collect();
    let program = std::env::current_exe().ok();
    Ok(Plan { driver, sim, devices, bytes, program })
}

fn write(telling: &Telling, json: bool) -> io::Result<()> {
    let mut out = io::stdout().lock();
    if json {
        serde_json::to_writer(&mut out, telling)?;
        writeln!(out)?;
    } else {
        writeln!(out, "{telling}")?;
    }
    // Line by line: should a driver call hang, the last line says after what.
    out.flush()
}
