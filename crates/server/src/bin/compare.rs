//! The comparison of forms of cache: docs/SERVER.md.

use std::process::ExitCode;

use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use vmm_server::compare::{CompareArgs, CompareError, Row, run, table};

/// Serves the same load from each form of KV cache, with the same memory and no network, and tells
/// how many requests ran at once, and how long steps took.
#[derive(Debug, Parser)]
#[command(name = "vmm-serve-compare", version)]
struct Args {
    #[command(flatten)]
    compare: CompareArgs,
}

fn main() -> ExitCode {
    match compare(&Args::parse().compare) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("vmm-serve-compare: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Whether every answer was right.
fn compare(args: &CompareArgs) -> Result<bool, CompareError> {
    let runs = args.runs();
    let bar = ProgressBar::new(runs.len() as u64);
    if let Ok(style) = ProgressStyle::with_template("{bar:40} {pos}/{len} {elapsed}") {
        bar.set_style(style);
    }
    let mut rows: Vec<Row> = Vec::new();
    for (form, growth, lend) in runs {
        let row = run(args, form, growth, lend)?;
        if args.json {
            println!("{}", serde_json::to_string(&row).unwrap_or_default());
        }
        rows.push(row);
        bar.inc(1);
    }
    bar.finish_and_clear();
    if !args.json {
        println!("seed {}, {} requests, {} at a time", args.seed, args.requests, args.concurrency);
        print!("{}", table(&rows));
    }
    Ok(rows.iter().all(|row| row.wrong == 0 && row.failed == 0))
}
