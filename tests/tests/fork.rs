//! A process that forks while it has a pool (F-E6): the child's copies are silent, the parent goes
//! on. A program of its own, since a fork copies only the thread that calls it.

#![allow(clippy::unwrap_used, reason = "a failure ends the story")]

use std::mem::ManuallyDrop;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Duration;

use vmm_kv::{Dtype, KvShape, PagedCache, PagedSequence};
use vmm_pool::{Buffer, Contents, ElasticBuffer, Error, Lane, Pool};
use vmm_pool_tests::{DriverChoice, Machine, MachineSpec, any_driver};
use vmm_sys::sim::{CallGate, FaultPlan};
use vmm_sys::{Access, Call, DeviceId};

/// A child that hangs ends by this.
const PATIENCE_S: u32 = 10;
/// What a child ends with that got a wrong answer to the nth question, or none: from here on. 1 if it made a
/// driver call.
const FIRST_WRONG: u8 = 10;
/// What it ends with if a look at figures hung, from here on; one less if its drops did.
const FIRST_LOOK: u8 = 102;
static REACHED: AtomicU8 = AtomicU8::new(0);

extern "C" fn too_late(_: libc::c_int) {
    // SAFETY: may be called in a signal handler, and needs nothing of the process.
    unsafe { libc::_exit(i32::from(REACHED.load(Ordering::Relaxed))) }
}

/// The number of a signal that ended a child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Signal(libc::c_int);

/// Runs `child` in a fork, and gives what it says: zero if all was well.
fn in_child(child: impl FnOnce() -> u8) -> Result<u8, Signal> {
    // SAFETY: the child calls only what this test is about, and leaves by `_exit` or by the alarm.
    match unsafe { libc::fork() } {
        -1 => panic!("no fork"),
        0 => {
            // SAFETY: the handler does what a signal handler may; nobody else has use for the signal.
            unsafe {
                libc::signal(libc::SIGALRM, too_late as *const () as libc::sighandler_t);
                libc::alarm(PATIENCE_S);
            }
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child));
            // SAFETY: ends the child without running what the parent registered for its exit.
            unsafe { libc::_exit(i32::from(outcome.unwrap_or(u8::MAX))) }
        }
        pid => {
            let mut status = 0;
            // SAFETY: `pid` is the child made above, and `status` outlives the call.
            assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
            match libc::WIFEXITED(status) {
                true => Ok(libc::WEXITSTATUS(status) as u8),
                false => Err(Signal(libc::WTERMSIG(status))),
            }
        }
    }
}

#[test]
fn f_e6_a_forked_child_is_silent_and_the_parent_goes_on() {
    if any_driver() == DriverChoice::Cuda {
        println!("f_e6: skipped: told on the simulated device");
        return;
    }
    let machine = Machine::simulated(MachineSpec::default());
    let driver = machine.driver().clone();
    let builder = Pool::builder(driver.clone()).stock_marks(8 << 20, 64 << 20);
    let pool = builder.build().unwrap();
    let lane = pool.lane(&machine.stream(0)).unwrap();
    let other = machine.stream(0);
    let mut buffer = lane.alloc(3 << 20).unwrap();
    buffer.record_stream(&other).unwrap();

    // A thread is at the driver, and another looks at the figures, when the process forks.
    let sim = machine.sim().unwrap();
    sim.inject(FaultPlan::delay_real(Duration::from_millis(200)).on(Call::MemCreate).once());
    let growing = {
        let lane = lane.clone();
        std::thread::spawn(move || lane.alloc(100 << 20).map(drop))
    };
    while sim.faults_fired() == 0 {
        std::thread::yield_now();
    }
    // SAFETY: the copies are dropped by the child only: the parent keeps and drops its own.
    let copies = unsafe { (std::ptr::read(&buffer), std::ptr::read(&lane), std::ptr::read(&pool)) };
    let copies = ManuallyDrop::new(copies);
    let silent = in_child(move || {
        let before = driver.ledger().snapshot();
        let refused = matches!(copies.1.alloc(1000), Err(Error::DriverGone))
            && copies.1.alloc(0).is_ok()
            && matches!(copies.2.lane(copies.1.stream()), Err(Error::DriverGone))
            && matches!(copies.2.trim(DeviceId(0)), Err(Error::DriverGone));
        drop(ManuallyDrop::into_inner(copies));
        let calls = driver.ledger().snapshot().since(&before).total();
        if refused && calls == 0 { 0 } else { 1 }
    });
    assert_eq!(silent, Ok(0), "the child made a call, or was answered wrongly");

    growing.join().unwrap().unwrap();
    drop(buffer);
    drop(lane.alloc(1000).unwrap());
    pool.trim(DeviceId(0)).unwrap();
    pool.verify().unwrap();
    drop((lane, pool, other));
    machine.check_clean().unwrap();
}

/// A pool with something of everything.
struct Scene {
    machine: Machine,
    pool: Pool,
    lane: Lane,
    buffer: Buffer,
    elastic: ElasticBuffer,
    cache: PagedCache,
    sequence: Mutex<PagedSequence>,
}

impl Scene {
    fn new(background: bool) -> Scene {
        let machine = Machine::simulated(MachineSpec { devices: 2, ..MachineSpec::default() });
        let driver = machine.driver().clone();
        let chunk_bytes = machine.granularity_bytes();
        let pool = Pool::builder(driver).background(background).host_memory(0, 1 << 30, 0);
        let pool = pool.device(DeviceId(0)).device(DeviceId(1)).build().unwrap();
        let lane = pool.lane(&machine.stream(0)).unwrap();
        let buffer = lane.alloc(3 << 20).unwrap();
        let elastic = pool.elastic(DeviceId(0)).chunk_bytes(chunk_bytes);
        let elastic = elastic.capacity_bytes(64 * chunk_bytes).build().unwrap();
        elastic.grow_to(3 * chunk_bytes).unwrap();
        let shape = KvShape::new(8, 8, 128, Dtype::F16).unwrap();
        let cache = PagedCache::builder(&pool, lane.stream(), shape).block_tokens(16);
        let cache = cache.max_blocks(1024).build().unwrap();
        let sequence = Mutex::new(cache.open(20).unwrap());
        Scene { machine, pool, lane, buffer, elastic, cache, sequence }
    }

    /// The same things once more, for a child to drop.
    fn copy(&self) -> ManuallyDrop<Scene> {
        // SAFETY: the copy is dropped in a child, which has memory of its own; the parent forgets it.
        ManuallyDrop::new(unsafe { std::ptr::read(self) })
    }

    /// What a child does with all it has. It must answer, whatever other threads held when it was made.
    fn in_child(mut copy: ManuallyDrop<Scene>) -> u8 {
        let driver = copy.machine.driver().clone();
        let before = driver.ledger().snapshot();
        // Whoever holds the lock is not in the child.
        let kv_refused = copy.sequence.get_mut().unwrap().append(10_000).is_err();
        let (pool, lane, elastic) = (&copy.pool, &copy.lane, &copy.elastic);
        let now = Duration::ZERO;
        let questions: [&dyn Fn() -> Result<(), Error>; 17] = [
            &|| lane.alloc(1000).map(drop),
            &|| pool.lane(lane.stream()).map(drop),
            &|| pool.trim(DeviceId(0)).map(drop),
            &|| pool.trim_idle(DeviceId(0), now).map(drop),
            &|| pool.prefill(DeviceId(0), 1 << 20).map(drop),
            &|| pool.elastic(DeviceId(0)).capacity_bytes(1 << 20).build().map(drop),
            &|| pool.grant(DeviceId(0), DeviceId(1), Access::ReadWrite),
            &|| pool.sleep("a tag", Contents::Dropped, now).map(drop),
            &|| elastic.grow_to(64 << 20).map(drop),
            &|| elastic.shrink_to(0).map(drop),
            &|| elastic.migrate(DeviceId(1)).map(drop),
            &|| elastic.grow_ahead(64 << 20).map(drop),
            &|| elastic.use_on(lane.stream()).map(drop),
            &|| elastic.sleep(Contents::Dropped, now).map(drop),
            &|| elastic.grant(DeviceId(1), Access::Read),
            &|| elastic.read(0, &mut [0; 8]),
            &|| copy.buffer.read(0, &mut [0; 8]),
        ];
        for (at, question) in (FIRST_WRONG..).zip(questions) {
            REACHED.store(at, Ordering::Relaxed);
            if !matches!(question(), Err(Error::DriverGone)) {
                return at;
            }
        }
        if !kv_refused || pool.verify().is_ok() {
            return FIRST_WRONG - 1;
        }
        // Looks, which answer with something.
        let looks: [&dyn Fn(); 12] = [
            &|| drop(pool.stats()),
            &|| drop(pool.elastic_stats()),
            &|| drop(pool.access_matrix()),
            &|| {
                let _looked = pool.device_stats(DeviceId(0));
            },
            &|| {
                let _looked = lane.largest_free_bytes();
            },
            &|| drop(elastic.pieces()),
            &|| drop(elastic.stats()),
            &|| {
                let _looked = (elastic.committed_bytes(), elastic.generation());
            },
            &|| {
                let _looked = elastic.access(DeviceId(1));
            },
            &|| drop(elastic.room()),
            &|| {
                let _looked = copy.cache.stats();
            },
            &|| {
                let _looked = copy.cache.room();
            },
        ];
        for (at, look) in (FIRST_LOOK..).zip(looks) {
            REACHED.store(at, Ordering::Relaxed);
            look();
        }
        REACHED.store(FIRST_LOOK - 1, Ordering::Relaxed);
        drop(ManuallyDrop::into_inner(copy));
        if driver.ledger().snapshot().since(&before).total() == 0 { 0 } else { 1 }
    }

    fn end(self) {
        self.pool.verify().unwrap();
        let Scene { machine, pool, lane, buffer, elastic, cache, sequence } = self;
        drop((sequence, cache, elastic, buffer, lane, pool));
        machine.check_clean().unwrap();
    }
}

type Work = fn(&Scene) -> Result<(), Error>;

/// What another thread does when the process forks.
const WORKS: &[(&str, Work)] = &[
    ("a growth", |scene| scene.lane.alloc(100 << 20).map(drop)),
    ("a trim", |scene| {
        drop(scene.lane.alloc(40 << 20)?);
        scene.pool.trim(DeviceId(0)).map(drop)
    }),
    ("an elastic growth", |scene| scene.elastic.grow_to(8 * scene.elastic.chunk_bytes()).map(drop)),
    ("a move", |scene| scene.elastic.migrate(DeviceId(1)).map(drop)),
    ("sleep", |scene| {
        scene.elastic.sleep(Contents::Kept { node: 0 }, Duration::from_secs(9))?;
        scene.elastic.wake().map(drop)
    }),
    ("tokens", |scene| {
        scene.sequence.lock().unwrap().append(500).map(drop).map_err(|error| panic!("{error}"))
    }),
];

#[test]
fn f_e6_a_child_answers_whichever_call_another_thread_was_in() {
    if any_driver() == DriverChoice::Cuda {
        println!("f_e6: skipped: told on the simulated device");
        return;
    }
    for (name, work) in WORKS {
        let scene = Scene::new(false);
        let before = scene.machine.driver().ledger().snapshot();
        work(&scene).unwrap();
        let calls = scene.machine.driver().ledger().snapshot().since(&before);
        scene.end();
        let kinds: Vec<Call> = calls.nonzero().map(|(call, _)| call).collect();
        assert!(!kinds.is_empty(), "{name} makes no call");
        for call in kinds {
            let scene = Scene::new(false);
            let gate = CallGate::new();
            let sim = scene.machine.sim().unwrap();
            sim.inject(FaultPlan::stop_at(&gate).on(call).once());
            std::thread::scope(|scope| {
                let worker = scope.spawn(|| work(&scene));
                // What depends on the time, as a look at free memory does, is not made each time.
                while gate.came() == 0 && !worker.is_finished() {
                    std::thread::yield_now();
                }
                let copy = scene.copy();
                let answered = in_child(move || Scene::in_child(copy));
                gate.open();
                worker.join().unwrap().unwrap_or_else(|error| panic!("{name}, {call}: {error}"));
                assert_eq!(answered, Ok(0), "{name}, {call}");
            });
            scene.end();
        }
    }
}

#[test]
fn f_e6_a_child_answers_whatever_other_threads_hold() {
    if any_driver() == DriverChoice::Cuda {
        println!("f_e6: skipped: told on the simulated device");
        return;
    }
    const CHILDREN: usize = 60;
    let scene = Scene::new(true);
    let done = AtomicBool::new(false);
    let looks: Work = |scene| {
        let _looked = (scene.pool.stats(), scene.pool.elastic_stats(), scene.elastic.pieces());
        let _looked = (scene.elastic.stats(), scene.cache.stats(), scene.pool.access_matrix());
        Ok(())
    };
    let lanes: Work = |scene| {
        let mut buffer = scene.lane.alloc(5 << 20)?;
        let other = scene.machine.stream(0);
        buffer.record_stream(&other)?;
        scene.pool.lane(&other)?.alloc(1000).map(drop)?;
        scene.pool.close_lane(&other);
        Ok(())
    };
    let elastics: Work = |scene| {
        drop(scene.elastic.use_on(scene.lane.stream())?);
        scene.elastic.grow_to(6 * scene.elastic.chunk_bytes())?;
        scene.elastic.shrink_to(3 * scene.elastic.chunk_bytes())?;
        let buffer = scene.pool.elastic(DeviceId(1)).capacity_bytes(64 << 20).build()?;
        buffer.grow_to(4 << 20).map(drop)
    };
    let caches: Work = |scene| {
        let mut sequence = scene.cache.open(40).unwrap();
        drop(sequence.fork().unwrap());
        Ok(())
    };
    let answers: Vec<Result<u8, Signal>> = std::thread::scope(|scope| {
        for work in [looks, lanes, elastics, caches] {
            let (scene, done) = (&scene, &done);
            scope.spawn(move || {
                while !done.load(Ordering::Relaxed) {
                    work(scene).unwrap();
                }
            });
        }
        let mut answers = Vec::new();
        // Once is enough of what takes so long to find.
        while answers.len() < CHILDREN && answers.last().is_none_or(|last| *last == Ok(0)) {
            let copy = scene.copy();
            answers.push(in_child(move || Scene::in_child(copy)));
        }
        done.store(true, Ordering::Relaxed);
        answers
    });
    let last = answers.last();
    assert_eq!((answers.len(), last), (CHILDREN, Some(&Ok(0))));
    scene.end();
}
