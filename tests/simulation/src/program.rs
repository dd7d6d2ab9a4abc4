//! Runs by their seeds, on all cores; what was covered; the failing run's story.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};

use shuttle::Runner;
use vmm_sys::sync::settings;

use crate::coverage::Coverage;
use crate::execute;
use crate::notes::Notes;
use crate::scheduler::Chances;

/// Every so many runs one is done twice, to see that its seed is all there is to it.
const TWICE_EVERY: u64 = 50;
/// From so many runs on everything must have happened, and how often in a thousand runs.
const COVERED_FROM_RUNS: u64 = 200;
const COVERED_PER_MILLE: u64 = 3;
/// Lines of a failed run's log that are shown.
const LINES_SHOWN: usize = 120;

pub(crate) fn main() -> ExitCode {
    let numbers: Option<Vec<u64>> = std::env::args().skip(1).map(|it| it.parse().ok()).collect();
    let (runs, first) = match numbers.as_deref() {
        Some([]) => (300, 1),
        Some([runs]) => (*runs, 1),
        Some([runs, seed]) => (*runs, *seed),
        _ => {
            eprintln!("usage: simulate [RUNS] [SEED]");
            return ExitCode::from(2);
        }
    };
    tell_panics();
    println!("simulate: {runs} runs, seeds {first} to {}", first + runs.saturating_sub(1));
    let (coverage, failed) = all(first, runs);
    println!("{coverage}");
    if failed {
        return ExitCode::FAILURE;
    }
    let least = (coverage.runs * COVERED_PER_MILLE / 1000).max(1);
    let missing =
        if coverage.runs < COVERED_FROM_RUNS { Vec::new() } else { coverage.missing(least) };
    if !missing.is_empty() {
        println!("expected at least {least} times each:\n  {}", missing.join("\n  "));
        return ExitCode::FAILURE;
    }
    println!("simulate: {} runs passed", coverage.runs);
    ExitCode::SUCCESS
}

/// Runs the seeds on as many threads as there are cores, up to the first failure.
fn all(first: u64, runs: u64) -> (Coverage, bool) {
    let (next, failed) = (AtomicU64::new(0), AtomicBool::new(false));
    let sum = Mutex::new(Coverage::default());
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..cores.min(runs as usize) {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, SeqCst);
                    if at >= runs || failed.load(SeqCst) {
                        return;
                    }
                    let seed = first + at;
                    let mut notes = once(seed);
                    if let Some(ran) = &notes
                        && (runs == 1 || at % TWICE_EVERY == TWICE_EVERY - 1)
                    {
                        notes = same(seed, ran);
                    }
                    match notes {
                        Some(notes) => {
                            let mut sum = sum.lock().unwrap_or_else(PoisonError::into_inner);
                            sum.add(&notes.coverage());
                            sum.runs += 1;
                        }
                        None => failed.store(true, SeqCst),
                    }
                }
            });
        }
    });
    let sum = sum.into_inner().unwrap_or_else(PoisonError::into_inner);
    (sum, failed.into_inner())
}

thread_local! {
    /// The run of this thread.
    static RUNS: RefCell<Option<(u64, Arc<Notes>)>> = const { RefCell::new(None) };
}

/// A panic is the end of a run: its story is told at once, for what is dropped afterwards may panic again,
/// and that ends the process.
fn tell_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let Some((seed, notes)) = RUNS.with_borrow_mut(Option::take) else {
            eprintln!("{panic}");
            return;
        };
        notes.shut_down();
        eprintln!("{}", story(seed, &notes, &panic.to_string()));
    }));
}

/// One run; `None` if it failed.
fn once(seed: u64) -> Option<Arc<Notes>> {
    let notes = Arc::new(Notes::default());
    RUNS.set(Some((seed, notes.clone())));
    let for_run = notes.clone();
    let run = move || execute::run(seed, &for_run);
    let ran =
        catch_unwind(AssertUnwindSafe(|| Runner::new(Chances::new(seed), settings()).run(run)));
    RUNS.set(None);
    ran.is_ok().then_some(notes)
}

/// The run again: it must be the same.
fn same(seed: u64, before: &Arc<Notes>) -> Option<Arc<Notes>> {
    let again = once(seed)?;
    if again.fingerprint() == before.fingerprint() {
        return Some(again);
    }
    let (one, two) = (before.lines(), again.lines());
    let differs = one.iter().zip(&two).position(|(a, b)| a != b);
    let at = differs.unwrap_or(one.len().min(two.len()));
    let line = |lines: &[String]| lines.get(at).cloned().unwrap_or_default();
    let text = format!("a second run differs at line {at}:\n{}\n{}", line(&one), line(&two));
    eprintln!("{}", story(seed, &again, &text));
    None
}

fn story(seed: u64, notes: &Notes, text: &str) -> String {
    let lines = notes.lines();
    let shown = std::env::var("VMM_SIMULATE_LINES").ok().and_then(|text| text.parse().ok());
    let from = lines.len().saturating_sub(shown.unwrap_or(LINES_SHOWN));
    let setup = lines.first().cloned().unwrap_or_default();
    format!(
        "\nsimulate: {text}\n{setup}\n{}\nto repeat: tests/simulate.sh 1 {seed}\n",
        lines[from..].join("\n")
    )
}
