//! [`Policy`]: which other devices may use a device's memory, and the changing of it.
//!
//! A change counts for every mapping that is made later from the moment it is written down. Then
//! what stands already is changed: the chunks of lanes, and elastic buffers that follow the policy. A
//! thread that was bringing memory to a lane meanwhile finds the policy's version changed when it
//! publishes, and grants once more.

use vmm_sys::caught::caught;
use vmm_sys::{Access, AccessGrant, Call, DeviceId, DriverError, Location};

use crate::device::Device;
use crate::elastic::access::Word;
use crate::elastic::body;
use crate::elastic::error::ElasticError;
use crate::error::Error;
use crate::lanes::LaneRef;
use crate::places::Places;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::turn::Turn;

/// Which other devices may use a device's memory.
#[derive(Debug)]
pub(crate) struct Policy {
    owner: DeviceId,
    /// Those that may do nothing any more are kept: mappings may have to be told.
    named: Mutex<Vec<(DeviceId, Access)>>,
    /// Counts the changes. Written under the lock.
    version: AtomicU64,
}

/// What mappings are granted, and since which version.
#[derive(Debug)]
pub(crate) struct Grants {
    pub(crate) list: Vec<AccessGrant>,
    pub(crate) version: u64,
}

impl Policy {
    pub(crate) fn new(owner: DeviceId, named: Vec<(DeviceId, Access)>) -> Policy {
        Policy { owner, named: Mutex::new(named), version: AtomicU64::new(0) }
    }

    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// The devices that may do something, beside the owner.
    pub(crate) fn others(&self) -> Vec<(DeviceId, Access)> {
        let named = self.named.lock();
        named.iter().copied().filter(|(_, access)| *access != Access::None).collect()
    }

    /// What a new mapping in a lane is granted.
    pub(crate) fn grants(&self) -> Grants {
        self.granted(false)
    }

    /// What a mapping is granted that was granted before, under another policy.
    pub(crate) fn grants_again(&self) -> Grants {
        self.granted(true)
    }

    fn granted(&self, with_none: bool) -> Grants {
        let named = self.named.lock();
        let others = named.iter().filter(|(_, access)| with_none || *access != Access::None);
        let mut list = vec![AccessGrant::read_write(self.owner)];
        list.extend(others.map(|(device, access)| grant_of(*device, *access)));
        Grants { list, version: self.version() }
    }

    /// Sets what `accessor` may do from now on. Returns what it might before.
    fn set(&self, accessor: DeviceId, access: Access) -> Access {
        let mut named = self.named.lock();
        self.version.fetch_add(1, Ordering::AcqRel);
        match named.iter_mut().find(|(device, _)| *device == accessor) {
            Some((_, known)) => std::mem::replace(known, access),
            None => {
                named.push((accessor, access));
                Access::None
            }
        }
    }
}

fn grant_of(device: DeviceId, access: Access) -> AccessGrant {
    AccessGrant { location: Location::Device(device), access }
}

/// Changes what `accessor` may do with memory of `owner`: everywhere, or nowhere.
pub(crate) fn change(
    places: &Places,
    owner: DeviceId,
    accessor: DeviceId,
    access: Access,
) -> Result<(), Error> {
    let device = places.device(owner).ok_or(Error::UnknownDevice { device: owner })?;
    if accessor == owner {
        return match access {
            Access::ReadWrite => Ok(()),
            Access::None | Access::Read => Err(ElasticError::HomeAccess { device: owner }.into()),
        };
    }
    if body::is_operating() {
        // A thread that changes the policy waits for those that change buffers.
        return Err(ElasticError::Busy.into());
    }
    if access != Access::None {
        places.peers.ensure(places, owner, accessor)?;
    }
    let _alone = places.policy_change.lock();
    let before = device.policy.set(accessor, access);
    if before == access {
        return Ok(());
    }
    let applied = lanes(device, grant_of(accessor, access))
        .map_err(Error::from)
        .and_then(|()| buffers(places, owner, accessor, access));
    if applied.is_err() {
        device.policy.set(accessor, before);
        if let Err(error) = lanes(device, grant_of(accessor, before)) {
            vmm_sys::say!(warn, %error, %owner, %accessor, "an access could not be taken back");
        }
        if let Err(error) = buffers(places, owner, accessor, before) {
            vmm_sys::say!(warn, %error, %owner, %accessor, "an access could not be taken back");
        }
    }
    applied
}

/// Grants every chunk that stands in a lane.
fn lanes(device: &Device, grant: AccessGrant) -> Result<(), DriverError> {
    let all = device.lanes.lock().all();
    for lane in all {
        for (address, bytes) in placed(lane) {
            let set = || {
                caught(Call::MemSetAccess, || device.driver.set_access(address, bytes, &[grant]))
            };
            if let Err(error) = Turn::Requester.with(set)
                // What has left its address meanwhile needs no grant.
                && placed(lane).contains(&(address, bytes))
            {
                return Err(error);
            }
        }
    }
    Ok(())
}

/// Addresses and lengths of the chunks in a lane.
fn placed(lane: LaneRef) -> Vec<(u64, u64)> {
    let Some(state) = lane.lock() else { return Vec::new() };
    state.region.placed().map(|(_, it)| (it.mapping.address(), it.mapping.bytes())).collect()
}

/// Grants every elastic buffer with home `owner` that follows the policy.
fn buffers(
    places: &Places,
    owner: DeviceId,
    accessor: DeviceId,
    access: Access,
) -> Result<(), Error> {
    let all = places.bodies();
    let following = all.iter().filter(|it| it.home() == owner && it.shape.follows_policy);
    following.into_iter().try_for_each(|body| match body.operate_unless_ended()? {
        Some(operation) => operation.grant(accessor, access, Word::Policy),
        None => Ok(()),
    })
}
