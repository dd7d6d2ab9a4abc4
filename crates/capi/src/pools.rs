//! The pools: the process's own, one a device, made when they are first needed; and those that were
//! created.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use vmm_pool::{Budget, Error, Pool};
use vmm_sys::{DeviceId, Driver};

use crate::border::not_forked;
use crate::driver::driver_of;
use crate::failure::{Failure, tell};
use crate::handle::{self, VmmPool};
use crate::{lanes, recent};

/// Held by all who remember a lane of a pool. A pool's end waits and ends a thread, which must not
/// happen where a thread drops its values: so the pool stays here until nobody else has this.
pub(crate) type Owner = Arc<()>;

struct Entry {
    pool: Pool,
    owner: Owner,
    /// Of a pool of the process's own: its device.
    own: Option<DeviceId>,
    /// The node of the host where its elastic buffers may lie.
    host_node: Option<u32>,
    /// Elastic buffers and uses of them that are alive.
    users: usize,
}

struct Pools {
    last: u32,
    entries: BTreeMap<u32, Entry>,
    own: BTreeMap<DeviceId, u32>,
    /// What the process's own pools may hold, also before they are made.
    budgets: BTreeMap<DeviceId, Budget>,
    /// Destroyed, but threads remember lanes of them.
    retired: Vec<(Pool, Owner)>,
}

static POOLS: Mutex<Pools> = Mutex::new(Pools {
    last: 0,
    entries: BTreeMap::new(),
    own: BTreeMap::new(),
    budgets: BTreeMap::new(),
    retired: Vec::new(),
});

fn unknown(number: u32) -> Failure {
    handle::unknown::<VmmPool>(handle::handle(number))
}

impl Pools {
    fn enter(
        &mut self,
        pool: Pool,
        own: Option<DeviceId>,
        host_node: Option<u32>,
    ) -> Result<u32, Failure> {
        let number = handle::next(&mut self.last)?;
        let entry = Entry { pool, owner: Owner::default(), own, host_node, users: 0 };
        self.entries.insert(number, entry);
        Ok(number)
    }

    fn budget(&mut self, device: DeviceId) -> Budget {
        self.budgets.entry(device).or_insert_with(|| Budget::new(u64::MAX)).clone()
    }

    fn entry(&mut self, number: u32) -> Result<&mut Entry, Failure> {
        self.entries.get_mut(&number).ok_or_else(|| unknown(number))
    }
}

/// The process's own pool of a device, made now if its memory was not asked for before. For Rust
/// programs in the same process: its statistics, its driver.
///
/// # Errors
/// No driver, no such device, a setting that is refused.
pub fn pool(device: DeviceId) -> Result<Pool, Failure> {
    Ok(own(device)?.1)
}

/// The same, with its number.
pub(crate) fn own(device: DeviceId) -> Result<(u32, Pool), Failure> {
    not_forked()?;
    let mut pools = POOLS.lock();
    if let Some(number) = pools.own.get(&device).copied() {
        return Ok((number, pools.entry(number)?.pool.clone()));
    }
    let budget = pools.budget(device);
    let build = |driver| build_own(driver, device, budget);
    let pool = driver_of(device).and_then(build).inspect_err(tell)?;
    let number = pools.enter(pool.clone(), Some(device), None)?;
    pools.own.insert(device, number);
    Ok((number, pool))
}

fn build_own(driver: &Arc<dyn Driver>, device: DeviceId, budget: Budget) -> Result<Pool, Failure> {
    let builder = Pool::builder(driver.clone()).device(device).budget(device, budget);
    Ok(builder.environment()?.build()?)
}

/// The pool with a number, for work on `device`. 0 stands for the process's own, and is what their
/// numbers come out as, so that each of their lanes has one key.
///
/// # Errors
/// [`Failure::UnknownHandle`]; [`Error::UnknownDevice`]; as [`pool`].
pub(crate) fn of(number: u32, device: DeviceId) -> Result<(u32, Pool), Failure> {
    if number == 0 {
        return Ok((0, pool(device)?));
    }
    let mut pools = POOLS.lock();
    let entry = pools.entry(number)?;
    if !entry.pool.devices().any(|known| known == device) {
        return Err(Error::UnknownDevice { device }.into());
    }
    Ok((if entry.own.is_some() { 0 } else { number }, entry.pool.clone()))
}

/// What those hold who remember a lane of the pool.
pub(crate) fn owner(number: u32, device: DeviceId) -> Result<Owner, Failure> {
    let mut pools = POOLS.lock();
    let number = match number {
        0 => pools.own.get(&device).copied().unwrap_or_default(),
        number => number,
    };
    Ok(pools.entry(number)?.owner.clone())
}

/// All pools that have the device.
pub(crate) fn with_device(device: DeviceId) -> Vec<Pool> {
    let pools = POOLS.lock();
    let all = pools.entries.values().map(|entry| &entry.pool);
    all.filter(|pool| pool.devices().any(|known| known == device)).cloned().collect()
}

/// The pool of a handle.
///
/// # Errors
/// [`Failure::UnknownHandle`]; a forked child.
pub(crate) fn by_handle(pool: *const VmmPool) -> Result<(u32, Pool), Failure> {
    not_forked()?;
    let number = handle::checked(pool)?;
    Ok((number, POOLS.lock().entry(number)?.pool.clone()))
}

/// Enters a pool that was created.
pub(crate) fn enter(pool: Pool, host_node: Option<u32>) -> Result<u32, Failure> {
    let number = POOLS.lock().enter(pool, None, host_node);
    sweep();
    number
}

/// The node of the host that a pool was given memory of.
pub(crate) fn host_node(number: u32) -> Result<Option<u32>, Failure> {
    Ok(POOLS.lock().entry(number)?.host_node)
}

/// An elastic buffer of the pool, or a use of one, lives from now on.
pub(crate) fn add_user(number: u32) -> Result<(), Failure> {
    POOLS.lock().entry(number)?.users += 1;
    Ok(())
}

/// One of them has ended.
pub(crate) fn end_user(number: u32) {
    if let Ok(entry) = POOLS.lock().entry(number) {
        entry.users -= 1;
    }
}

/// Ends a pool that was created. Blocks stay valid until they are freed.
///
/// # Errors
/// [`Failure::UnknownHandle`], [`Failure::DefaultPool`], [`Failure::PoolInUse`],
/// [`Failure::StreamCaptured`]; a forked child.
pub(crate) fn destroy(pool: *const VmmPool) -> Result<(), Failure> {
    not_forked()?;
    let number = handle::checked(pool)?;
    let (entry, lanes) = lanes::take_all(number, || {
        let mut pools = POOLS.lock();
        let entry = pools.entry(number)?;
        match (entry.own, entry.users) {
            (Some(_), _) => Err(Failure::DefaultPool),
            (None, 0) => pools.entries.remove(&number).ok_or_else(|| unknown(number)),
            (None, users) => Err(Failure::PoolInUse(users)),
        }
    })?;
    recent::forget_pool(number);
    for lane in lanes {
        entry.pool.close_lane(lane.stream());
    }
    // Other threads may remember lanes, and keep the pool open by that, but no memory.
    for device in entry.pool.devices() {
        let _gone = entry.pool.trim(device);
    }
    POOLS.lock().retired.push((entry.pool, entry.owner));
    sweep();
    Ok(())
}

/// Ends the process's own pools, which only tests do.
pub(crate) fn end_own() {
    let ended: Vec<Entry> = {
        let mut pools = POOLS.lock();
        pools.budgets.clear();
        let numbers = std::mem::take(&mut pools.own);
        numbers.values().filter_map(|number| pools.entries.remove(number)).collect()
    };
    // Their lanes are under 0, whichever they are of.
    recent::forget_pool(0);
    // Without the lock: it waits.
    drop(ended);
}

/// Drops the destroyed pools that no thread remembers any more, without the lock: it waits.
fn sweep() {
    let is_free = |(_, owner): &mut (Pool, Owner)| Arc::strong_count(owner) == 1;
    let free: Vec<_> = POOLS.lock().retired.extract_if(.., is_free).collect();
    drop(free);
}

/// Gives everything idle of the process's own pools back.
///
/// # Errors
/// A forked child; the pool's.
pub fn empty() -> Result<(), Failure> {
    not_forked()?;
    let own: Vec<_> = {
        let pools = POOLS.lock();
        let pool = |(device, number): (&DeviceId, &u32)| {
            Some((*device, pools.entries.get(number)?.pool.clone()))
        };
        pools.own.iter().filter_map(pool).collect()
    };
    for (device, pool) in own {
        pool.trim(device)?;
    }
    Ok(())
}

/// Lets the process's own pool of a device hold at most this part of the device's memory, from now on:
/// what it holds beyond stays until it is given back.
///
/// # Errors
/// [`Failure::BadArgument`] unless it is from 0 to 1; no such device or driver; a forked child.
pub fn set_fraction(device: DeviceId, fraction: f64) -> Result<(), Failure> {
    not_forked()?;
    if !(0.0..=1.0).contains(&fraction) {
        return Err(Failure::argument("fraction", fraction, "0 to 1"));
    }
    let total_bytes = driver_of(device)?.device_total_bytes(device)?;
    let limit_bytes = (total_bytes as f64 * fraction) as u64;
    POOLS.lock().budget(device).set_limit_bytes(limit_bytes);
    Ok(())
}
