//! An engine whose k-th driver call fails, and one whose calls fail from then on until they are mended.
//!
//! Each request is answered right, or told what failed; the engine goes on, its weights are loaded whenever a
//! step streams them, and in the end the machine has everything back.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmm_pool::ElasticBuffer;
use vmm_server::backend::{Backend, BackendError, Batch, StepDone};
use vmm_server::cache::Form;
use vmm_server::engine::{Engine, EngineError, EngineSettings, Outcome, SleepMode};
use vmm_sys::object::retry_failed_drops;
use vmm_sys::sim::{FaultPlan, Sim};
use vmm_sys::{Call, Driver, ResultCode};

use crate::common::{Asked, Rig, forms, run, tiny};
use crate::fleet;

const LIMIT: u64 = 64 << 20;
/// A request that is not answered for so long hangs.
const HANGS_AFTER: Duration = Duration::from_secs(60);
/// In the weights once they are loaded.
const LOADED: u8 = 0xa5;
/// What a call is made to answer, in turn.
const CODES: [ResultCode; 3] =
    [ResultCode::UNKNOWN, ResultCode::OUT_OF_MEMORY, ResultCode::INVALID_VALUE];
/// Of the calls of one run, about so many are spoilt, in one cell each; all with `VMM_FAULTS=all`.
const SOME: usize = 12;

/// Loads weights for real, and looks for them in each step.
struct Loader(Box<dyn Backend>);

impl Backend for Loader {
    fn is_modelled(&self) -> bool {
        self.0.is_modelled()
    }

    fn load_weights(&mut self, weights: &ElasticBuffer) -> Result<(), BackendError> {
        self.0.load_weights(weights)?;
        Ok(weights.write(0, &[LOADED])?)
    }

    fn step(&mut self, batch: &Batch<'_>) -> Result<StepDone, BackendError> {
        if let Some(weights) = batch.weights {
            let mut found = [0];
            weights.read(0, &mut found)?;
            assert_eq!(found, [LOADED], "a step with weights that were never loaded");
        }
        self.0.step(batch)
    }
}

fn build(rig: &Rig, form: Form, sleep_mode: SleepMode) -> Result<Engine, EngineError> {
    let mut cache = rig.cache(form, &tiny());
    cache.host_bytes = 16 << 20;
    let settings = EngineSettings { sleep_mode, patience_us: 50e3, ..EngineSettings::default() };
    rig.try_engine_with(&tiny(), &cache, settings, |inner| Box::new(Loader(inner)))
}

/// What is done while calls fail: the requests, and what answered no.
type Story = fn(&Rig, Form, &mut Option<Engine>) -> (Vec<Asked>, Vec<EngineError>);

/// A story, and whether the engine is there before.
const STORIES: [(&str, bool, Story); 4] = [
    ("build", false, |rig, form, engine| match build(rig, form, SleepMode::Drop) {
        Ok(built) => {
            *engine = Some(built);
            (Vec::new(), Vec::new())
        }
        Err(error) => (Vec::new(), vec![error]),
    }),
    ("serve", true, |_, _, engine| {
        let engine = engine.as_mut().unwrap();
        let asked = [40, 300, 90].into_iter().enumerate();
        let asked: Vec<_> =
            asked.map(|(at, prompt)| Asked::nth(engine, at as u32, prompt, 6)).collect();
        run(engine);
        (asked, Vec::new())
    }),
    ("sleep and wake", true, |_, _, engine| sleep_and_serve(engine.as_mut().unwrap())),
    ("short of memory", true, |rig, _, engine| {
        let engine = engine.as_mut().unwrap();
        let asked: Vec<_> = (0..4).map(|at| Asked::nth(engine, at, 200, 6)).collect();
        engine.tick();
        // Another tenant comes and goes.
        let hog = rig.pool.lane(&rig.stream).and_then(|lane| lane.alloc(LIMIT / 2));
        run(engine);
        drop(hog);
        rig.pool.close_lane(&rig.stream);
        (asked, Vec::new())
    }),
];

fn sleep_and_serve(engine: &mut Engine) -> (Vec<Asked>, Vec<EngineError>) {
    let refused = engine.sleep().err();
    let asked = Asked::nth(engine, 0, 40, 5);
    run(engine);
    (vec![asked], refused.into_iter().collect())
}

/// The words name a call that failed, and the code.
fn check_words(words: &str, hit: &[Call], code: ResultCode) {
    let is_named = hit.iter().any(|call| words.contains(call.name()));
    assert!(is_named && words.contains(&code.to_string()), "{code}, {hit:?}: {words}");
}

/// One run: the calls that failed, or all of them without a fault.
fn cell(
    form: Form,
    mode: SleepMode,
    at: usize,
    fault: Option<(u64, ResultCode, bool)>,
) -> Vec<Call> {
    let (_, is_built, story) = STORIES[at];
    let rig = Rig::new(LIMIT);
    let sim: Arc<Sim> = rig.sim.clone();
    let mut engine = is_built.then(|| build(&rig, form, mode).unwrap());
    match fault {
        None => drop(sim.inject(FaultPlan::delay_us(0))),
        Some((k, code, true)) => drop(sim.inject(FaultPlan::fail(code).at(k).once())),
        Some((k, code, false)) => drop(sim.inject(FaultPlan::fail(code).at(k))),
    }
    let (asked, errors) = story(&rig, form, &mut engine);
    let hit = sim.faults_hit();
    sim.clear_faults();
    let code = fault.map_or(ResultCode::SUCCESS, |(_, code, _)| code);
    errors.iter().for_each(|error| check_words(&error.to_string(), &hit, code));
    for it in &asked {
        match it.answer.outcome() {
            Some(Outcome::Finished) => it.check_right(&tiny()),
            Some(Outcome::Failed(words)) => check_words(&words, &hit, code),
            Some(Outcome::Refused(refusal)) => check_words(&refusal.reason, &hit, code),
            other => panic!("a request was answered {other:?}"),
        }
    }
    // It goes on.
    let mut engine = engine.unwrap_or_else(|| build(&rig, form, mode).unwrap());
    let (again, errors) = sleep_and_serve(&mut engine);
    assert!(errors.is_empty(), "{errors:?}");
    again.iter().for_each(|it| it.check_right(&tiny()));
    engine.cache().verify().unwrap();
    drop(engine);
    let driver: Arc<dyn Driver> = sim.clone();
    assert_eq!(retry_failed_drops(&driver), 0);
    rig.check_empty();
    drop(rig);
    sim.check_clean().unwrap();
    hit
}

#[test]
fn whatever_call_fails_requests_are_answered_and_the_engine_goes_on() {
    let is_whole = std::env::var("VMM_FAULTS").is_ok_and(|text| text == "all");
    let (mut cells, mut failures) = (0, Vec::new());
    for (form, (at, story)) in
        forms().into_iter().flat_map(|form| STORIES.iter().enumerate().map(move |it| (form, it)))
    {
        let modes = [SleepMode::Drop, SleepMode::Host];
        for mode in if story.0 == "sleep and wake" { &modes[..] } else { &modes[..1] } {
            let calls = cell(form, *mode, at, None);
            let every = if is_whole { 1 } else { calls.len() / SOME + 1 };
            for k in (0..calls.len()).step_by(every) {
                for is_once in [true, false] {
                    let code = CODES[(k + usize::from(is_once)) % CODES.len()];
                    let fault = Some((k as u64 + 1, code, is_once));
                    cells += 1;
                    let play = AssertUnwindSafe(|| cell(form, *mode, at, fault));
                    if catch_unwind(play).is_err() {
                        let call = calls[k].name();
                        let name = (form, story.0, mode, call);
                        failures.push(format!("{name:?} {fault:?}"));
                    }
                }
            }
        }
    }
    println!("{cells} cells");
    assert!(failures.is_empty(), "{} of {cells}:\n{}", failures.len(), failures.join("\n"));
}

/// Waits for the answer of a model's own thread.
fn wait(asked: &Asked) {
    let began = Instant::now();
    while asked.answer.outcome().is_none() {
        assert!(began.elapsed() < HANGS_AFTER, "no answer");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_fleet_outlives_a_time_in_which_every_call_fails() {
    for form in forms() {
        let rig = Rig::new(LIMIT);
        let engine = build(&rig, form, SleepMode::Drop).unwrap();
        let fleet = fleet(&rig, engine);
        let ask = || Asked::by(|job| fleet.models()[0].submit(job), vec![7; 200], 20);
        rig.sim.inject(FaultPlan::fail(ResultCode::UNKNOWN));
        let spoilt = ask();
        wait(&spoilt);
        rig.sim.clear_faults();
        let fine = ask();
        wait(&fine);
        fine.check_right(&tiny());
        match spoilt.answer.outcome() {
            Some(Outcome::Failed(words)) => {
                assert!(words.contains("CUDA_ERROR_UNKNOWN"), "{words}")
            }
            Some(Outcome::Refused(refusal)) => {
                assert!(refusal.reason.contains("CUDA_ERROR_UNKNOWN"), "{}", refusal.reason);
            }
            other => panic!("{form:?}: {other:?}"),
        }
        assert_eq!(fleet.stop(Duration::ZERO).verdict, Ok(()), "{form:?}");
    }
}
