//! A pool over two simulated devices and a node of the host, and everything in it that a failure must
//! leave as it was.

use std::any::Any;
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use vmm_pool::{
    Buffer, CaptureScope, ChunkSize, DeviceStats, ElasticBuffer, ElasticBuilder, ElasticStats,
    GraphMemory, HostStats, Lane, Place, Pool, PoolBuilder,
};
use vmm_sys::object::{Stream, retry_failed_drops};
use vmm_sys::sim::{Sim, SimBuilder};
use vmm_sys::{DeviceId, Driver, Location};

use crate::engine::{Scene, check_mode, give_back};

/// The granularity of the devices, and the length of all chunks.
pub(crate) const G: u64 = 2 << 20;
pub(crate) const HOME: DeviceId = DeviceId(0);
pub(crate) const NEXT: DeviceId = DeviceId(1);
pub(crate) const HOST: Place = Place::HostNuma(0);
/// For what should take no time.
pub(crate) const SOON: Duration = Duration::from_secs(20);
/// Bytes that are written at the start of each piece.
const MARK_BYTES: usize = 64;

pub(crate) struct Stage {
    pub(crate) sim: Arc<Sim>,
    pub(crate) driver: Arc<dyn Driver>,
    /// Two of the first device, one of the second.
    pub(crate) streams: Vec<Stream>,
    pub(crate) kept: Vec<Box<dyn Any>>,
    pub(crate) scope: Option<CaptureScope>,
    pub(crate) graphs: Vec<GraphMemory>,
    pub(crate) buffers: Vec<Buffer>,
    /// Addresses and lengths of raw blocks.
    pub(crate) raw: Vec<(u64, u64)>,
    pub(crate) elastic: Vec<ElasticBuffer>,
    pub(crate) lanes: Vec<Lane>,
    pub(crate) pool: Option<Pool>,
    /// Another process may have its memory: what it gave back may be taken still.
    pub(crate) outside: bool,
    /// Its elastic buffers may move by themselves.
    pub(crate) moves: bool,
    /// What was made for a request that failed may stay for the next, as lanes and the stock do.
    pub(crate) keeps: bool,
    pub(crate) now_ms: Arc<AtomicU64>,
}

/// A machine as `sim` says, without a pool.
pub(crate) fn bare(sim: fn(SimBuilder) -> SimBuilder) -> Stage {
    on(sim(Sim::builder().devices(2)).build())
}

/// The same on a machine that is there, of two devices.
pub(crate) fn on(sim: Arc<Sim>) -> Stage {
    let driver: Arc<dyn Driver> = sim.clone();
    let streams = [HOME, HOME, NEXT].map(|device| Stream::create(&driver, device).unwrap());
    Stage {
        sim,
        driver,
        streams: streams.into(),
        kept: Vec::new(),
        scope: None,
        graphs: Vec::new(),
        buffers: Vec::new(),
        raw: Vec::new(),
        elastic: Vec::new(),
        lanes: Vec::new(),
        pool: None,
        outside: false,
        moves: false,
        keeps: false,
        now_ms: Arc::default(),
    }
}

/// A pool with settings, on a machine as `sim` says.
pub(crate) fn stage(
    sim: fn(SimBuilder) -> SimBuilder,
    settings: fn(PoolBuilder) -> PoolBuilder,
) -> Stage {
    let mut stage = bare(sim);
    stage.pool = Some(settings(stage.builder()).build().unwrap());
    stage
}

/// The usual one.
pub(crate) fn usual() -> Stage {
    stage(|sim| sim, |pool| pool)
}

/// The usual one, with a thread of its own.
pub(crate) fn threaded() -> Stage {
    stage(|sim| sim, |pool| pool.background(true))
}

impl Stage {
    /// Settings of the usual pool: both devices, 64 chunks of the host, chunks of one length, a clock that
    /// stands still, and no thread.
    pub(crate) fn builder(&self) -> PoolBuilder {
        let clock = self.now_ms.clone();
        Pool::builder(self.driver.clone())
            .background(false)
            .device(HOME)
            .device(NEXT)
            .chunk(ChunkSize::Fixed(G))
            .soft_limit(None)
            .host_memory(0, 64 * G, 0)
            .clock(move || Duration::from_millis(clock.load(Ordering::Relaxed)))
    }

    pub(crate) fn pool(&self) -> &Pool {
        self.pool.as_ref().unwrap()
    }

    pub(crate) fn pass(&self, ms: u64) {
        self.now_ms.fetch_add(ms, Ordering::Relaxed);
    }

    /// Opens the lanes of the three streams.
    pub(crate) fn with_lanes(mut self) -> Stage {
        self.lanes = self.streams.iter().map(|it| self.pool().lane(it).unwrap()).collect();
        self.keeps = true;
        self
    }

    /// A block of a lane, with bytes of its own.
    pub(crate) fn alloc(&mut self, lane: usize, bytes: u64) {
        let buffer = self.lanes[lane].alloc(bytes).unwrap();
        self.mark(buffer.address());
        self.buffers.push(buffer);
    }

    /// Bytes that say at which address they were written.
    pub(crate) fn mark(&self, address: u64) {
        let bytes: Vec<u8> = (0..MARK_BYTES as u64).map(|at| (address / G + at) as u8).collect();
        self.sim.poke(address, &bytes).unwrap();
    }

    pub(crate) fn elastic_builder(&self) -> ElasticBuilder {
        self.pool().elastic(HOME).capacity_bytes(64 * G).chunk_bytes(G)
    }

    /// A buffer with so many chunks, each with bytes of its own.
    pub(crate) fn with_elastic(self, chunks: u64) -> Stage {
        self.with_built(chunks, |builder| builder)
    }

    pub(crate) fn with_built(
        mut self,
        chunks: u64,
        settings: fn(ElasticBuilder) -> ElasticBuilder,
    ) -> Stage {
        let buffer = settings(self.elastic_builder()).build().unwrap();
        buffer.grow_to(chunks * G).unwrap();
        self.elastic.push(buffer);
        self.mark_elastic();
        self
    }

    /// Marks every piece of the elastic buffers.
    pub(crate) fn mark_elastic(&self) {
        for piece in self.elastic.iter().flat_map(ElasticBuffer::pieces) {
            self.mark(piece.address);
        }
    }

    /// What the pieces of the first elastic buffer hold is what [`Stage::mark_elastic`] wrote.
    pub(crate) fn check_marks(&self) {
        for piece in self.elastic[0].pieces() {
            let found = self.sim.peek(piece.address, 1).unwrap();
            assert_eq!(found, [(piece.address / G) as u8], "the bytes at {:#x}", piece.address);
        }
    }

    /// How many chunks of the first elastic buffer lie at a place.
    pub(crate) fn count_at(&self, place: impl Into<Place>) -> usize {
        let place = place.into();
        self.elastic[0].pieces().iter().filter(|piece| piece.place == place).count()
    }

    /// What both devices may do there.
    pub(crate) fn access_at(&self, address: u64) -> String {
        let ask = |device| self.driver.get_access(address, Location::Device(device)).ok();
        format!("{:?}", [HOME, NEXT].map(ask))
    }

    pub(crate) fn bytes_at(&self, address: u64) -> String {
        format!("{:02x?}", self.sim.peek(address, MARK_BYTES))
    }

    fn lines(&self, text: &mut String, exact: bool) {
        for buffer in &self.buffers {
            let (address, bytes) = (buffer.address(), buffer.bytes());
            let (access, held) = (self.access_at(address), self.bytes_at(address));
            let _ = writeln!(text, "buffer {address:#x} {bytes} {access} {held}");
        }
        for (address, bytes) in &self.raw {
            let _ = writeln!(text, "raw {address:#x} {bytes} {}", self.bytes_at(*address));
        }
        for graph in &self.graphs {
            let _ = writeln!(text, "graph {}", graph.mapped_bytes());
        }
        for buffer in &self.elastic {
            let (address, committed_bytes) = (buffer.address(), buffer.committed_bytes());
            let _ = writeln!(text, "elastic {address:#x} with {committed_bytes}");
            let _ = writeln!(text, "asleep {:?}", buffer.asleep());
            if exact && !self.moves {
                let _ = writeln!(text, "{:?}", books_of_buffer(buffer.stats()));
            }
            for piece in buffer.pieces() {
                let (access, held) = (self.access_at(piece.address), self.bytes_at(piece.address));
                match (exact, self.moves) {
                    (true, false) => writeln!(text, "{piece:?} {access} {held}"),
                    (false, false) => writeln!(text, "{:#x} {access} {held}", piece.address),
                    (_, true) => writeln!(text, "{:#x} {held}", piece.address),
                }
                .unwrap();
            }
        }
    }
}

/// The books without what only counts events.
pub(crate) fn books_of_buffer(mut stats: ElasticStats) -> ElasticStats {
    stats.created_bytes = 0;
    stats.from_stock_bytes = 0;
    stats.scrubbed_bytes = 0;
    stats.returned_bytes = 0;
    stats.moved_bytes = 0;
    stats.uses = 0;
    stats
}

/// What users have, and what is kept for them: no events, and nothing of how free memory lies.
fn books_of_device(stats: &DeviceStats, moves: bool) -> String {
    let DeviceStats {
        live_bytes,
        rounding_bytes,
        elastic_bytes,
        lent_bytes,
        borrowed_bytes,
        lending_bytes,
        lending_booked_bytes,
        limit_bytes,
        buffers,
        elastic_buffers,
        lanes,
        ..
    } = stats;
    if moves {
        return format!("live {live_bytes} buffers {buffers} {elastic_buffers} lanes {lanes}");
    }
    format!(
        "live {live_bytes} rounding {rounding_bytes} elastic {elastic_bytes} lent {lent_bytes} \
         borrowed {borrowed_bytes} lending {lending_bytes} {lending_booked_bytes} limit {limit_bytes} \
         buffers {buffers} {elastic_buffers} lanes {lanes}"
    )
}

/// All that is held, and as what. Anchors stay: what was found out about two devices is known.
fn holdings_of_device(stats: &DeviceStats) -> String {
    let DeviceStats {
        idle_bytes,
        limbo_bytes,
        private_bytes,
        anchor_bytes,
        stock_bytes,
        held_bytes,
        reserved_bytes,
        retired_mappings,
        limbo_buffers,
        scrubbed_bytes,
        ..
    } = stats;
    let held_bytes = held_bytes - anchor_bytes;
    format!(
        "idle {idle_bytes} limbo {limbo_bytes} private {private_bytes} stock {stock_bytes} \
         held {held_bytes} reserved {reserved_bytes} scrubbed {scrubbed_bytes} \
         retired {retired_mappings} {limbo_buffers}"
    )
}

fn books_of_host(stats: &HostStats) -> String {
    let HostStats { elastic_bytes, lending_booked_bytes, .. } = stats;
    format!("elastic {elastic_bytes} lending {lending_booked_bytes}")
}

fn holdings_of_host(stats: &HostStats) -> String {
    let HostStats { limbo_bytes, stock_bytes, held_bytes, scrubbed_bytes, .. } = stats;
    format!("limbo {limbo_bytes} stock {stock_bytes} held {held_bytes} scrubbed {scrubbed_bytes}")
}

impl Scene for Stage {
    fn sim(&self) -> Arc<Sim> {
        self.sim.clone()
    }

    /// Each operation on a buffer begins with what earlier ones could not do.
    fn settle(&self) {
        for buffer in &self.elastic {
            // One that sleeps says so, after that.
            let _nothing = buffer.shrink_to(buffer.capacity_bytes());
        }
        // A trim tries again what concerns lanes.
        if let Some(pool) = &self.pool {
            pool.devices().for_each(|device| assert!(pool.trim(device).is_ok()));
        }
    }

    fn picture(&self, exact: bool) -> String {
        let mut text = String::new();
        self.lines(&mut text, exact);
        let Some(pool) = &self.pool else { return text };
        let stats = pool.stats();
        for (device, stats) in &stats.devices {
            let books = books_of_device(stats, self.moves || !exact);
            let _ = writeln!(text, "{device}: {books}");
            if exact && !self.moves && !self.keeps {
                let _ = writeln!(text, "{device}: {}", holdings_of_device(stats));
            }
        }
        for stats in &stats.hosts {
            if exact && !self.moves {
                let _ = writeln!(text, "node {}: {}", stats.node, books_of_host(stats));
            }
            if exact && !self.moves && !self.keeps {
                let _ = writeln!(text, "node {}: {}", stats.node, holdings_of_host(stats));
            }
        }
        for pair in pool.access_matrix().pairs {
            let _ = writeln!(text, "{:?} may {:?}", (pair.owner, pair.accessor), pair.policy);
        }
        text
    }

    /// The pool's own walk; columns add up; and what the driver has given out is what the pool says it
    /// holds, neither more nor less.
    fn laws(&self) -> Result<(), String> {
        check_mode(&self.driver)?;
        let Some(pool) = &self.pool else { return Ok(()) };
        pool.verify()?;
        // What the driver refused to take back from nobody's hands is told by `failed_drops`, and
        // counts in no pool.
        retry_failed_drops(&self.driver);
        let (stats, ledger) = (pool.stats(), self.sim.ledger_summary());
        for (device, stats) in &stats.devices {
            let used_bytes = ledger.devices[device.0 as usize].used_bytes;
            let is_so = match self.outside {
                true => stats.held_bytes <= used_bytes,
                false => stats.held_bytes == used_bytes,
            };
            if !stats.adds_up() || !is_so {
                return Err(format!("{device}: {used_bytes} bytes are taken, {stats:?}"));
            }
        }
        let held_bytes: u64 = stats.hosts.iter().map(|host| host.held_bytes).sum();
        if !stats.hosts.iter().all(HostStats::adds_up) || held_bytes != ledger.host_used_bytes {
            let used_bytes = ledger.host_used_bytes;
            return Err(format!("{used_bytes} bytes of the host are taken, {:?}", stats.hosts));
        }
        Ok(())
    }

    fn end(self) -> Result<(), String> {
        let Stage {
            driver, streams, kept, scope, graphs, buffers, raw, elastic, lanes, pool, ..
        } = self;
        drop((kept, scope, graphs, buffers));
        for (address, bytes) in raw {
            vmm_pool::free_raw(address, bytes).map_err(|error| error.to_string())?;
        }
        drop((elastic, lanes));
        pool.map_or(Ok(()), |pool| pool.verify())?;
        drop(streams);
        give_back(&driver)
    }
}
