//! Counts instructions per warm pair under callgrind: exact, and the same on a busy machine.
//! `benches/callgrind.sh` runs it. See docs/BENCHMARKS.md.
//!
//! Only functions whose name begins with `countme` are counted, with all that they call.

#![forbid(unsafe_code)]

use serde::Serialize;
use vmm_pool::Placement;
use vmm_pool_benches::setup::{Setup, fail};
use vmm_pool_benches::subject::{BareHeap, Nothing, PoolLane, Subject};
use vmm_pool_benches::work::{Live, Sizes};
use vmm_pool_cli::replay::Cause;

const USAGE: &str = "instructions count CASE SUBJECT
       instructions record CASE SUBJECT INSTRUCTIONS LOOP_INSTRUCTIONS

CASE     hot-64KiB | replace-64KiB | replace-mixed
SUBJECT  pool-first-fit | pool-buddy | heap-first-fit | heap-buddy | nothing";

/// Pairs that are counted.
const PAIRS: u64 = 100_000;

#[inline(never)]
fn countme_hot<S: Subject>(live: &mut Live<S>) -> Result<(), S::Error> {
    live.hot(PAIRS)
}

#[inline(never)]
fn countme_replace<S: Subject>(live: &mut Live<S>) -> Result<(), S::Error> {
    live.replace(PAIRS)
}

/// Sizes and live blocks of a case.
fn load(case: &str) -> Result<(Sizes, usize), Cause> {
    match case {
        "hot-64KiB" | "replace-64KiB" => Ok((Sizes::one(64 << 10), 10_000)),
        "replace-mixed" => Ok((Sizes::log_uniform(256, 64 << 20), 2_000)),
        other => Err(format!("no case {other}\n\n{USAGE}").into()),
    }
}

fn count<S: Subject>(setup: &Setup, case: &str, subject: S) -> Result<(), Cause> {
    let (sizes, blocks) = load(case)?;
    let mut live = Live::new(subject, sizes, blocks)?;
    let (before, misses) = (setup.driver.ledger().snapshot(), live.subject().misses());
    let done =
        if case.starts_with("hot") { countme_hot(&mut live) } else { countme_replace(&mut live) };
    done.map_err(Into::into)?;
    let calls = setup.driver.ledger().snapshot().since(&before);
    let misses = live.subject().misses() - misses;
    if calls.total() != 0 || misses != 0 {
        return Err(format!("{case}: not warm: {calls}, {misses} misses of the heap").into());
    }
    live.end()
}

fn count_by_name(case: &str, subject: &str) -> Result<(), Cause> {
    let setup = Setup::start("instructions")?;
    let pool = |placement| PoolLane::new(&setup.driver, setup.device, placement);
    match subject {
        "pool-first-fit" => count(&setup, case, pool(Placement::FirstFit)?),
        "pool-buddy" => count(&setup, case, pool(Placement::Buddy)?),
        "heap-first-fit" => count(&setup, case, BareHeap::new(Placement::FirstFit)),
        "heap-buddy" => count(&setup, case, BareHeap::new(Placement::Buddy)),
        "nothing" => count(&setup, case, Nothing),
        other => Err(format!("no subject {other}\n\n{USAGE}").into()),
    }
}

/// What is recorded of a case.
#[derive(Serialize)]
struct Row<'a> {
    case: &'a str,
    subject: &'a str,
    pairs: u64,
    /// Per pair, the loop included.
    instructions: f64,
    /// Of the loop alone, per pair.
    loop_instructions: f64,
}

fn record(case: &str, subject: &str, counted: &str, loop_counted: &str) -> Result<(), Cause> {
    let per_pair = |text: &str| -> Result<f64, Cause> {
        let counted: u64 = text.parse().map_err(|_| format!("{text}: expected a count"))?;
        Ok(counted as f64 / PAIRS as f64)
    };
    let (instructions, loop_instructions) = (per_pair(counted)?, per_pair(loop_counted)?);
    println!("{case:16} {subject:16} {instructions:14.1} {loop_instructions:10.1}");
    let mut setup = Setup::start_silent("instructions")?;
    setup.record(&Row { case, subject, pairs: PAIRS, instructions, loop_instructions })
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let done = match words.as_slice() {
        ["count", case, subject] => count_by_name(case, subject),
        ["record", case, subject, counted, loop_counted] => {
            record(case, subject, counted, loop_counted)
        }
        _ => Err(format!("usage: {USAGE}").into()),
    };
    if let Err(error) = done {
        fail("instructions", error);
    }
}
