//! [`Settings`]: what builders of both forms are told alike, and the memory that comes of it.

use vmm_pool::{Place, Pool};
use vmm_sys::caught::caught;
use vmm_sys::object::Stream;
use vmm_sys::{Call, ChunkProps, GranularityKind, HandleTypes, Location};

use crate::error::KvError;
use crate::layout::KvShape;
use crate::memory::{Lending, Memory};

#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) pool: Pool,
    pub(crate) stream: Stream,
    pub(crate) shape: KvShape,
    pub(crate) chunk_bytes: Option<u64>,
    pub(crate) keep_idle_bytes: u64,
    pub(crate) lending: Lending,
    pub(crate) tag: Option<String>,
    pub(crate) quota_bytes: Option<u64>,
    pub(crate) movable: bool,
    pub(crate) background: bool,
}

impl Settings {
    pub(crate) fn new(
        pool: Pool,
        stream: Stream,
        shape: KvShape,
        keep_idle_bytes: u64,
    ) -> Settings {
        Settings {
            pool,
            stream,
            shape,
            chunk_bytes: None,
            keep_idle_bytes,
            lending: Lending::Nobody,
            tag: None,
            quota_bytes: None,
            movable: false,
            background: true,
        }
    }

    pub(crate) fn home(&self) -> Place {
        Place::Device(self.stream.device())
    }

    /// The length of a chunk: `otherwise`, if none was set.
    pub(crate) fn chunk_bytes_or(
        &self,
        otherwise: impl FnOnce() -> Result<u64, KvError>,
    ) -> Result<u64, KvError> {
        match self.chunk_bytes {
            Some(0) => Err(refuse("chunk_bytes", 0, "a multiple of the granularity")),
            Some(bytes) => Ok(bytes),
            None => otherwise(),
        }
    }

    /// That of memory at a place.
    pub(crate) fn granularity_bytes(&self, place: Place) -> Result<u64, KvError> {
        let location = match place {
            Place::Device(device) => Location::Device(device),
            Place::HostNuma(node) => Location::HostNuma(node),
        };
        let props = ChunkProps { location, handle_types: HandleTypes::NONE, rdma: false };
        Ok(caught(Call::MemGetAllocationGranularity, || {
            self.pool.driver().granularity(&props, GranularityKind::Minimum)
        })?)
    }

    /// Reserves the addresses. Nothing is committed.
    pub(crate) fn memory(&self, capacity_bytes: u64, chunk_bytes: u64) -> Result<Memory, KvError> {
        let mut buffer = self.pool.elastic(self.stream.device());
        buffer = buffer.capacity_bytes(capacity_bytes).chunk_bytes(chunk_bytes);
        buffer = buffer.movable(self.movable);
        if let Some(tag) = &self.tag {
            buffer = buffer.tag(tag);
        }
        if let Some(bytes) = self.quota_bytes {
            buffer = buffer.quota_bytes(bytes);
        }
        let (pool, stream) = (self.pool.clone(), self.stream.clone());
        Ok(Memory::new(pool, buffer.build()?, stream, self.lending.clone()))
    }
}

pub(crate) fn refuse(setting: &'static str, value: impl ToString, expected: &str) -> KvError {
    KvError::BadSetting { setting, value: value.to_string(), expected: expected.to_owned() }
}
