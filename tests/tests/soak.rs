//! The short form of the soak: a fixed number of operations of each thread, on the simulated device, in
//! a process of its own, whose descriptors and host memory are counted. docs/CHECKS.md has the long form.

use std::process::Command;

#[test]
fn a_short_soak_on_the_simulated_device_finds_nothing() {
    let program = env!("CARGO_BIN_EXE_soak");
    let arguments =
        "--driver sim --seed 5 --operations 200 --quiet-operations 100 --memory 536870912";
    let ran = Command::new(program).args(arguments.split(' ')).output().expect("the soak is run");
    let text = String::from_utf8_lossy(&ran.stdout);
    let last = text.lines().last().unwrap_or_default();
    assert!(ran.status.success(), "{text}\n{}", String::from_utf8_lossy(&ran.stderr));
    assert!(last.starts_with("{\"errors\":0,") && last.contains("\"quiet_points\":2"), "{last}");
    // Nearly all kinds of operation: which ones a run as short as this misses is chance.
    assert!(last.matches("\":[0,").count() < 15, "{last}");
}
