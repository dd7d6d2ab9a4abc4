//! Copies and fills.

use super::{Cuda, have};
use crate::call::Call;
use crate::error::{DriverResult, ResultCode};
use crate::types::{DeviceId, StreamHandle, Transfer};

impl Cuda {
    /// # Safety
    /// As [`crate::Driver::copy`].
    pub(super) unsafe fn copy(&self, device: DeviceId, transfer: &Transfer) -> DriverResult<()> {
        let _scope = self.enter(device)?;
        let entry = &self.entry;
        let on = Some(device);
        // SAFETY (all arms): the caller vouches for the addresses and their length; the numbers
        // are passed on as they are.
        match *transfer {
            Transfer::HostToDevice { dst, src, bytes } => self.door(Call::MemcpyHtoD, on, || {
                // SAFETY: as above.
                unsafe { (entry.memcpy_htod)(dst, src, bytes) }
            }),
            Transfer::DeviceToHost { dst, src, bytes } => self.door(Call::MemcpyDtoH, on, || {
                // SAFETY: as above.
                unsafe { (entry.memcpy_dtoh)(dst, src, bytes) }
            }),
            Transfer::DeviceToDevice { dst, src, bytes } => self.door(Call::MemcpyDtoD, on, || {
                // SAFETY: as above.
                unsafe { (entry.memcpy_dtod)(dst, src, bytes) }
            }),
            Transfer::Peer { dst, dst_device, src, src_device, bytes } => {
                let copy = have(Call::MemcpyPeer, entry.memcpy_peer)?;
                let (to, from) = (self.context_of(dst_device)?, self.context_of(src_device)?);
                self.door(Call::MemcpyPeer, on, || {
                    // SAFETY: as above; both contexts are held by `self`.
                    unsafe { copy(dst, to, src, from, bytes) }
                })
            }
            Transfer::Fill8 { dst, value, bytes } => self.door(Call::MemsetD8, on, || {
                // SAFETY: as above.
                unsafe { (entry.memset_d8)(dst, value, bytes) }
            }),
        }
        .and_then(|()| self.finish(device, transfer))
        .map_err(|error| self.explain_transfer(error))
    }

    /// Some of the driver's synchronous calls return before the bytes are there: fills, copies
    /// within a device, and copies from pageable memory, whose last part may still be in a staging
    /// buffer (CUDA's "API synchronization behavior"). They run on the legacy stream, for which
    /// streams that do not block never wait.
    fn finish(&self, device: DeviceId, transfer: &Transfer) -> DriverResult<()> {
        let call = match transfer {
            Transfer::DeviceToHost { .. } => return Ok(()),
            Transfer::HostToDevice { .. } => Call::MemcpyHtoD,
            Transfer::DeviceToDevice { .. } => Call::MemcpyDtoD,
            Transfer::Peer { .. } => Call::MemcpyPeer,
            Transfer::Fill8 { .. } => Call::MemsetD8,
        };
        // A part of the call before, so it is not counted as one of its own.
        // SAFETY: the legacy stream of the context that is current lives as long as the context.
        let code = unsafe { (self.entry.stream_synchronize)(StreamHandle::LEGACY.0) };
        match ResultCode(code) {
            ResultCode::SUCCESS => Ok(()),
            code => {
                let refused = self.refused(call, Some(device), code);
                Err(refused.because("at cuStreamSynchronize, which waits for its end"))
            }
        }
    }

    /// # Safety
    /// As [`crate::Driver::copy_async`].
    pub(super) unsafe fn copy_async(
        &self,
        device: DeviceId,
        transfer: &Transfer,
        stream: StreamHandle,
    ) -> DriverResult<()> {
        let _scope = self.enter(device)?;
        let entry = &self.entry;
        let (on, stream) = (Some(device), stream.0);
        // SAFETY (all arms): the caller vouches for the addresses, their length and the stream, and
        // keeps host memory until the stream has passed the copy.
        match *transfer {
            Transfer::HostToDevice { dst, src, bytes } => {
                self.door(Call::MemcpyHtoDAsync, on, || {
                    // SAFETY: as above.
                    unsafe { (entry.memcpy_htod_async)(dst, src, bytes, stream) }
                })
            }
            Transfer::DeviceToHost { dst, src, bytes } => {
                self.door(Call::MemcpyDtoHAsync, on, || {
                    // SAFETY: as above.
                    unsafe { (entry.memcpy_dtoh_async)(dst, src, bytes, stream) }
                })
            }
            Transfer::DeviceToDevice { dst, src, bytes } => {
                self.door(Call::MemcpyDtoDAsync, on, || {
                    // SAFETY: as above.
                    unsafe { (entry.memcpy_dtod_async)(dst, src, bytes, stream) }
                })
            }
            Transfer::Peer { dst, dst_device, src, src_device, bytes } => {
                let copy = have(Call::MemcpyPeerAsync, entry.memcpy_peer_async)?;
                let (to, from) = (self.context_of(dst_device)?, self.context_of(src_device)?);
                self.door(Call::MemcpyPeerAsync, on, || {
                    // SAFETY: as above; both contexts are held by `self`.
                    unsafe { copy(dst, to, src, from, bytes, stream) }
                })
            }
            Transfer::Fill8 { dst, value, bytes } => self.door(Call::MemsetD8Async, on, || {
                // SAFETY: as above.
                unsafe { (entry.memset_d8_async)(dst, value, bytes, stream) }
            }),
        }
        .map_err(|error| self.explain_transfer(error))
    }
}
