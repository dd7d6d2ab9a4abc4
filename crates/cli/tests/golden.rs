//! Driver calls and density of the recorded traces on the simulated device: exact numbers.
//!
//! Nothing here is measured: counts and peaks follow from the pool's decisions alone, so any
//! difference is a change of behaviour. After a change that is meant, `VMM_UPDATE_GOLDEN=1` writes
//! the file anew.

#![allow(clippy::unwrap_used, reason = "a failure ends the test")]

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// The settings that are held to their numbers: a name, and the arguments.
const SETTINGS: &[(&str, &[&str])] = &[
    ("default", &[]),
    ("soft-limit-off", &["--soft-limit", "off"]),
    ("chunk-2M", &["--chunk", "2M"]),
    ("chunk-32M", &["--chunk", "32M"]),
    ("buddy-soft-limit-off", &["--placement", "buddy", "--soft-limit", "off"]),
];

fn tests_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests")
}

fn traces() -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = std::fs::read_dir(tests_folder().join("traces"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|ext| ext == "gz"))
        .collect();
    found.sort();
    assert_eq!(found.len(), 5, "the five recorded traces");
    found
}

/// One line a trace and pass: what is exact.
fn replay(arguments: &[&str]) -> Vec<Value> {
    let output = Command::new(env!("CARGO_BIN_EXE_vmm-pool"))
        .args(["replay", "--driver", "sim", "--json"])
        .args(arguments)
        .args(traces())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn line(setting: &str, row: &Value) -> String {
    let mut text = format!("{setting} {} pass {}:", row["trace"].as_str().unwrap(), row["pass"]);
    let peaks =
        (row["peak_live_bytes"].as_u64().unwrap(), row["peak_held_bytes"].as_u64().unwrap());
    write!(text, " live {} held {} ratio {:.4}", peaks.0, peaks.1, peaks.1 as f64 / peaks.0 as f64)
        .unwrap();
    for call in ["create", "map", "set_access", "unmap", "release"] {
        write!(text, " {call} {}", row["driver_calls"][call]).unwrap();
    }
    text
}

#[test]
fn counts_and_peaks_are_what_they_were() {
    let mut now = String::new();
    for (setting, arguments) in SETTINGS {
        for row in replay(arguments) {
            writeln!(now, "{}", line(setting, &row)).unwrap();
        }
    }
    let path = tests_folder().join("golden/replay.txt");
    if std::env::var_os("VMM_UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, &now).unwrap();
    }
    let golden = std::fs::read_to_string(&path).unwrap();
    for (now, golden) in now.lines().zip(golden.lines()) {
        assert_eq!(now, golden, "left: now, right: {}", path.display());
    }
    assert_eq!(now.lines().count(), golden.lines().count());
}

#[test]
fn warm_passes_make_no_driver_call_with_the_soft_limit_off() {
    for row in replay(&["--soft-limit", "off", "--passes", "3"]) {
        let calls = row["driver_calls"].as_object().unwrap();
        let total: u64 = calls.values().map(|count| count.as_u64().unwrap()).sum();
        match row["pass"].as_u64().unwrap() {
            1 => assert!(total > 100, "{row}"),
            _ => assert_eq!(total, 0, "{row}"),
        }
    }
}

#[test]
fn density_is_what_is_promised() {
    // Peak held / peak live of the cold pass: geometric mean and worst of the five.
    for (arguments, mean_most, worst_most) in [
        (&[][..], 1.027, 1.08),
        (&["--chunk", "2M"][..], 1.022, 1.08),
        (&["--chunk", "32M"][..], 1.06, 1.20),
    ] {
        let ratios: Vec<f64> = replay(arguments)
            .iter()
            .filter(|row| row["pass"] == 1)
            .map(|row| {
                let bytes = |key: &str| row[key].as_u64().unwrap() as f64;
                bytes("peak_held_bytes") / bytes("peak_live_bytes")
            })
            .collect();
        assert_eq!(ratios.len(), 5);
        let mean = (ratios.iter().map(|r| r.ln()).sum::<f64>() / 5.0).exp();
        let worst = ratios.iter().copied().fold(0.0, f64::max);
        assert!(mean <= mean_most, "{arguments:?}: mean {mean:.4} of {ratios:?}");
        assert!(worst <= worst_most, "{arguments:?}: worst {worst:.4} of {ratios:?}");
    }
}
