//! A pool with something of everything, and what can be asked of it.

use std::sync::Arc;
use std::time::Duration;

use vmm_pool::{Buffer, Contents, ElasticBuffer, Error, Lane, Place, Pool, PoolBuilder};
use vmm_sys::caught::caught;
use vmm_sys::object::{Stream, retry_failed_drops};
use vmm_sys::sim::Sim;
use vmm_sys::{Access, Call, CaptureMode, DeviceId, Driver};

use crate::common::elastic::G;
use crate::common::{HOME, MIB};

/// Only to detect that something hangs.
pub(crate) const LONG: Duration = Duration::from_secs(15);
pub(crate) const SECOND: DeviceId = DeviceId(1);

/// Two devices; a lane with memory of every kind, an elastic buffer with contents.
pub(crate) struct Scene {
    pub(crate) sim: Arc<Sim>,
    pub(crate) driver: Arc<dyn Driver>,
    pub(crate) pool: Pool,
    pub(crate) lane: Lane,
    pub(crate) other: Lane,
    pub(crate) far: Lane,
    pub(crate) kept: Buffer,
    pub(crate) elastic: ElasticBuffer,
}

impl Scene {
    pub(crate) fn new(settings: impl FnOnce(PoolBuilder) -> PoolBuilder) -> Scene {
        let sim = Sim::builder().devices(2).build();
        let driver: Arc<dyn Driver> = sim.clone();
        let pool = Pool::builder(driver.clone()).background(false).device(HOME).device(SECOND);
        let pool = settings(pool.host_memory(0, 64 * G, 0)).build().unwrap();
        let lane = |device| pool.lane(&Stream::create(&driver, device).unwrap()).unwrap();
        let (one, other, far) = (lane(HOME), lane(HOME), lane(SECOND));
        let kept = one.alloc(3 * MIB).unwrap();
        drop(one.alloc(9 * MIB).unwrap());
        let elastic = pool.elastic(HOME).capacity_bytes(64 * G).chunk_bytes(G).exportable(true);
        let elastic = elastic.build().unwrap();
        elastic.grow_to(3 * G).unwrap();
        elastic.write(G, &[7; 64]).unwrap();
        Scene { sim, driver, pool, lane: one, other, far, kept, elastic }
    }

    /// The pool is whole: nothing is broken, everything can be used, the figures add up.
    pub(crate) fn check(&self, what: &str) {
        let stats = self.pool.stats();
        assert_eq!((&*stats.broken, stats.thread_panics), (&[][..], 0), "{what}");
        assert!(stats.devices.iter().all(|(_, stats)| stats.adds_up()), "{what}: {stats:?}");
        self.pool.verify().unwrap_or_else(|error| panic!("{what}: {error}"));
        for lane in [&self.lane, &self.other, &self.far] {
            for bytes in [1000, 17 * MIB] {
                drop(lane.alloc(bytes).unwrap_or_else(|error| panic!("{what}: {error}")));
            }
        }
        let works = || -> Result<[u8; 64], Error> {
            self.elastic.wake()?;
            self.elastic.grow_to(5 * G)?;
            let mut found = [0; 64];
            self.elastic.read(G, &mut found)?;
            Ok(found)
        };
        assert_eq!(works().unwrap_or_else(|error| panic!("{what}: {error}")), [7; 64], "{what}");
        self.pool.trim(HOME).unwrap();
        self.pool.verify().unwrap_or_else(|error| panic!("{what}: {error}"));
    }

    pub(crate) fn end(self, what: &str) {
        let Scene { sim, driver, pool, lane, other, far, kept, elastic } = self;
        drop((elastic, kept, lane, other, far, pool));
        // What a call refused, the next try gets.
        assert_eq!(retry_failed_drops(&driver), 0, "{what}");
        sim.check_clean().unwrap_or_else(|error| panic!("{what}: {error}"));
    }
}

/// One operation, which may fail.
pub(crate) type Work = fn(&Scene) -> Result<(), Error>;

fn free_crossed(scene: &Scene) -> Result<(), Error> {
    let mut buffer = scene.lane.alloc(4096)?;
    buffer.record_stream(scene.other.stream())?;
    drop(buffer);
    scene.lane.alloc(33 * MIB).map(drop)
}

fn capture(scene: &Scene) -> Result<(), Error> {
    let scope = scene.lane.capture()?;
    let (sim, stream) = (&scene.sim, scene.lane.stream().handle());
    // SAFETY: the stream is live.
    let begin = || unsafe { sim.capture_begin(HOME, stream, CaptureMode::Global) };
    caught(Call::StreamBeginCapture, begin)?;
    let block = scene.lane.alloc(5 * MIB).map(drop);
    // SAFETY: the stream is live, and so is the graph until it is destroyed.
    let end = || unsafe {
        let graph = sim.capture_end(HOME, stream)?;
        caught(Call::GraphDestroy, || sim.graph_destroy(HOME, graph)).or_else(|error| {
            sim.clear_faults();
            sim.graph_destroy(HOME, graph).and(Err(error))
        })
    };
    // A program has to end what it began.
    if let Err(error) = caught(Call::StreamEndCapture, end) {
        sim.clear_faults();
        let _ended_before = end();
        return Err(error.into());
    }
    drop(scope.finish());
    block
}

fn end_a_lane(scene: &Scene) -> Result<(), Error> {
    let stream = Stream::create(&scene.driver, HOME)?;
    let lane = scene.pool.lane(&stream)?;
    let buffer = lane.alloc(5 * MIB)?;
    scene.pool.close_lane(&stream);
    drop((buffer, lane, stream));
    Ok(())
}

pub(crate) const OPERATIONS: &[(&str, Work)] = &[
    ("a growth", |scene| scene.lane.alloc(40 * MIB).map(drop)),
    ("a free that waits", free_crossed),
    ("a trim", |scene| scene.pool.trim(HOME).map(drop)),
    ("a prefill", |scene| scene.pool.prefill(HOME, 64 * MIB).map(drop)),
    ("a capture", capture),
    ("the end of a lane", end_a_lane),
    ("an elastic growth", |scene| scene.elastic.grow_to(7 * G).map(drop)),
    ("a use", |scene| scene.elastic.use_on(scene.lane.stream()).map(drop)),
    ("a shrink", |scene| scene.elastic.shrink_to(2 * G).map(drop)),
    ("a grant", |scene| scene.elastic.grant(SECOND, Access::ReadWrite)),
    ("a move", |scene| scene.elastic.migrate(SECOND).map(drop)),
    ("a move to the host", |scene| scene.elastic.migrate(Place::HostNuma(0)).map(drop)),
    ("sleep", |scene| {
        scene.elastic.sleep(Contents::Kept { node: 0 }, LONG)?;
        scene.elastic.wake().map(drop)
    }),
    ("an export", |scene| scene.elastic.export_pieces().map(drop)),
    ("dma-bufs", |scene| scene.elastic.dma_bufs().map(drop)),
];
