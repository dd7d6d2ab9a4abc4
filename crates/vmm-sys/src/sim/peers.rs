//! What a process asks about handles, and peer access between contexts.
//!
//! Peer access (`cuCtxEnablePeerAccess`) opens the allocations of `cuMemAlloc` of one context to the
//! kernels of another. Mapped chunks do not care (row D-A7), nor does memory of the stream-ordered
//! pool, and copy engines reach every allocation anyway.

use super::Sim;
use super::answer::Refused;
use super::builder::Link;
use crate::call::Call;
use crate::error::{DriverResult, ResultCode};
use crate::types::{ContextHandle, DeviceId, StreamHandle};

impl Sim {
    /// The device whose live context this is.
    pub fn context_device(&self, context: ContextHandle) -> Option<DeviceId> {
        self.state.lock().context_device(context)
    }

    /// The live primary context of a device, if it has one now. Makes none and takes no reference.
    pub fn primary_context(&self, device: DeviceId) -> Option<ContextHandle> {
        let state = self.state.lock();
        let context = state.devices.get(device.0 as usize)?.context.as_ref()?;
        Some(context.handle)
    }

    /// The device of a stream that was created and not destroyed, and whether it is ordered with
    /// the legacy stream. `None` for the handles of no stream of its own (0, 1 and 2) too.
    pub fn created_stream(&self, stream: StreamHandle) -> Option<(DeviceId, bool)> {
        self.state.lock().created_stream(stream)
    }

    /// Whether all of a stretch of host memory is page-locked memory of this machine.
    pub fn is_page_locked(&self, address: u64, bytes: u64) -> bool {
        self.state.lock().is_pinned(address, bytes)
    }

    /// `cuCtxEnablePeerAccess`: kernels of `device` may use what `cuMemAlloc` gave out on `peer`.
    /// Booked as `cuDeviceCanAccessPeer`.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_DEVICE` for the device itself, `CUDA_ERROR_PEER_ACCESS_UNSUPPORTED` without a
    /// link, `CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED`, and what a lost context answers.
    pub fn enable_peer_access(&self, device: DeviceId, peer: DeviceId) -> DriverResult<()> {
        self.call_on(Call::DeviceCanAccessPeer, device, |state| {
            state.check_context(peer)?;
            if device == peer {
                return Err(Refused::new(ResultCode::INVALID_DEVICE)
                    .because("a device is not its own peer"));
            }
            if state.config.link(device, peer) == Link::None {
                return Err(Refused::new(ResultCode::PEER_ACCESS_UNSUPPORTED)
                    .because(format_args!("no link between {device} and {peer}")));
            }
            match state.enabled_peers.insert((device, peer)) {
                true => Ok(()),
                false => Err(Refused::new(ResultCode::PEER_ACCESS_ALREADY_ENABLED)),
            }
        })
    }

    /// `cuCtxDisablePeerAccess`. Booked as `cuDeviceCanAccessPeer`.
    ///
    /// # Errors
    /// `CUDA_ERROR_PEER_ACCESS_NOT_ENABLED`, and what a lost context answers.
    pub fn disable_peer_access(&self, device: DeviceId, peer: DeviceId) -> DriverResult<()> {
        self.call_on(Call::DeviceCanAccessPeer, device, |state| {
            match state.enabled_peers.remove(&(device, peer)) {
                true => Ok(()),
                false => Err(Refused::new(ResultCode::PEER_ACCESS_NOT_ENABLED)),
            }
        })
    }
}
