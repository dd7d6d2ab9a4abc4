//! Whether the simulated device is like a GPU: the same work on both, driver calls and their time side by
//! side. See docs/DRIVER.md.
//!
//! ```text
//! fidelity run [--driver auto|cuda|sim] [--devices 1|2] --out FILE TRACE...
//! fidelity compare FILE FILE
//! ```
//!
//! Exit code of `compare`: 0 if all calls are equal or it is known why not, else 1. Times fail nothing.

#![forbid(unsafe_code)]

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use vmm_pool_benches::fidelity::{Row, compare::compare, work};
use vmm_pool_cli::driver_choice::{DriverRequest, choose_all};
use vmm_pool_cli::replay::Cause;

#[derive(Debug, Parser)]
struct Arguments {
    #[command(subcommand)]
    command: Order,
}

#[derive(Debug, Subcommand)]
enum Order {
    /// Does the work, and records what it cost.
    Run {
        /// Which driver.
        #[arg(long, value_enum, default_value = "auto")]
        driver: DriverRequest,
        /// Devices that the tour uses; as many as there are, 2 at most, unless it is said. Only records
        /// of as many devices can be compared.
        #[arg(long, value_parser = clap::value_parser!(u32).range(1..=2))]
        devices: Option<u32>,
        /// The record.
        #[arg(long)]
        out: PathBuf,
        /// Allocator traces.
        #[arg(required = true)]
        traces: Vec<PathBuf>,
    },
    /// Compares two records.
    Compare {
        /// One.
        first: PathBuf,
        /// The other.
        second: PathBuf,
    },
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().command {
        Order::Run { driver, devices, out, traces } => {
            run(driver, devices, &out, &traces).map(|()| true)
        }
        Order::Compare { first, second } => side_by_side(&first, &second),
    };
    match outcome {
        Ok(well) => ExitCode::from(u8::from(!well)),
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(2)
        }
    }
}

fn run(
    driver: DriverRequest,
    asked: Option<u32>,
    out: &Path,
    traces: &[PathBuf],
) -> Result<(), Cause> {
    let choice = choose_all(driver, asked.unwrap_or(2) as usize)?;
    let count = choice.driver.device_count()?;
    let devices = asked.unwrap_or(count.min(2));
    if devices > count {
        return Err(format!("--devices {devices}: this machine has {count}").into());
    }
    eprintln!("{}; devices: {devices}", choice.why);
    let mut file = File::create(out)?;
    work::all(&choice, devices, traces, |row| {
        // Line by line: what was finished before a failure is still true.
        writeln!(file, "{}", serde_json::to_string(&row)?)?;
        eprintln!("{}", row.work);
        Ok(())
    })
}

fn rows(path: &Path) -> Result<Vec<Row>, Cause> {
    let text = std::fs::read_to_string(path)?;
    text.lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
}

fn side_by_side(first: &Path, second: &Path) -> Result<bool, Cause> {
    let comparison = compare(&rows(first)?, &rows(second)?)?;
    print!("{}", comparison.text);
    Ok(comparison.unexplained == 0)
}
