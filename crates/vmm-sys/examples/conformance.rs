//! Runs the conformance suite on a driver.
//!
//! ```text
//! conformance [--driver sim|cuda] [--device N] [--filter d_m] [--json FILE] [--list]
//! ```
//!
//! Exit code 0: no row failed. 1: a row failed. 2: the driver cannot be opened, or the call is
//! wrong. Rows that break their context run in child processes of this very program (`--child`), as
//! does the second process of the export rows (`--second`).

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::Duration;

use vmm_sys::conformance::{
    Bench, Outcome, Progress, run_all, run_in_child, select, serve_second_process,
};
use vmm_sys::cuda::Cuda;
use vmm_sys::sim::Sim;
use vmm_sys::{DeviceId, Driver, DriverKind};

/// How long a row in a process of its own may take, opening the driver included.
const CHILD_LIMIT: Duration = Duration::from_secs(40);

const USAGE: &str =
    "usage: conformance [--driver sim|cuda] [--device N] [--filter NAME] [--json FILE] [--list]";

#[derive(Clone, Debug)]
struct Options {
    driver: DriverKind,
    device: u32,
    filter: String,
    json: Option<PathBuf>,
    role: Role,
}

/// What this process is for.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Role {
    Suite,
    List,
    /// One case of one row.
    Child(usize),
    /// The other side of an export.
    Second,
}

fn main() -> ExitCode {
    let options = match Options::parse(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(text) => return refuse(&format!("{text}\n{USAGE}")),
    };
    if options.role == Role::List {
        for row in select(&options.filter) {
            println!("{:<6} {:<8} {}", row.id, row.group, row.title);
        }
        return ExitCode::SUCCESS;
    }
    let driver = match open(options.driver) {
        Ok(driver) => driver,
        Err(text) => return refuse(&format!("no {} driver: {text}", options.driver)),
    };
    match options.role {
        Role::Child(case) => child(driver, &options, case),
        Role::Second => match serve_second_process(&driver) {
            Ok(()) => ExitCode::SUCCESS,
            Err(text) => {
                eprintln!("second process: {text}");
                ExitCode::FAILURE
            }
        },
        Role::Suite | Role::List => suite(driver, &options),
    }
}

fn refuse(text: &str) -> ExitCode {
    eprintln!("{text}");
    ExitCode::from(2)
}

impl Options {
    fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Options, String> {
        let mut options = Options {
            driver: DriverKind::Sim,
            device: 0,
            filter: String::new(),
            json: None,
            role: Role::Suite,
        };
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().ok_or(format!("{argument} takes a value"));
            match argument.as_str() {
                "--driver" => options.driver = parse_driver(&value()?)?,
                "--device" => options.device = parse_number(&argument, &value()?)?,
                "--filter" => options.filter = value()?,
                "--json" => options.json = Some(value()?.into()),
                "--list" => options.role = Role::List,
                "--child" => options.role = Role::Child(parse_number(&argument, &value()?)?),
                "--second" => options.role = Role::Second,
                other => return Err(format!("{other} is no option")),
            }
        }
        if select(&options.filter).is_empty() {
            return Err(format!("no row is named {0}, or begins with {0}", options.filter));
        }
        Ok(options)
    }

    /// This program again, on the same driver and device.
    fn command(&self) -> std::io::Result<Command> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["--driver", &self.driver.to_string()]);
        command.args(["--device", &self.device.to_string()]);
        Ok(command)
    }
}

fn parse_driver(text: &str) -> Result<DriverKind, String> {
    match text {
        "sim" => Ok(DriverKind::Sim),
        "cuda" => Ok(DriverKind::Cuda),
        other => Err(format!("--driver is sim or cuda, not {other}")),
    }
}

fn parse_number<T: std::str::FromStr>(option: &str, text: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("{option} takes a number, not {text}"))
}

fn open(kind: DriverKind) -> Result<Arc<dyn Driver>, String> {
    match kind {
        DriverKind::Sim => Ok(Sim::builder().devices(2).build()),
        DriverKind::Cuda => Ok(Cuda::open().map_err(|error| error.to_string())?),
    }
}

/// Runs all selected rows and tells what came.
fn suite(driver: Arc<dyn Driver>, options: &Options) -> ExitCode {
    println!("{}", describe(&*driver));
    let bench = match bench(driver, options) {
        Ok(bench) => bench,
        Err(text) => return refuse(&text),
    };
    let report = run_all(&bench, &options.filter, &mut |progress| match progress {
        // On standard error and without a line break: a row that hangs is the last word there.
        Progress::Begins(row) => {
            eprint!("\r{} ...", row.id);
            // A closed standard error is no reason to stop the suite.
            let _ = std::io::stderr().flush();
        }
        Progress::Ended(row) => {
            eprint!("\r");
            println!("{row}");
        }
    });
    println!("\n{report}");
    if let Some(path) = &options.json
        && let Err(error) = std::fs::write(path, report.to_json_lines())
    {
        eprintln!("{}: {error}", path.display());
        return ExitCode::FAILURE;
    }
    if report.is_good() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The bench, with the places that rows need beside this process.
fn bench(driver: Arc<dyn Driver>, options: &Options) -> Result<Bench, String> {
    let kind = driver.kind();
    let bench = Bench::new(driver, DeviceId(options.device)).map_err(|error| error.to_string())?;
    let again = options.command().map_err(|error| format!("this program's own path: {error}"))?;
    let again = Arc::new(again);
    let rebuild = |command: &Command| {
        let mut copy = Command::new(command.get_program());
        copy.args(command.get_args());
        copy
    };
    let second = Arc::clone(&again);
    let bench = bench.with_second_process(move || {
        let mut command = rebuild(&second);
        command.arg("--second");
        command
    });
    Ok(match kind {
        DriverKind::Sim => bench.with_fresh(|| Ok(Sim::builder().devices(2).build() as _)),
        DriverKind::Cuda => bench.with_isolation(move |row, case| {
            let mut command = rebuild(&again);
            command.args(["--filter", row.id, "--child", &case.to_string()]);
            run_in_child(row, case, command, CHILD_LIMIT)
        }),
    })
}

/// Runs one case of one row, and prints the outcome for the parent.
fn child(driver: Arc<dyn Driver>, options: &Options, case: usize) -> ExitCode {
    let outcome = match (select(&options.filter).as_slice(), bench(driver, options)) {
        (&[row], Ok(bench)) if case < row.cases.len() => {
            bench.with_voice(|text| println!("{text}")).run_case_here(row, case)
        }
        (&[row], Ok(_)) => Outcome::Failed(format!("{} has no case {case}", row.id)),
        (rows, Ok(_)) => Outcome::Failed(format!("--child is for one row, not {}", rows.len())),
        (_, Err(text)) => Outcome::Failed(text),
    };
    print!("{}", outcome.encode());
    // The context may be broken: nothing that the end of a process would still do can help it.
    ExitCode::SUCCESS
}

/// The machine, in the words that a report should carry.
fn describe(driver: &dyn Driver) -> String {
    let count = driver.device_count().unwrap_or(0);
    let names: Vec<_> = (0..count)
        .map(|ordinal| driver.device_name(DeviceId(ordinal)).unwrap_or_else(|e| e.to_string()))
        .collect();
    match driver.driver_version() {
        Ok(version) => format!(
            "{} driver, CUDA {}.{}: {}",
            driver.kind(),
            version / 1000,
            version % 1000 / 10,
            names.join(", ")
        ),
        Err(error) => format!("{} driver: {error}", driver.kind()),
    }
}
