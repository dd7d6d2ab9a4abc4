//! What the actors of a run share.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vmm_pool::{ElasticBuffer, Pool};
use vmm_sys::object::Stream;
use vmm_sys::sim::{HoldId, Sim};
use vmm_sys::{Access, DeviceId, Driver};

use crate::blocks::Block;
use crate::caches::Caches;
use crate::notes::Notes;
use crate::rng::Rng;
use crate::setup::Setup;

/// Slots of each actor in a shared elastic buffer.
pub(crate) const SLOTS_EACH: u64 = 6;
/// Their tags.
pub(crate) const TAGS: &[&str] = &["red", "blue"];

/// An elastic buffer and what its users tell each other of it.
pub(crate) struct Elastic {
    pub(crate) buffer: ElasticBuffer,
    pub(crate) name: String,
    pub(crate) tag: Option<&'static str>,
    /// Sleeps that drop contents and are under way, or were: see `Dropping`.
    dropping: AtomicU32,
    drops: AtomicU32,
    /// How often it woke with its contents.
    pub(crate) wakes: AtomicU32,
}

/// A sleep that drops contents is under way, or may be: whoever writes meanwhile knows nothing of what
/// will be there.
pub(crate) struct Dropping(Vec<Arc<Elastic>>);

impl Dropping {
    pub(crate) fn begin(elastics: Vec<Arc<Elastic>>) -> Dropping {
        for elastic in &elastics {
            elastic.dropping.fetch_add(1, SeqCst);
        }
        Dropping(elastics)
    }
}

impl Drop for Dropping {
    fn drop(&mut self) {
        for elastic in &self.0 {
            elastic.drops.fetch_add(1, SeqCst);
            elastic.dropping.fetch_sub(1, SeqCst);
        }
    }
}

impl Elastic {
    pub(crate) fn new(buffer: ElasticBuffer, name: String, tag: Option<&'static str>) -> Elastic {
        let [dropping, drops, wakes] = [const { AtomicU32::new(0) }; 3];
        Elastic { buffer, name, tag, dropping, drops, wakes }
    }

    /// How often contents were dropped; `None` while they may be. Contents written in between two equal
    /// answers, the first of them under a guard, are still there at the second, under a guard as well.
    pub(crate) fn epoch(&self) -> Option<u32> {
        let drops = self.drops.load(SeqCst);
        (self.dropping.load(SeqCst) == 0).then_some(drops)
    }
}

pub(crate) struct World {
    pub(crate) setup: Setup,
    pub(crate) sim: Arc<Sim>,
    pub(crate) driver: Arc<dyn Driver>,
    pub(crate) pool: Pool,
    /// The machine as another process has it.
    pub(crate) other: Arc<Sim>,
    /// Two of each device.
    pub(crate) streams: Vec<Stream>,
    /// Every actor has a part of these.
    pub(crate) shared: Vec<Arc<Elastic>>,
    /// And one of its own.
    pub(crate) own: Vec<Arc<Elastic>>,
    pub(crate) caches: Option<Caches>,
    pub(crate) notes: Arc<Notes>,
    pub(crate) clock_ms: Arc<AtomicU64>,
    exchange: Mutex<Vec<Block>>,
    holds: Mutex<VecDeque<HoldId>>,
    versions: AtomicU32,
    lost: AtomicBool,
    over: AtomicBool,
}

fn open<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}

impl World {
    pub(crate) fn new(setup: Setup, seed: u64, notes: Arc<Notes>) -> World {
        let mut rng = Rng::new(seed ^ 0x0A1D);
        let sim = setup.sim(seed);
        let driver: Arc<dyn Driver> = sim.clone();
        let clock_ms = Arc::new(AtomicU64::new(1000));
        let pool = setup.pool(driver.clone(), clock_ms.clone()).expect("a pool is built");
        let both = setup.devices().flat_map(|device| [device, device]);
        let streams = both.map(|device| Stream::create(&driver, device).unwrap()).collect();
        let shares = 1 + rng.below(2);
        let mut make = |name, slots| elastic(&setup, &pool, &mut rng, name, slots);
        let owners = setup.actors as u64;
        let shared =
            (0..shares).map(|at| make(format!("shared {at}"), owners * SLOTS_EACH)).collect();
        let own = (0..owners).map(|at| make(format!("own {at}"), SLOTS_EACH)).collect();
        let other = setup.other_process();
        let caches = rng.chance(500).then(|| Caches::new(&setup, &pool, &driver, &mut rng));
        World {
            sim,
            driver,
            pool,
            other,
            streams,
            shared,
            own,
            caches,
            notes,
            clock_ms,
            exchange: Mutex::default(),
            holds: Mutex::default(),
            versions: AtomicU32::new(1),
            lost: AtomicBool::new(false),
            over: AtomicBool::new(false),
            setup,
        }
    }

    /// Contents that nothing else has.
    pub(crate) fn next_version(&self) -> u32 {
        self.versions.fetch_add(1, SeqCst)
    }

    pub(crate) fn streams_of(&self, device: DeviceId) -> impl Iterator<Item = &Stream> {
        self.streams.iter().filter(move |stream| stream.device() == device)
    }

    pub(crate) fn elastics(&self) -> impl Iterator<Item = &Arc<Elastic>> {
        self.shared.iter().chain(&self.own)
    }

    /// Those with a tag.
    pub(crate) fn tagged(&self, tag: &str) -> Vec<Arc<Elastic>> {
        self.elastics().filter(|it| it.tag == Some(tag)).cloned().collect()
    }

    /// Puts a block where another actor may take it.
    pub(crate) fn offer(&self, block: Block) {
        open(&self.exchange).push(block);
    }

    pub(crate) fn take_offer(&self, choice: u64) -> Option<Block> {
        let mut offers = open(&self.exchange);
        (!offers.is_empty()).then(|| {
            let at = choice as usize % offers.len();
            offers.swap_remove(at)
        })
    }

    pub(crate) fn note_hold(&self, hold: HoldId) {
        open(&self.holds).push_back(hold);
    }

    pub(crate) fn has_holds(&self) -> bool {
        !open(&self.holds).is_empty()
    }

    pub(crate) fn release_a_hold(&self) {
        let hold = open(&self.holds).pop_front();
        if let Some(hold) = hold {
            self.sim.release_hold(hold);
        }
    }

    /// A context is lost: from now on everything may fail.
    pub(crate) fn lose(&self) {
        self.lost.store(true, SeqCst);
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(SeqCst)
    }

    /// The actors are done.
    pub(crate) fn end(&self) {
        self.over.store(true, SeqCst);
    }

    pub(crate) fn is_over(&self) -> bool {
        self.over.load(SeqCst)
    }
}

/// An elastic buffer that every device may use.
pub(crate) fn elastic(
    setup: &Setup,
    pool: &Pool,
    rng: &mut Rng,
    name: String,
    slots: u64,
) -> Arc<Elastic> {
    let home = DeviceId(rng.below(setup.devices.into()) as u32);
    let others = setup.devices().filter(|device| *device != home);
    let mut builder = pool
        .elastic(home)
        .capacity_bytes(slots * setup.slot_bytes)
        .chunk_bytes(setup.slot_bytes)
        .exportable(rng.chance(400))
        .movable(rng.chance(600))
        .access(others.map(|device| (device, Access::ReadWrite)));
    let tag = rng.chance(700).then(|| rng.pick(TAGS));
    if let Some(tag) = tag {
        builder = builder.tag(tag);
    }
    if rng.chance(150) {
        builder = builder.quota_bytes(slots * setup.slot_bytes * 2 / 3);
    }
    let buffer = builder.build().expect("an elastic buffer is built");
    Arc::new(Elastic::new(buffer, name, tag))
}
