//! Primary contexts and the calling thread's current one.

use super::answer::{Answer, Refused};
use super::state::Context;
use super::{Locked, Sim};
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
            if let Some(told) = state.config.told_memory {
                return Ok(told);
            }
            let total_bytes = state.config.devices[device.0 as usize].bytes;
            let free_bytes = total_bytes.saturating_sub(state.device(device)?.used_bytes);
            Ok(MemInfo { free_bytes, total_bytes })
        })
    }
}

/// Whether a call waits while another one waits for all work of the device (row D-N18). Copies and
/// launches of the kinds that the row does not make are taken to do as those that it makes.
fn waits_behind(call: Call) -> bool {
    matches!(
        call,
        Call::MemcpyHtoD
            | Call::MemcpyDtoH
            | Call::MemcpyDtoD
            | Call::MemcpyPeer
            | Call::MemsetD8
            | Call::MemcpyHtoDAsync
            | Call::MemcpyDtoHAsync
            | Call::MemcpyDtoDAsync
            | Call::MemcpyPeerAsync
            | Call::MemsetD8Async
            | Call::LaunchKernel
            | Call::LaunchHostFunc
            | Call::GraphLaunch
            | Call::EventCreate
            | Call::EventRecord
    )
}

impl Sim {
    /// Waits for all work of the device, and keeps [such calls](waits_behind) of other threads
    /// waiting meanwhile.
    pub(super) fn drain_device_alone(
        &self,
        state: &mut Locked<'_>,
        device: DeviceId,
    ) -> Answer<()> {
        let count = |state: &mut Locked<'_>, change: fn(&mut Context)| {
            let entry = state.devices.get_mut(device.0 as usize);
            entry.and_then(|entry| entry.context.as_mut()).map(change)
        };
        count(state, |context| context.waiting_alone += 1);
        let drained = self.drain_device(state, device);
        // The context may have ended meanwhile, and its successor counts from 0.
        count(state, |context| context.waiting_alone = context.waiting_alone.saturating_sub(1));
        drained
    }

    /// Waits until no other thread waits for all work of the device, if `call` is one that does.
    pub(super) fn wait_behind(
        &self,
        state: &mut Locked<'_>,
        call: Call,
        device: DeviceId,
    ) -> Answer<()> {
        let is_free = |state: &super::State| {
            let context = state.devices.get(device.0 as usize).and_then(|it| it.context.as_ref());
            context.is_none_or(|context| context.waiting_alone == 0)
        };
        if is_free(state) || !waits_behind(call) {
            return Ok(());
        }
        self.wait_until(state, is_free)?;
        // What was waited for may have lost the context.
        state.check_context(device)
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
