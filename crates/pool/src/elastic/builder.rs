//! [`ElasticBuilder`]: the settings of an elastic buffer, validated once.

use std::collections::BTreeMap;
use std::sync::Arc;

use vmm_sys::caught::caught;
use vmm_sys::object::Range;
use vmm_sys::{Access, Call, DeviceId, GranularityKind};

use super::ElasticBuffer;
use super::body::{Body, Holder, Shape};
use crate::budget::Budget;
use crate::device::Device;
use crate::error::Error;
use crate::past::User;
use crate::place::Place;
use crate::pool::PoolInner;

/// All addresses that a process can reserve, 128 TiB: a cache with room for the longest context of each of
/// its sequences needs many times a device's memory of them. What is left of them, the driver says.
const CAPACITY_MAX_BYTES: u64 = 1 << 47;

/// Settings of an elastic buffer; see [`Pool::elastic`](crate::Pool::elastic).
#[derive(Clone, Debug)]
pub struct ElasticBuilder {
    pool: Arc<PoolInner>,
    device: DeviceId,
    capacity_bytes: Option<u64>,
    chunk_bytes: Option<u64>,
    single_piece: bool,
    exportable: bool,
    scrubs: Option<bool>,
    tag: Option<Arc<str>>,
    quota: Option<Budget>,
    movable: bool,
    access: Option<BTreeMap<DeviceId, Access>>,
}

impl ElasticBuilder {
    pub(crate) fn new(pool: Arc<PoolInner>, device: DeviceId) -> ElasticBuilder {
        ElasticBuilder {
            exportable: pool.exportable(),
            pool,
            device,
            capacity_bytes: None,
            chunk_bytes: None,
            single_piece: false,
            scrubs: None,
            tag: None,
            quota: None,
            movable: false,
            access: None,
        }
    }

    /// How much can ever be committed, in bytes: as many addresses are reserved at once, which
    /// costs no memory (the driver has 128 TiB of them in all). Default: the device's memory.
    pub fn capacity_bytes(mut self, bytes: u64) -> Self {
        self.capacity_bytes = Some(bytes);
        self
    }

    /// The length of its chunks, in bytes: a multiple of the granularity. Long chunks are quick to
    /// map, short ones waste less. Default: as the pool's stock.
    pub fn chunk_bytes(mut self, bytes: u64) -> Self {
        self.chunk_bytes = Some(bytes);
        self
    }

    /// All of the capacity in one physical piece, for whoever can register only one. It is
    /// committed and taken away as a whole.
    pub fn single_piece(mut self) -> Self {
        self.single_piece = true;
        self
    }

    /// Whether its chunks can be exported to other processes. That is fixed when they are made, and
    /// every call for such a chunk costs 10 to 18 us more. Default: the pool's setting.
    pub fn exportable(mut self, on: bool) -> Self {
        self.exportable = on;
        self
    }

    /// Whether memory of the stock that somebody used is zeroed before it comes to this buffer, so that
    /// whoever it is exported to finds nothing of others in it: by the device, 9 us for 32 MiB and one
    /// wait for each growth. Default: whether it is exportable.
    /// [`PoolBuilder::scrub_between_tags`](crate::PoolBuilder::scrub_between_tags) holds besides.
    pub fn scrub(mut self, on: bool) -> Self {
        self.scrubs = Some(on);
        self
    }

    /// A label of the owner, shown in the statistics. Buffers of one tag may find each other's contents
    /// in memory that is committed anew
    /// ([`PoolBuilder::scrub_between_tags`](crate::PoolBuilder::scrub_between_tags) keeps those of
    /// different ones apart).
    pub fn tag(mut self, tag: &str) -> Self {
        self.tag = Some(tag.into());
        self
    }

    /// What the buffer may commit at most, in bytes. Default: its capacity.
    pub fn quota_bytes(self, bytes: u64) -> Self {
        self.quota(Budget::new(bytes))
    }

    /// A quota that several buffers share, those of one tag for example. The last one given counts.
    pub fn quota(mut self, quota: Budget) -> Self {
        self.quota = Some(quota);
        self
    }

    /// Whether the pool may move it by itself while no guard of it is alive. To make room on a device
    /// that is short, for requests that may borrow
    /// ([`Request::may_borrow`](crate::Request::may_borrow)): to a neighbour that lends, else to the
    /// host; it comes home when there is room. And to an emptier device, if it is cold and the pool
    /// has balance ([`PoolBuilder::balance`](crate::PoolBuilder::balance)). Default: false.
    pub fn movable(mut self, on: bool) -> Self {
        self.movable = on;
        self
    }

    /// Which other devices may use the buffer, in place of the pool's policy for its home.
    pub fn access(mut self, devices: impl IntoIterator<Item = (DeviceId, Access)>) -> Self {
        self.access = Some(devices.into_iter().collect());
        self
    }

    /// Reserves the addresses. Nothing is committed.
    ///
    /// # Errors
    /// [`Error::UnknownDevice`], [`Error::BadSetting`] names the setting and what is expected,
    /// [`Error::OutOfAddresses`],
    /// [`ElasticError::NoPeer`](super::ElasticError::NoPeer) names a pair of devices that cannot
    /// work together; the driver's.
    pub fn build(self) -> Result<ElasticBuffer, Error> {
        if vmm_sys::process::is_forked_child() {
            return Err(Error::DriverGone);
        }
        let places = self.pool.places();
        let unknown = Error::UnknownDevice { device: self.device };
        let keeper = places.device(self.device).ok_or(unknown)?.clone();
        let shape = self.shape(&keeper)?;
        loop {
            let version = keeper.policy.version();
            let buffer = self.build_once(&keeper, shape.clone())?;
            // A policy that changed meanwhile has missed the buffer, or not.
            if self.access.is_some() || keeper.policy.version() == version {
                return Ok(buffer);
            }
        }
    }

    fn build_once(&self, keeper: &Arc<Device>, shape: Shape) -> Result<ElasticBuffer, Error> {
        let places = self.pool.places();
        let mut access =
            self.access.clone().unwrap_or_else(|| keeper.policy.others().into_iter().collect());
        access.retain(|device, access| *access != Access::None && *device != self.device);
        for accessor in access.keys() {
            places.peers.ensure(places, self.device, *accessor)?;
        }
        access.insert(self.device, Access::ReadWrite);
        let range = reserve(keeper, &shape)?;
        let body = Body::new(shape, places.clone(), keeper.clone(), range, access);
        body.uses.touch(keeper.watch.now_ms());
        let body = Arc::new(body);
        places.add(&body);
        Ok(ElasticBuffer { body: Holder::new(body), pool: self.pool.clone() })
    }

    fn shape(&self, keeper: &Device) -> Result<Shape, Error> {
        let refuse = |setting, value: u64, expected: String| Error::BadSetting {
            setting,
            value: value.to_string(),
            expected,
        };
        // What can never be is refused before the driver is asked anything.
        if let Some(bytes) = self.capacity_bytes
            && !(1..=CAPACITY_MAX_BYTES).contains(&bytes)
        {
            return Err(refuse("capacity", bytes, format!("1 to {CAPACITY_MAX_BYTES} bytes")));
        }
        let props = Place::Device(self.device).props(self.exportable);
        let granularity = caught(Call::MemGetAllocationGranularity, || {
            keeper.driver.granularity(&props, GranularityKind::Minimum)
        })?;
        let capacity_bytes = match self.capacity_bytes {
            Some(bytes) => bytes,
            None => caught(Call::DeviceTotalMem, || keeper.driver.device_total_bytes(self.device))?,
        };
        let whole = capacity_bytes.next_multiple_of(granularity);
        let chunk_bytes = match self.chunk_bytes {
            _ if self.single_piece => whole,
            Some(bytes) if bytes > 0 && bytes % granularity == 0 => bytes,
            Some(bytes) => {
                let expected = format!("a multiple of the granularity, {granularity} bytes");
                return Err(refuse("chunk", bytes, expected));
            }
            // Not longer than the buffer is.
            None => keeper.plan.stock_chunk_bytes().max(granularity).min(whole),
        };
        if capacity_bytes.div_ceil(chunk_bytes) > u64::from(u32::MAX) {
            let expected = format!("at most 2^32 chunks of {chunk_bytes} bytes");
            return Err(refuse("capacity", capacity_bytes, expected));
        }
        Ok(Shape {
            capacity_bytes,
            chunk_bytes,
            exportable: self.exportable,
            follows_policy: self.access.is_none(),
            user: match self.pool.tells_tags_apart() {
                true => User::of_tag(self.tag.as_ref()),
                false => User::Nameless,
            },
            scrubs: self.scrubs.unwrap_or(self.exportable),
            tag: self.tag.clone(),
            quota: self.quota.clone(),
            movable: self.movable,
        })
    }
}

/// Addresses for whole chunks, so that every chunk stands at a multiple of the granularity.
fn reserve(keeper: &Device, shape: &Shape) -> Result<Range, Error> {
    let bytes = shape.capacity_bytes.next_multiple_of(shape.chunk_bytes);
    let align_bytes = keeper.plan.align_max_bytes;
    Range::reserve(&keeper.driver, bytes, align_bytes, 0).map_err(|cause| {
        match cause.is_out_of_addresses() {
            true => Error::OutOfAddresses { bytes, cause },
            false => Error::Driver(cause),
        }
    })
}
