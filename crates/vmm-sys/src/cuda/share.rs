//! Chunks beyond this process, and what the driver knows of an address.

use std::ffi::c_void;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use super::ffi::{
    HANDLE_TYPE_POSIX_FD, IpcMemHandle, POINTER_CONTEXT, POINTER_DEVICE_ORDINAL,
    POINTER_LEGACY_IPC_CAPABLE, POINTER_MEMORY_TYPE, RANGE_HANDLE_DMA_BUF_FD,
};
use super::{Cuda, have, supported};
use crate::call::Call;
use crate::error::{DriverResult, ResultCode, explain};
use crate::types::{ChunkHandle, ContextHandle, DeviceId, PointerInfo};

/// A descriptor that the driver opened for the caller just now.
fn kept_to_ourselves(descriptor: libc::c_int) -> OwnedFd {
    // SAFETY: the driver opened it for the caller, so nobody else owns it.
    let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
    // An open descriptor keeps the memory taken (rows D-X6, D-X9): it must not leak into programs
    // that this process starts. Refusal would leave only that leak.
    // SAFETY: the descriptor is open; the call changes a flag of it.
    unsafe { libc::fcntl(descriptor.as_raw_fd(), libc::F_SETFD, libc::FD_CLOEXEC) };
    descriptor
}

impl Cuda {
    /// # Safety
    /// As [`crate::Driver::export_fd`].
    pub(super) unsafe fn export_fd(&self, chunk: ChunkHandle) -> DriverResult<OwnedFd> {
        let export = have(Call::MemExportToShareableHandle, self.entry.mem_export)?;
        let mut descriptor: libc::c_int = -1;
        self.door(Call::MemExportToShareableHandle, None, || {
            // SAFETY: the caller says that the handle is live; for this handle type the driver
            // writes one int.
            unsafe { export((&raw mut descriptor).cast(), chunk.0, HANDLE_TYPE_POSIX_FD, 0) }
        })
        .map_err(|error| match error.code() {
            ResultCode::INVALID_VALUE => error.because(format_args!(
                "was the chunk created with a POSIX descriptor as handle type? else {}",
                explain::HANDLE_LIFE
            )),
            _ => error,
        })?;
        Ok(kept_to_ourselves(descriptor))
    }

    pub(super) fn dma_buf(
        &self,
        device: DeviceId,
        address: u64,
        bytes: u64,
    ) -> DriverResult<OwnedFd> {
        let call = Call::MemGetHandleForAddressRange;
        let get = supported(call, self.entry.mem_range_handle)?;
        let _scope = self.enter(device)?;
        let mut descriptor: libc::c_int = -1;
        self.door(call, Some(device), || {
            let place = (&raw mut descriptor).cast();
            // SAFETY: the driver checks the addresses; for this handle type it writes one int.
            unsafe { get(place, address, bytes, RANGE_HANDLE_DMA_BUF_FD, 0) }
        })
        .map_err(|error| {
            error.because(format_args!(
                "{bytes} bytes at {address:#x}: expected mapped memory, from and to a page of the \
                 host"
            ))
        })?;
        Ok(kept_to_ourselves(descriptor))
    }

    pub(super) fn import_fd(&self, descriptor: BorrowedFd<'_>) -> DriverResult<ChunkHandle> {
        let import = have(Call::MemImportFromShareableHandle, self.entry.mem_import)?;
        // The driver takes the number itself in the place of a pointer.
        let number = i64::from(descriptor.as_raw_fd()).cast_unsigned();
        let mut handle = 0;
        self.door(Call::MemImportFromShareableHandle, None, || {
            // SAFETY: of this handle type the driver reads the number only, and the descriptor is
            // open while it is borrowed.
            unsafe { import(&mut handle, number, HANDLE_TYPE_POSIX_FD) }
        })
        .map_err(|error| match error.code() {
            ResultCode::UNKNOWN | ResultCode::INVALID_VALUE => {
                error.because("the descriptor is no exported chunk")
            }
            _ => error,
        })?;
        Ok(ChunkHandle(handle))
    }

    pub(super) fn address_range(&self, device: DeviceId, address: u64) -> DriverResult<(u64, u64)> {
        let get = have(Call::MemGetAddressRange, self.entry.mem_address_range)?;
        let _scope = self.enter(device)?;
        let (mut base, mut bytes) = (0, 0);
        self.door(Call::MemGetAddressRange, Some(device), || get(&mut base, &mut bytes, address))
            .map_err(|error| {
            error.because(format_args!("is anything mapped at {address:#x}, for {device}?"))
        })?;
        Ok((base, bytes))
    }

    pub(super) fn pointer_info(&self, address: u64) -> DriverResult<PointerInfo> {
        let get = have(Call::PointerGetAttributes, self.entry.pointer_attributes)?;
        let _scope = self.enter_any()?;
        let (mut memory_type, mut ordinal, mut context) = (0_u32, 0_i32, 0_u64);
        // A C bool or an int, by driver: the wider one, zeroed, reads right for both.
        let mut legacy_ipc = 0_u32;
        let attributes = [
            POINTER_MEMORY_TYPE,
            POINTER_DEVICE_ORDINAL,
            POINTER_CONTEXT,
            POINTER_LEGACY_IPC_CAPABLE,
        ];
        let places: [*mut c_void; 4] = [
            (&raw mut memory_type).cast(),
            (&raw mut ordinal).cast(),
            (&raw mut context).cast(),
            (&raw mut legacy_ipc).cast(),
        ];
        self.door(Call::PointerGetAttributes, None, || {
            // SAFETY: both arrays have the count that is passed, and each place is a live variable
            // of the attribute's width.
            unsafe { get(attributes.len() as u32, attributes.as_ptr(), places.as_ptr(), address) }
        })
        .map_err(|error| error.because(format_args!("address {address:#x}")))?;
        Ok(PointerInfo {
            memory_type,
            // Negative ordinals stand for the host and for "none".
            device: DeviceId(u32::try_from(ordinal).unwrap_or(u32::MAX)),
            context: (context != 0).then_some(ContextHandle(context)),
            legacy_ipc_capable: legacy_ipc != 0,
        })
    }

    pub(super) fn legacy_ipc_export(&self, device: DeviceId, address: u64) -> DriverResult<()> {
        let export = have(Call::IpcGetMemHandle, self.entry.ipc_get_mem_handle)?;
        let _scope = self.enter(device)?;
        let mut handle = IpcMemHandle { reserved: [0; 64] };
        self.door(Call::IpcGetMemHandle, Some(device), || export(&mut handle, address)).map_err(
            |error| error.because("mapped chunks have no legacy IPC handle: export a descriptor"),
        )
    }
}
