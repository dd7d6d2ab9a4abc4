//! The conformance suite of `vmm-sys`, with `vmm_sys::cuda::Cuda` on the stand-in: the driver object
//! that a GPU has, the library in between, and the simulated device behind. What it is not expected
//! to pass is listed here with the reason, and each listed row must indeed not pass.
//!
//! This program has several roles, told by the environment. Without one it is the test: it starts
//! itself with the stand-in on its library path. That process is the suite, and starts itself again
//! for rows that break their context, and as the second process of the export rows.

#![allow(clippy::unwrap_used, reason = "a failure ends the process, which is what is looked at")]

use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::Duration;

use vmm_standin_directory::library_directory;
use vmm_sys::conformance::{Bench, Outcome, run_all, run_in_child, select, serve_second_process};
use vmm_sys::cuda::Cuda;
use vmm_sys::{DeviceId, Driver};

const ROLE: &str = "VMM_STANDIN_TEST_ROLE";
const ROW: &str = "VMM_STANDIN_TEST_ROW";
const CASE: &str = "VMM_STANDIN_TEST_CASE";
/// How long a row in a process of its own may take.
const CHILD_LIMIT: Duration = Duration::from_secs(40);

/// Rows that the stand-in does not answer as a GPU does, and why.
const DIFFERENT: &[(&str, &str)] = &[
    ("D-X7", "the simulated device shares no events between processes, so there are none to ask"),
    (
        "D-N5",
        "a GPU's driver crashes on handles that were never given out; the simulated device refuses them",
    ),
];

fn main() -> ExitCode {
    let role = std::env::var(ROLE).unwrap_or_default();
    if role.is_empty() {
        return test();
    }
    let driver = Cuda::open().unwrap();
    assert!(driver.library().contains("vmm-standin"), "{}", driver.library());
    assert_eq!(driver.missing_calls(), [], "every entry point that the driver object looks up");
    match role.as_str() {
        "suite" => suite(driver),
        "row" => row(driver),
        _ => {
            let driver: Arc<dyn Driver> = driver;
            serve_second_process(&driver).unwrap();
            ExitCode::SUCCESS
        }
    }
}

/// This program in another role, on the same library path.
fn again(role: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.env(ROLE, role);
    command
}

fn test() -> ExitCode {
    let directory = library_directory().unwrap();
    let mut suite = again("suite");
    // A filter of cargo's is for other tests; one for rows would make the counts wrong.
    let status = suite.env("LD_LIBRARY_PATH", directory.search_path()).status().unwrap();
    if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn bench(driver: Arc<Cuda>) -> Bench {
    let bench = Bench::new(driver, DeviceId(0)).unwrap();
    bench.with_second_process(|| again("second")).with_isolation(|row, case| {
        let mut command = again("row");
        command.env(ROW, row.id).env(CASE, case.to_string());
        run_in_child(row, case, command, CHILD_LIMIT)
    })
}

fn suite(driver: Arc<Cuda>) -> ExitCode {
    let report = run_all(&bench(driver), "", &mut |_| {});
    let mut wrong = Vec::new();
    for row in &report.rows {
        let listed = DIFFERENT.iter().find(|(id, _)| *id == row.id);
        match (listed, row.outcome.word()) {
            (Some((id, why)), "failed" | "skipped") => println!("{id} differs, as listed: {why}"),
            (Some((id, _)), word) => wrong.push(format!("{id} is listed, and {word}")),
            (None, "failed" | "skipped") => wrong.push(row.to_string()),
            (None, _) => {}
        }
    }
    let count = |word| report.count(word);
    println!(
        "vmm_sys::cuda::Cuda on the stand-in: {} passed, {} observed, {} skipped, {} differ of {} rows",
        count("passed"),
        count("observed"),
        count("skipped"),
        DIFFERENT.len(),
        report.rows.len()
    );
    for text in &wrong {
        println!("{text}");
    }
    if wrong.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// One case of one row, whose outcome the parent reads.
fn row(driver: Arc<Cuda>) -> ExitCode {
    let (row, case) = (std::env::var(ROW).unwrap(), std::env::var(CASE).unwrap());
    let [row] = select(&row)[..] else { panic!("{row} is no row") };
    let outcome: Outcome = bench(driver)
        .with_voice(|text| println!("{text}"))
        .run_case_here(row, case.parse().unwrap());
    print!("{}", outcome.encode());
    ExitCode::SUCCESS
}
