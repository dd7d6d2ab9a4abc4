//! The virtual memory management calls. None of them needs a context to be current.

use super::ffi::{MemAccessDesc, MemAllocationProp, MemLocation, access_from_flags};
use super::{Cuda, have};
use crate::call::Call;
use crate::error::{DriverResult, ResultCode, explain};
use crate::types::{Access, AccessGrant, ChunkHandle, ChunkProps, GranularityKind, Location};

/// Enough grants for all GPUs of a host without a heap allocation.
const GRANTS_INLINE: usize = 16;

impl Cuda {
    pub(super) fn granularity(
        &self,
        props: &ChunkProps,
        kind: GranularityKind,
    ) -> DriverResult<u64> {
        let flag = match kind {
            GranularityKind::Minimum => 0,
            GranularityKind::Recommended => 1,
        };
        let prop = MemAllocationProp::from(props);
        let mut bytes = 0;
        self.door(Call::MemGetAllocationGranularity, props.location.device(), || {
            (self.entry.mem_granularity)(&mut bytes, &prop, flag)
        })
        .map_err(|error| error.because(format_args!("memory on {}", props.location)))?;
        if kind == GranularityKind::Minimum {
            self.remember_granularity(props, bytes);
        }
        Ok(bytes)
    }

    pub(super) fn address_reserve(
        &self,
        bytes: u64,
        align_bytes: u64,
        hint: u64,
    ) -> DriverResult<u64> {
        let mut address = 0;
        self.door(Call::MemAddressReserve, None, || {
            (self.entry.mem_address_reserve)(&mut address, bytes, align_bytes, hint, 0)
        })
        .map_err(|error| self.explain_reserve(error, bytes, align_bytes))?;
        Ok(address)
    }

    pub(super) fn address_free(&self, address: u64, bytes: u64) -> DriverResult<()> {
        self.door(Call::MemAddressFree, None, || (self.entry.mem_address_free)(address, bytes))
            .map_err(|error| {
                let why = "free exactly what one reserve gave, once, with nothing mapped in it";
                self.explain_range(error, Some(address), bytes, None, why)
            })
    }

    pub(super) fn create(&self, bytes: u64, props: &ChunkProps) -> DriverResult<ChunkHandle> {
        let prop = MemAllocationProp::from(props);
        let mut handle = 0;
        self.door(Call::MemCreate, props.location.device(), || {
            (self.entry.mem_create)(&mut handle, bytes, &prop, 0)
        })
        .map_err(|error| self.explain_create(error, bytes, props))?;
        Ok(ChunkHandle(handle))
    }

    /// # Safety
    /// As [`crate::Driver::release`].
    pub(super) unsafe fn release(&self, chunk: ChunkHandle) -> DriverResult<()> {
        self.door(Call::MemRelease, None, || {
            // SAFETY: the caller owns a reference on the live handle.
            unsafe { (self.entry.mem_release)(chunk.0) }
        })
        .map_err(|error| self.explain_handle(error, chunk))
    }

    pub(super) fn retain(&self, address: u64) -> DriverResult<ChunkHandle> {
        let retain = have(Call::MemRetainAllocationHandle, self.entry.mem_retain)?;
        let mut handle = 0;
        self.door(Call::MemRetainAllocationHandle, None, || retain(&mut handle, address))
            .map_err(|error| error.because(format_args!("is a chunk mapped at {address:#x}?")))?;
        Ok(ChunkHandle(handle))
    }

    /// # Safety
    /// As [`crate::Driver::properties`].
    pub(super) unsafe fn properties(&self, chunk: ChunkHandle) -> DriverResult<ChunkProps> {
        let get = have(Call::MemGetAllocationProperties, self.entry.mem_properties)?;
        let mut prop = MemAllocationProp::zeroed();
        self.door(Call::MemGetAllocationProperties, None, || {
            // SAFETY: the caller says that the handle is live.
            unsafe { get(&mut prop, chunk.0) }
        })
        .map_err(|error| self.explain_handle(error, chunk))?;
        prop.props()
    }

    /// # Safety
    /// As [`crate::Driver::map`].
    pub(super) unsafe fn map(
        &self,
        address: u64,
        bytes: u64,
        offset: u64,
        chunk: ChunkHandle,
    ) -> DriverResult<()> {
        self.door(Call::MemMap, None, || {
            // SAFETY: the caller says that the handle is live; the driver checks the numbers.
            unsafe { (self.entry.mem_map)(address, bytes, offset, chunk.0, 0) }
        })
        .map_err(|error| self.explain_map(error, address, bytes, offset))
    }

    pub(super) fn unmap(&self, address: u64, bytes: u64) -> DriverResult<()> {
        self.door(Call::MemUnmap, None, || (self.entry.mem_unmap)(address, bytes)).map_err(
            |error| {
                let why = "only whole mappings can be unmapped";
                self.explain_range(error, Some(address), bytes, None, why)
            },
        )
    }

    pub(super) fn set_access(
        &self,
        address: u64,
        bytes: u64,
        grants: &[AccessGrant],
    ) -> DriverResult<()> {
        let mut inline = [MemAccessDesc::NONE; GRANTS_INLINE];
        let spilled: Vec<MemAccessDesc>;
        let descs: &[MemAccessDesc] = match inline.get_mut(..grants.len()) {
            Some(room) => {
                for (desc, grant) in room.iter_mut().zip(grants) {
                    *desc = grant.into();
                }
                room
            }
            None => {
                spilled = grants.iter().map(MemAccessDesc::from).collect();
                &spilled
            }
        };
        self.door(Call::MemSetAccess, None, || {
            // SAFETY: pointer and count are those of one slice.
            unsafe {
                (self.entry.mem_set_access)(address, bytes, descs.as_ptr(), descs.len() as u64)
            }
        })
        .map_err(|error| self.explain_access(error, address, bytes, grants))
    }

    pub(super) fn get_access(&self, address: u64, location: Location) -> DriverResult<Access> {
        let get = have(Call::MemGetAccess, self.entry.mem_get_access)?;
        let mut flags = 0;
        self.door(Call::MemGetAccess, location.device(), || {
            get(&mut flags, &MemLocation::from(location), address)
        })
        .map_err(|error| match error.code() {
            ResultCode::INVALID_VALUE => error.because(format_args!(
                "is {address:#x} mapped? asked for {location}: {}",
                explain::MISSING_GRANT
            )),
            _ => error,
        })?;
        access_from_flags(flags)
    }
}
