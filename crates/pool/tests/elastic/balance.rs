//! Cold buffers that move from a full device to an empty one: which, when, and what is said of it.
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::common::elastic::{G, Machine, machine};
use vmm_pool::{Balance, BalanceStats, BalanceVerdict, ElasticBuffer, Error, Pool, PoolBuilder};
use vmm_sys::sim::{FaultPlan, Sim};
use vmm_sys::{Call, DeviceId, ResultCode};

const FULL: DeviceId = DeviceId(0);
const EMPTY: DeviceId = DeviceId(1);
const SETTINGS: Balance = Balance { full: 0.8, empty: 0.5, cold_ms: 1000, bytes_per_s: 4 * G };

struct Scene {
    machine: Machine,
    now_ms: Arc<AtomicU64>,
}

/// Two devices of 20 chunks, a clock of our own, and no thread but the mover.
fn scene(settings: impl FnOnce(PoolBuilder) -> PoolBuilder) -> Scene {
    let now_ms = Arc::new(AtomicU64::new(0));
    let clock = now_ms.clone();
    let machine = machine(
        2,
        |sim| sim.device_bytes(20 * G),
        |pool| {
            let pool = pool.balance(SETTINGS);
            let pool = pool.clock(move || Duration::from_millis(clock.load(Ordering::Relaxed)));
            settings(pool)
        },
    );
    Scene { machine, now_ms }
}

impl Scene {
    fn buffer(&self, device: DeviceId, chunks: u64, movable: bool) -> ElasticBuffer {
        let builder = self.machine.pool.elastic(device).capacity_bytes(20 * G).chunk_bytes(G);
        let buffer = builder.movable(movable).build().unwrap();
        buffer.grow_to(chunks * G).unwrap();
        buffer
    }

    fn pass(&self, ms: u64) {
        self.now_ms.fetch_add(ms, Ordering::Relaxed);
    }

    /// One look, and the end of the move that it began.
    fn look(&self) -> BalanceStats {
        self.machine.pool.rebalance();
        loop {
            let stats = self.machine.pool.stats().balance.unwrap();
            if !stats.moving {
                return stats;
            }
            std::thread::yield_now();
        }
    }

    fn homes(&self, buffers: &[&ElasticBuffer]) -> Vec<DeviceId> {
        self.machine.pool.verify().unwrap();
        buffers.iter().map(|buffer| buffer.device()).collect()
    }
}

#[test]
fn the_coldest_buffer_that_may_moves_from_a_full_device_to_an_empty_one() {
    let scene = scene(|pool| pool);
    let pinned = scene.buffer(FULL, 8, false);
    let cold = scene.buffer(FULL, 4, true);
    cold.write(3 * G, b"kept").unwrap();
    scene.pass(500);
    let warm = scene.buffer(FULL, 4, true);
    assert_eq!(scene.look().verdict, BalanceVerdict::NothingCold { device: FULL });
    scene.pass(600);
    let stats = scene.look();
    assert_eq!((stats.moves, stats.moved_bytes, stats.failed), (1, 4 * G, 0));
    let last = stats.last.unwrap();
    assert_eq!((last.address, last.bytes), (cold.address(), 4 * G));
    assert_eq!((last.from, last.to, last.cold_ms), (FULL, EMPTY, 1100));
    assert!((800..1000).contains(&last.from_taken_permille), "{last:?}");
    assert_eq!(scene.homes(&[&pinned, &cold, &warm]), [FULL, EMPTY, FULL]);
    let mut found = [0; 4];
    cold.read(3 * G, &mut found).unwrap();
    assert_eq!(&found, b"kept");
    // Nine tenths are taken no more: the rest stays, and what moved does not come back.
    for _ in 0..5 {
        scene.pass(2000);
        assert_eq!(scene.look().verdict, BalanceVerdict::Balanced);
    }
    assert_eq!(scene.homes(&[&pinned, &cold, &warm]), [FULL, EMPTY, FULL]);
    drop((pinned, cold, warm));
    scene.machine.end();
}

#[test]
fn what_is_used_stays_where_it_is() {
    let scene = scene(|pool| pool);
    let stream = scene.machine.stream(0);
    let buffer = scene.buffer(FULL, 16, true);
    let using = buffer.use_on(&stream).unwrap();
    scene.pass(5000);
    assert_eq!(scene.look().verdict, BalanceVerdict::NothingCold { device: FULL });
    drop(using);
    scene.pass(999);
    assert_eq!(scene.look().verdict, BalanceVerdict::NothingCold { device: FULL });
    buffer.read(0, &mut [0]).unwrap();
    scene.pass(999);
    assert_eq!(scene.look().verdict, BalanceVerdict::NothingCold { device: FULL }, "it was read");
    scene.pass(1);
    // Sixteen of twenty would fill the other one too.
    assert_eq!(scene.look().verdict, BalanceVerdict::NowhereEmpty { device: FULL });
    drop((buffer, stream));
    scene.machine.end();
}

#[test]
fn no_more_is_moved_than_the_budget_allows() {
    let scene = scene(|pool| pool);
    let buffers: Vec<_> = (0..6).map(|_| scene.buffer(FULL, 3, true)).collect();
    scene.pass(1000);
    assert_eq!(scene.look().moves, 1, "18 of 20 are taken");
    let more = scene.buffer(FULL, 2, false);
    // One chunk is left of the first second's four: the next move goes beyond, and is paid for.
    assert_eq!(scene.look().moves, 2);
    let rest = scene.buffer(FULL, 3, false);
    scene.pass(400);
    assert_eq!(scene.look().verdict, BalanceVerdict::BudgetSpent { device: FULL });
    scene.pass(200);
    let stats = scene.look();
    assert_eq!((stats.moves, stats.moved_bytes), (3, 9 * G));
    let moved = buffers.iter().filter(|buffer| buffer.device() == EMPTY).count();
    assert_eq!(moved, 3);
    drop((buffers, more, rest));
    scene.machine.end();
}

#[test]
fn a_move_that_fails_is_counted_and_leaves_the_buffer() {
    let scene = scene(|pool| pool);
    let buffer = scene.buffer(FULL, 8, true);
    let rest = scene.buffer(FULL, 9, false);
    scene.pass(2000);
    scene.machine.sim.inject(FaultPlan::fail(ResultCode::UNKNOWN).on(Call::EventRecord));
    let stats = scene.look();
    scene.machine.sim.clear_faults();
    assert_eq!((stats.moves, stats.failed, buffer.device()), (0, 1, FULL));
    scene.pass(5000);
    assert_eq!(scene.look().moves, 1);
    drop((buffer, rest));
    scene.machine.end();
}

#[test]
fn a_look_that_the_driver_refuses_says_so_and_the_next_one_sees() {
    let scene = scene(|pool| pool);
    let (movable, rest) = (scene.buffer(FULL, 8, true), scene.buffer(FULL, 9, false));
    scene.pass(2000);
    for call in [Call::MemGetInfo, Call::ThreadExchangeStreamCaptureMode] {
        scene.machine.sim.inject(FaultPlan::fail(ResultCode::UNKNOWN).on(call));
        let verdict = scene.look().verdict;
        let BalanceVerdict::NotSeen { refused, .. } = &verdict else { panic!("{verdict}") };
        assert_eq!((refused.call(), refused.code()), (call, ResultCode::UNKNOWN));
        assert!(verdict.to_string().contains(call.name()), "{verdict}");
        scene.machine.sim.clear_faults();
    }
    // The full one is seen, and the only empty one is not.
    scene.machine.sim.inject(FaultPlan::fail(ResultCode::UNKNOWN).on(Call::MemGetInfo).at(2));
    assert_eq!(scene.look().verdict, BalanceVerdict::NowhereEmpty { device: FULL });
    scene.machine.sim.clear_faults();
    assert_eq!(scene.look().moves, 1);
    drop((movable, rest));
    scene.machine.end();
}

#[test]
fn balance_is_off_unless_asked_for_and_looks_by_itself_where_there_is_a_thread() {
    let machine = machine(1, |sim| sim, |pool| pool);
    machine.pool.rebalance();
    assert_eq!(machine.pool.stats().balance, None);
    machine.end();
    let scene = scene(|pool| pool.background(true));
    let buffer = scene.buffer(FULL, 8, true);
    let rest = scene.buffer(FULL, 9, false);
    scene.pass(2000);
    while buffer.device() == FULL {
        std::thread::yield_now();
    }
    drop((buffer, rest));
    scene.machine.end();
}

#[test]
fn settings_that_make_no_sense_are_refused() {
    let driver: Arc<dyn vmm_sys::Driver> = Sim::builder().devices(2).build();
    for (balance, name) in [
        (Balance { full: 0.0, ..SETTINGS }, "balance: full"),
        (Balance { full: f64::NAN, ..SETTINGS }, "balance: full"),
        (Balance { full: 1.1, ..SETTINGS }, "balance: full"),
        (Balance { empty: 0.8, ..SETTINGS }, "balance: empty"),
        (Balance { empty: -1.0, ..SETTINGS }, "balance: empty"),
        (Balance { bytes_per_s: 0, ..SETTINGS }, "balance: bytes_per_s"),
    ] {
        let error = Pool::builder(driver.clone()).balance(balance).build().unwrap_err();
        assert!(matches!(error, Error::BadSetting { setting, .. } if setting == name), "{error}");
    }
}
