//! The comparison, at a small size: what it is to show, and that it shows the same every time.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use clap::Parser;
use vmm_server::cache::Form;
use vmm_server::compare::{CompareArgs, Growth, Row, run, table};

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    compare: CompareArgs,
}

fn rows(memory: &str, more: &[&str]) -> Vec<Row> {
    let fixed = "compare --driver sim --model tiny --max-tokens 8192 --concurrency 64 --memory";
    let load = "--requests 100 --output-tokens 32";
    let fixed = fixed.split(' ').chain([memory]).chain(load.split(' '));
    let args = Cli::parse_from(fixed.chain(more.iter().copied())).compare;
    let runs = args.runs();
    runs.into_iter().map(|(form, growth, lend)| run(&args, form, growth, lend).unwrap()).collect()
}

#[test]
fn forms_that_grow_run_more_at_once_in_the_same_memory() {
    let rows = rows("68MiB", &["--bytes", "checked"]);
    let of = |form, growth| rows.iter().find(|it| it.form == form && it.growth == growth).unwrap();
    let fixed = of(Form::Fixed, Growth::Off);
    let contiguous = of(Form::Contiguous, Growth::On);
    let paged = of(Form::Paged, Growth::On);
    let mapped = of(Form::Paged, Growth::Off);
    for row in &rows {
        assert_eq!((row.finished, row.failed, row.wrong), (100, 0, 0), "{row:?}");
        assert!(row.peak_committed_bytes <= 68 << 20, "{row:?}");
    }
    // 8 MiB a slot of 64 MiB beside the weights.
    assert_eq!((fixed.peak_running, fixed.growths_waited), (8, 0));
    assert!(contiguous.peak_running >= 2 * fixed.peak_running, "{contiguous:?}");
    assert!(paged.peak_running >= contiguous.peak_running, "{paged:?}");
    assert!(paged.growths_ahead + paged.growths_waited > 0);
    assert!(mapped.peak_running >= fixed.peak_running);
    let text = table(&rows);
    assert_eq!(text.lines().count(), 1 + rows.len());
}

#[test]
fn a_comparison_is_the_same_every_time() {
    let more = ["--form", "contiguous", "--form", "paged", "--growth", "on"];
    assert_eq!(rows("68MiB", &more), rows("68MiB", &more));
}

#[test]
fn what_is_lent_lets_more_run() {
    let more = ["--form", "paged", "--growth", "on", "--lend", "32MiB"];
    let rows = rows("20MiB", &more);
    let [alone, lent] = rows.as_slice() else { panic!("{rows:?}") };
    assert!(lent.peak_running > alone.peak_running, "{rows:?}");
    assert!(lent.peak_borrowed_bytes > 0 && alone.peak_borrowed_bytes == 0);
}
