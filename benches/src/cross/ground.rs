//! The devices that are measured, and what every part needs of them.

use std::sync::Arc;

use vmm_pool_cli::replay::Cause;
use vmm_pool_cli::target::CurrentContext;
use vmm_sys::object::{Chunk, Event, Mapping, Range, Stream};
use vmm_sys::{AccessGrant, ChunkProps, DeviceAttribute, DeviceId, Driver, DriverKind, Location};

use crate::timed::{Took, timed};

/// A device, its neighbour if there is one, and a NUMA node of the host.
#[derive(Debug)]
pub struct Ground {
    driver: Arc<dyn Driver>,
    home: DeviceId,
    peer: Option<DeviceId>,
    node: u32,
    /// Dropped in this order: the home's is the current one.
    _contexts: (CurrentContext, Option<CurrentContext>),
}

impl Ground {
    /// Takes references on the contexts of both devices, and makes the home's current on this thread.
    /// A neighbour that the home cannot reach, or that cannot reach it, counts as none.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(
        driver: &Arc<dyn Driver>,
        home: DeviceId,
        peer: Option<DeviceId>,
        node: u32,
    ) -> Result<Ground, Cause> {
        let peer = match peer {
            Some(peer)
                if driver.can_access_peer(home, peer)? && driver.can_access_peer(peer, home)? =>
            {
                Some(peer)
            }
            _ => None,
        };
        let of_peer = peer.map(|peer| CurrentContext::enter(driver, peer)).transpose()?;
        let contexts = (CurrentContext::enter(driver, home)?, of_peer);
        Ok(Ground { driver: driver.clone(), home, peer, node, _contexts: contexts })
    }

    /// The driver.
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    /// Whether times are real.
    pub fn is_gpu(&self) -> bool {
        self.driver.kind() == DriverKind::Cuda
    }

    /// The device that works.
    pub fn home(&self) -> DeviceId {
        self.home
    }

    /// Its neighbour.
    pub fn peer(&self) -> Option<DeviceId> {
        self.peer
    }

    /// The NUMA node of the host that memory sleeps on.
    pub fn node(&self) -> u32 {
        self.node
    }

    /// The properties of host memory, if the driver has chunks of it.
    ///
    /// # Errors
    /// The driver's.
    pub fn host_props(&self) -> Result<Option<ChunkProps>, Cause> {
        let attribute = DeviceAttribute::HostNumaVmmSupported;
        let supported = self.driver.device_attribute(self.home, attribute)? == 1;
        let location = Location::HostNuma(self.node);
        Ok(supported.then(|| ChunkProps { location, ..ChunkProps::on_device(self.home) }))
    }

    /// Addresses for `bytes`, aligned for chunks of a length.
    ///
    /// # Errors
    /// The driver's.
    pub fn range(&self, bytes: u64, chunk_bytes: u64) -> Result<Range, Cause> {
        Ok(Range::reserve(&self.driver, bytes, chunk_bytes, 0)?)
    }

    /// Makes chunks for `bytes`.
    ///
    /// # Errors
    /// The driver's.
    pub fn chunks(
        &self,
        props: &ChunkProps,
        bytes: u64,
        chunk_bytes: u64,
    ) -> Result<Vec<Arc<Chunk>>, Cause> {
        let make = |_| Ok(Arc::new(Chunk::create(&self.driver, chunk_bytes, props)?));
        (0..bytes / chunk_bytes).map(make).collect()
    }

    /// A stream of the home.
    ///
    /// # Errors
    /// The driver's.
    pub fn stream(&self) -> Result<Stream, Cause> {
        Ok(Stream::create(&self.driver, self.home)?)
    }

    /// An event of the home.
    ///
    /// # Errors
    /// The driver's.
    pub fn event(&self) -> Result<Event, Cause> {
        Ok(Event::create(&self.driver, self.home)?)
    }

    /// Runs `work`, timed and counted: see [`timed`].
    ///
    /// # Errors
    /// Those of `work`.
    pub fn timed<T>(&self, work: impl FnOnce() -> Result<T, Cause>) -> Result<(T, Took), Cause> {
        timed(&self.driver, work)
    }
}

/// Maps chunks one after another from the beginning of a range, each with the grants.
///
/// # Errors
/// The driver's.
pub(super) fn map_all(
    range: &Range,
    chunks: &[Arc<Chunk>],
    grants: &[AccessGrant],
) -> Result<Vec<Mapping>, Cause> {
    let mut mappings = Vec::with_capacity(chunks.len());
    let mut offset = 0;
    for chunk in chunks {
        let mapping = Mapping::map(range, offset, chunk.clone())?;
        offset += mapping.bytes();
        mapping.set_access(grants)?;
        mappings.push(mapping);
    }
    Ok(mappings)
}

/// Unmaps all, and gives back what the mappings alone kept.
///
/// # Errors
/// The driver's.
pub(super) fn unmap_all(mappings: Vec<Mapping>) -> Result<(), Cause> {
    mappings.into_iter().try_for_each(|it| it.unmap().map(drop).map_err(|(_, error)| error.into()))
}

/// One small mapping of the home's memory that the peer may use, kept so that the link of the pair
/// stays up.
#[derive(Debug)]
pub struct Anchor {
    _mapping: Mapping,
}

impl Anchor {
    const BYTES: u64 = 2 << 20;

    /// Anchors the use of `owner`'s memory by `accessor`.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(ground: &Ground, owner: DeviceId, accessor: DeviceId) -> Result<Anchor, Cause> {
        let props = ChunkProps::on_device(owner);
        let chunk = Chunk::create(ground.driver(), Anchor::BYTES, &props)?;
        let range = ground.range(Anchor::BYTES, Anchor::BYTES)?;
        let mapping = Mapping::map(&range, 0, Arc::new(chunk))?;
        mapping.set_access(&[owner, accessor].map(AccessGrant::read_write))?;
        Ok(Anchor { _mapping: mapping })
    }
}
