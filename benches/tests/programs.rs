//! The programs run, and record what they say they do: on the simulated device, where counts are
//! exact. No timing is judged here.

#![allow(clippy::unwrap_used, reason = "helpers of tests are not seen as tests")]

use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::Value;

const GROWTH: &str = env!("CARGO_BIN_EXE_growth");
const CROSS: &str = env!("CARGO_BIN_EXE_cross");
const THREADS: &str = env!("CARGO_BIN_EXE_threads");
const OVERLAP: &str = env!("CARGO_BIN_EXE_overlap");
const INSTRUCTIONS: &str = env!("CARGO_BIN_EXE_instructions");

/// A program with its record in a file of its own.
struct Program {
    command: Command,
    record: PathBuf,
}

impl Program {
    fn new(program: &str, test: &str) -> Program {
        let record =
            std::env::temp_dir().join(format!("vmm-bench-{}-{test}.jsonl", std::process::id()));
        let mut command = Command::new(program);
        command.env("VMM_BENCH_DRIVER", "sim").env("VMM_BENCH_REPS", "2");
        command.env("VMM_BENCH_DATE", "2001-02-03").env("VMM_BENCH_OUT", &record);
        Program { command, record }
    }

    fn output(mut self) -> (Output, Vec<Value>) {
        let output = self.command.output().unwrap();
        let text = std::fs::read_to_string(&self.record).unwrap_or_default();
        let _ = std::fs::remove_file(&self.record);
        (output, text.lines().map(|line| serde_json::from_str(line).unwrap()).collect())
    }

    fn rows(self) -> Vec<Value> {
        let (output, rows) = self.output();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{errors}");
        rows
    }
}

#[test]
fn growth_from_stock_makes_the_bare_calls_and_no_other() {
    let rows = Program::new(GROWTH, "growth").rows();
    assert_eq!(rows.len(), 4);
    for (row, chunks) in rows.iter().zip([32, 32, 32, 1]) {
        let case = &row["case"];
        let calls = format!("cuMemMap {chunks}, cuMemSetAccess {chunks}");
        assert_eq!(row["bare_calls"], calls, "{case}");
        assert_eq!(row["pool_calls"], row["bare_calls"], "{case}");
        assert_eq!((&row["date"], &row["time"]), (&"2001-02-03".into(), &"modelled".into()));
        assert_eq!(row["repetitions"], 2);
    }
}

/// The sizes of `cross` in these tests.
const TINY: [&str; 10] =
    ["--move", "4M", "--chunks", "2M,4M", "--kernel", "2M", "--sleep", "4M", "--chunk", "2M"];

#[test]
fn every_side_across_gpus_makes_the_calls_that_it_says() {
    let mut program = Program::new(CROSS, "cross");
    program.command.args(TINY);
    let rows = program.rows();
    assert!(rows.iter().all(|row| row["left_out"].is_null() && row["time"] == "modelled"));
    let calls = |part: &str, case: &str, side: &str| -> String {
        let is = |row: &&Value| {
            row["part"] == part
                && row["case"].as_str().unwrap().contains(case)
                && row["side"].as_str().unwrap().contains(side)
        };
        let found: Vec<_> = rows.iter().filter(is).collect();
        assert_eq!(found.len(), 1, "{part}, {case}, {side}: {found:?}");
        found[0]["calls"].as_str().unwrap().to_owned()
    };
    let copies =
        |count| format!("cuMemcpyDtoDAsync {count}, cuEventRecord 1, cuEventSynchronize 1");
    assert_eq!(calls("move", "2 MiB", "one copy"), copies(1));
    assert_eq!(calls("move", "2 MiB", "by the chunk"), copies(2));
    let exchange = "cuMemMap 2, cuMemUnmap 2, cuMemSetAccess 2";
    assert_eq!(calls("move", "2 MiB", "exchanging"), exchange);
    assert!(calls("move", "2 MiB", "swap: the stream is held").contains("cuStreamWaitValue32 1"));
    assert_eq!(calls("move", "chunks of 4 MiB", "unmapping"), "cuMemUnmap 1");
    for chunk in ["chunk of 2 MiB", "chunk of 32 MiB"] {
        for side in ["no anchor", "anchored", "pool"] {
            assert_eq!(calls("grant", chunk, side), "cuMemSetAccess 1");
        }
    }
    for side in ["cuMemAlloc", "own", "bare: the neighbour", "pool: the neighbour"] {
        assert!(calls("bandwidth", "reads", side).starts_with("cuLaunchKernel 8"));
        assert!(calls("bandwidth", "writes", side).starts_with("cuLaunchKernel 8"));
    }
    assert_eq!(calls("sleep", "dropped", "bare: sleep"), "cuMemRelease 2, cuMemUnmap 2");
    let wake = "cuMemCreate 2, cuMemMap 2, cuMemSetAccess 2";
    assert_eq!(calls("sleep", "dropped", "bare: wake"), wake);
    assert_eq!(calls("sleep", "host", "copying in"), copies(2));
}

#[test]
fn one_device_leaves_out_what_needs_two() {
    let mut program = Program::new(CROSS, "cross-alone");
    program.command.args(TINY).args(["--peer", "none", "--driver", "sim"]);
    program.command.env("VMM_BENCH_DRIVER", "cuda"); // the option goes before it
    let (output, rows) = program.output();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("left out of Move: needs two devices"), "{text}");
    let left_out =
        |part: &str| rows.iter().any(|row| row["part"] == part && row["left_out"].is_string());
    assert!(left_out("move") && left_out("grant") && left_out("bandwidth") && !left_out("sleep"));
    assert!(rows.iter().all(|row| !row["side"].as_str().unwrap_or("").contains("neighbour")));
    assert!(rows.iter().any(|row| row["part"] == "bandwidth" && row["side"] == "cuMemAlloc"));
}

#[test]
fn threads_are_counted_with_their_driver_calls() {
    let rows = Program::new(THREADS, "threads").rows();
    let shape: Vec<_> =
        rows.iter().map(|r| (r["subject"].as_str(), r["threads"].as_u64())).collect();
    let expected = [1, 2, 4, 8, 16].into_iter().flat_map(|threads| {
        ["pool-first-fit", "pool-buddy"].map(|subject| (Some(subject), Some(threads)))
    });
    assert_eq!(shape, expected.collect::<Vec<_>>());
    for row in &rows {
        assert_eq!(row["driver_calls"].as_array().unwrap().len(), 2);
        assert!(row["total_mops"]["min"].as_f64().unwrap() > 0.0);
    }
}

#[test]
fn kernels_run_beside_cold_passes() {
    let mut program = Program::new(OVERLAP, "overlap");
    program.command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/traces/gnn.trace.gz"));
    let rows = program.rows();
    assert_eq!(rows.len(), 1);
    let number = |field: &str| rows[0][field].as_f64().unwrap();
    assert!(number("cold_passes") >= 2.0 && number("driver_calls") > 12_000.0, "{rows:?}");
    assert!(number("ratio") > 0.0 && number("quiet_ratio") >= 1.0, "{rows:?}");
}

#[test]
fn every_case_of_the_instruction_count_is_warm() {
    for case in ["hot-64KiB", "replace-64KiB", "replace-mixed"] {
        for subject in ["pool-first-fit", "pool-buddy", "heap-first-fit", "heap-buddy", "nothing"] {
            let mut program = Program::new(INSTRUCTIONS, "count");
            program.command.args(["count", case, subject]);
            assert!(program.rows().is_empty(), "counting records nothing");
        }
    }
    let mut program = Program::new(INSTRUCTIONS, "record");
    program.command.args(["record", "hot-64KiB", "pool-buddy", "20000000", "1000000"]);
    let rows = program.rows();
    assert_eq!(rows.len(), 1);
    assert_eq!(
        (&rows[0]["instructions"], &rows[0]["loop_instructions"]),
        (&200.0.into(), &10.0.into())
    );
}

#[test]
fn what_is_not_understood_is_refused_by_name() {
    let mut program = Program::new(GROWTH, "driver");
    program.command.env("VMM_BENCH_DRIVER", "gpu");
    let mut asked = Program::new(THREADS, "threads-help");
    asked.command.arg("--help");
    let mut wordless = Program::new(INSTRUCTIONS, "usage");
    wordless.command.arg("count");
    let mut uneven = Program::new(CROSS, "cross-uneven");
    uneven.command.args(["--move", "5M", "--chunks", "2M"]);
    for (program, expected) in [
        (program, "VMM_BENCH_DRIVER=gpu: expected auto, cuda or sim"),
        (asked, "--help: expected no argument; VMM_BENCH_DRIVER"),
        (wordless, "usage: "),
        (uneven, "each size must be a whole number of its chunks"),
    ] {
        let (output, rows) = program.output();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{errors}");
        assert!(errors.contains(expected), "{errors}");
        assert!(rows.is_empty());
    }
}
