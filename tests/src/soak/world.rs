//! What the threads of a soak share.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak};
use std::time::Instant;

use vmm_pool::{Balance, Budget, Lane, Place, Pool, PoolBuilder};
use vmm_sys::object::{Chunk, Mapping, Range, Stream, failed_drops, retry_failed_drops};
use vmm_sys::{
    Access, AccessGrant, ChunkProps, DeviceId, Driver, DriverResult, HandleTypes, Location,
};

use super::blocks::Block;
use super::board::Board;
use super::gate::Gate;
use super::item::Item;
use super::kv::Caches;
use super::sharing::Sharing;
use super::sleep::TAGS;
use super::trouble::Trouble;
use super::worker::KINDS;
use super::{HANG, Options};
use crate::machine::{Machine, MachineSpec, Skip};

/// The pool that keeps itself: its thread, lenders, balance, memory of the host.
pub(super) const KEPT: usize = 0;
/// The pool without a thread, whose elastic buffers can be exported.
pub(super) const BARE: usize = 1;

/// What the stock of the pool with a thread is kept at.
pub(super) const LOW_BYTES: u64 = 8 << 20;
pub(super) const HIGH_BYTES: u64 = 32 << 20;
/// After so long its lanes give back what they do not use.
const IDLE_LANE_MS: u64 = 250;
/// The node of the host that pools may use.
pub(super) const NODE: Place = Place::HostNuma(0);

/// A shared stream, and its lane of each pool.
pub(super) struct Track {
    pub(super) stream: Stream,
    pub(super) lanes: Vec<Lane>,
}

impl Track {
    pub(super) fn device(&self) -> DeviceId {
        self.stream.device()
    }
}

/// What others see of a thread.
pub(super) struct Slot {
    pub(super) doing: Mutex<Doing>,
    /// What was done and what was refused, by kind.
    pub(super) done: Vec<AtomicU64>,
    pub(super) refused: Vec<AtomicU64>,
    pub(super) checks: AtomicU64,
}

/// The last operations of a thread, the present one at the end.
pub(super) struct Doing {
    pub(super) last: Vec<(u64, &'static str, String)>,
    pub(super) since: Instant,
    pub(super) waits: bool,
}

pub(super) struct World {
    pub(super) sharing: Mutex<Option<Sharing>>,
    pub(super) caches: Mutex<Vec<Arc<Caches>>>,
    pub(super) items: Mutex<Vec<Arc<Item>>>,
    /// These, and those that somebody has who is about to let go.
    pub(super) every: Mutex<Vec<Weak<Item>>>,
    pub(super) mail: Mutex<Vec<Block>>,
    pub(super) tags: [Mutex<bool>; TAGS],
    /// Streams that are captured, one a device: nothing else is enqueued on them meanwhile.
    pub(super) captured: Vec<Mutex<Track>>,
    tracks: Vec<RwLock<Arc<Track>>>,
    pub(super) pools: Vec<Pool>,
    /// What pools that come and go may own together, for each device.
    pub(super) passing: Vec<Budget>,
    pub(super) board: Board,
    pub(super) gate: Gate,
    pub(super) slots: Vec<Slot>,
    pub(super) numbers: AtomicU64,
    /// Of each device, before the first chunk.
    pub(super) free_before: Vec<u64>,
    failure: Mutex<Option<String>>,
    pub(super) stop: AtomicBool,
    pub(super) options: Options,
    pub(super) machine: Machine,
}

/// Somebody who panicked has told it: the run ends, and what he left is only dropped.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl World {
    pub(super) fn new(options: Options) -> Result<World, Skip> {
        let spec = MachineSpec {
            devices: options.devices,
            // More than the pools may own, and enough for what the driver would keep.
            device_bytes: Some(2 * options.memory_bytes.max(4 << 30)),
            ..MachineSpec::default()
        };
        let machine = Machine::new(options.choice, spec)?;
        let driver = machine.driver();
        // One for whoever tidies up at quiet points.
        let rows = options.threads + 1;
        let free = machine.devices().map(|device| driver.mem_info(device));
        let free: Result<Vec<_>, _> = free.map(|info| Ok(info?.free_bytes)).collect();
        let free_before = free.map_err(|error: vmm_sys::DriverError| Skip::because(error))?;
        let board = Board::new(driver, options.devices, rows).map_err(Skip::because)?;
        let pools = [kept(&machine, &options), bare(&machine, &options)];
        let pools: Result<Vec<Pool>, _> = pools.into_iter().map(PoolBuilder::build).collect();
        let pools = pools.map_err(Skip::because)?;
        let opened = |device| open(driver, &pools, DeviceId(device)).map_err(Skip::because);
        let tracks = (0..options.streams)
            .map(|n| Ok(RwLock::new(Arc::new(opened(n % options.devices)?))))
            .collect::<Result<_, Skip>>()?;
        let captured = (0..options.devices)
            .map(|n| Ok(Mutex::new(opened(n)?)))
            .collect::<Result<_, Skip>>()?;
        Ok(World {
            sharing: Mutex::new(None),
            caches: Mutex::new(Vec::new()),
            items: Mutex::new(Vec::new()),
            every: Mutex::new(Vec::new()),
            mail: Mutex::new(Vec::new()),
            tags: Default::default(),
            captured,
            tracks,
            passing: machine.devices().map(|_| Budget::new(options.memory_bytes / 8)).collect(),
            board,
            gate: Gate::new(options.threads),
            slots: (0..rows).map(|row| Slot::new(row == options.threads)).collect(),
            numbers: AtomicU64::new(0),
            free_before,
            failure: Mutex::new(None),
            stop: AtomicBool::new(false),
            pools,
            machine,
            options,
        })
    }

    pub(super) fn driver(&self) -> &Arc<dyn Driver> {
        self.machine.driver()
    }

    pub(super) fn next_number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    pub(super) fn tracks(&self) -> usize {
        self.tracks.len()
    }

    pub(super) fn track(&self, index: usize) -> Arc<Track> {
        self.tracks[index].read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Puts a new stream in the place of one, whose lanes are closed. Others may still be at work
    /// with the old one.
    pub(super) fn renew(&self, index: usize) -> Result<(), Trouble> {
        let device = self.track(index).device();
        let new = Arc::new(open(self.driver(), &self.pools, device)?);
        let mut slot = self.tracks[index].write().unwrap_or_else(PoisonError::into_inner);
        let old = std::mem::replace(&mut *slot, new);
        drop(slot);
        self.close(&old)
    }

    /// The same for the streams that are captured.
    pub(super) fn renew_captured(&self) -> Result<(), Trouble> {
        for slot in &self.captured {
            let mut slot = lock(slot);
            let new = open(self.driver(), &self.pools, slot.device())?;
            let old = std::mem::replace(&mut *slot, new);
            self.close(&old)?;
        }
        Ok(())
    }

    fn close(&self, track: &Track) -> Result<(), Trouble> {
        let closed = self.pools.iter().all(|pool| pool.close_lane(&track.stream));
        if closed { Ok(()) } else { Err(Trouble::wrong("a stream of ours may not be destroyed")) }
    }

    pub(super) fn fail(&self, text: String) {
        lock(&self.failure).get_or_insert(text);
        self.stop.store(true, Ordering::Relaxed);
        self.gate.close();
    }

    pub(super) fn failure(&self) -> Option<String> {
        lock(&self.failure).clone()
    }

    /// Ends the process if a thread hangs: nobody could end it otherwise.
    pub(super) fn watch(&self) {
        let hangs = |slot: &Slot| {
            let doing = lock(&slot.doing);
            !doing.waits && doing.since.elapsed() > HANG
        };
        if !self.slots.iter().any(hangs) {
            return;
        }
        for (number, slot) in self.slots.iter().enumerate() {
            let doing = lock(&slot.doing);
            let for_ms = doing.since.elapsed().as_millis();
            let what = if doing.waits { "waits to go on".to_owned() } else { told(&doing.last) };
            println!("thread {number}, for {for_ms} ms: {what}");
        }
        println!("FAIL a thread hangs, seed {}", self.options.seed);
        std::process::exit(1);
    }

    /// Drops everything, and looks that it is gone.
    pub(super) fn end(self) -> Result<(), String> {
        let World { machine, captured, tracks, pools, board, free_before, .. } = self;
        drop((captured, tracks, pools, board));
        if machine.sim().is_ok() {
            return machine.check_clean();
        }
        let left = retry_failed_drops(machine.driver());
        if left > 0 {
            return Err(format!("{left} kept back: {:?}", failed_drops(machine.driver())));
        }
        for (device, before) in machine.devices().zip(free_before) {
            let info = machine.driver().mem_info(device).map_err(|error| error.to_string())?;
            if info.free_bytes + DRIVER_BYTES < before {
                let free = info.free_bytes;
                return Err(format!("{device}: {before} bytes free before, {free} in the end"));
            }
        }
        Ok(())
    }
}

/// What the driver may come to take of a device for itself: for graphs, streams and code.
pub(super) const DRIVER_BYTES: u64 = 64 << 20;

/// Whether memory of the host can be exported and imported: not every driver may know how.
fn host_is_exportable(driver: &Arc<dyn Driver>, granule: u64) -> DriverResult<()> {
    let location = Location::HostNuma(0);
    let props = ChunkProps { location, handle_types: HandleTypes::POSIX_FD, rdma: false };
    let descriptor = Chunk::create(driver, granule, &props)?.export_fd()?;
    let chunk = Chunk::import_fd(driver, descriptor.as_fd(), granule, &props)?;
    let range = Range::reserve(driver, granule, 0, 0)?;
    let mapping = Mapping::map(&range, 0, Arc::new(chunk))?;
    mapping.set_access(&[AccessGrant::read_write(DeviceId(0))])?;
    range.read(DeviceId(0), 0, &mut [0; 4])
}

impl Slot {
    /// Of a thread; `waits` says that it does nothing yet.
    fn new(waits: bool) -> Slot {
        let counts = || KINDS.iter().map(|_| AtomicU64::new(0)).collect();
        let doing = Doing { last: Vec::new(), since: Instant::now(), waits };
        Slot {
            doing: Mutex::new(doing),
            done: counts(),
            refused: counts(),
            checks: AtomicU64::new(0),
        }
    }
}

/// The last operations, one a line.
pub(super) fn told(last: &[(u64, &'static str, String)]) -> String {
    let lines = last.iter().map(|(number, kind, what)| format!("\n  {number} {kind} {what}"));
    lines.collect()
}

fn open(driver: &Arc<dyn Driver>, pools: &[Pool], device: DeviceId) -> Result<Track, Trouble> {
    let stream = Stream::create(driver, device)?;
    let lanes = pools.iter().map(|pool| pool.lane(&stream)).collect::<Result<_, _>>()?;
    Ok(Track { stream, lanes })
}

fn over_all(machine: &Machine) -> PoolBuilder {
    let mut builder = Pool::builder(machine.driver().clone());
    for device in machine.devices() {
        builder = builder.device(device);
        for other in machine.devices().filter(|other| *other != device) {
            builder = builder.access(device, other, Access::ReadWrite);
        }
    }
    builder
}

fn kept(machine: &Machine, options: &Options) -> PoolBuilder {
    let limit = options.memory_bytes / 2;
    let balance = Balance { full: 0.7, empty: 0.5, cold_ms: 200, ..Balance::default() };
    let builder = over_all(machine)
        .limit_bytes(limit)
        .stock_marks(LOW_BYTES, HIGH_BYTES)
        .idle_lane_ms(Some(IDLE_LANE_MS))
        .host_memory(0, limit / 2, 0)
        .balance(balance);
    machine.devices().fold(builder, |builder, device| builder.lend(device, limit / 4))
}

fn bare(machine: &Machine, options: &Options) -> PoolBuilder {
    let builder = over_all(machine)
        .limit_bytes(options.memory_bytes / 4)
        .background(false)
        .soft_limit(None)
        .exportable(true);
    match host_is_exportable(machine.driver(), machine.granularity_bytes()) {
        Ok(()) => builder.host_memory(0, options.memory_bytes / 8, 0),
        Err(error) => {
            println!("no exportable memory of the host: {error}");
            builder
        }
    }
}
