//! The program itself: `vmm-pool replay`, run as a user runs it, on the simulated device.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

fn recorded(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../tests/traces/{name}.trace.gz"))
}

/// A trace of this test's own.
fn written(name: &str, text: &str) -> PathBuf {
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::File::create(&file).unwrap().write_all(text.as_bytes()).unwrap();
    file
}

fn replay(files: &[PathBuf], options: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_vmm-pool"))
        .arg("replay")
        .args(files)
        .args(options)
        .output()
        .unwrap()
}

fn replay_sim(files: &[PathBuf], options: &[&str]) -> Output {
    replay(files, &[&["--driver", "sim"], options].concat())
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn rows(output: &Output) -> Vec<Value> {
    assert_eq!(output.status.code(), Some(0), "{}", stderr(output));
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Everything of a row that the host's clock has no part in.
fn without_times(mut row: Value) -> Value {
    for field in ["mean_ns", "median_ns", "p99_ns", "max_us"] {
        assert!(row.as_object_mut().unwrap().remove(field).is_some(), "{field}");
    }
    row
}

fn calls(row: &Value, kind: &str) -> u64 {
    row["driver_calls"][kind].as_u64().unwrap()
}

#[test]
fn a_recorded_trace_is_replayed_and_counted_the_same_each_time() {
    let run = || rows(&replay_sim(&[recorded("gnn")], &["--json", "--passes", "2"]));
    let first = run();
    assert_eq!(first.len(), 2);
    for (index, row) in first.iter().enumerate() {
        assert_eq!(row["trace"], "gnn");
        assert_eq!(row["driver"], "sim");
        assert_eq!(row["driver_time"], "modelled");
        assert_eq!(row["allocator"], "vmm-pool");
        assert_eq!(row["pass"], index as u64 + 1);
        assert_eq!(row["ops"], 33810);
        assert_eq!(row["peak_live_bytes"], 10_671_256_184_u64);
        let ratio = row["ratio"].as_f64().unwrap();
        assert!((1.0..1.5).contains(&ratio), "{ratio}");
        assert!(row["mean_ns"].as_f64().unwrap() > 0.0);
        assert!(row["p99_ns"].as_u64() >= row["median_ns"].as_u64());
    }
    let (cold, warm) = (&first[0], &first[1]);
    assert!(calls(cold, "create") > 0 && calls(cold, "map") >= calls(cold, "create"));
    assert!(calls(warm, "create") < calls(cold, "create") / 2, "the second pass finds memory");
    assert!(cold["driver_us"].as_f64() > warm["driver_us"].as_f64());
    let second = run();
    let counted = |rows: Vec<Value>| rows.into_iter().map(without_times).collect::<Vec<_>>();
    assert_eq!(counted(first), counted(second));
}

#[test]
fn the_drivers_own_allocators_get_rows_of_their_own() {
    let trace = written("three.trace", "a 1 3000000 0 0\na 2 700 0 1\nf 1 2\na 3 512 0 3\n");
    let options = ["--json", "--passes", "1", "--compare", "cudaMalloc,cudaMallocAsync"];
    let rows = rows(&replay_sim(&[trace], &options));
    let allocators: Vec<_> = rows.iter().map(|row| row["allocator"].as_str().unwrap()).collect();
    assert_eq!(allocators, ["vmm-pool", "cudaMalloc", "cudaMallocAsync"]);
    for row in &rows[1..] {
        assert_eq!(calls(row, "other"), 4, "one call an operation: {row}");
        assert_eq!(calls(row, "create"), 0);
        assert!(row["placement"].is_null() && row["chunk"].is_null());
        assert!(row["peak_held_bytes"].as_u64() >= row["peak_live_bytes"].as_u64(), "{row}");
        // The call is the operation: its modelled time is in the mean.
        let driver_ns = row["driver_us"].as_f64().unwrap() * 1e3;
        assert!(driver_ns > 0.0);
        assert!(row["mean_ns"].as_f64().unwrap() >= driver_ns / 4.0 - 0.1, "{row}");
    }
}

#[test]
fn streams_are_spread_by_a_seed_that_is_printed() {
    let trace = recorded("unet_seg");
    let options = ["--json", "--passes", "1", "--streams", "4", "--seed", "42"];
    let output = replay_sim(&[trace], &options);
    assert!(
        stderr(&output).contains("streams: 4, blocks spread by seed 42"),
        "{}",
        stderr(&output)
    );
    let rows = rows(&output);
    assert_eq!((&rows[0]["streams"], &rows[0]["seed"]), (&Value::from(4), &Value::from(42)));
    assert!(calls(&rows[0], "other") > 0, "blocks that cross streams need events");
}

#[test]
fn work_behind_every_free_is_asked_for_by_its_length() {
    let options = ["--json", "--passes", "2", "--late-us", "2000", "--compare", "sim"];
    let rows = rows(&replay_sim(&[recorded("unet_seg")], &options));
    assert_eq!(rows.len(), 4);
    for row in &rows {
        assert_eq!((&row["late_us"], &row["host_waits"]), (&Value::from(2000), &Value::from(0)));
        assert_eq!(
            without_times(row.clone())["ratio"],
            rows[row["pass"].as_u64().unwrap() as usize - 1]["ratio"]
        );
    }
}

#[test]
fn several_traces_give_a_table_with_a_summary() {
    let files = [recorded("unet_seg"), recorded("gnn")];
    let output = replay_sim(&files, &["--passes", "2", "--chunk", "32MiB", "--soft-limit", "off"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let text = String::from_utf8(output.stdout).unwrap();
    let starts = |start: &str| text.lines().filter(|line| line.starts_with(start)).count();
    assert_eq!((starts("unet_seg"), starts("gnn"), starts("geometric mean of 2")), (2, 2, 2));
    assert!(text.contains("MODELLED"), "{text}");
}

#[test]
fn every_chunk_size_and_placement_replays_without_overlap() {
    for placement in ["first-fit", "buddy"] {
        for chunk in ["auto", "2M", "32M"] {
            let options = ["--json", "--passes", "1", "--placement", placement, "--chunk", chunk];
            let rows = rows(&replay_sim(&[recorded("unet_seg")], &options));
            assert_eq!(rows[0]["placement"], placement);
        }
    }
}

#[test]
fn a_malformed_file_stops_everything_before_it_starts() {
    let good = recorded("unet_seg");
    let bad = written("bad.trace", "# c\na 1 512 0 0\nf 2 1\n");
    let output = replay_sim(&[good, bad.clone()], &["--json"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(output.stdout.is_empty(), "no row of the good file either");
    let message = stderr(&output);
    let place = format!("error: {}, line 3: expected the ID of a live block", bad.display());
    assert!(message.contains(&place), "{message}");
    assert!(!message.contains("driver:"), "no driver was opened: {message}");
}

#[test]
fn in_guard_mode_each_block_is_mapped_and_unmapped() {
    let trace = written("guard.trace", "a 1 1000 0 0\na 2 700 0 1\nf 1 2\na 3 512 0 3\n");
    for (mode, calls_of_each) in [("off", 0), ("guard", 3)] {
        let options = ["--json", "--passes", "2", "--debug", mode];
        let warm = &rows(&replay_sim(std::slice::from_ref(&trace), &options))[1];
        assert_eq!((&warm["debug_mode"], calls(warm, "create")), (&Value::from(mode), 0));
        for kind in ["map", "set_access"] {
            assert_eq!(calls(warm, kind), calls_of_each, "{mode}, {kind}: {warm}");
        }
    }
}

#[test]
fn when_idle_lanes_are_emptied_is_said() {
    let trace = written("idle.trace", "a 1 1000 0 0\nf 1 2\n");
    for setting in ["auto", "off", "50"] {
        let options = ["--json", "--passes", "1", "--idle-lane-ms", setting];
        let rows = rows(&replay_sim(std::slice::from_ref(&trace), &options));
        assert_eq!(rows[0]["idle_lane_ms"], setting);
    }
}

#[test]
fn a_file_that_is_not_there_is_refused() {
    let output = replay_sim(&[PathBuf::from("/no/such.trace")], &[]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("/no/such.trace: cannot be read"), "{}", stderr(&output));
}

#[test]
fn bad_usage_is_refused_with_what_was_expected() {
    let file = [recorded("unet_seg")];
    for (options, expected) in [
        (&["--chunk", "3M"][..], "chunk = 3145728: expected a power of two"),
        (&["--chunk", "large"], "expected a number of bytes"),
        (&["--soft-limit", "-1"], "expected a fraction of at least 0"),
        (&["--soft-limit", "NaN"], "expected a fraction of at least 0"),
        (&["--passes", "0"], "1..=1000"),
        (&["--streams", "0"], "1..=1024"),
        (&["--compare", "malloc"], "cudaMallocAsync"),
        (&["--placement", "best-fit"], "first-fit"),
        (&["--idle-lane-ms", "soon"], "expected a whole number of milliseconds, or `off`"),
        (&["--idle-lane-ms", "0"], "idle"),
        (&["--debug", "loud"], "expected `off` or `guard`"),
        (&["--late-us", "0"], "1..=1000000"),
        (&["--late-us", "9", "--compare", "cudaMalloc"], "expected no --compare, or --compare sim"),
        (&["--device", "99"], "--device 99: this machine has 16 device(s), from 0 to 15"),
    ] {
        let output = replay_sim(&file, options);
        assert_eq!(output.status.code(), Some(2), "{options:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(expected), "{options:?}: {}", stderr(&output));
        assert!(output.stdout.is_empty());
    }
    assert_eq!(replay(&[], &[]).status.code(), Some(2), "no file");
}

#[test]
fn the_gpu_is_taken_if_there_is_one_and_its_absence_is_explained() {
    let file = [recorded("unet_seg")];
    let insisted = replay(&file, &["--driver", "cuda", "--passes", "1"]);
    let auto = replay(&file, &["--driver", "auto", "--passes", "1"]);
    assert_eq!(auto.status.code(), Some(0), "{}", stderr(&auto));
    if vmm_sys::cuda::Cuda::open().is_ok() {
        assert_eq!(insisted.status.code(), Some(0), "{}", stderr(&insisted));
        assert!(stderr(&auto).contains("driver: cuda"), "{}", stderr(&auto));
    } else {
        assert_eq!(insisted.status.code(), Some(2));
        assert!(stderr(&insisted).contains("--driver cuda:"), "{}", stderr(&insisted));
        assert!(insisted.stdout.is_empty());
        assert!(stderr(&auto).contains("driver: sim"), "{}", stderr(&auto));
        assert!(stderr(&auto).contains("no usable GPU"), "{}", stderr(&auto));
    }
}

#[test]
fn out_of_memory_ends_with_its_report_and_keeps_what_was_finished() {
    let good = written("good.trace", "a 1 512 0 0\n");
    let huge = written("huge.trace", "a 5 512 0 0\na 6 200000000000 0 0\n");
    let output = replay_sim(&[good, huge], &["--json", "--passes", "1"]);
    assert_eq!(output.status.code(), Some(1));
    let message = stderr(&output);
    let start =
        "error: huge on vmm-pool: pass 1, operation 2: alloc of block 6 (200000000000 bytes)";
    assert!(message.contains(start), "{message}");
    assert!(message.contains("out of memory on device 0"), "{message}");
    assert_eq!(String::from_utf8(output.stdout).unwrap().lines().count(), 1, "the good trace");
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_vmm-pool"))
        .args(["replay", "--driver", "sim", "--passes", "1", "--json"])
        .arg(recorded("unet_seg"))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(!stderr(&output).contains("panicked"), "{}", stderr(&output));
}

#[test]
fn the_help_says_how_figures_are_made() {
    let output =
        Command::new(env!("CARGO_BIN_EXE_vmm-pool")).args(["replay", "--help"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    let text = String::from_utf8(output.stdout).unwrap();
    for part in ["fresh allocator", "driver calls taken out", "modelled", "Exit code"] {
        assert!(text.contains(part), "{part} is missing in: {text}");
    }
}

#[test]
fn the_simulated_device_stands_beside_with_the_same_calls() {
    let options = ["--json", "--passes", "2", "--compare", "sim"];
    let rows = rows(&replay_sim(&[recorded("unet_seg")], &options));
    assert_eq!(rows.len(), 4);
    for pass in 0..2 {
        let (own, beside) = (&rows[pass], &rows[pass + 2]);
        assert_eq!(own["allocator"], "vmm-pool");
        assert_eq!(beside["allocator"], "vmm-pool on sim");
        for field in ["driver_calls", "driver_us", "peak_held_bytes"] {
            assert_eq!(own[field], beside[field], "{field}");
        }
    }
}
