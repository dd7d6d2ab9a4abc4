//! A context that is lost, or was reset by somebody else; a driver that has shut down. It is said with its
//! cause, nothing is tried without end, drops are quiet, and what is healthy works.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use vmm_pool::{Error, Pool};
use vmm_sys::object::{Stream, failed_drops};
use vmm_sys::sim::{FaultPlan, Sim};
use vmm_sys::{DeviceId, Driver, ProbeKernel, ResultCode};

use crate::common::elastic::G;
use crate::common::{HOME, MIB};
use crate::scene::{OPERATIONS, SECOND, Scene};

/// More calls than one operation makes, or one end: what is tried without end makes more.
const CALLS_MAX: u64 = 600;

/// Counts what is logged at level warn and above.
#[derive(Clone, Default)]
struct Warnings(Arc<AtomicU64>);

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() <= tracing::Level::WARN
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, _: &tracing::Event<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

/// Every operation is tried, and each ends: well, or with an error that has one of these codes.
fn try_all(scene: &Scene, codes: &[ResultCode], what: &str) -> usize {
    let mut refused = 0;
    for (name, work) in OPERATIONS {
        let before = scene.driver.ledger().snapshot();
        let outcome = work(scene);
        let calls = scene.driver.ledger().snapshot().since(&before);
        assert!(calls.total() < CALLS_MAX, "{what}, {name}: tried without end: {calls}");
        match outcome {
            Ok(()) => {}
            Err(Error::Driver(error)) => {
                assert!(codes.contains(&error.code()), "{what}, {name}: {error}");
                refused += 1;
            }
            // Of the pool's own: what an earlier one left undone stands in the way.
            Err(Error::Elastic(_) | Error::DriverGone) => refused += 1,
            Err(error) => panic!("{what}, {name}: {error}"),
        }
        assert!(scene.pool.stats().devices.iter().all(|(_, stats)| stats.adds_up()));
    }
    refused
}

/// Drops everything: quietly, and with no more calls than it takes.
fn end(scene: Scene, what: &str) -> (Arc<Sim>, Arc<dyn Driver>) {
    let Scene { sim, driver, pool, lane, other, far, kept, elastic } = scene;
    let before = driver.ledger().snapshot();
    drop((elastic, kept, lane, other, far, pool));
    let calls = driver.ledger().snapshot().since(&before);
    assert!(calls.total() < CALLS_MAX, "{what}: tried without end: {calls}");
    (sim, driver)
}

/// A pool that is made now serves requests on `device`.
fn serves_anew(driver: &Arc<dyn Driver>, device: DeviceId, what: &str) {
    let pool = Pool::builder(driver.clone()).background(false).device(device);
    let pool = pool.build().unwrap_or_else(|error| panic!("{what}: {error}"));
    let stream = Stream::create(driver, device).unwrap();
    let lane = pool.lane(&stream).unwrap();
    let block = lane.alloc(5 * MIB).unwrap();
    block.write(0, &[7; 16]).unwrap();
    let mut found = [0; 16];
    block.read(0, &mut found).unwrap();
    assert_eq!(found, [7; 16], "{what}");
}

#[test]
fn f_e2_a_lost_context_is_told_with_its_cause_and_left_in_peace() {
    for code in [ResultCode::ILLEGAL_ADDRESS, ResultCode::ECC_UNCORRECTABLE] {
        let what = format!("{code}");
        let scene = Scene::new(|pool| pool);
        scene.sim.lose_context(HOME, code);
        let Err(Error::Driver(error)) = scene.kept.read(0, &mut [0; 8]) else { panic!("{what}") };
        assert!(error.is_sticky() && error.code() == code, "{error}");
        assert!(try_all(&scene, &[code], &what) > 0, "{what}");
        // The other device is not lost, nor is the pool's side of it.
        let block = scene.far.alloc(5 * MIB).unwrap();
        block.write(0, &[1; 8]).unwrap();
        drop(block);
        let (_sim, driver) = end(scene, &what);
        serves_anew(&driver, SECOND, &what);
    }
}

#[test]
fn f_e2_a_kernel_that_faults_takes_one_machine_and_no_other() {
    let scene = Scene::new(|pool| pool);
    let wild = ProbeKernel::FillWords { dst: 1 << 46, words: 16, value: 7 };
    let handle = scene.lane.stream().handle();
    // SAFETY: a live stream; the address is nobody's, which is what this is about.
    unsafe { scene.driver.launch(HOME, &wild, handle) }.unwrap();
    let error = scene.lane.stream().synchronize().unwrap_err();
    assert!(error.is_sticky(), "{error}");
    let Err(Error::Driver(told)) = scene.kept.read(0, &mut [0; 8]) else { panic!("not told") };
    assert_eq!(told.code(), error.code());
    try_all(&scene, &[error.code()], "a kernel");
    end(scene, "a kernel");
    serves_anew(&(Sim::builder().build() as Arc<dyn Driver>), HOME, "another machine");
}

#[test]
fn f_x2_a_context_that_somebody_else_resets_is_a_dead_one() {
    let scene = Scene::new(|pool| pool);
    scene.sim.reset_context(HOME);
    let codes = [
        ResultCode::CONTEXT_IS_DESTROYED,
        ResultCode::INVALID_HANDLE,
        ResultCode::INVALID_CONTEXT,
        ResultCode::INVALID_VALUE,
    ];
    assert!(try_all(&scene, &codes, "reset") > 0, "its streams are gone");
    drop(scene.far.alloc(5 * MIB).unwrap());
    let (_sim, driver) = end(scene, "reset");
    for device in [HOME, SECOND] {
        serves_anew(&driver, device, "reset");
    }
}

#[test]
fn a_driver_that_has_shut_down_is_left_in_silence() {
    for code in [ResultCode::DEINITIALIZED, ResultCode::NOT_INITIALIZED] {
        let what = format!("{code}");
        let scene = Scene::new(|pool| pool);
        let mut crossed = scene.lane.alloc(3 * G).unwrap();
        crossed.record_stream(scene.other.stream()).unwrap();
        scene.sim.inject(FaultPlan::fail(code));
        assert!(try_all(&scene, &[code], &what) > 0);
        let warnings = Warnings::default();
        let (_sim, driver) = tracing::subscriber::with_default(warnings.clone(), || {
            drop(crossed);
            end(scene, &what)
        });
        assert_eq!(failed_drops(&driver), [], "{what}: kept for another try");
        assert_eq!(warnings.0.load(Ordering::Relaxed), 0, "{what}: not silent");
    }
}
