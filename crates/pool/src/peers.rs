//! [`Peers`]: which devices can use each other's memory, found out once by reading bytes.
//!
//! Only pairs that somebody named are touched. The first grant of a pair brings its link up, about
//! 1 ms, and the link stays up as long as one mapping is granted: so each pair keeps an *anchor*, one
//! small mapping. The anchors of one owner are aliases of one chunk. An owner that has no memory left
//! for it goes without: see [`Sample`].

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use vmm_sys::object::{Chunk, Mapping, Range, RelaxedCapture};
use vmm_sys::{AccessGrant, DeviceId, DriverError};

use crate::depot::{Footing, Shortage};
use crate::device::Device;
use crate::elastic::error::{ElasticError, PeerFault};
use crate::error::Error;
use crate::out_of_memory::{Asked, OutOfMemory};
use crate::places::Places;
use crate::sync::{Mutex, across_calls};
use crate::turn::Turn;

/// Bytes that are written by the owner and read by its peer.
const PATTERN_BYTES: usize = 4096;

/// How often bytes that are in use are read anew, since somebody wrote meanwhile.
const SAMPLES_MAX: u32 = 8;

/// The pairs that somebody named.
#[derive(Debug)]
pub(crate) struct Peers {
    state: Mutex<State>,
    /// Held while a pair is tried, so that each is tried once. Nothing else waits for it.
    trying: Mutex<()>,
}

impl Default for Peers {
    fn default() -> Peers {
        Peers { state: Mutex::default(), trying: across_calls(()) }
    }
}

#[derive(Debug, Default)]
struct State {
    /// By owner and accessor.
    pairs: BTreeMap<(DeviceId, DeviceId), Found>,
    /// The chunk behind an owner's anchors.
    chunks: BTreeMap<DeviceId, Arc<Chunk>>,
    /// Mappings of these chunks that nobody wants, and that the driver did not let go of. The chunk
    /// counts as an anchor until they are gone.
    leftovers: Vec<(DeviceId, Mapping)>,
}

/// A chunk of the owner that stands in a buffer. Where there is no memory for an anchor, a pair is tried by
/// reading it: an alias of it for a moment, and nothing is written. That the same bytes are read proves
/// less than bytes that were written for it, so the pair counts as untried still.
pub(crate) struct Sample {
    pub(crate) chunk: Arc<Chunk>,
    pub(crate) footing: Weak<Footing>,
}

/// What is known of a pair.
#[derive(Debug)]
enum Found {
    /// It works; the anchor keeps the link up.
    Works(Mapping),
    Fails(PeerFault),
}

/// What was found out about a pair of devices.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PeerVerdict {
    /// Nobody named the pair, so it was not touched.
    Untried,
    /// Bytes that the owner wrote were read right by the other, and the link is kept up.
    Works,
    /// It does not work, and why.
    Fails(PeerFault),
}

impl Peers {
    pub(crate) fn verdict(&self, owner: DeviceId, accessor: DeviceId) -> PeerVerdict {
        match self.state.lock().pairs.get(&(owner, accessor)) {
            None => PeerVerdict::Untried,
            Some(Found::Works(_)) => PeerVerdict::Works,
            Some(Found::Fails(fault)) => PeerVerdict::Fails(fault.clone()),
        }
    }

    /// Makes sure that `accessor` can use memory of `owner`: tried once, then known. A pair that
    /// failed is tried again: links come and go.
    pub(crate) fn ensure(
        &self,
        places: &Places,
        owner: DeviceId,
        accessor: DeviceId,
    ) -> Result<(), Error> {
        self.ensure_by(places, owner, accessor, || None)
    }

    /// The same for who has memory of `owner` to try it with, should there be none for an anchor.
    pub(crate) fn ensure_by(
        &self,
        places: &Places,
        owner: DeviceId,
        accessor: DeviceId,
        sample: impl FnOnce() -> Option<Sample>,
    ) -> Result<(), Error> {
        let works = || self.verdict(owner, accessor) == PeerVerdict::Works;
        if owner == accessor || works() {
            return Ok(());
        }
        let device = places.device(owner).ok_or(Error::UnknownDevice { device: owner })?;
        let _alone = self.trying.lock();
        if works() {
            return Ok(());
        }
        self.settle_leftovers(device);
        let chunk = match self.chunk(device) {
            Ok(chunk) => chunk,
            Err(error) if error.is_out_of_memory() => {
                let Some(sample) = sample() else { return Err(error) };
                return self.sample(device, accessor, sample).unwrap_or(Err(error));
            }
            Err(error) => return Err(error),
        };
        let tried = try_pair(device, accessor, chunk, written).map_err(|(trouble, leftover)| {
            let leftover = leftover.map(|mapping| (owner, mapping));
            self.state.lock().leftovers.extend(leftover);
            trouble
        });
        let (found, answer) = match tried {
            Ok(anchor) => (Some(Found::Works(anchor)), Ok(())),
            Err(Trouble::Fault(cause)) => {
                let error = ElasticError::NoPeer { accessor, owner, cause: cause.clone() };
                (Some(Found::Fails(cause)), Err(error.into()))
            }
            Err(Trouble::Error(error)) => (None, Err(error.into())),
            // Only of a sample.
            Err(Trouble::Unsteady) => (None, Ok(())),
        };
        if let Some(found) = found {
            self.state.lock().pairs.insert((owner, accessor), found);
        }
        self.drop_unused_chunk(device);
        answer
    }

    /// Tries a pair by memory that is in use. `None` if the bytes do not keep still.
    fn sample(
        &self,
        device: &Device,
        accessor: DeviceId,
        Sample { chunk, footing }: Sample,
    ) -> Option<Result<(), Error>> {
        let owner = device.plan.device;
        let (alias, answer) = match try_pair(device, accessor, chunk, standing) {
            Ok(alias) => (unmap(alias), Some(Ok(()))),
            Err((Trouble::Unsteady, alias)) => (alias, None),
            Err((Trouble::Error(error), alias)) => (alias, Some(Err(error.into()))),
            Err((Trouble::Fault(cause), alias)) => {
                let error = ElasticError::NoPeer { accessor, owner, cause: cause.clone() };
                self.state.lock().pairs.insert((owner, accessor), Found::Fails(cause));
                (alias, Some(Err(error.into())))
            }
        };
        device.depot.leaving.add_shared(alias.into_iter(), Vec::new(), &footing);
        answer
    }

    /// The chunk behind the anchors of a device's memory.
    fn chunk(&self, device: &Device) -> Result<Arc<Chunk>, Error> {
        let owner = device.plan.device;
        if let Some(chunk) = self.state.lock().chunks.get(&owner) {
            return Ok(chunk.clone());
        }
        let bytes = device.plan.granularity_bytes;
        let _carrying = device.depot.carries.begin();
        let made = device.create_chunk(bytes, Turn::Requester).or_else(|shortage| {
            match shortage {
                Shortage::Driver(error) if !error.is_out_of_memory() => {
                    return Err(Shortage::Driver(error));
                }
                Shortage::Limit | Shortage::Driver(_) => {}
            }
            // What lies on the shelf is as good, in whatever length.
            device.release_stock(0, Turn::Requester);
            device.create_chunk(bytes, Turn::Requester)
        });
        let chunk = made.map_err(|shortage| {
            let cause = match shortage {
                Shortage::Limit => None,
                Shortage::Driver(error) if error.is_out_of_memory() => Some(error),
                Shortage::Driver(error) => return Error::Driver(error),
            };
            let asked = Asked { bytes, rounded_bytes: bytes, may_wait: true };
            Error::OutOfMemory(Box::new(OutOfMemory::new(device, asked, None, None, cause)))
        })?;
        let chunk = Arc::new(chunk);
        self.state.lock().chunks.insert(owner, chunk.clone());
        device.depot.anchors_grew(bytes);
        Ok(chunk)
    }

    /// Tries again to unmap what nobody wants.
    fn settle_leftovers(&self, device: &Device) {
        let owner = device.plan.device;
        let taken: Vec<(DeviceId, Mapping)> = {
            let mut state = self.state.lock();
            state.leftovers.extract_if(.., |(of, _)| *of == owner).collect()
        };
        let left = taken.into_iter().filter_map(|(_, mapping)| Some((owner, unmap(mapping)?)));
        let left: Vec<_> = left.collect();
        self.state.lock().leftovers.extend(left);
    }

    /// Gives the chunk of an owner without anchors back.
    fn drop_unused_chunk(&self, device: &Device) {
        let owner = device.plan.device;
        let _carrying = device.depot.carries.begin();
        let chunk = {
            let mut state = self.state.lock();
            let mut pairs = state.pairs.iter();
            if pairs.any(|((of, _), found)| *of == owner && matches!(found, Found::Works(_)))
                || state.leftovers.iter().any(|(of, _)| *of == owner)
            {
                return;
            }
            state.chunks.remove(&owner)
        };
        let Some(chunk) = chunk else { return };
        device.depot.anchors_shrank(chunk.bytes());
        match Arc::try_unwrap(chunk) {
            Ok(chunk) => device.depot.release(chunk, Turn::Requester),
            // A mapping of it could not be unmapped, and leaves later.
            Err(chunk) => device.depot.settle(chunk, Turn::Requester),
        }
    }

    /// Gives all anchors back: the pool ends.
    pub(crate) fn end(&self, places: &Places) {
        let pairs = std::mem::take(&mut self.state.lock().pairs);
        for ((owner, _), found) in pairs {
            let Found::Works(anchor) = found else { continue };
            let leftover = unmap(anchor).map(|mapping| (owner, mapping));
            self.state.lock().leftovers.extend(leftover);
        }
        for device in &places.devices {
            self.settle_leftovers(device);
            // From here on they count as what is on its way, and the chunk with them.
            let _carrying = device.depot.carries.begin();
            let owner = device.plan.device;
            let mut state = self.state.lock();
            let left: Vec<_> = state.leftovers.extract_if(.., |(of, _)| *of == owner).collect();
            drop(state);
            device.depot.leaving.add(left.into_iter().map(|(_, mapping)| mapping), Vec::new());
            self.drop_unused_chunk(device);
        }
    }
}

/// Why a pair was not seen to work.
enum Trouble {
    Fault(PeerFault),
    /// It says nothing about the pair.
    Error(DriverError),
    /// Nor does this: somebody writes meanwhile.
    Unsteady,
}

impl From<DriverError> for Trouble {
    fn from(error: DriverError) -> Trouble {
        let passing = error.is_out_of_memory()
            || error.is_out_of_addresses()
            || error.is_driver_gone()
            || error.is_sticky();
        if passing { Trouble::Error(error) } else { Trouble::Fault(PeerFault::Refused(error)) }
    }
}

/// What the owner and the accessor of a mapping read, by their ordinals.
type Read = fn(&Range, DeviceId, DeviceId) -> Result<(Vec<u8>, Vec<u8>), Trouble>;

/// Maps the owner's chunk, lets both use it, and has the accessor read what the owner has there. A failure
/// may leave a mapping.
fn try_pair(
    device: &Device,
    accessor: DeviceId,
    chunk: Arc<Chunk>,
    read: Read,
) -> Result<Mapping, (Trouble, Option<Mapping>)> {
    let (driver, owner, turn) = (&device.driver, device.plan.device, Turn::Requester);
    let _within = vmm_sys::within!("vmm_pool.peer", owner = owner.0, accessor = accessor.0);
    let bytes = chunk.bytes();
    let error = |error| (Trouble::Error(error), None);
    let range = turn.with(|| Range::reserve(driver, bytes, bytes, 0)).map_err(error)?;
    let mapping = turn.with(|| Mapping::map(&range, 0, chunk)).map_err(error)?;
    let checked = check(device, accessor, &range, &mapping, read);
    match checked {
        Ok(()) => Ok(mapping),
        Err(trouble) => Err((trouble, unmap(mapping))),
    }
}

fn check(
    device: &Device,
    accessor: DeviceId,
    range: &Range,
    mapping: &Mapping,
    read: Read,
) -> Result<(), Trouble> {
    let (owner, turn) = (device.plan.device, Turn::Requester);
    let own = [AccessGrant::read_write(owner)];
    turn.with(|| mapping.set_access(&own)).map_err(Trouble::Error)?;
    turn.with(|| mapping.set_access(&[AccessGrant::read_write(accessor)]))?;
    let _relaxed = RelaxedCapture::enter(&device.driver).map_err(Trouble::Error)?;
    let (expected, found) = read(range, owner, accessor)?;
    let wrong = found.iter().zip(&expected).filter(|(found, expected)| found != expected).count();
    match wrong {
        0 => Ok(()),
        _ => {
            let (wrong, bytes) = (wrong as u64, PATTERN_BYTES as u64);
            Err(Trouble::Fault(PeerFault::WrongBytes { wrong, bytes }))
        }
    }
}

/// The owner writes bytes, the accessor reads them.
fn written(
    range: &Range,
    owner: DeviceId,
    accessor: DeviceId,
) -> Result<(Vec<u8>, Vec<u8>), Trouble> {
    let first = (owner.0 << 4 ^ accessor.0) as u8;
    let expected: Vec<u8> = (0..PATTERN_BYTES).map(|at| first.wrapping_add(at as u8 | 1)).collect();
    range.write(owner, 0, &expected).map_err(Trouble::Error)?;
    let mut found = vec![0; PATTERN_BYTES];
    range.read(accessor, 0, &mut found)?;
    Ok((expected, found))
}

/// Both read what is there, while it keeps still.
fn standing(
    range: &Range,
    owner: DeviceId,
    accessor: DeviceId,
) -> Result<(Vec<u8>, Vec<u8>), Trouble> {
    let (mut before, mut after) = (vec![0; PATTERN_BYTES], vec![0; PATTERN_BYTES]);
    let mut found = vec![0; PATTERN_BYTES];
    for _ in 0..SAMPLES_MAX {
        range.read(owner, 0, &mut before).map_err(Trouble::Error)?;
        range.read(accessor, 0, &mut found)?;
        range.read(owner, 0, &mut after).map_err(Trouble::Error)?;
        if before == after {
            return Ok((before, found));
        }
    }
    Err(Trouble::Unsteady)
}

/// Takes an anchor away; its chunk stays with [`Peers`]. Gives it, if the driver refuses.
fn unmap(mapping: Mapping) -> Option<Mapping> {
    let (mapping, error) = Turn::Requester.with(|| mapping.unmap()).err()?;
    crate::obstacle::tell(&error, "an anchor could not be unmapped");
    Some(mapping)
}
