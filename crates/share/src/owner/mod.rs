//! [`Owner`]: a process that holds buffers for others, which may come and go.

mod client;
mod house;
mod status;
mod work;

use std::fmt;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use vmm_pool::Pool;
use vmm_sys::{DeviceId, Driver, process};

use crate::address::Address;
use crate::error::{AtStep, ShareError};
use crate::exporter::{Exporter, PeerRule};
use crate::wire::HOLDERS_MAX;

use house::{Clock, House};

pub use client::{NamedBuffer, OwnerClient};
pub use status::{HeldBuffer, Holder, LeaseState, OwnerDevice, OwnerStatus};

/// The most buffers of an owner process.
const NAMES_MAX: usize = 1024;
/// The longest lease: ten years.
const LEASE_MAX: Duration = Duration::from_secs(10 * 365 * 86400);
const STEP: &str = "starting an owner process";

/// The limits of an owner process, validated.
#[derive(Clone, Copy, Debug)]
struct Limits {
    /// For the buffers that one process has created.
    client_bytes: u64,
    /// For all.
    total_bytes: u64,
    /// How long a buffer stays that nobody holds. Zero: until it is released.
    lease: Duration,
}

/// Holds named buffers for other processes: a buffer lives while somebody has it, and for a lease
/// after that, so a worker that crashed finds its bytes again. Clients are [`OwnerClient`]s; plain
/// [`Importer`](crate::Importer)s may open what is there.
///
/// Dropped, it gives all memory back; what clients have mapped stays theirs until they let go.
pub struct Owner {
    house: Arc<House>,
    address: Address,
    thread: Option<JoinHandle<()>>,
}

/// Settings of an [`Owner`].
#[derive(Clone)]
pub struct OwnerBuilder {
    driver: Arc<dyn Driver>,
    devices: Vec<DeviceId>,
    limits: Limits,
    rule: PeerRule,
    timeout: Duration,
    clock: Clock,
}

impl Owner {
    /// An owner with the usual settings: device 0, no limits, a lease of 60 s, clients of the same
    /// user.
    pub fn builder(driver: Arc<dyn Driver>) -> OwnerBuilder {
        let lease = Duration::from_secs(60);
        let start = Instant::now();
        OwnerBuilder {
            driver,
            devices: vec![DeviceId(0)],
            limits: Limits { client_bytes: u64::MAX, total_bytes: u64::MAX, lease },
            rule: PeerRule::SameUser,
            timeout: Duration::from_secs(5),
            clock: Clock(Arc::new(move || start.elapsed())),
        }
    }

    /// Where it listens.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// What it holds.
    pub fn status(&self) -> OwnerStatus {
        self.house.status()
    }
}

impl OwnerBuilder {
    /// The GPUs on which it makes buffers. Default: device 0.
    pub fn devices(mut self, devices: impl IntoIterator<Item = DeviceId>) -> Self {
        self.devices = devices.into_iter().collect();
        self
    }

    /// The most that one process may have created, as long as it is connected. Default: no limit.
    pub fn client_bytes_max(mut self, bytes: u64) -> Self {
        self.limits.client_bytes = bytes;
        self
    }

    /// The most that all buffers may have. Default: no limit.
    pub fn total_bytes_max(mut self, bytes: u64) -> Self {
        self.limits.total_bytes = bytes;
        self
    }

    /// How long a buffer stays that nobody holds any more. Zero: until it is released. Default: 60 s.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.limits.lease = lease;
        self
    }

    /// Who is let in. Default: processes of the same user.
    pub fn rule(mut self, rule: PeerRule) -> Self {
        self.rule = rule;
        self
    }

    /// How long a client may take for its first word. Default: 5 s.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// The time by which leases are counted, since any moment. It must not go back. Default: that of
    /// the system. It is looked at four times a second while a lease runs.
    pub fn clock(mut self, now: impl Fn() -> Duration + Send + Sync + 'static) -> Self {
        self.clock = Clock(Arc::new(now));
        self
    }

    /// Listens. A file that a dead process left at the path is replaced.
    ///
    /// # Errors
    /// [`ShareError::BadArgument`] for no device or one that is not there, or a lease of more than ten
    /// years; the pool's; the operating system's: that the address is in use, above all.
    pub fn bind(self, address: Address) -> Result<Owner, ShareError> {
        if process::is_forked_child() {
            return Err(ShareError::Forked { step: STEP });
        }
        let bad = |what, value: String, expected: String| {
            Err(ShareError::BadArgument { what, value, expected })
        };
        if self.limits.lease > LEASE_MAX {
            let lease = format!("{:?}", self.limits.lease);
            return bad("lease", lease, format!("at most {LEASE_MAX:?}"));
        }
        let count = self.driver.device_count().at(STEP)?;
        if self.devices.is_empty() || self.devices.iter().any(|device| device.0 >= count) {
            let expected = format!("at least one device, with ordinals below {count}");
            return bad("devices", format!("{:?}", self.devices), expected);
        }
        let named = self.devices.iter().map(|device| {
            let uuid = self.driver.device_uuid(*device).at(STEP)?;
            Ok((device.0, uuid, *device))
        });
        let gpus = named.collect::<Result<Vec<_>, ShareError>>()?;
        let mut pool = Pool::builder(self.driver.clone());
        for device in &self.devices {
            pool = pool.device(*device);
        }
        let pool = pool.build().at(STEP)?;
        let house = Arc::new(House::new(self.limits, gpus, self.clock));
        let exporter = Exporter::builder()
            .rule(self.rule)
            .clients_max(HOLDERS_MAX)
            .timeout(self.timeout)
            .bind_with(address.clone(), Some(house.clone()))?;
        let works = house.clone();
        let thread = thread::Builder::new().name("vmm-share-owner".to_owned());
        let thread = thread.spawn(move || work::run(&works, &pool, &exporter)).at(STEP)?;
        Ok(Owner { house, address, thread: Some(thread) })
    }
}

impl fmt::Debug for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Owner({})", self.address)
    }
}

impl fmt::Debug for OwnerBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnerBuilder")
            .field("devices", &self.devices)
            .field("limits", &self.limits)
            .field("rule", &self.rule)
            .finish_non_exhaustive()
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        // The thread and all that it has are the parent's.
        if process::is_forked_child() {
            return;
        }
        self.house.stop();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            vmm_sys::say!(error, "the thread of an owner process has panicked");
        }
    }
}

#[cfg(test)]
mod tests;
