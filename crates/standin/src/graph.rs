//! Stream capture and graphs.

use std::ffi::c_void;

use vmm_sys::{
    CaptureInfo, CaptureMode, CaptureStatus, Driver, GraphExecHandle, GraphHandle, ResultCode,
    StreamHandle,
};

use crate::door::{Done, Out, Refusal};
use crate::machine::current;

/// `CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH`: no graph here has memory of its own.
const AUTO_FREE: u64 = 1;

/// `CUstreamCaptureMode`.
pub(crate) fn mode_from(mode: u32) -> Result<CaptureMode, Refusal> {
    match mode {
        0 => Ok(CaptureMode::Global),
        1 => Ok(CaptureMode::ThreadLocal),
        2 => Ok(CaptureMode::Relaxed),
        _ => Err(Refusal::new(ResultCode::INVALID_VALUE, format_args!("capture mode {mode}"))),
    }
}

/// The other way round.
pub(crate) fn mode_to(mode: CaptureMode) -> u32 {
    match mode {
        CaptureMode::Global => 0,
        CaptureMode::ThreadLocal => 1,
        CaptureMode::Relaxed => 2,
    }
}

/// `CUstreamCaptureStatus`.
fn status_to(status: CaptureStatus) -> u32 {
    match status {
        CaptureStatus::None => 0,
        CaptureStatus::Active => 1,
        CaptureStatus::Invalidated => 2,
    }
}

fn capture_info(stream: u64) -> Result<CaptureInfo, Refusal> {
    let (sim, device) = current()?;
    // SAFETY: the simulated device checks the handle.
    Ok(unsafe { sim.capture_info(device, StreamHandle(stream)) }?)
}

/// Null means not wanted; the id is written while the capture is active.
fn tell(stream: u64, status: *mut u32, id: *mut u64) -> Done {
    let status = Out::new(status)?;
    let info = capture_info(stream)?;
    if info.status == CaptureStatus::Active && !id.is_null() {
        Out::new(id)?.set(info.id)?;
    }
    status.set(status_to(info.status))
}

/// The graph of a capture in progress cannot be had.
fn refuse_lists(lists: &[*mut c_void]) -> Done {
    match lists.iter().all(|list| list.is_null()) {
        true => Ok(()),
        false => Err(Refusal::new(ResultCode::NOT_SUPPORTED, "the graph of a capture in progress")),
    }
}

entries! {
    fn cuStreamBeginCapture_v2(stream: u64, mode: u32) {
        let (sim, device) = current()?;
        let mode = mode_from(mode)?;
        // SAFETY: the simulated device checks the handle.
        Ok(unsafe { sim.capture_begin(device, StreamHandle(stream), mode) }?)
    }

    /// A spoilt capture ends too, with its code and no graph.
    fn cuStreamEndCapture(stream: u64, graph: *mut u64) {
        let place = Out::new(graph)?;
        let (sim, device) = current()?;
        // SAFETY: the simulated device checks the handle.
        match unsafe { sim.capture_end(device, StreamHandle(stream)) } {
            Ok(graph) => place.set(graph.0),
            Err(error) => {
                place.set(0)?;
                Err(error.into())
            }
        }
    }

    fn cuStreamIsCapturing(stream: u64, status: *mut u32) {
        let out = Out::new(status)?;
        out.set(status_to(capture_info(stream)?.status))
    }

    fn cuStreamGetCaptureInfo(stream: u64, status: *mut u32, id: *mut u64) {
        tell(stream, status, id)
    }

    fn cuStreamGetCaptureInfo_v2(
        stream: u64, status: *mut u32, id: *mut u64,
        graph: *mut c_void, dependencies: *mut c_void, dependency_count: *mut c_void,
    ) {
        refuse_lists(&[graph, dependencies, dependency_count])?;
        tell(stream, status, id)
    }

    fn cuStreamGetCaptureInfo_v3(
        stream: u64, status: *mut u32, id: *mut u64,
        graph: *mut c_void, dependencies: *mut c_void, edges: *mut c_void, dependency_count: *mut c_void,
    ) {
        refuse_lists(&[graph, dependencies, edges, dependency_count])?;
        tell(stream, status, id)
    }

    fn cuGraphInstantiateWithFlags(exec: *mut u64, graph: u64, flags: u64) {
        let out = Out::new(exec)?;
        let (sim, device) = current()?;
        if flags & !AUTO_FREE != 0 {
            return Err(Refusal::new(ResultCode::NOT_SUPPORTED, format_args!("flags {flags:#x}")));
        }
        // SAFETY: the simulated device checks the handle.
        out.set(unsafe { sim.graph_instantiate(device, GraphHandle(graph)) }?.0)
    }

    fn cuGraphLaunch(exec: u64, stream: u64) {
        let (sim, device) = current()?;
        // SAFETY: the simulated device checks both handles.
        Ok(unsafe { sim.graph_launch(device, GraphExecHandle(exec), StreamHandle(stream)) }?)
    }

    fn cuGraphDestroy(graph: u64) {
        let (sim, device) = current()?;
        // SAFETY: the simulated device checks the handle.
        Ok(unsafe { sim.graph_destroy(device, GraphHandle(graph)) }?)
    }

    fn cuGraphExecDestroy(exec: u64) {
        let (sim, device) = current()?;
        // SAFETY: the simulated device checks the handle.
        Ok(unsafe { sim.graph_exec_destroy(device, GraphExecHandle(exec)) }?)
    }
}
