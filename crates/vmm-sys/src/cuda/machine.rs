//! Questions about the machine: none of them needs a context, except how much memory is free.

use super::ffi::DeviceUuid;
use super::{Cuda, have};
use crate::call::Call;
use crate::error::DriverResult;
use crate::types::{DeviceAttribute, DeviceId, MemInfo, PeerAttribute, Uuid};

/// NVIDIA's names are shorter; a longer one would be cut, not overrun.
const NAME_BYTES: usize = 256;

impl Cuda {
    pub(super) fn driver_version(&self) -> DriverResult<u32> {
        let mut version = 0;
        self.door(Call::DriverGetVersion, None, || (self.entry.driver_get_version)(&mut version))?;
        Ok(version.max(0).cast_unsigned())
    }

    pub(super) fn device_count(&self) -> DriverResult<u32> {
        let mut count = 0;
        self.door(Call::DeviceGetCount, None, || (self.entry.device_get_count)(&mut count))?;
        Ok(count.max(0).cast_unsigned())
    }

    pub(super) fn device_name(&self, device: DeviceId) -> DriverResult<String> {
        let handle = self.device_handle(device)?;
        let mut name = [0_u8; NAME_BYTES];
        self.door(Call::DeviceGetName, Some(device), || {
            // SAFETY: the buffer has the length that is passed, less one: the last byte stays a
            // terminator whatever the driver writes.
            unsafe {
                (self.entry.device_get_name)(name.as_mut_ptr(), NAME_BYTES as i32 - 1, handle)
            }
        })?;
        let text = name.split(|&byte| byte == 0).next().unwrap_or_default();
        Ok(String::from_utf8_lossy(text).into_owned())
    }

    pub(super) fn device_uuid(&self, device: DeviceId) -> DriverResult<Uuid> {
        let get = have(Call::DeviceGetUuid, self.entry.device_get_uuid)?;
        let handle = self.device_handle(device)?;
        let mut uuid = DeviceUuid::default();
        self.door(Call::DeviceGetUuid, Some(device), || get(&mut uuid, handle))?;
        Ok(Uuid(uuid.bytes))
    }

    pub(super) fn device_total_bytes(&self, device: DeviceId) -> DriverResult<u64> {
        let handle = self.device_handle(device)?;
        let mut bytes = 0;
        self.door(Call::DeviceTotalMem, Some(device), || {
            (self.entry.device_total_mem)(&mut bytes, handle)
        })?;
        Ok(bytes)
    }

    pub(super) fn device_attribute(
        &self,
        device: DeviceId,
        attribute: DeviceAttribute,
    ) -> DriverResult<i32> {
        let handle = self.device_handle(device)?;
        let mut value = 0;
        self.door(Call::DeviceGetAttribute, Some(device), || {
            (self.entry.device_get_attribute)(&mut value, attribute as i32, handle)
        })
        .map_err(|error| error.because(format_args!("attribute {attribute:?}")))?;
        Ok(value)
    }

    pub(super) fn can_access_peer(&self, device: DeviceId, peer: DeviceId) -> DriverResult<bool> {
        let can = have(Call::DeviceCanAccessPeer, self.entry.device_can_access_peer)?;
        let (from, to) = (self.device_handle(device)?, self.device_handle(peer)?);
        let mut answer = 0;
        self.door(Call::DeviceCanAccessPeer, Some(device), || can(&mut answer, from, to))
            .map_err(|error| error.because(format_args!("for memory of {peer}")))?;
        Ok(answer != 0)
    }

    pub(super) fn peer_attribute(
        &self,
        attribute: PeerAttribute,
        device: DeviceId,
        peer: DeviceId,
    ) -> DriverResult<i32> {
        let get = have(Call::DeviceGetP2pAttribute, self.entry.device_p2p_attribute)?;
        let (from, to) = (self.device_handle(device)?, self.device_handle(peer)?);
        let mut value = 0;
        self.door(Call::DeviceGetP2pAttribute, Some(device), || {
            get(&mut value, attribute as i32, from, to)
        })
        .map_err(|error| error.because(format_args!("{attribute:?} towards {peer}")))?;
        Ok(value)
    }

    pub(super) fn mem_info(&self, device: DeviceId) -> DriverResult<MemInfo> {
        let _scope = self.enter(device)?;
        let mut info = MemInfo { free_bytes: 0, total_bytes: 0 };
        self.door(Call::MemGetInfo, Some(device), || {
            (self.entry.mem_get_info)(&mut info.free_bytes, &mut info.total_bytes)
        })?;
        Ok(info)
    }
}
