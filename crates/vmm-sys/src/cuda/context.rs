//! Primary contexts: made when a call first names their device, current for the length of a call.
//!
//! The calling thread's own context is never lost: a [`Scope`] puts it back, whatever happened in
//! between. Where the right context is current already, which is the common case, a scope costs one
//! `cuCtxGetCurrent`, a read of thread-local state.

use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::Cuda;
use super::kernel::Probes;
use crate::call::Call;
use crate::error::{DriverResult, ResultCode};
use crate::types::{ContextHandle, DeviceId};

/// What the driver object keeps for one device.
#[derive(Debug)]
pub(super) struct DeviceSlot {
    /// `CUdevice`.
    handle: i32,
    /// The primary context, one reference held; 0 until a call names the device.
    context: AtomicU64,
    /// Held while the context is made: once, however many threads come first.
    making: Mutex<()>,
    /// The probe kernels, loaded at their first launch.
    pub(super) probes: Mutex<Option<Probes>>,
}

impl DeviceSlot {
    pub(super) fn new(handle: i32) -> DeviceSlot {
        DeviceSlot {
            handle,
            context: AtomicU64::new(0),
            making: Mutex::new(()),
            probes: Mutex::new(None),
        }
    }
}

/// While it lives, the context it was made for is current on this thread.
#[must_use = "the context is current only while the scope lives"]
pub(super) struct Scope<'a> {
    cuda: &'a Cuda,
    /// What was current before (0: none), if that was another one.
    previous: Option<u64>,
}

impl Drop for Scope<'_> {
    fn drop(&mut self) {
        let Some(previous) = self.previous else { return };
        // SAFETY: it was current on this thread when the scope began, so it is live unless its
        // owner destroyed it meanwhile from another thread, which nobody can see from here.
        let result = unsafe { self.cuda.set_current(previous) };
        if let Err(error) = result {
            tracing::warn!(%error, "the caller's context could not be made current again");
        }
    }
}

impl Cuda {
    /// `cuDeviceGet`.
    pub(super) fn device_get(&self, device: DeviceId) -> DriverResult<i32> {
        let mut handle = 0;
        let ordinal = device.0.cast_signed();
        self.door(Call::DeviceGet, Some(device), || (self.entry.device_get)(&mut handle, ordinal))?;
        Ok(handle)
    }

    /// The `CUdevice` of an ordinal; ordinals that do not exist get the driver's own refusal.
    pub(super) fn device_handle(&self, device: DeviceId) -> DriverResult<i32> {
        match self.slot(device) {
            Some(slot) => Ok(slot.handle),
            None => self.device_get(device),
        }
    }

    pub(super) fn slot(&self, device: DeviceId) -> Option<&DeviceSlot> {
        self.devices.get(usize::try_from(device.0).ok()?)
    }

    /// The primary context of a device, made now if this is the first call that names it.
    pub(super) fn context_of(&self, device: DeviceId) -> DriverResult<u64> {
        let Some(slot) = self.slot(device) else {
            // Not there when the driver was opened: its own refusal is the answer.
            self.device_get(device)?;
            return Err(self.refused(Call::DeviceGet, Some(device), ResultCode::INVALID_DEVICE));
        };
        let context = slot.context.load(Ordering::Acquire);
        if context != 0 {
            return Ok(context);
        }
        let _making = slot.making.lock();
        let context = slot.context.load(Ordering::Acquire);
        if context != 0 {
            return Ok(context);
        }
        let context = self.primary_context_retain(device)?.0;
        slot.context.store(context, Ordering::Release);
        Ok(context)
    }

    pub(super) fn primary_context_retain(&self, device: DeviceId) -> DriverResult<ContextHandle> {
        let handle = self.device_handle(device)?;
        let mut context = 0;
        self.door(Call::DevicePrimaryCtxRetain, Some(device), || {
            (self.entry.primary_ctx_retain)(&mut context, handle)
        })?;
        Ok(ContextHandle(context))
    }

    pub(super) fn primary_context_release(&self, device: DeviceId) -> DriverResult<()> {
        let handle = self.device_handle(device)?;
        self.door(Call::DevicePrimaryCtxRelease, Some(device), || {
            (self.entry.primary_ctx_release)(handle)
        })
    }

    /// Makes the primary context of `device` current until the scope is dropped.
    pub(super) fn enter(&self, device: DeviceId) -> DriverResult<Scope<'_>> {
        let context = self.context_of(device)?;
        let current = self.current()?;
        if current == context {
            return Ok(Scope { cuda: self, previous: None });
        }
        // SAFETY: this object holds a reference on the context as long as it lives.
        unsafe { self.set_current(context) }.map_err(|error| error.on(device))?;
        Ok(Scope { cuda: self, previous: Some(current) })
    }

    /// For the few calls that name no device and yet may want a context: if none is current, any
    /// that was made already. None made is fine too: then there is nothing such a call could find.
    pub(super) fn enter_any(&self) -> DriverResult<Scope<'_>> {
        let idle = Scope { cuda: self, previous: None };
        let made = self.devices.iter().map(|slot| slot.context.load(Ordering::Acquire));
        let Some(context) = made.into_iter().find(|&context| context != 0) else {
            return Ok(idle);
        };
        if self.current()? != 0 {
            return Ok(idle);
        }
        // SAFETY: this object holds a reference on the context as long as it lives.
        unsafe { self.set_current(context) }?;
        Ok(Scope { cuda: self, previous: Some(0) })
    }

    /// `cuCtxGetCurrent`; 0 is none.
    pub(super) fn current(&self) -> DriverResult<u64> {
        let mut context = 0;
        self.door(Call::CtxGetCurrent, None, || (self.entry.ctx_get_current)(&mut context))?;
        Ok(context)
    }

    /// `cuCtxSetCurrent`.
    ///
    /// # Safety
    /// The context is live, or 0 for none.
    pub(super) unsafe fn set_current(&self, context: u64) -> DriverResult<()> {
        self.door(Call::CtxSetCurrent, None, || {
            // SAFETY: the caller vouches for the context.
            unsafe { (self.entry.ctx_set_current)(context) }
        })
    }

    /// Gives back what was made for a device, when the driver object goes.
    pub(super) fn give_back(&self, device: DeviceId, slot: &DeviceSlot) {
        let context = slot.context.load(Ordering::Acquire);
        if context == 0 {
            return;
        }
        if let Some(probes) = slot.probes.lock().take() {
            self.unload_probes(device, probes);
        }
        if let Err(error) = self.primary_context_release(device) {
            tracing::debug!(%error, "a primary context could not be given back");
        }
        slot.context.store(0, Ordering::Release);
    }

    pub(super) fn context_current(&self) -> DriverResult<Option<ContextHandle>> {
        let context = self.current()?;
        Ok((context != 0).then_some(ContextHandle(context)))
    }

    /// # Safety
    /// As [`crate::Driver::context_set_current`].
    pub(super) unsafe fn context_set_current(
        &self,
        context: Option<ContextHandle>,
    ) -> DriverResult<()> {
        // SAFETY: the caller says that the context is live.
        unsafe { self.set_current(context.map_or(0, |context| context.0)) }
    }

    pub(super) fn device_synchronize(&self, device: DeviceId) -> DriverResult<()> {
        let _scope = self.enter(device)?;
        self.door(Call::CtxSynchronize, Some(device), || (self.entry.ctx_synchronize)())
    }
}
