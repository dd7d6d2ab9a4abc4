//! Host memory of the program's own, registered as page-locked (`cuMemHostRegister`): kernels reach it
//! at its own address, and asynchronous copies need not stage it.

use super::Sim;
use super::answer::Refused;
use super::regions::{AccessTable, Backing, Region};
use crate::call::Call;
use crate::error::{DriverResult, ResultCode};
use crate::types::{DeviceId, PinnedAddress};

impl Sim {
    /// `cuMemHostRegister` (portable, mapped). Booked as `cuMemHostAlloc`.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for null or no bytes, `CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED` if some
    /// of it is page-locked memory already.
    ///
    /// # Safety
    /// The memory is readable and writable until it is unregistered, or the machine is dropped.
    pub unsafe fn host_register(
        &self,
        device: DeviceId,
        address: PinnedAddress,
        bytes: u64,
    ) -> DriverResult<()> {
        self.call_on(Call::MemHostAlloc, device, |state| {
            state.refuse_unsafe_in_capture()?;
            let address = address.0;
            if address == 0 || bytes == 0 || address.checked_add(bytes).is_none() {
                return Err(Refused::invalid_value(format_args!("{bytes} bytes at {address:#x}")));
            }
            if state.any_region_in(address, bytes) {
                return Err(Refused::new(ResultCode::HOST_MEMORY_ALREADY_REGISTERED)
                    .because(format_args!("some of {bytes} bytes at {address:#x}")));
            }
            let id = state.next_region_id();
            let access = AccessTable::ALL;
            state.regions.insert(address, Region { bytes, backing: Backing::Pinned, access, id });
            state.registered.insert(address, bytes);
            Ok(())
        })
    }

    /// `cuMemHostUnregister`: waits for all work of the device, so that nothing uses the memory under
    /// that name any more. Booked as `cuMemFreeHost`.
    ///
    /// # Errors
    /// `CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED` for an address that no registration begins at.
    pub fn host_unregister(&self, device: DeviceId, address: PinnedAddress) -> DriverResult<()> {
        self.call_on(Call::MemFreeHost, device, |state| {
            state.refuse_unsafe_in_capture()?;
            self.drain_device_alone(state, device)?;
            // After the wait: another thread may have been here meanwhile.
            match state.registered.remove(&address.0) {
                Some(_) => state.regions.remove(&address.0),
                None => {
                    return Err(Refused::new(ResultCode::HOST_MEMORY_NOT_REGISTERED)
                        .because(format_args!("nothing begins at {:#x}", address.0)));
                }
            };
            Ok(())
        })
    }
}
