//! Primary contexts and the calling thread's current one.

use super::Sim;
use super::answer::Refused;
use crate::call::Call;
use crate::error::{DriverResult, ResultCode};
use crate::types::{ContextHandle, DeviceId, Location, MemInfo};

impl Sim {
    /// One reference more; the first makes the context.
    pub(super) fn do_context_retain(&self, device: DeviceId) -> DriverResult<ContextHandle> {
        self.ask(Call::DevicePrimaryCtxRetain, Some(device), |state| {
            state.ensure_context(device)?;
            let entry = state.device_mut(device)?;
            let context = entry.context.as_mut().ok_or(Refused::new(ResultCode::UNKNOWN))?;
            context.references += 1;
            Ok(context.handle)
        })
    }

    /// One reference less. With the last one the context ends, unless the driver object itself has
    /// used it since.
    pub(super) fn do_context_release(&self, device: DeviceId) -> DriverResult<()> {
        self.ask(Call::DevicePrimaryCtxRelease, Some(device), |state| {
            let held = state.device_mut(device)?.context.as_mut();
            let Some(context) = held.filter(|context| context.references > 0) else {
                return Err(Refused::new(ResultCode::INVALID_CONTEXT)
                    .because("the primary context is not retained"));
            };
            context.references -= 1;
            if context.references == 0 && !context.implicit {
                state.destroy_context(device);
            }
            Ok(())
        })
    }

    /// The calling thread's own, which no other call of this driver changes.
    pub(super) fn do_context_current(&self) -> DriverResult<Option<ContextHandle>> {
        self.ask(Call::CtxGetCurrent, None, |state| Ok(state.thread_mut().current))
    }

    /// A context that has ended is refused.
    pub(super) fn do_context_set_current(
        &self,
        context: Option<ContextHandle>,
    ) -> DriverResult<()> {
        self.ask(Call::CtxSetCurrent, None, |state| {
            if let Some(context) = context
                && state.context_device(context).is_none()
            {
                return Err(Refused::new(ResultCode::INVALID_CONTEXT)
                    .because(format_args!("no context {:#x}", context.0)));
            }
            state.thread_mut().current = context;
            Ok(())
        })
    }

    /// Waits for every stream of the device, and reports what went wrong on it.
    pub(super) fn do_device_synchronize(&self, device: DeviceId) -> DriverResult<()> {
        self.call_on(Call::CtxSynchronize, device, |state| {
            state.refuse_while_capturing(device)?;
            self.drain_device(state, device)?;
            state.trim_pool(device);
            state.report_fault(device)
        })
    }

    /// Memory whose last descriptor was closed since is noticed here (row D-X6).
    pub(super) fn do_mem_info(&self, device: DeviceId) -> DriverResult<MemInfo> {
        self.call_on(Call::MemGetInfo, device, |state| {
            state.collect_orphans();
            let total_bytes = state.config.devices[device.0 as usize].bytes;
            let free_bytes = total_bytes.saturating_sub(state.device(device)?.used_bytes);
            Ok(MemInfo { free_bytes, total_bytes })
        })
    }
}

impl super::State {
    /// Bytes free at a location, after descriptors closed since were noticed.
    pub(super) fn make_room(&mut self, location: Location) {
        if !self.orphans.is_empty() && location != Location::Host {
            self.collect_orphans();
        }
    }
}
