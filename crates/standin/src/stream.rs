//! Streams and host functions.

use std::ffi::c_void;

use vmm_sys::{Driver, EventHandle, PinnedAddress, ResultCode, StreamHandle};

use crate::door::{Done, Out, Refusal};
use crate::machine::{current, sim};

/// `CU_STREAM_DEFAULT`
const DEFAULT: u32 = 0;
/// `CU_STREAM_NON_BLOCKING`
const NON_BLOCKING: u32 = 1;
/// `CU_STREAM_WAIT_VALUE_GEQ`
const WAIT_GEQ: u32 = 0;

fn create(stream: *mut u64, flags: u32) -> Done {
    let out = Out::new(stream)?;
    let (sim, device) = current()?;
    match flags {
        DEFAULT => out.set(sim.stream_create_blocking(device)?.0),
        NON_BLOCKING => out.set(sim.stream_create(device)?.0),
        _ => Err(Refusal::new(ResultCode::INVALID_VALUE, format_args!("stream flags {flags}"))),
    }
}

/// The argument of a host function, on its way to the thread that calls it.
struct Argument(*mut c_void);

// SAFETY: the caller of `cuLaunchHostFunc` hands the pointer to a thread of the driver, whatever it
// points to.
unsafe impl Send for Argument {}

impl Argument {
    fn get(self) -> *mut c_void {
        self.0
    }
}

entries! {
    fn cuStreamCreate(stream: *mut u64, flags: u32) {
        create(stream, flags)
    }

    /// Every priority is brought into the range, which is one value.
    fn cuStreamCreateWithPriority(stream: *mut u64, flags: u32, _priority: i32) {
        create(stream, flags)
    }

    fn cuStreamDestroy_v2(stream: u64) {
        let (sim, device) = current()?;
        // SAFETY: the simulated device checks the handle.
        Ok(unsafe { sim.stream_destroy(device, StreamHandle(stream)) }?)
    }

    fn cuStreamGetId(stream: u64, id: *mut u64) {
        let out = Out::new(id)?;
        let (sim, device) = current()?;
        // SAFETY: the simulated device checks the handle.
        out.set(unsafe { sim.stream_id(device, StreamHandle(stream)) }?.0)
    }

    fn cuStreamGetFlags(stream: u64, flags: *mut u32) {
        let out = Out::new(flags)?;
        let (sim, device) = current()?;
        // SAFETY: the simulated device checks the handle.
        unsafe { sim.stream_id(device, StreamHandle(stream)) }?;
        let blocking = sim.created_stream(StreamHandle(stream)).is_none_or(|(_, blocking)| blocking);
        out.set(if blocking { DEFAULT } else { NON_BLOCKING })
    }

    fn cuStreamGetPriority(stream: u64, priority: *mut i32) {
        let out = Out::new(priority)?;
        let (sim, device) = current()?;
        // SAFETY: the simulated device checks the handle.
        unsafe { sim.stream_id(device, StreamHandle(stream)) }?;
        out.set(0)
    }

    /// The default streams are those of the current context.
    fn cuStreamGetCtx(stream: u64, context: *mut u64) {
        let out = Out::new(context)?;
        let (sim, device) = current()?;
        // SAFETY: the simulated device checks the handle.
        unsafe { sim.stream_id(device, StreamHandle(stream)) }?;
        let home = sim.created_stream(StreamHandle(stream)).map_or(device, |(home, _)| home);
        out.set(sim.primary_context(home).map_or(0, |context| context.0))
    }

    fn cuStreamGetDevice(stream: u64, device: *mut i32) {
        let out = Out::new(device)?;
        let (sim, current) = current()?;
        // SAFETY: the simulated device checks the handle.
        unsafe { sim.stream_id(current, StreamHandle(stream)) }?;
        let home = sim.created_stream(StreamHandle(stream)).map_or(current, |(home, _)| home);
        out.set(home.0.cast_signed())
    }

    fn cuStreamQuery(stream: u64) {
        let (sim, device) = current()?;
        // SAFETY: the simulated device checks the handle.
        match unsafe { sim.stream_query(device, StreamHandle(stream)) }? {
            true => Ok(()),
            false => Err(Refusal::new(ResultCode::NOT_READY, "")),
        }
    }

    fn cuStreamSynchronize(stream: u64) {
        let (sim, device) = current()?;
        // SAFETY: the simulated device checks the handle.
        Ok(unsafe { sim.stream_synchronize(device, StreamHandle(stream)) }?)
    }

    fn cuStreamWaitEvent(stream: u64, event: u64, flags: u32) {
        let (sim, device) = current()?;
        if flags != 0 {
            return Err(Refusal::new(ResultCode::NOT_SUPPORTED, format_args!("wait flags {flags}")));
        }
        // SAFETY: the simulated device checks both handles.
        Ok(unsafe { sim.stream_wait_event(device, StreamHandle(stream), EventHandle(event)) }?)
    }

    /// Of the comparisons there is "at least", as a gate needs it.
    fn cuStreamWaitValue32_v2(stream: u64, address: u64, value: u32, flags: u32) {
        let (sim, device) = current()?;
        if flags != WAIT_GEQ {
            return Err(Refusal::new(ResultCode::NOT_SUPPORTED, format_args!("wait flags {flags}")));
        }
        // SAFETY: the simulated device checks the handle, and that the word is page-locked memory.
        Ok(unsafe {
            sim.stream_wait_value32(device, StreamHandle(stream), PinnedAddress(address), value)
        }?)
    }

    fn cuLaunchHostFunc(stream: u64, function: Option<unsafe extern "C" fn(*mut c_void)>, argument: *mut c_void) {
        let (sim, device) = current()?;
        let Some(function) = function else {
            return Err(Refusal::new(ResultCode::INVALID_VALUE, "null in the place of a function"));
        };
        let argument = Argument(argument);
        // SAFETY: what the function may be called with, and until when, is the caller's promise.
        let run = move || unsafe { function(argument.get()) };
        // SAFETY: the simulated device checks the handle.
        Ok(unsafe { sim.launch_host_function(device, StreamHandle(stream), Box::new(run)) }?)
    }

    fn cuThreadExchangeStreamCaptureMode(mode: *mut u32) {
        let out = Out::new(mode)?;
        // SAFETY: not null, and the caller has a mode there.
        let wanted = crate::graph::mode_from(unsafe { mode.read() })?;
        out.set(crate::graph::mode_to(sim()?.exchange_capture_mode(wanted)?))
    }
}
