//! A process that ends while it has pools: by returning, by `exit` while threads work, from a handler of
//! `exit`, from a hook. It ends soon, with the status it chose, and says nothing. Each case runs in a process of
//! its own: this program once more, told which.

#![allow(clippy::unwrap_used, reason = "a failure ends the story")]

use std::cell::RefCell;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use vmm_kv::{Dtype, KvShape, PagedCache, PagedSequence};
use vmm_pool::{Buffer, ElasticBuffer, Error, Lane, Pool};
use vmm_sys::object::Stream;
use vmm_sys::sim::Sim;
use vmm_sys::{DeviceId, Driver};

const ROLE: &str = "VMM_TEST_EXIT_ROLE";
/// A status that nothing but the case itself ends with.
const STATUS: i32 = 77;
const PATIENCE: Duration = Duration::from_secs(20);
const HOME: DeviceId = DeviceId(0);

/// A pool with something of everything, its background thread running.
struct All {
    sequence: PagedSequence,
    _cache: PagedCache,
    elastic: ElasticBuffer,
    buffer: Option<Buffer>,
    lane: Lane,
    pool: Pool,
}

impl All {
    fn new() -> All {
        let driver: Arc<dyn Driver> = Sim::builder().build();
        let pool = Pool::builder(driver.clone()).background(true).stock_marks(8 << 20, 64 << 20);
        let pool = pool.build().unwrap();
        let lane = pool.lane(&Stream::create(&driver, HOME).unwrap()).unwrap();
        let other = Stream::create(&driver, HOME).unwrap();
        let mut buffer = lane.alloc(3 << 20).unwrap();
        buffer.record_stream(&other).unwrap();
        let elastic = pool.elastic(HOME).capacity_bytes(1 << 30).build().unwrap();
        elastic.grow_to(8 << 20).unwrap();
        let _ahead = elastic.grow_ahead(64 << 20).unwrap();
        let shape = KvShape::new(8, 8, 128, Dtype::F16).unwrap();
        let cache = PagedCache::builder(&pool, lane.stream(), shape).block_tokens(16);
        let cache = cache.max_blocks(1024).build().unwrap();
        let sequence = cache.open(40).unwrap();
        All { sequence, _cache: cache, elastic, buffer: Some(buffer), lane, pool }
    }

    /// Everything that makes driver calls; once exit has begun it is refused in silence.
    fn work(&mut self) -> Result<(), Error> {
        drop(self.lane.alloc(40 << 20)?);
        self.elastic.grow_to(16 << 20)?;
        self.elastic.shrink_to(8 << 20)?;
        let _tokens = self.sequence.append(1);
        self.pool.trim(HOME).map(drop)
    }
}

static LEFT: OnceLock<Mutex<All>> = OnceLock::new();

thread_local! {
    /// Dropped when its thread ends.
    static LATE: RefCell<Option<All>> = const { RefCell::new(None) };
}

fn at_exit(handler: extern "C" fn()) {
    // SAFETY: a function of this program, which does not unwind.
    assert_eq!(unsafe { libc::atexit(handler) }, 0);
}

extern "C" fn handler_with_a_driver() {
    handle(|outcome| outcome.is_ok());
}

extern "C" fn handler_without_a_driver() {
    handle(|outcome| matches!(outcome, Err(Error::DriverGone)));
}

/// Works and frees in a handler of `exit`; ends the process by a signal if that goes otherwise.
fn handle(is_right: fn(Result<(), Error>) -> bool) {
    let Some(mut all) = LEFT.get().and_then(|all| all.lock().ok()) else { std::process::abort() };
    let outcome = all.work();
    drop(all.buffer.take());
    if !is_right(outcome) {
        std::process::abort();
    }
}

/// The cases, by name. Those that come back end by the test's own end.
const ROLES: &[(&str, fn())] = &[
    ("all is in a static", || {
        assert!(LEFT.set(Mutex::new(All::new())).is_ok());
        std::process::exit(STATUS);
    }),
    ("threads work", || {
        for _ in 0..4 {
            std::thread::spawn(|| {
                let mut all = All::new();
                while all.work().is_ok() {}
                // Refused, as it should be: what it holds goes while others end.
                drop(all);
                loop {
                    std::thread::park();
                }
            });
        }
        std::thread::sleep(Duration::from_millis(50));
        std::process::exit(STATUS);
    }),
    ("values of threads", || {
        let threads: Vec<_> = (0..3)
            .map(|_| std::thread::spawn(|| LATE.with(|late| *late.borrow_mut() = Some(All::new()))))
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        LATE.with(|late| *late.borrow_mut() = Some(All::new()));
        std::process::exit(STATUS);
    }),
    ("a handler of exit before the pool's", || {
        assert!(LEFT.set(Mutex::new(All::new())).is_ok());
        // The last one that was registered runs first.
        at_exit(handler_with_a_driver);
        std::process::exit(STATUS);
    }),
    ("a handler of exit after the pool's", || {
        at_exit(handler_without_a_driver);
        assert!(LEFT.set(Mutex::new(All::new())).is_ok());
        std::process::exit(STATUS);
    }),
    ("a hook", || {
        let all = All::new();
        let _hook = all.elastic.on_backing_change(|_| std::process::exit(STATUS));
        all.elastic.grow_to(512 << 20).unwrap();
    }),
];

#[test]
fn role() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let (_, body) = ROLES.iter().find(|(name, _)| *name == role).unwrap();
    body();
}

#[test]
fn a_process_ends_soon_in_silence_and_with_its_own_status() {
    if std::env::var(ROLE).is_ok() {
        return;
    }
    for (name, _) in ROLES {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "role", "--nocapture"])
            .env(ROLE, name)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let deadline = Instant::now() + PATIENCE;
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break status;
            }
            if Instant::now() > deadline {
                child.kill().unwrap();
                panic!("{name}: it hangs");
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        let said = std::io::read_to_string(child.stderr.take().unwrap()).unwrap();
        assert_eq!((status.code(), &*said), (Some(STATUS), ""), "{name}");
    }
}
