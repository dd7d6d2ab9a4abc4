//! Runs the cells, two cases at a time where there are two processors, and says what was run.

use std::collections::{BTreeMap, BTreeSet};
use std::panic;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use vmm_sys::Call;
use vmm_sys::caught::thrown;

use crate::codes::{Fault, Mode, faults};
use crate::engine::{Case, Kind};

/// How long a cell may take before the process says where it hangs, and ends.
const HANGS_AFTER: Duration = Duration::from_secs(90);

/// Which cells are run.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Choice {
    /// Every call once, and once for longer, each with one code.
    Short,
    /// Every call, code and mode.
    Whole,
    /// Those of the cases whose name begins so, whole.
    Cases(String),
    /// One: the name of the case, k, the code, the mode.
    Cell(String, u64, u32, Mode),
}

impl Choice {
    /// Of the variable `VMM_FAULTS`.
    ///
    /// # Panics
    /// If it says something else: a typing mistake must not pass as a test.
    pub(crate) fn of_environment() -> Choice {
        let Ok(text) = std::env::var("VMM_FAULTS") else { return Choice::Short };
        let words: Vec<&str> = text.split_whitespace().collect();
        let number = |word: &str, name: &str| word.strip_prefix(name)?.parse::<u64>().ok();
        match words[..] {
            [] | ["short"] => Choice::Short,
            ["all"] => Choice::Whole,
            [name] => Choice::Cases(name.to_owned()),
            [name, k, code, mode] => {
                let cell = || {
                    let code = u32::try_from(number(code, "code=")?).ok()?;
                    Some(Choice::Cell(name.to_owned(), number(k, "k=")?, code, Mode::parse(mode)?))
                };
                cell().unwrap_or_else(|| panic!("VMM_FAULTS={text}: expected NAME k=N code=N MODE"))
            }
            _ => panic!("VMM_FAULTS={text}: expected all, a case's name, or NAME k=N code=N MODE"),
        }
    }

    fn has(&self, case: &Case) -> bool {
        match self {
            Choice::Short | Choice::Whole => true,
            Choice::Cases(name) => case.name.starts_with(name.as_str()),
            Choice::Cell(name, ..) => case.name == name,
        }
    }

    fn faults(&self, trace: &[Call]) -> Vec<Fault> {
        match self {
            Choice::Short => faults(trace, false),
            Choice::Whole | Choice::Cases(_) => faults(trace, true),
            Choice::Cell(_, k, code, mode) => {
                let mut all = faults(trace, true);
                all.retain(|it| (it.k, it.code.0, it.mode) == (*k, *code, *mode));
                all.dedup_by_key(|it| it.k);
                all
            }
        }
    }
}

/// What was run.
#[derive(Default)]
pub(crate) struct Report {
    pub(crate) cases: u64,
    pub(crate) cells: u64,
    pub(crate) refused: u64,
    /// Cells that spoilt a call of the kind, and the codes.
    pub(crate) hit: BTreeMap<Call, (u64, BTreeSet<u32>)>,
    /// One line each, which says how to run the cell again.
    pub(crate) failures: Vec<String>,
}

impl Report {
    fn add(&mut self, other: Report) {
        self.cases += other.cases;
        self.cells += other.cells;
        self.refused += other.refused;
        self.failures.extend(other.failures);
        for (call, (count, codes)) in other.hit {
            let entry = self.hit.entry(call).or_default();
            entry.0 += count;
            entry.1.extend(codes);
        }
    }

    pub(crate) fn print(&self, took: Duration) {
        println!(
            "fault matrix: {} cases, {} cells, {} refused and {} tolerated, in {:.1} s",
            self.cases,
            self.cells,
            self.refused,
            self.cells - self.refused,
            took.as_secs_f64()
        );
        for (call, (count, codes)) in &self.hit {
            println!("  {call}: {count} cells, codes {codes:?}");
        }
    }
}

/// What each thread is at.
static AT: Mutex<BTreeMap<usize, (ThreadId, Instant, String)>> = Mutex::new(BTreeMap::new());
/// Every panic of this process, in whatever thread.
static PANICS: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Ends the process if a cell hangs: nothing else would end it.
fn watch() {
    thread::spawn(|| {
        loop {
            thread::sleep(Duration::from_secs(1));
            let at = AT.lock().unwrap_or_else(|it| it.into_inner());
            for (_, since, line) in at.values() {
                if since.elapsed() > HANGS_AFTER {
                    eprintln!("HANGS: {line}");
                    std::process::abort();
                }
            }
        }
    });
}

fn note_panics() {
    let before = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        let thread = thread::current();
        let text = format!("{:?}: {info}", thread.name().unwrap_or("a thread"));
        PANICS.lock().unwrap_or_else(|it| it.into_inner()).push(text);
        before(info);
    }));
}

/// How a cell is run again.
pub(crate) fn line(case: &Case, fault: Option<&Fault>) -> String {
    let what = fault.map_or(case.name.to_owned(), |fault| format!("{} {fault}", case.name));
    format!("VMM_FAULTS=\"{what}\" cargo test -p vmm-pool-tests --test faults")
}

/// Runs `work` where a hang is noticed and a panic is an error.
fn guarded<T>(
    worker: usize,
    line: &str,
    work: impl FnOnce() -> Result<T, String>,
) -> Result<T, String> {
    let lock = || AT.lock().unwrap_or_else(|it| it.into_inner());
    lock().insert(worker, (thread::current().id(), Instant::now(), line.to_owned()));
    let outcome = thrown(work);
    lock().remove(&worker);
    outcome.unwrap_or_else(|words| Err(format!("panicked: {words}")))
}

fn run_case(worker: usize, case: &Case, choice: &Choice) -> Report {
    let mut report = Report { cases: 1, ..Report::default() };
    let dry = line(case, None);
    let trace = match guarded(worker, &dry, || case.trace()) {
        Ok(trace) => trace,
        Err(why) => {
            report.failures.push(format!("{dry}\n  without a fault: {why}"));
            return report;
        }
    };
    if (case.kind == Kind::Silent) != trace.is_empty() {
        report.failures.push(format!("{dry}\n  it makes these driver calls: {trace:?}"));
    }
    for fault in choice.faults(&trace) {
        let line = line(case, Some(&fault));
        report.cells += 1;
        match guarded(worker, &line, || case.cell(&fault, *choice != Choice::Short)) {
            Ok(played) => {
                report.refused += u64::from(played.refused);
                for call in played.hit.into_iter().collect::<BTreeSet<_>>() {
                    let entry = report.hit.entry(call).or_default();
                    entry.0 += 1;
                    entry.1.insert(fault.code.0);
                }
            }
            Err(why) => report.failures.push(format!("{line}\n  ({}) {why}", fault.call)),
        }
    }
    report
}

/// Runs the chosen cells of all cases.
pub(crate) fn run(cases: &[Case], choice: &Choice) -> Report {
    watch();
    note_panics();
    let chosen = cases.iter().filter(|case| choice.has(case));
    let (alone, together): (Vec<&Case>, Vec<&Case>) = chosen.partition(|case| case.alone);
    let mut pieces: Vec<Vec<&Case>> = vec![alone];
    pieces.extend(together.into_iter().map(|case| vec![case]));
    let next = AtomicUsize::new(0);
    let total = Mutex::new(Report::default());
    let workers = thread::available_parallelism().map_or(2, |count| count.get().min(8));
    thread::scope(|scope| {
        for worker in 0..workers {
            let (pieces, next, total) = (&pieces, &next, &total);
            scope.spawn(move || {
                while let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
                    for case in piece {
                        let report = run_case(worker, case, choice);
                        total.lock().unwrap().add(report);
                    }
                }
            });
        }
    });
    let mut report = total.into_inner().unwrap();
    report.failures.sort();
    // Those of the cells are among them; those of background threads are only here.
    let panics = PANICS.lock().unwrap_or_else(|it| it.into_inner());
    report.failures.extend(panics.iter().map(|text| format!("a panic in {text}")));
    report
}
