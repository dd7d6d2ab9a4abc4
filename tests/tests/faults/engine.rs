//! One cell of the matrix: an operation, in a scene of its own, while one driver call fails.

use std::error::Error;
use std::sync::Arc;

use vmm_sys::object::{RelaxedCapture, failed_drops, retry_failed_drops};
use vmm_sys::sim::{FaultPlan, LedgerSummary, Sim};
use vmm_sys::{Call, CaptureMode, Driver, ResultCode};

use crate::codes::{Fault, Mode};

/// What an operation answers.
pub(crate) type Done = Result<(), Box<dyn Error>>;

/// An answer of which only the failure matters here.
pub(crate) fn done<T, E: Into<Box<dyn Error>>>(answer: Result<T, E>) -> Done {
    answer.map(drop).map_err(Into::into)
}

/// Where an operation takes place.
pub(crate) trait Scene {
    /// The machine whose calls fail.
    fn sim(&self) -> Arc<Sim>;

    /// All machines, that one among them.
    fn sims(&self) -> Vec<Arc<Sim>> {
        vec![self.sim()]
    }

    /// All that a failure must leave as it was: addresses, contents, access, the books of users. What
    /// counts changes, and where memory lies, only if `exact`: where the driver refused the way back too,
    /// a chunk stays where it was brought.
    fn picture(&self, exact: bool) -> String;

    /// Does what users do next: what the driver refused on the way back is tried again by it.
    fn settle(&self) {}

    /// What holds at any time.
    fn laws(&self) -> Result<(), String>;

    /// Drops everything. What the driver refused to take back while calls failed must be gone too.
    fn end(self) -> Result<(), String>;
}

/// What an operation may answer to a failure.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// It says what went wrong, or goes on without.
    Answers,
    /// It has nothing to say, and nothing is lost.
    Quiet,
    /// It makes no driver call.
    Silent,
}

/// One cell: the operation with a fault or without.
type Play = dyn Fn(Kind, Option<&Fault>, bool) -> Result<Played, String> + Send + Sync;

/// An operation.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    /// The public operations that it calls.
    pub(crate) covers: &'static [&'static str],
    pub(crate) kind: Kind,
    /// It uses what the process has one of: no other such case runs beside it.
    pub(crate) alone: bool,
    play: Box<Play>,
}

/// What became of it.
pub(crate) struct Played {
    /// The calls that were spoilt; without a fault, all of them.
    pub(crate) hit: Vec<Call>,
    pub(crate) refused: bool,
}

/// The parts of a case.
struct Parts<S> {
    make: fn() -> S,
    act: fn(&mut S) -> Done,
    check: fn(&S),
}

impl Case {
    /// `make` sets the scene, `act` is the operation, and `check` holds after its success, of which
    /// `act` keeps the results in the scene.
    pub(crate) fn new<S: Scene + 'static>(
        name: &'static str,
        covers: &'static [&'static str],
        make: fn() -> S,
        act: fn(&mut S) -> Done,
        check: fn(&S),
    ) -> Case {
        let parts = Parts { make, act, check };
        let play =
            Box::new(move |kind, fault: Option<&Fault>, deep| play(&parts, kind, fault, deep));
        Case { name, covers, kind: Kind::Answers, alone: false, play }
    }

    /// Operations that make no driver call, and so cannot fail by one.
    pub(crate) fn silent<S: Scene + 'static>(
        name: &'static str,
        covers: &'static [&'static str],
        make: fn() -> S,
        act: fn(&mut S) -> Done,
    ) -> Case {
        Case { kind: Kind::Silent, ..Case::new(name, covers, make, act, |_| {}) }
    }

    /// It returns nothing: what fails is not told.
    pub(crate) fn quiet(self) -> Case {
        Case { kind: Kind::Quiet, ..self }
    }

    /// No other case of this kind runs beside it.
    pub(crate) fn alone(self) -> Case {
        Case { alone: true, ..self }
    }

    /// The calls that it makes where nothing fails.
    pub(crate) fn trace(&self) -> Result<Vec<Call>, String> {
        (self.play)(self.kind, None, false).map(|played| played.hit)
    }

    /// Runs it while calls fail. `deep`: the failure comes again and again.
    pub(crate) fn cell(&self, fault: &Fault, deep: bool) -> Result<Played, String> {
        (self.play)(self.kind, Some(fault), deep)
    }
}

fn play<S: Scene>(
    parts: &Parts<S>,
    kind: Kind,
    fault: Option<&Fault>,
    deep: bool,
) -> Result<Played, String> {
    let mut scene = (parts.make)();
    let sims = scene.sims();
    let sim = scene.sim();
    scene.laws().map_err(|why| format!("before the operation: {why}"))?;
    let exact = fault.is_some_and(|fault| fault.mode == Mode::Once);
    let before = scene.picture(exact);
    sim.clear_faults();
    match fault {
        Some(fault) => fault.inject(&sim),
        // Spoils nothing, and notes every call.
        None => drop(sim.inject(FaultPlan::delay_us(0))),
    }
    let outcome = (parts.act)(&mut scene);
    let hit = sim.faults_hit();
    sim.clear_faults();
    if fault.is_some() && !exact {
        // The next guard puts the thread's capture mode right.
        for sim in &sims {
            let driver: Arc<dyn Driver> = sim.clone();
            drop(RelaxedCapture::enter(&driver).unwrap());
        }
        if outcome.is_err() {
            scene.settle();
        }
    }
    scene.laws().map_err(|why| format!("after the operation: {why}"))?;
    let refused = outcome.is_err();
    if let Err(error) = outcome {
        let Some(fault) = fault else { return Err(format!("refused without a fault: {error}")) };
        check_text(&error.to_string(), &hit, fault.code)?;
        if kind == Kind::Quiet {
            return Err(format!("an operation that answers nothing said: {error}"));
        }
        same(&before, &scene.picture(exact), "changed by an operation that failed", &error)?;
        let done = deep && exact && fails_again(parts, &mut scene, &sim, fault, &before)?;
        if !done {
            (parts.act)(&mut scene).map_err(|error| format!("the retry failed: {error}"))?;
        }
        scene.laws().map_err(|why| format!("after the retry: {why}"))?;
    }
    (parts.check)(&scene);
    scene.end().map_err(|why| format!("at the end: {why}"))?;
    for (at, sim) in sims.iter().enumerate() {
        sim.check_clean().map_err(|why| format!("machine {at}: {why}"))?;
    }
    Ok(Played { hit, refused })
}

/// The error names a call that failed, and the code.
fn check_text(text: &str, hit: &[Call], code: ResultCode) -> Result<(), String> {
    if hit.is_empty() {
        return Err(format!("refused before the fault: {text}"));
    }
    if !hit.iter().any(|call| text.contains(call.name())) || !text.contains(&code.to_string()) {
        let calls: Vec<_> = hit.iter().take(3).map(|call| call.name()).collect();
        return Err(format!("the error does not name {calls:?} and {code}: {text}"));
    }
    Ok(())
}

fn same(
    before: &str,
    after: &str,
    what: &str,
    error: &dyn std::fmt::Display,
) -> Result<(), String> {
    if before == after {
        return Ok(());
    }
    let lines = before.lines().zip(after.lines());
    let (was, is) = lines.clone().find(|(was, is)| was != is).unwrap_or(("", "another length"));
    let common = was.bytes().zip(is.bytes()).take_while(|(was, is)| was == is).count();
    let from = |line: &str| line.get(common.saturating_sub(80)..).unwrap_or(line).to_owned();
    Err(format!("{what} ({error}):\n  was .. {}\n  is  .. {}", from(was), from(is)))
}

/// The same failure again and again leaves no more and more behind. Whether the operation succeeded in
/// the end: what an earlier try left in stock may spare the call that fails.
fn fails_again<S: Scene>(
    parts: &Parts<S>,
    scene: &mut S,
    sim: &Arc<Sim>,
    fault: &Fault,
    before: &str,
) -> Result<bool, String> {
    // What keeps the memory that it made, as filling the stock does, has it all after some tries.
    const TIMES: usize = 16;
    const STILL: u32 = 3;
    let mut held = held(sim);
    let mut still = 0;
    for _ in 0..TIMES {
        fault.inject(sim);
        let outcome = (parts.act)(scene);
        sim.clear_faults();
        let Err(error) = outcome else { return Ok(true) };
        let what = "changed by an operation that failed again";
        same(before, &scene.picture(true), what, &error)?;
        let now = self::held(sim);
        still += u32::from(now.iter().zip(&held).all(|(now, before)| now <= before));
        held = now;
        if still == STILL {
            return Ok(false);
        }
    }
    Err(format!("each failure leaves more behind: {held:?}"))
}

/// What adds up at the driver if it is forgotten.
fn held(sim: &Sim) -> [u64; 7] {
    let LedgerSummary {
        handle_references,
        chunks,
        mappings,
        ranges,
        streams,
        events,
        pinned_allocations,
        ..
    } = sim.ledger_summary();
    [handle_references, chunks, mappings, ranges, streams, events, pinned_allocations]
}

/// What the driver refused to take back is kept, and goes when it is tried again.
pub(crate) fn give_back(driver: &Arc<dyn Driver>) -> Result<(), String> {
    match retry_failed_drops(driver) {
        0 => Ok(()),
        left => Err(format!("{left} are kept still: {:?}", failed_drops(driver))),
    }
}

/// The thread is in the capture mode in which it began.
pub(crate) fn check_mode(driver: &Arc<dyn Driver>) -> Result<(), String> {
    let mode = driver.exchange_capture_mode(CaptureMode::Relaxed).unwrap();
    driver.exchange_capture_mode(mode).unwrap();
    match mode {
        CaptureMode::Global => Ok(()),
        mode => Err(format!("the thread is left in capture mode {mode:?}")),
    }
}
