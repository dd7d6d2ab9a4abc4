//! Primary contexts, and each thread's stack of current ones.

use std::cell::RefCell;

use parking_lot::Mutex;
use vmm_sys::{ContextHandle, Driver, ResultCode};

use crate::door::{Done, Out, Refusal};
use crate::machine::{current, device_id, machine, sim};

thread_local! {
    /// What lies below the current context (0: none), the simulated device knows the top.
    static BELOW: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

/// Counting references and ending a context are one step.
static PRIMARY: Mutex<()> = Mutex::new(());

/// What lies directly below the top, taken off. A thread that is ending has no stack any more.
fn pop_below() -> u64 {
    let popped = BELOW.try_with(|stack| stack.borrow_mut().pop());
    popped.ok().flatten().unwrap_or(0)
}

fn top() -> Result<u64, Refusal> {
    Ok(sim()?.context_current()?.map_or(0, |context| context.0))
}

fn set_top(context: u64) -> Done {
    let context = (context != 0).then_some(ContextHandle(context));
    // SAFETY: the simulated device checks the handle.
    Ok(unsafe { sim()?.context_set_current(context) }?)
}

/// The device of a context that a call names.
pub(crate) fn device_of(context: u64) -> Result<vmm_sys::DeviceId, Refusal> {
    sim()?.context_device(ContextHandle(context)).ok_or_else(|| {
        Refusal::new(ResultCode::INVALID_CONTEXT, format_args!("no context {context:#x}"))
    })
}

entries! {
    fn cuDevicePrimaryCtxRetain(context: *mut u64, device: i32) {
        let out = Out::new(context)?;
        let _step = PRIMARY.lock();
        out.set(sim()?.primary_context_retain(device_id(device))?.0)
    }

    /// The simulated device keeps a reference of its own for whoever names a device without a
    /// context. Nobody does here, so the last release ends the context, as on a GPU.
    fn cuDevicePrimaryCtxRelease_v2(device: i32) {
        let (sim, device) = (sim()?, device_id(device));
        let _step = PRIMARY.lock();
        sim.primary_context_release(device)?;
        let summary = sim.ledger_summary();
        if summary.devices.get(device.0 as usize).is_some_and(|it| it.context_references == 0) {
            sim.reset_context(device);
            machine()?.modules.lock().forget(device);
        }
        Ok(())
    }

    fn cuCtxGetCurrent(context: *mut u64) {
        let out = Out::new(context)?;
        out.set(top()?)
    }

    /// Replaces the top of the stack; null takes it off.
    fn cuCtxSetCurrent(context: u64) {
        match context {
            0 => set_top(pop_below()),
            _ => set_top(context),
        }
    }

    fn cuCtxPushCurrent_v2(context: u64) {
        device_of(context)?;
        let below = top()?;
        let pushed = BELOW.try_with(|stack| stack.borrow_mut().push(below));
        pushed.map_err(|error| Refusal::new(ResultCode::UNKNOWN, error))?;
        set_top(context)
    }

    fn cuCtxPopCurrent_v2(context: *mut u64) {
        let top = top()?;
        if top == 0 {
            return Err(Refusal::new(ResultCode::INVALID_CONTEXT, "no context is current"));
        }
        set_top(pop_below())?;
        // Null is allowed here.
        match context.is_null() {
            true => Ok(()),
            false => Out::new(context)?.set(top),
        }
    }

    fn cuCtxGetDevice(device: *mut i32) {
        let out = Out::new(device)?;
        out.set(current()?.1.0.cast_signed())
    }

    fn cuCtxSynchronize() {
        let (sim, device) = current()?;
        Ok(sim.device_synchronize(device)?)
    }

    /// There are no priorities: the range is one value.
    fn cuCtxGetStreamPriorityRange(least: *mut i32, greatest: *mut i32) {
        current()?;
        for place in [least, greatest] {
            // Null means not wanted.
            if !place.is_null() {
                Out::new(place)?.set(0)?;
            }
        }
        Ok(())
    }

    fn cuCtxEnablePeerAccess(context: u64, flags: u32) {
        let (sim, device) = current()?;
        let peer = device_of(context)?;
        match flags {
            0 => Ok(sim.enable_peer_access(device, peer)?),
            _ => Err(Refusal::new(ResultCode::INVALID_VALUE, format_args!("flags {flags}"))),
        }
    }

    fn cuCtxDisablePeerAccess(context: u64) {
        let (sim, device) = current()?;
        Ok(sim.disable_peer_access(device, device_of(context)?)?)
    }
}
