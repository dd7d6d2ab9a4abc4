//! `vmm-pool doctor`, run as a user runs it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::process::{Command, Output};

use serde_json::Value;

fn doctor(options: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_vmm-pool")).arg("doctor").args(options).output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

#[test]
fn the_simulated_machine_is_usable() {
    let output = doctor(&["--driver", "sim"]);
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(0), "{text}");
    let last = text.lines().last().unwrap();
    assert_eq!(last, "ok    verdict: usable on device 0, device 1");
    for line in text.lines() {
        let status = line.split("  ").next().unwrap().trim();
        assert!(["ok", "warn"].contains(&status), "{line}");
    }
}

#[test]
fn json_lines_say_the_same() {
    let output = doctor(&["--driver", "sim", "--json"]);
    assert_eq!(output.status.code(), Some(0));
    let findings: Vec<Value> =
        stdout(&output).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(findings.len(), stdout(&doctor(&["--driver", "sim"])).lines().count());
    let last = findings.last().unwrap();
    assert_eq!((&last["finding"], &last["status"]), (&"verdict".into(), &"ok".into()));
    assert_eq!(last["detail"]["usable_devices"], serde_json::json!([0, 1]));
}

#[test]
fn a_machine_without_a_driver_is_explained() {
    for driver in ["auto", "cuda"] {
        let output = doctor(&["--driver", driver]);
        let text = stdout(&output);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(!errors.contains("panicked"), "{errors}");
        let last = text.lines().last().unwrap();
        match vmm_sys::cuda::Cuda::open() {
            Ok(_) => assert!(text.contains("library: ") && last.contains("verdict: "), "{text}"),
            Err(error) => {
                assert_eq!(output.status.code(), Some(2), "{text}");
                assert!(last.starts_with("fail  verdict: not usable: "), "{last}");
                assert!(last.contains(&error.to_string()), "{last}");
                assert_eq!(text.lines().count(), 2, "{text}");
            }
        }
    }
}

#[test]
fn bad_usage_is_refused() {
    let output = doctor(&["--driver", "none"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(output.stdout.is_empty());
    assert!(String::from_utf8_lossy(&output.stderr).contains("auto, cuda, sim"));
}
