//! The driver's code panics, at each call of each operation: it is an error of that call, and the pool is
//! as usable as after any other. Hooks, clocks and logs that panic are not even noticed.

use std::panic::set_hook;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Once};
use std::time::Duration;

use vmm_pool::{AheadState, Error, MigrationState, Pool};
use vmm_sys::object::{Stream, retry_failed_drops};
use vmm_sys::sim::{FaultPlan, Sim};
use vmm_sys::{Driver, ResultCode};

use crate::common::elastic::G;
use crate::common::{HOME, MIB};
use crate::scene::{LONG, OPERATIONS, SECOND, Scene, Work};

/// Keeps what these tests throw out of the log, and nothing else.
fn quietly() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        set_hook(Box::new(move |panic| {
            let payload = panic.payload();
            let text = payload.downcast_ref::<&str>().copied();
            let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
            let text = text.unwrap_or_default();
            if !text.starts_with("injected") {
                before(panic);
            }
        }));
    });
}

fn ahead(scene: &Scene) -> Result<(), Error> {
    match scene.elastic.grow_ahead(9 * G)?.wait(LONG) {
        AheadState::Done => Ok(()),
        AheadState::Failed(error) => Err(error),
        other => panic!("{other:?} after {LONG:?}"),
    }
}

fn move_behind(scene: &Scene) -> Result<(), Error> {
    match scene.elastic.migrate_async(SECOND)?.wait(LONG) {
        MigrationState::Done(_) => Ok(()),
        MigrationState::Failed(error) => Err(error),
        other => panic!("{other:?} after {LONG:?}"),
    }
}

const IN_THREADS: &[(&str, Work)] = &[("growth ahead", ahead), ("a move behind", move_behind)];

/// Whether a plan of panics, from the k-th call on, met a call of the operation.
fn run(threads: bool, (name, work): (&str, Work), k: u64, for_ever: bool) -> bool {
    let scene = Scene::new(|pool| pool.background(threads));
    let what = format!("{name}, call {k}{}", if for_ever { " and all behind" } else { "" });
    let plan = FaultPlan::panic().at(k);
    scene.sim.inject(if for_ever { plan } else { plan.once() });
    let outcome = work(&scene);
    let fired = scene.sim.faults_fired() > 0;
    if for_ever && k.is_multiple_of(2) {
        // Everything ends while the driver throws at every call: silently.
        let Scene { sim, driver, pool, lane, other, far, kept, elastic } = scene;
        drop((elastic, kept, lane, other, far, pool));
        sim.clear_faults();
        retry_failed_drops(&driver);
        return fired;
    }
    scene.sim.clear_faults();
    if let Err(error) = outcome {
        assert!(fired, "{what}: {error}");
        assert!(!matches!(error, Error::Broken(_)), "{what}: {error}");
    }
    scene.check(&what);
    scene.end(&what);
    fired
}

fn sweep(threads: bool, operations: &[(&'static str, Work)]) {
    quietly();
    for operation in operations {
        for for_ever in [false, true] {
            let calls = (1..).find(|k| !run(threads, *operation, *k, for_ever)).unwrap();
            assert!(calls > 1, "{} makes no call", operation.0);
        }
    }
}

#[test]
fn a_driver_that_panics_at_any_call_leaves_the_pool_whole() {
    sweep(false, OPERATIONS);
}

#[test]
fn a_driver_that_panics_in_the_threads_of_a_pool_is_an_error_of_who_waits() {
    quietly();
    for (name, work) in IN_THREADS {
        for k in 1..12 {
            run(true, (*name, *work), k, k % 3 == 0);
        }
    }
}

#[test]
fn the_words_of_a_panic_reach_who_asked() {
    quietly();
    let scene = Scene::new(|pool| pool);
    scene.sim.inject(FaultPlan::panic().once());
    let Err(Error::Driver(error)) = scene.lane.alloc(100 * MIB) else {
        panic!("a call was thrown")
    };
    assert_eq!(error.code(), ResultCode::UNKNOWN);
    for part in ["injected panic in cu", "the_words_of_a_panic"] {
        assert!(error.to_string().contains(part), "{error}");
    }
    scene.check("one call");
    scene.end("one call");
}

#[test]
fn a_clock_that_panics_stands_still() {
    quietly();
    let sim = Sim::builder().build();
    let driver: Arc<dyn Driver> = sim.clone();
    let asked = Arc::new(AtomicU64::new(0));
    let theirs = asked.clone();
    let clock = move || -> Duration {
        theirs.fetch_add(1, Ordering::Relaxed);
        panic!("injected by a clock")
    };
    let pool = Pool::builder(driver.clone()).background(false).clock(clock).build().unwrap();
    let stream = Stream::create(&driver, HOME).unwrap();
    let lane = pool.lane(&stream).unwrap();
    // To the stock, and from there to another lane: both ask for the time under its lock.
    drop(lane.alloc(9 * MIB).unwrap());
    pool.trim_idle(HOME, Duration::ZERO).unwrap();
    pool.prefill(HOME, 8 * MIB).unwrap();
    drop(lane.alloc(19 * MIB).unwrap());
    assert!(asked.load(Ordering::Relaxed) > 0, "nobody asked it");
    pool.verify().unwrap();
    drop((lane, pool, stream, driver));
    sim.check_clean().unwrap();
}
