//! A graph that uses the buffer: captured once, launched again after every move.

#![allow(unsafe_code)] // the contract's calls for graphs take handles

use std::sync::Arc;

use vmm_sys::object::Stream;
use vmm_sys::{CaptureMode, DeviceId, Driver, DriverResult, GraphExecHandle, ProbeKernel};

use super::bytes::{check_all, launch, write};
use super::stage::{Stage, StepResult};
use super::telling::{Told, Trouble};

/// An executable graph that writes all of the buffer.
pub(super) struct Graph {
    driver: Arc<dyn Driver>,
    device: DeviceId,
    exec: GraphExecHandle,
    /// The first of the words that it writes.
    value: u32,
}

impl Graph {
    /// Captures what `work` enqueues on the stream.
    fn capture(
        stream: &Stream,
        value: u32,
        work: impl FnOnce() -> DriverResult<()>,
    ) -> DriverResult<Graph> {
        let (driver, device) = (stream.driver().clone(), stream.device());
        // SAFETY: the stream owns a live handle. The capture is ended whatever came of the work, and
        // the graph is destroyed once, after its executable was made.
        let exec = unsafe {
            driver.capture_begin(device, stream.handle(), CaptureMode::ThreadLocal)?;
            let worked = work();
            let graph = driver.capture_end(device, stream.handle())?;
            let exec = worked.and_then(|()| driver.graph_instantiate(device, graph));
            driver.graph_destroy(device, graph)?;
            exec?
        };
        Ok(Graph { driver, device, exec, value })
    }

    fn launch(&self, stream: &Stream) -> DriverResult<()> {
        // SAFETY: the executable is alive as long as `self`, the stream owns a live handle, and the
        // caller holds a guard of the buffer that the graph writes to.
        unsafe { self.driver.graph_launch(self.device, self.exec, stream.handle()) }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.driver.is_gone() {
            return;
        }
        // SAFETY: the executable is alive, owned, and not used afterwards. Whoever launched it has
        // waited for the launch. A refusal leaves it to the end of the process.
        let _ = unsafe { self.driver.graph_exec_destroy(self.device, self.exec) };
    }
}

pub(super) fn capture(stage: &mut Stage) -> StepResult {
    let stream = &stage.first.stream;
    let value = 0x6000_0000;
    let kernel = ProbeKernel::FillWords { dst: stage.address, words: stage.bytes / 4, value };
    let graph = Graph::capture(stream, value, || launch(stream, &kernel))?;
    stage.graph = Some(graph);
    replay(stage)?;
    Ok(Told::Done("captured a graph that writes every word of the buffer, and launched it".into()))
}

/// Writes other words over the buffer, launches the graph, and finds the graph's words.
pub(super) fn replay(stage: &mut Stage) -> Result<(), Trouble> {
    let Some(graph) = &stage.graph else { return Ok(()) };
    write(stage, &stage.first, stage.bytes, !graph.value)?;
    {
        let _using = stage.buffer.use_on(&stage.first.stream)?;
        graph.launch(&stage.first.stream)?;
    }
    stage.first.stream.synchronize()?;
    stage.value = graph.value;
    check_all(stage)
}
