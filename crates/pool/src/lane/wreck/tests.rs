//! What throws under a lane's lock breaks that lane, and nothing else.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::Duration;

use vmm_sys::object::Stream;
use vmm_sys::sim::{CallGate, FaultPlan, Sim};
use vmm_sys::{Call, DeviceId, Driver, ResultCode};

use super::super::Lane;
use super::*;
use crate::pool::Pool;
use crate::{block_of, free_raw, record_stream_raw};

const MIB: u64 = 1 << 20;
const LONG: Duration = Duration::from_secs(10);

struct Scene {
    sim: Arc<Sim>,
    pool: Pool,
    lane: Lane,
    other: Lane,
    far: Lane,
}

impl Scene {
    fn new() -> Scene {
        let sim = Sim::builder().devices(2).build();
        let driver: Arc<dyn Driver> = sim.clone();
        let devices = [DeviceId(0), DeviceId(1)];
        let pool = Pool::builder(driver.clone()).background(false);
        let pool = pool.device(devices[0]).device(devices[1]).build().unwrap();
        let lane = |device| pool.lane(&Stream::create(&driver, device).unwrap()).unwrap();
        let (one, other, far) = (lane(devices[0]), lane(devices[0]), lane(devices[1]));
        Scene { sim, pool, lane: one, other, far }
    }

    fn end(self) {
        let Scene { sim, pool, lane, other, far } = self;
        drop((pool, lane, other, far));
        sim.check_clean().unwrap();
    }

    /// Everything but the broken lane works, and the figures add up.
    fn check_the_rest(&self) {
        for lane in [&self.other, &self.far, &self.pool.lane(self.lane.stream()).unwrap()] {
            let blocks = [1000, 7 * MIB].map(|bytes| lane.alloc(bytes).unwrap());
            blocks[1].write(5, &[7; 3]).unwrap();
            drop(blocks);
        }
        self.pool.verify().unwrap();
        let stats = self.pool.device_stats(DeviceId(0)).unwrap();
        assert!(stats.adds_up() && stats.limbo_bytes > 0, "{stats:?}");
        self.pool.trim(DeviceId(0)).unwrap();
        self.pool.trim_idle(DeviceId(0), Duration::ZERO).unwrap();
        self.pool.verify().unwrap();
    }
}

/// Unwinds as a panic does, without its message in the log.
fn throw() -> ! {
    resume_unwind(Box::new("as the test wants it"))
}

/// Throws in a thread of this name.
fn thrown_by(name: &str, work: impl FnOnce() + Send) {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name(name.into());
        let work = move || catch_unwind(AssertUnwindSafe(work));
        assert!(thread.spawn_scoped(scope, work).unwrap().join().unwrap().is_err());
    });
}

/// A way to break a lane, and its name.
type Way = (&'static str, fn(&Lane));

/// The ways to break a lane: under its lock on the cold paths and on the warm ones, and at the driver.
const WAYS: [Way; 3] = [
    ("cold", |lane| {
        let mut guard = lane.cell.lock();
        guard.as_mut().unwrap().live.buffers += 0;
        throw()
    }),
    ("warm", |lane| lane.cell.with(|_| throw())),
    ("driver", |lane| {
        let _at_driver = AtDriver::for_lane(lane.cell);
        throw()
    }),
];

fn is_broken<T: std::fmt::Debug>(answer: Result<T, Error>, lane: &Lane, thread: &str) {
    let Err(Error::Broken(broken)) = &answer else { panic!("{answer:?}") };
    let part = BrokenPart::Lane { device: lane.device(), stream: lane.stream().id() };
    assert_eq!(**broken, Broken { part, thread: thread.into() });
}

#[test]
fn a_panic_in_a_lane_breaks_that_lane_alone() {
    for (name, way) in WAYS {
        let scene = Scene::new();
        let lane = &scene.lane;
        let kept = [1000, 5 * MIB].map(|bytes| lane.alloc(bytes).unwrap());
        // Once: its addresses stay taken, and each of these machines has the same ones.
        let raw = (name == "cold").then(|| lane.alloc_raw(3000).unwrap());
        let mut crossed = lane.alloc(4096).unwrap();
        crossed.record_stream(scene.other.stream()).unwrap();
        drop(lane.alloc(3 * MIB).unwrap());
        assert_eq!(scene.pool.stats().broken, []);
        thrown_by(name, || way(lane));

        is_broken(lane.alloc(1000), lane, name);
        is_broken(lane.try_alloc(100 * MIB), lane, name);
        is_broken(lane.alloc_raw(1000), lane, name);
        is_broken(lane.capture(), lane, name);
        if let Some(raw) = raw {
            is_broken(free_raw(raw, 3000), lane, name);
            is_broken(block_of(raw), lane, name);
            is_broken(record_stream_raw(raw, scene.other.stream()), lane, name);
        }
        is_broken(kept[1].read(0, &mut [0; 8]), lane, name);
        assert_eq!((lane.alloc_raw_warm(1000), lane.largest_free_bytes()), (None, 0));
        assert!(lane.alloc(0).is_ok_and(|empty| empty.is_empty()));
        let broken = scene.pool.stats().broken;
        assert_eq!((broken.len(), &*broken[0].thread), (1, name), "{broken:?}");
        let words = broken[0].to_string();
        assert!(words.starts_with("the lane of ") && words.contains(name), "{words}");
        scene.check_the_rest();
        drop((kept, crossed));
        scene.check_the_rest();
        assert!(scene.pool.close_lane(scene.lane.stream()));
        // The raw block is somebody's still.
        let Scene { sim, pool, lane, other, far } = scene;
        drop((pool, lane, other, far));
        assert!(raw.is_none_or(|raw| sim.peek(raw, 8).is_some()), "it stays mapped");
    }
}

#[test]
fn memory_of_a_broken_lane_goes_with_its_pool_if_nobody_has_any() {
    for (name, way) in WAYS {
        let scene = Scene::new();
        let (held, held_by) = (scene.lane.alloc(5 * MIB).unwrap(), scene.lane.stream());
        let hold = scene.sim.hold(DeviceId(0), held_by.handle()).unwrap();
        let address = held.address();
        // One that leaves behind the held stream when the lane breaks.
        drop(scene.lane.alloc(9 * MIB).unwrap());
        scene.pool.trim_idle(DeviceId(0), Duration::ZERO).unwrap();
        assert!(scene.lane.cell.lock().as_ref().unwrap().limbo.retired_count() > 0);
        thrown_by(name, || way(&scene.lane));
        drop(held);
        scene.check_the_rest_while_held(hold, address);
        scene.end();
    }
}

impl Scene {
    /// The same; memory at `address`, which work of a held stream may use, stays until the stream goes on.
    fn check_the_rest_while_held(&self, hold: vmm_sys::sim::HoldId, address: u64) {
        drop(self.other.alloc(3 * MIB).unwrap());
        self.pool.trim_idle(DeviceId(0), Duration::ZERO).unwrap();
        self.pool.verify().unwrap();
        assert!(self.sim.peek(address, 8).is_some(), "unmapped under its users");
        self.sim.release_hold(hold);
        self.lane.stream().synchronize().unwrap();
        self.check_the_rest();
    }
}

#[test]
fn a_buffer_of_a_broken_lane_keeps_its_memory_beyond_the_pool() {
    let scene = Scene::new();
    let kept = scene.lane.alloc(5 * MIB).unwrap();
    kept.write(0, &[9; 4]).unwrap();
    thrown_by("breaker", || WAYS[1].1(&scene.lane));
    let Scene { sim, pool, lane, other, far } = scene;
    drop((pool, lane, other, far));
    assert_eq!(sim.peek(kept.address(), 4).unwrap(), [9; 4]);
    drop(kept);
    assert!(sim.check_clean().is_err(), "nobody takes it back any more");
}

#[test]
fn a_panic_that_only_looks_breaks_nothing_nor_does_one_of_the_caller() {
    let scene = Scene::new();
    let buffer = scene.lane.alloc(1000).unwrap();
    thrown_by("looker", || {
        let guard = scene.lane.cell.lock();
        assert_eq!(guard.as_ref().map(|state| state.live.buffers), Some(1));
        throw()
    });
    let mut crossed = scene.lane.alloc(1000).unwrap();
    crossed.record_stream(scene.other.stream()).unwrap();
    thrown_by("caller", move || {
        let _freed_while_unwinding = (buffer, crossed);
        throw()
    });
    assert_eq!(scene.pool.stats().broken, []);
    drop(scene.lane.alloc(1000).unwrap());
    scene.pool.verify().unwrap();
    scene.end();
}

#[test]
fn who_is_at_the_driver_for_a_lane_that_breaks_meanwhile_finds_out() {
    // A growth; a sweep that has retired mappings in its hands, whose stream is held.
    for call in [Call::MemMap, Call::EventQuery] {
        let scene = Scene::new();
        let lane = &scene.lane;
        let kept = lane.alloc(1000).unwrap();
        let used = lane.alloc(9 * MIB).unwrap();
        let address = used.address() + 4 * MIB;
        drop(used);
        let hold = scene.sim.hold(DeviceId(0), lane.stream().handle()).unwrap();
        let gate = CallGate::new();
        scene.sim.inject(FaultPlan::stop_at(&gate).on(call).once());
        std::thread::scope(|scope| {
            let at_driver = scope.spawn(|| match call {
                Call::MemMap => is_broken(lane.alloc(40 * MIB), lane, "breaker"),
                _ => drop(scene.pool.trim_idle(DeviceId(0), Duration::ZERO).unwrap()),
            });
            assert!(gate.wait_for(1, LONG), "{call} was not made");
            thrown_by("breaker", || WAYS[1].1(lane));
            gate.open();
            at_driver.join().unwrap();
        });
        is_broken(lane.alloc(1000), lane, "breaker");
        drop(kept);
        scene.check_the_rest_while_held(hold, address);
        scene.end();
    }
}

#[test]
fn an_elastic_buffer_in_whose_change_a_thread_panics_is_broken_alone() {
    let scene = Scene::new();
    let build = || {
        let buffer = scene.pool.elastic(DeviceId(0)).capacity_bytes(64 * MIB).build().unwrap();
        buffer.grow_to(4 * MIB).unwrap();
        buffer
    };
    let (buffer, other) = (build(), build());
    let (operating, told) = (std::sync::Barrier::new(2), buffer.address());
    std::thread::scope(|scope| {
        // Waits for the operation, and is told what became of it.
        let waiter = scope.spawn(|| {
            operating.wait();
            buffer.grow_to(8 * MIB)
        });
        thrown_by("changer", || {
            let _operation = buffer.body().operate().unwrap();
            operating.wait();
            throw()
        });
        let Err(Error::Broken(broken)) = waiter.join().unwrap() else { panic!("it is broken") };
        let part = BrokenPart::Elastic { address: told };
        assert!(broken.to_string().contains(&format!("{told:#x}")), "{broken}");
        assert_eq!(*broken, Broken { part, thread: "changer".into() });
    });
    let stream = scene.lane.stream();
    for answer in [
        buffer.shrink_to(0).map(drop),
        buffer.migrate(DeviceId(1)).map(drop),
        buffer.use_on(stream).map(drop),
        buffer.write(0, &[1]),
        buffer.grant(DeviceId(1), vmm_sys::Access::ReadWrite),
    ] {
        assert!(matches!(answer, Err(Error::Broken(_))), "{answer:?}");
    }
    assert_eq!((buffer.pieces().len() as u64) * buffer.chunk_bytes(), buffer.committed_bytes());
    assert_eq!(scene.pool.stats().broken.len(), 1);
    // It keeps nobody from a change of the policy, nor from one that fails and is taken back.
    let grants = |answer: Result<(), Error>, access| {
        answer.unwrap();
        assert_eq!(other.access(DeviceId(1)), access);
    };
    let read = vmm_sys::Access::Read;
    grants(scene.pool.grant(DeviceId(0), DeviceId(1), read), read);
    let refused = FaultPlan::fail(ResultCode::UNKNOWN).on(Call::MemSetAccess).once();
    scene.sim.inject(refused);
    scene.pool.grant(DeviceId(0), DeviceId(1), vmm_sys::Access::ReadWrite).unwrap_err();
    scene.sim.clear_faults();
    grants(Ok(()), read);
    other.grow_to(8 * MIB).unwrap();
    drop(other);
    scene.pool.verify().unwrap();
    assert!(scene.pool.device_stats(DeviceId(0)).unwrap().adds_up());
    drop(scene.lane.alloc(5 * MIB).unwrap());
    drop(buffer);
    assert!(scene.sim.peek(told, 8).is_some(), "nobody knows who uses it");
}
