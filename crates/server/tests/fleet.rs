//! Models in threads of their own: how they end.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[allow(dead_code, reason = "each program of tests uses a part of it")]
mod common;
mod faults;

use std::thread;
use std::time::Duration;

use common::{Asked, Rig, forms, run, tiny};
use vmm_server::cache::Form;
use vmm_server::engine::{Engine, EngineSettings, Outcome, RefusalKind};
use vmm_server::fleet::Fleet;
use vmm_server::meters::Meters;

fn fleet(rig: &Rig, engine: Engine) -> Fleet {
    let meters = Meters::new().unwrap();
    Fleet::start(&rig.pool, vec![(engine, meters.model("tiny"))], None).unwrap()
}

#[test]
fn memory_whose_buffer_ends_a_moment_later_is_no_leak() {
    for form in forms() {
        let (rig, spec) = (Rig::new(64 << 20), tiny());
        let mut engine = rig.engine(&spec, &rig.cache(form, &spec), EngineSettings::default());
        let asked = Asked::nth(&mut engine, 0, 40, 5);
        run(&mut engine);
        asked.check_right(&spec);
        // As the pool's thread keeps a buffer that it looks at.
        let using = engine.cache().use_now().unwrap();
        let fleet = fleet(&rig, engine);
        thread::scope(|scope| {
            scope.spawn(move || {
                thread::sleep(Duration::from_millis(100));
                drop(using);
            });
            assert_eq!(fleet.stop(Duration::ZERO).verdict, Ok(()), "{form:?}");
        });
    }
}

#[test]
fn memory_that_stays_is_told() {
    let (rig, spec) = (Rig::new(64 << 20), tiny());
    let cache = rig.cache(Form::Fixed, &spec);
    let engine = rig.engine(&spec, &cache, EngineSettings::default());
    let _using = engine.cache().use_now().unwrap();
    let verdict = fleet(&rig, engine).stop(Duration::ZERO).verdict;
    assert!(verdict.unwrap_err().contains("still holds memory"));
}

#[test]
fn any_grace_is_taken() {
    let (rig, spec) = (Rig::new(64 << 20), tiny());
    let cache = rig.cache(Form::Paged, &spec);
    let engine = rig.engine(&spec, &cache, EngineSettings::default());
    let stopped = fleet(&rig, engine).stop(Duration::MAX);
    assert_eq!((stopped.verdict, stopped.counts.len()), (Ok(()), 1));
}

#[test]
fn a_grace_ends_when_somebody_is_in_a_hurry() {
    let (rig, spec) = (Rig::new(64 << 20), tiny());
    let cache = rig.cache(Form::Contiguous, &spec);
    let mut engine = rig.engine(&spec, &cache, EngineSettings::default());
    let asked = Asked::nth(&mut engine, 0, 20, 16_000);
    let fleet = fleet(&rig, engine);
    thread::scope(|scope| {
        let stopping = scope.spawn(|| fleet.stop(Duration::MAX));
        while asked.answer.tokens().is_empty() {
            thread::sleep(Duration::from_millis(1));
        }
        fleet.hurry();
        assert_eq!(stopping.join().unwrap().verdict, Ok(()));
    });
    match asked.answer.outcome() {
        Some(Outcome::Refused(refusal)) => assert_eq!(refusal.kind, RefusalKind::Stopping),
        other => panic!("{other:?}"),
    }
}
