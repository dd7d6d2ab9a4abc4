//! [`Places`]: the places of a pool's memory, and what lies across them: elastic buffers, peers.

use std::sync::{Arc, Weak};

use vmm_sys::caught::caught;
use vmm_sys::{Call, ChunkProps, DeviceId, Driver, DriverError};

use crate::background::Signal;
use crate::balance::Balancer;
use crate::depot::{Depot, Shortage};
use crate::device::Device;
use crate::elastic::body::Body;
use crate::elastic::commit::How;
use crate::elastic::copier::Copiers;
use crate::elastic::door::Latches;
use crate::elastic::error::ElasticError;
use crate::error::Error;
use crate::host::Host;
use crate::ladder::Climb;
use crate::lane::Wait;
use crate::leaving::Returned;
use crate::mover::Mover;
use crate::out_of_memory::{Asked, OutOfMemory, device_memory};
use crate::peers::Peers;
use crate::place::Place;
use crate::sync::atomic::AtomicU64;
use crate::sync::{Mutex, across_calls};
use crate::turn::Turn;

/// What a pool's devices share.
#[derive(Debug)]
pub(crate) struct Places {
    pub(crate) driver: Arc<dyn Driver>,
    /// Before the devices: its anchors are memory of theirs.
    pub(crate) peers: Peers,
    pub(crate) devices: Vec<Arc<Device>>,
    /// Nodes of the host that may give memory. Never without a device.
    pub(crate) hosts: Vec<Host>,
    /// Held while a policy changes: one at a time.
    pub(crate) policy_change: Mutex<()>,
    /// Every elastic buffer that has not ended.
    bodies: Mutex<Vec<Weak<Body>>>,
    /// How the background thread is woken.
    pub(crate) signal: Arc<Signal>,
    /// What moves use, for the next one.
    pub(crate) copiers: Copiers,
    pub(crate) latches: Latches,
    /// Who moves elastic buffers in the background.
    pub(crate) mover: Arc<Mover>,
    pub(crate) balancer: Option<Balancer>,
    /// How often its threads panicked.
    pub(crate) thread_panics: Arc<AtomicU64>,
    /// Whether borrowed memory comes home by itself.
    pub(crate) returns_home: bool,
}

/// One place, with the device that lends it events.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Site<'a> {
    pub(crate) place: Place,
    pub(crate) depot: &'a Depot,
    keeper: &'a Arc<Device>,
    places: &'a Places,
}

/// What stands at addresses that were given up.
#[derive(Debug)]
pub(crate) enum Found<'a> {
    Nothing,
    /// A mapping of the right kind, with its last users.
    Reclaimed(Returned),
    /// One of another kind, or of a chunk that is used elsewhere: it waits there for its users.
    Other(Site<'a>),
}

impl Places {
    pub(crate) fn new(
        driver: Arc<dyn Driver>,
        devices: Vec<Arc<Device>>,
        hosts: Vec<Host>,
        balancer: Option<Balancer>,
        returns_home: bool,
    ) -> Places {
        let thread_panics: Arc<AtomicU64> = Arc::default();
        Places {
            driver,
            peers: Peers::default(),
            devices,
            hosts,
            policy_change: across_calls(()),
            bodies: Mutex::new(Vec::new()),
            signal: Arc::default(),
            copiers: Copiers::default(),
            latches: Latches::default(),
            mover: Arc::new(Mover::new(thread_panics.clone())),
            balancer,
            thread_panics,
            returns_home,
        }
    }

    pub(crate) fn device(&self, device: DeviceId) -> Option<&Arc<Device>> {
        self.devices.iter().find(|known| known.plan.device == device)
    }

    /// Every place.
    pub(crate) fn sites(&self) -> impl Iterator<Item = Site<'_>> {
        let devices = self.devices.iter().map(|device| Site {
            place: Place::Device(device.plan.device),
            depot: &device.depot,
            keeper: device,
            places: self,
        });
        let hosts = self.hosts.iter().zip(self.devices.iter().cycle());
        devices.chain(hosts.map(|(host, keeper)| Site {
            place: Place::HostNuma(host.node),
            depot: &host.depot,
            keeper,
            places: self,
        }))
    }

    pub(crate) fn site(&self, place: Place) -> Result<Site<'_>, Error> {
        let known = self.sites().find(|site| site.place == place);
        known.ok_or_else(|| ElasticError::UnknownPlace { place }.into())
    }

    /// Takes the mapping at `address` back that was given up, if its chunk has these properties.
    pub(crate) fn reclaim(&self, address: u64, props: &ChunkProps) -> Found<'_> {
        for site in self.sites().filter(|site| !site.depot.leaving.is_empty()) {
            match site.depot.leaving.reclaim(address, props) {
                None => {}
                Some(Some(returned)) => return Found::Reclaimed(returned),
                Some(None) => return Found::Other(site),
            }
        }
        Found::Nothing
    }

    /// The place of a memory that was given up and still stands at `address` for its users.
    pub(crate) fn occupant(&self, address: u64) -> Option<Site<'_>> {
        let mut sites = self.sites().filter(|site| !site.depot.leaving.is_empty());
        sites.find(|site| site.depot.leaving.has(address))
    }

    /// Lists a new buffer.
    pub(crate) fn add(&self, body: &Arc<Body>) {
        let mut bodies = self.bodies.lock();
        bodies.retain(|known| known.strong_count() > 0);
        bodies.push(Arc::downgrade(body));
    }

    /// The buffers that have not ended. One may end the next moment: [`Body::operate_unless_ended`].
    pub(crate) fn bodies(&self) -> Vec<Arc<Body>> {
        if vmm_sys::process::is_forked_child() {
            return Vec::new();
        }
        let known = self.bodies.lock().clone();
        known.iter().filter_map(Weak::upgrade).filter(|body| !body.has_ended()).collect()
    }
}

impl Site<'_> {
    /// Refuses chunks that cannot lie here.
    pub(crate) fn check_chunk(&self, chunk_bytes: u64) -> Result<(), Error> {
        let (place, granularity_bytes) = (self.place, self.depot.terms.granularity_bytes);
        match chunk_bytes.is_multiple_of(granularity_bytes) {
            true => Ok(()),
            false => {
                Err(ElasticError::ChunkTooFine { place, chunk_bytes, granularity_bytes }.into())
            }
        }
    }

    /// What the place could give at once, in bytes, as far as can be said: its stock, of which other
    /// lengths than the chunk's count if they are plain, and what can still be made.
    pub(crate) fn ready_bytes(&self, props: &ChunkProps, chunk_bytes: u64) -> u64 {
        let plain = self.depot.terms.plain;
        let stock_bytes: u64 = {
            let stock = self.depot.stock.lock();
            let exact = stock.counts_of_all(props).filter(|(bytes, _)| *bytes == chunk_bytes);
            let others = stock.counts_of_all(&plain).filter(|_| *props == plain);
            let others = others.filter(|(bytes, _)| *bytes != chunk_bytes);
            exact.chain(others).map(|(bytes, count)| bytes * count as u64).sum()
        };
        stock_bytes.saturating_add(self.depot.room_bytes().min(self.free_bytes()))
    }

    /// What the driver has left here, as far as can be said.
    pub(crate) fn free_bytes(&self) -> u64 {
        let Some(device) = self.place.device() else { return u64::MAX };
        // A device of which the pool has nothing may have no context, and asking makes one.
        if self.depot.held_bytes() == 0 {
            let ask = || self.places.driver.device_total_bytes(device);
            return caught(Call::DeviceTotalMem, ask).unwrap_or(u64::MAX);
        }
        device_memory(self.keeper).map_or(u64::MAX, |info| info.free_bytes)
    }

    pub(crate) fn sweep(&self, wait: Wait, turn: Turn) {
        self.depot.leaving.sweep(self.keeper, self.depot, wait, turn);
    }

    /// What has passed comes to the shelf, other threads' sweeps included.
    pub(crate) fn sweep_now(&self, turn: Turn) {
        self.depot.leaving.sweep_now(self.keeper, self.depot, turn);
    }

    /// Something is on its way to the shelf: the background thread sees to it, or who is here.
    pub(crate) fn tidy(&self, turn: Turn) {
        if self.depot.leaving.is_empty() {
            return;
        }
        if !self.places.signal.wake() {
            self.sweep(Wait::No, turn);
        }
    }

    /// Makes chunks until the shelf holds `bytes`. Returns the bytes made.
    pub(crate) fn fill(&self, bytes: u64) -> Result<u64, Error> {
        // A chunk that could not be unmapped the last time is made already.
        self.sweep(Wait::No, Turn::Requester);
        let made = self.depot.stock_up(bytes, u64::MAX, Turn::Requester, &|| false);
        let how = How { place: self.place, turn: Turn::Requester, wait: Wait::Yes };
        made.map_err(|shortage| match shortage {
            Shortage::Driver(error) if !error.is_out_of_memory() => error.into(),
            Shortage::Driver(error) => self.shortage(bytes, how, Some(error)),
            Shortage::Limit => self.shortage(bytes, how, None),
        })
    }

    /// Does what the next rung of the ladder says. False if none is left.
    pub(crate) fn make_room(&self, climb: &mut Climb, bytes: u64, how: How) -> bool {
        match self.place {
            Place::Device(_) => climb.next_for_chunks(self.keeper, &how.request(bytes), how.turn),
            Place::HostNuma(_) => climb.next_on_host(self, how),
        }
    }

    /// The error of a chunk that could not be had.
    pub(crate) fn shortage(&self, bytes: u64, how: How, cause: Option<DriverError>) -> Error {
        match self.place {
            Place::Device(_) => {
                let may_wait = how.wait == Wait::Yes;
                let asked = Asked { bytes, rounded_bytes: bytes, may_wait };
                let info = device_memory(self.keeper);
                let facts = OutOfMemory::new(self.keeper, asked, None, info, cause).hindered();
                Error::OutOfMemory(Box::new(facts))
            }
            Place::HostNuma(node) => ElasticError::HostShort { node, bytes, cause }.into(),
        }
    }
}

impl Drop for Places {
    fn drop(&mut self) {
        if !self.driver.is_gone() {
            self.peers.end(self);
            for site in self.sites().filter(|site| site.place.device().is_none()) {
                site.depot.leaving.end(site.keeper, site.depot);
                site.depot.release_stock(0, Turn::Requester);
            }
        }
    }
}
