//! [`Host`]: a NUMA node of the host as a place of memory: the last resort of elastic buffers.
//!
//! A kernel reaches it at a tenth of the neighbour's speed, and making it is slow, 246 ms a GiB: so
//! it is only used where somebody names it, and made ahead, chunk by chunk, in the background.

use std::sync::Arc;

use vmm_sys::caught::caught;
use vmm_sys::object::{Mapping, Range};
use vmm_sys::{AccessGrant, Call, DriverError, GranularityKind};

use crate::depot::{Depot, Shortage, Terms};
use crate::device::Device;
use crate::elastic::error::ElasticError;
use crate::error::Error;
use crate::idle::Clock;
use crate::place::Place;
use crate::stats::HostStats;
use crate::turn::Turn;

/// What the builder was told of a node.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostSettings {
    pub(crate) node: u32,
    pub(crate) limit_bytes: u64,
    pub(crate) stock_bytes: u64,
    /// What it lends, if that was said: then to whoever borrows of any place too.
    pub(crate) lends_bytes: Option<u64>,
}

/// A NUMA node of the host.
#[derive(Debug)]
pub(crate) struct Host {
    pub(crate) node: u32,
    pub(crate) depot: Depot,
    /// Below, the background thread makes chunks ahead of need.
    pub(crate) stock_bytes: u64,
}

impl Host {
    /// Tries the node once: a granule that every device of the pool can use.
    pub(crate) fn open(
        settings: HostSettings,
        devices: &[Arc<Device>],
        clock: Clock,
    ) -> Result<Host, Error> {
        let HostSettings { node, limit_bytes, stock_bytes, lends_bytes } = settings;
        let refuse = |cause| Error::from(ElasticError::NoHostMemory { node, cause });
        let Some(keeper) = devices.first() else {
            return Err(ElasticError::UnknownPlace { place: Place::HostNuma(node) }.into());
        };
        let plain = Place::HostNuma(node).props(false);
        let kind = GranularityKind::Minimum;
        let granularity_bytes =
            caught(Call::MemGetAllocationGranularity, || keeper.driver.granularity(&plain, kind))
                .map_err(refuse)?;
        for (setting, value, least, most) in [
            ("limit of host memory", limit_bytes, granularity_bytes, u64::MAX),
            ("stock of host memory", stock_bytes, 0, limit_bytes),
        ] {
            if !(least..=most).contains(&value) {
                let expected = format!("{least} to {most} bytes");
                return Err(Error::BadSetting { setting, value: value.to_string(), expected });
            }
        }
        let terms = Terms {
            plain,
            warmer: keeper.plan.device,
            granularity_bytes,
            stock_chunk_bytes: keeper.plan.stock_chunk_bytes().max(granularity_bytes),
            limit_bytes: limit_bytes - limit_bytes % granularity_bytes,
            stock_high_bytes: u64::MAX,
            // There for elastic buffers alone: who names it may have all that the pool may.
            lends_bytes: lends_bytes.unwrap_or(limit_bytes),
            lends_to_any: lends_bytes.is_some(),
        };
        let depot = Depot::new(keeper.driver.clone(), terms, None, clock);
        let host = Host { node, depot, stock_bytes };
        host.try_granule(devices).map_err(|shortage| match shortage {
            Shortage::Driver(cause) => refuse(cause),
            Shortage::Limit => {
                let bytes = granularity_bytes;
                ElasticError::HostShort { node, bytes, cause: None }.into()
            }
        })?;
        Ok(host)
    }

    fn try_granule(&self, devices: &[Arc<Device>]) -> Result<(), Shortage> {
        let Terms { granularity_bytes: bytes, plain, .. } = self.depot.terms;
        let grants: Vec<AccessGrant> =
            devices.iter().map(|it| AccessGrant::read_write(it.plan.device)).collect();
        let turn = Turn::Requester;
        let chunk = Arc::new(self.depot.create(bytes, &plain, turn)?);
        let granted: Result<(), DriverError> = (|| {
            let driver = chunk.driver();
            let range = turn.with(|| Range::reserve(driver, bytes, bytes, 0))?;
            let mapping = turn.with(|| Mapping::map(&range, 0, chunk.clone()))?;
            turn.with(|| mapping.set_access(&grants))?;
            turn.with(|| mapping.unmap()).map(drop).map_err(|(_, error)| error)
        })();
        if let Some(chunk) = Arc::into_inner(chunk) {
            self.depot.release(chunk, turn);
        }
        granted.map_err(Shortage::Driver)
    }

    /// The figures now.
    pub(crate) fn stats(&self) -> HostStats {
        let depot = &self.depot;
        let elastic_bytes = depot.elastic_bytes();
        // Read afterwards: what stands somewhere was booked before.
        let held_bytes = depot.held_bytes().max(elastic_bytes);
        let limbo_bytes = depot.leaving.bytes().min(held_bytes - elastic_bytes);
        HostStats {
            node: self.node,
            elastic_bytes,
            limbo_bytes,
            stock_bytes: held_bytes - elastic_bytes - limbo_bytes,
            held_bytes,
            peak_held_bytes: depot.peak_held_bytes().max(held_bytes),
            limit_bytes: depot.terms.limit_bytes,
            lending_bytes: depot.lending.budget_bytes(),
            lending_booked_bytes: depot.lending.booked_bytes(),
            scrubbed_bytes: depot.scrubbed_bytes(),
        }
    }
}
