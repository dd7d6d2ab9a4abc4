//! The engine, on each form of cache: every answer right, the same every time, nothing lost.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use common::{Asked, HOME, Rig, Spoiler, forms, run, tiny};
use vmm_pool::ElasticBuffer;
use vmm_server::backend::{Backend, BackendError, Batch, StepDone};
use vmm_server::cache::Form;
use vmm_server::engine::{
    Counts, EngineError, EngineSettings, Outcome, RefusalKind, SleepMode, Tick,
};
use vmm_server::model::ModelSpec;

const LIMIT: u64 = 96 << 20;

/// Runs a mix of requests. Returns what is to be the same in each run.
fn mixed_run(form: Form) -> (Counts, Vec<Vec<u32>>, f64) {
    let (rig, spec) = (Rig::new(LIMIT), tiny());
    let set = EngineSettings { prefill_tokens: 100, ..EngineSettings::default() };
    let mut engine = rig.engine(&spec, &rig.cache(form, &spec), set);
    let mut asked = Vec::new();
    for index in 0..24 {
        asked.push(Asked::nth(&mut engine, index, 1 + index * 17 % 300, 1 + index * 5 % 40));
        engine.tick();
    }
    run(&mut engine);
    asked.iter().for_each(|it| it.check_right(&spec));
    engine.cache().verify().unwrap();
    let end_us = engine.now_us();
    let counts = *engine.counts();
    drop(engine);
    rig.check_empty();
    (counts, asked.iter().map(|it| it.answer.tokens()).collect(), end_us)
}

#[test]
fn every_answer_is_right_and_every_run_the_same() {
    for form in forms() {
        let (first, second) = (mixed_run(form), mixed_run(form));
        assert_eq!(first, second, "{form:?}");
        assert_eq!((first.0.finished, first.0.mismatches), (24, 0));
        assert_eq!(first.0.prompt_tokens, (0..24).map(|i| 1 + i * 17 % 300).sum::<u64>());
    }
}

#[test]
fn with_a_thread_that_grows_ahead_every_answer_is_right_however_long_it_is_waited_for() {
    for form in forms() {
        for ahead_ticks in [0, 3, u32::MAX] {
            let (rig, spec) = (Rig::new(LIMIT), ModelSpec { layers: 8, ..tiny() });
            let mut cache = rig.cache(form, &spec);
            cache.background = true;
            let set = EngineSettings { ahead_ticks, ..EngineSettings::default() };
            let mut engine = rig.engine(&spec, &cache, set);
            let mut asked = Vec::new();
            for index in 0..24 {
                asked.push(Asked::nth(
                    &mut engine,
                    index,
                    1 + index * 41 % 900,
                    1 + index * 5 % 40,
                ));
                engine.tick();
                engine.cache().verify().unwrap();
            }
            run(&mut engine);
            asked.iter().for_each(|it| it.check_right(&spec));
            let grown = engine.figures().cache;
            assert!(form == Form::Fixed || grown.background_growths > 0, "{form:?}: {grown:?}");
            drop(engine);
            rig.check_empty();
        }
    }
}

#[test]
fn a_byte_that_changes_fails_the_request_and_no_other() {
    for form in forms() {
        let (rig, spec) = (Rig::new(LIMIT), tiny());
        let mut engine =
            rig.engine_with(&spec, &rig.cache(form, &spec), EngineSettings::default(), |inner| {
                Box::new(Spoiler { inner, steps: 0, at_step: 5 })
            });
        let first = Asked::nth(&mut engine, 0, 30, 20);
        let second = Asked::nth(&mut engine, 1, 30, 20);
        run(&mut engine);
        let outcome = first.answer.outcome();
        assert!(
            matches!(&outcome, Some(Outcome::Failed(why)) if why.contains("of KV memory read"))
        );
        second.check_right(&spec);
        assert_eq!(engine.counts().mismatches, 1);
        drop(engine);
        rig.check_empty();
    }
}

#[test]
fn a_byte_of_a_long_sequence_is_found_by_its_last_step_at_the_latest() {
    for form in forms() {
        let (rig, spec) = (Rig::new(LIMIT), tiny());
        let spoil =
            |inner| -> Box<dyn Backend> { Box::new(Spoiler { inner, steps: 0, at_step: 4 }) };
        let cache = rig.cache(form, &spec);
        let mut engine = rig.engine_with(&spec, &cache, EngineSettings::default(), spoil);
        let asked = Asked::nth(&mut engine, 0, 600, 10);
        run(&mut engine);
        assert!(matches!(asked.answer.outcome(), Some(Outcome::Failed(_))), "{form:?}");
        assert_eq!(engine.counts().mismatches, 1);
    }
}

#[test]
fn too_many_are_refused_with_the_numbers_and_nothing_is_lost() {
    for form in forms() {
        let (rig, spec) = (Rig::new(LIMIT), tiny());
        let set = EngineSettings { max_running: 2, max_waiting: 1, ..EngineSettings::default() };
        let mut engine = rig.engine(&spec, &rig.cache(form, &spec), set);
        let asked: Vec<Asked> = (0..8).map(|i| Asked::nth(&mut engine, i, 50, 10)).collect();
        run(&mut engine);
        for (index, it) in asked.iter().enumerate() {
            match it.answer.outcome() {
                Some(Outcome::Refused(refusal)) => {
                    assert!(index >= 3);
                    assert_eq!(refusal.kind, RefusalKind::QueueFull);
                    assert_eq!((refusal.needed_tokens, refusal.waiting), (50, 3));
                    assert!(refusal.room.here_tokens > 0, "{refusal:?}");
                }
                _ => it.check_right(&spec),
            }
        }
        let counts = engine.counts();
        assert_eq!((counts.finished, counts.refused), (3, 5));
    }
}

#[test]
fn who_is_gone_frees_its_memory() {
    for form in forms() {
        let (rig, spec) = (Rig::new(LIMIT), tiny());
        let mut engine = rig.engine(&spec, &rig.cache(form, &spec), EngineSettings::default());
        let stays = Asked::nth(&mut engine, 0, 40, 30);
        let goes = Asked::nth(&mut engine, 1, 40, 30);
        let never_begins = Asked::nth(&mut engine, 2, 40, 30);
        drop(never_begins);
        for _ in 0..5 {
            assert!(matches!(engine.tick(), Tick::Stepped(_)));
        }
        assert_eq!(engine.figures().running, 2);
        drop(goes);
        engine.tick();
        assert_eq!((engine.figures().running, engine.figures().cache.sequences), (1, 1));
        run(&mut engine);
        stays.check_right(&spec);
        assert_eq!(engine.counts().cancelled, 2);
        drop(engine);
        rig.check_empty();
    }
}

#[test]
fn an_engine_that_ends_under_way_leaves_nothing() {
    for form in forms() {
        let (rig, spec) = (Rig::new(LIMIT), tiny());
        let mut engine = rig.engine(&spec, &rig.cache(form, &spec), EngineSettings::default());
        let asked: Vec<Asked> = (0..6).map(|i| Asked::nth(&mut engine, i, 60, 30)).collect();
        for _ in 0..4 {
            engine.tick();
        }
        engine.stop();
        let late = Asked::nth(&mut engine, 9, 5, 5);
        engine.refuse_all("the server ends");
        for it in asked.iter().chain([&late]) {
            let outcome = it.answer.outcome();
            let is_stopping = |it: &vmm_server::engine::Refusal| it.kind == RefusalKind::Stopping;
            assert!(matches!(&outcome, Some(Outcome::Refused(it)) if is_stopping(it)));
        }
        assert_eq!(engine.tick(), Tick::Idle);
        drop(engine);
        rig.check_empty();
    }
}

#[test]
fn a_model_sleeps_without_memory_and_wakes_for_a_request() {
    for form in forms() {
        let (rig, spec) = (Rig::new(LIMIT), tiny());
        let mut engine = rig.engine(&spec, &rig.cache(form, &spec), EngineSettings::default());
        let first = Asked::nth(&mut engine, 0, 40, 5);
        let error = engine.sleep().unwrap_err();
        assert!(matches!(error, EngineError::Busy { requests: 1, .. }), "{error}");
        run(&mut engine);
        first.check_right(&spec);
        assert!(engine.sleep().unwrap() >= spec.weights_bytes);
        assert_eq!(engine.sleep().unwrap(), 0);
        assert!(engine.is_asleep());
        let stats = rig.pool.device_stats(HOME).unwrap();
        assert_eq!(stats.elastic_bytes, 0, "{form:?}");
        let before_us = engine.now_us();
        let second = Asked::nth(&mut engine, 1, 40, 5);
        run(&mut engine);
        second.check_right(&spec);
        assert!(engine.now_us() - before_us > 800.0, "4 MiB at 5 GB/s");
        assert_eq!((engine.counts().sleeps, engine.counts().wakes), (1, 1));
        drop(engine);
        rig.check_empty();
    }
}

#[test]
fn a_request_that_finds_no_memory_for_too_long_is_refused_with_the_pools_words() {
    for form in forms() {
        let (rig, spec) = (Rig::new(LIMIT), tiny());
        let mut engine = rig.engine(&spec, &rig.cache(form, &spec), EngineSettings::default());
        engine.sleep().unwrap();
        // Another tenant takes everything.
        let lane = rig.pool.lane(&rig.stream).unwrap();
        let hog = lane.alloc(LIMIT - (4 << 20)).unwrap();
        let asked = Asked::nth(&mut engine, 0, 40, 5);
        run(&mut engine);
        match asked.answer.outcome() {
            Some(Outcome::Refused(refusal)) => {
                assert_eq!(refusal.kind, RefusalKind::NoMemory);
                assert!(refusal.reason.contains("out of memory on"), "{}", refusal.reason);
            }
            other => panic!("{form:?}: {other:?}"),
        }
        // It leaves, and the same request is served.
        drop((hog, lane));
        let again = Asked::nth(&mut engine, 0, 40, 5);
        run(&mut engine);
        again.check_right(&spec);
        drop(engine);
        rig.pool.close_lane(&rig.stream);
        rig.check_empty();
    }
}

/// Requests run while another tenant of the pool takes what is left, and later gives it back.
fn squeezed(form: Form, host_bytes: u64) -> Counts {
    let rig = Rig::new(48 << 20);
    // 4 KiB a token.
    let spec = ModelSpec { layers: 8, ..tiny() };
    let mut cache = rig.cache(form, &spec);
    cache.host_bytes = host_bytes;
    cache.keep_idle_bytes = Some(4 << 20);
    let set = EngineSettings { patience_us: 1e9, ..EngineSettings::default() };
    let mut engine = rig.engine(&spec, &cache, set);
    // More than 4 MiB each at the end: all together do not fit beside the tenant.
    let asked: Vec<Asked> = (0..8).map(|i| Asked::nth(&mut engine, i, 50, 1000)).collect();
    for _ in 0..20 {
        engine.tick();
    }
    let lane = rig.pool.lane(&rig.stream).unwrap();
    let mut hog = Vec::new();
    while let Ok(buffer) = lane.alloc(2 << 20) {
        hog.push(buffer);
    }
    assert!(hog.len() >= 3, "{form:?} took everything: {}", hog.len());
    for tick in 0..1000 {
        engine.tick();
        if tick % 100 == 0 {
            engine.cache().verify().unwrap();
        }
    }
    drop(hog);
    run(&mut engine);
    asked.iter().for_each(|it| it.check_right(&spec));
    rig.pool.verify().unwrap();
    let counts = *engine.counts();
    drop((engine, lane));
    rig.pool.close_lane(&rig.stream);
    rig.check_empty();
    counts
}

#[test]
fn a_cache_that_is_squeezed_parks_and_comes_back() {
    for form in [Form::Contiguous, Form::Paged] {
        let counts = squeezed(form, 64 << 20);
        assert!(counts.parked > 0, "{form:?}: {counts:?}");
        assert_eq!((counts.resumed, counts.finished), (counts.parked, 8), "{form:?}: {counts:?}");
    }
}

#[test]
fn without_host_memory_it_is_written_anew() {
    for form in [Form::Contiguous, Form::Paged] {
        let counts = squeezed(form, 0);
        assert!(counts.dropped > 0 && counts.parked == 0, "{form:?}: {counts:?}");
        assert_eq!(counts.finished, 8);
        assert!(counts.prompt_tokens > 8 * 50, "written anew: {counts:?}");
    }
}

#[test]
fn a_neighbour_that_lends_lets_more_run_and_steps_take_longer() {
    for form in [Form::Contiguous, Form::Paged] {
        let peak = |borrows| {
            let (rig, spec) = (Rig::new(16 << 20), tiny());
            let mut cache = rig.cache(form, &spec);
            cache.borrows = borrows;
            let mut engine = rig.engine(&spec, &cache, EngineSettings::default());
            let asked: Vec<Asked> = (0..24).map(|i| Asked::nth(&mut engine, i, 1000, 20)).collect();
            let (mut most, mut step_us, mut borrowed) = (0, 0.0, 0);
            loop {
                match engine.tick() {
                    Tick::Stepped(figures) => step_us = figures.step_us.max(step_us),
                    Tick::Stuck => panic!("nobody else has memory"),
                    Tick::Idle => break,
                }
                let figures = engine.figures();
                most = most.max(figures.running);
                borrowed = borrowed.max(figures.cache.borrowed_bytes);
            }
            asked.iter().for_each(|it| it.check_right(&spec));
            drop(engine);
            rig.check_empty();
            (most, borrowed, step_us)
        };
        let ((alone, none, step_us), (more, borrowed, longer_us)) = (peak(false), peak(true));
        assert!(more > alone && none == 0 && borrowed > 0, "{form:?}: {alone} {more} {borrowed}");
        assert!(longer_us > step_us, "{form:?}: {step_us} {longer_us}");
    }
}

/// Counts how often weights are loaded.
struct Loads {
    inner: Box<dyn Backend>,
    loads: Arc<AtomicU32>,
}

impl Backend for Loads {
    fn is_modelled(&self) -> bool {
        self.inner.is_modelled()
    }

    fn step(&mut self, batch: &Batch<'_>) -> Result<StepDone, BackendError> {
        self.inner.step(batch)
    }

    fn load_weights(&mut self, weights: &ElasticBuffer) -> Result<(), BackendError> {
        self.loads.fetch_add(1, Ordering::Relaxed);
        self.inner.load_weights(weights)
    }
}

#[test]
fn weights_that_a_failed_waking_lost_are_loaded_by_the_next() {
    let (rig, spec, loads) = (Rig::new(64 << 20), tiny(), Arc::new(AtomicU32::new(0)));
    let set = EngineSettings { sleep_mode: SleepMode::Host, ..EngineSettings::default() };
    // All of its memory comes at once, or the waking fails.
    let cache = rig.cache(Form::Fixed, &spec);
    let counted = loads.clone();
    let mut engine = rig.engine_with(&spec, &cache, set, move |inner| {
        Box::new(Loads { inner, loads: counted.clone() })
    });
    assert_eq!(loads.load(Ordering::Relaxed), 1);
    engine.sleep().unwrap();
    engine.wake().unwrap();
    assert_eq!(loads.load(Ordering::Relaxed), 1, "they came from the host");
    engine.sleep().unwrap();
    let other = rig.pool.elastic(HOME).capacity_bytes(40 << 20).chunk_bytes(2 << 20);
    let other = other.build().unwrap();
    other.grow_to(40 << 20).unwrap();
    let error = engine.wake().unwrap_err();
    assert!(error.is_shortage() && engine.is_asleep(), "{error}");
    drop(other);
    engine.wake().unwrap();
    assert_eq!(loads.load(Ordering::Relaxed), 2, "{error}");
    Asked::nth(&mut engine, 0, 20, 5);
    run(&mut engine);
    drop(engine);
    rig.check_empty();
}

#[test]
fn nobody_waits_longer_than_patience() {
    let (rig, spec) = (Rig::new(16 << 20), tiny());
    let set = EngineSettings { patience_us: 100e3, ..EngineSettings::default() };
    let mut engine = rig.engine(&spec, &rig.cache(Form::Paged, &spec), set);
    // Somebody else has all that is left.
    let other = rig.pool.elastic(HOME).capacity_bytes(64 << 20).chunk_bytes(2 << 20);
    let other = other.build().unwrap();
    let mut bytes = 0;
    while other.grow_to(bytes + (2 << 20)).is_ok() {
        bytes += 2 << 20;
    }
    let begun_us = engine.now_us();
    let asked: Vec<Asked> = (0..6).map(|i| Asked::nth(&mut engine, i, 50, 10)).collect();
    run(&mut engine);
    let waited_us = engine.now_us() - begun_us;
    assert!(asked.iter().all(|it| matches!(it.answer.outcome(), Some(Outcome::Refused(_)))));
    assert!(waited_us < 200e3, "the last waited {waited_us} us, patience is 100000");
}
