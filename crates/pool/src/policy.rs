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
use crate::elastic::error::ElasticError;
use crate::elastic::operation::{self, Operation};
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
    /// Chunks of lanes whose access the driver refused to take back after a change that failed.
    debts: Mutex<Vec<Debt>>,
}

/// What `accessor` may do with the chunk there is to be what the policy says.
#[derive(Clone, Copy, Debug)]
struct Debt {
    lane: LaneRef,
    chunk: (u64, u64),
    accessor: DeviceId,
}

/// What mappings are granted, and since which version.
#[derive(Debug)]
pub(crate) struct Grants {
    pub(crate) list: Vec<AccessGrant>,
    pub(crate) version: u64,
}

impl Policy {
    pub(crate) fn new(owner: DeviceId, named: Vec<(DeviceId, Access)>) -> Policy {
        let (version, debts) = (AtomicU64::new(0), Mutex::default());
        Policy { owner, named: Mutex::new(named), version, debts }
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

    /// What `accessor` may do.
    fn of(&self, accessor: DeviceId) -> Access {
        let named = self.named.lock();
        named.iter().find(|(known, _)| *known == accessor).map_or(Access::None, |it| it.1)
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
    if operation::is_operating() {
        // A thread that changes the policy waits for those that change buffers.
        return Err(ElasticError::Busy.into());
    }
    if access != Access::None {
        places.peers.ensure(places, owner, accessor)?;
    }
    let _alone = places.policy_change.lock();
    settle_debts(device);
    let before = device.policy.set(accessor, access);
    if before == access {
        return Ok(());
    }
    let applied = lanes(device, grant_of(accessor, access))
        .map_err(Error::from)
        .and_then(|()| buffers(places, owner, accessor, access));
    if applied.is_err() {
        device.policy.set(accessor, before);
        restore_lanes(device, accessor);
        restore_buffers(places, owner, accessor, before);
    }
    applied
}

/// Takes back what a change that failed has done to lanes. What the driver refuses is tried again: see
/// [`settle_debts`].
fn restore_lanes(device: &Device, accessor: DeviceId) {
    let all = device.lanes.lock().all();
    let debts = all
        .into_iter()
        .flat_map(|lane| placed(lane).into_iter().map(move |chunk| Debt { lane, chunk, accessor }));
    restore(device, debts.collect());
}

fn restore(device: &Device, debts: Vec<Debt>) {
    let mut left = Vec::new();
    for debt in debts {
        let Debt { lane, chunk: (address, bytes), accessor } = debt;
        let grant = grant_of(accessor, device.policy.of(accessor));
        let set = || device.driver.set_access(address, bytes, &[grant]);
        let is_there = || placed(lane).contains(&(address, bytes));
        if is_there()
            && let Err(error) = Turn::Requester.with(set)
            && is_there()
        {
            vmm_sys::say!(warn, %error, %accessor, "an access could not be taken back; tried again later");
            left.push(debt);
        }
    }
    device.policy.debts.lock().extend(left);
}

/// Tries again what could not be taken back: before the next change, and when the device is trimmed.
pub(crate) fn settle_debts(device: &Device) {
    let debts = std::mem::take(&mut *device.policy.debts.lock());
    restore(device, debts);
}

/// The same for elastic buffers, which keep their own debts.
fn restore_buffers(places: &Places, owner: DeviceId, accessor: DeviceId, before: Access) {
    let undone = each_follower(places, owner, |operation| {
        operation.ungrant(accessor, before);
        Ok(())
    });
    if let Err(error) = undone {
        // The process has no driver any more.
        vmm_sys::say!(warn, %error, "access to buffers could not be taken back");
    }
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
    each_follower(places, owner, |operation| operation.grant(accessor, access, Word::Policy))
}

/// Every elastic buffer with home `owner` that follows the policy. One that has ended meanwhile lets
/// nobody in; nor does one that is broken, which must not keep the others from a change.
fn each_follower(
    places: &Places,
    owner: DeviceId,
    change: impl Fn(&Operation<'_>) -> Result<(), Error>,
) -> Result<(), Error> {
    let all = places.bodies();
    let following = all.iter().filter(|it| it.home() == owner && it.shape.follows_policy);
    following.into_iter().try_for_each(|body| match body.operate_unless_ended() {
        Ok(Some(operation)) => change(&operation),
        Ok(None) => Ok(()),
        Err(Error::Broken(broken)) => {
            vmm_sys::say!(warn, %broken, "its access stays as it is");
            Ok(())
        }
        Err(error) => Err(error),
    })
}
