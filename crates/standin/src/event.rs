//! Events.

use vmm_sys::{Driver, EventHandle, IpcEventHandle, ResultCode, StreamHandle};

use crate::door::{Done, Out, Refusal};
use crate::machine::current;

/// `CU_EVENT_BLOCKING_SYNC`: how a thread waits, which nobody can see.
const BLOCKING_SYNC: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`
const DISABLE_TIMING: u32 = 2;
/// `CU_EVENT_INTERPROCESS`
const INTERPROCESS: u32 = 4;

/// `CUipcEventHandle`, passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct IpcEvent([u8; 64]);

fn elapsed(milliseconds: *mut f32, start: u64, end: u64) -> Done {
    let out = Out::new(milliseconds)?;
    let (sim, device) = current()?;
    let nanos = sim.event_elapsed_ns(device, EventHandle(start), EventHandle(end))?;
    out.set((nanos as f64 / 1e6) as f32)
}

entries! {
    fn cuEventCreate(event: *mut u64, flags: u32) {
        let out = Out::new(event)?;
        let (sim, device) = current()?;
        match flags & !BLOCKING_SYNC {
            0 => out.set(sim.event_create_timed(device)?.0),
            DISABLE_TIMING => out.set(sim.event_create(device)?.0),
            flags if flags == DISABLE_TIMING | INTERPROCESS => {
                out.set(sim.event_create_interprocess(device)?.0)
            }
            _ => Err(Refusal::new(ResultCode::NOT_SUPPORTED, format_args!("event flags {flags}"))),
        }
    }

    fn cuEventDestroy_v2(event: u64) {
        let (sim, device) = current()?;
        // SAFETY: the simulated device checks the handle.
        Ok(unsafe { sim.event_destroy(device, EventHandle(event)) }?)
    }

    fn cuEventRecord(event: u64, stream: u64) {
        let (sim, device) = current()?;
        // SAFETY: the simulated device checks both handles.
        Ok(unsafe { sim.event_record(device, EventHandle(event), StreamHandle(stream)) }?)
    }

    fn cuEventQuery(event: u64) {
        let (sim, device) = current()?;
        // SAFETY: the simulated device checks the handle.
        match unsafe { sim.event_query(device, EventHandle(event)) }? {
            true => Ok(()),
            false => Err(Refusal::new(ResultCode::NOT_READY, "")),
        }
    }

    fn cuEventSynchronize(event: u64) {
        let (sim, device) = current()?;
        // SAFETY: the simulated device checks the handle.
        Ok(unsafe { sim.event_synchronize(device, EventHandle(event)) }?)
    }

    fn cuEventElapsedTime(milliseconds: *mut f32, start: u64, end: u64) {
        elapsed(milliseconds, start, end)
    }

    fn cuEventElapsedTime_v2(milliseconds: *mut f32, start: u64, end: u64) {
        elapsed(milliseconds, start, end)
    }

    fn cuIpcGetEventHandle(handle: *mut IpcEvent, event: u64) {
        let out = Out::new(handle)?;
        let (sim, device) = current()?;
        // SAFETY: the simulated device checks the handle.
        let IpcEventHandle(bytes) = unsafe { sim.ipc_event_handle(device, EventHandle(event)) }?;
        out.set(IpcEvent(bytes))
    }

    fn cuIpcOpenEventHandle(event: *mut u64, handle: IpcEvent) {
        let out = Out::new(event)?;
        let (sim, device) = current()?;
        out.set(sim.ipc_event_open(device, &IpcEventHandle(handle.0))?.0)
    }
}
