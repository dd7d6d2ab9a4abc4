//! Capture and graphs.

use crate::error::DriverResult;
use crate::types::{
    CaptureMode, CaptureStatus, DeviceId, GraphExecHandle, GraphHandle, StreamHandle,
};

use super::Scratch;

impl Scratch<'_> {
    pub(crate) fn capture_begin(
        &self,
        device: DeviceId,
        stream: StreamHandle,
        mode: CaptureMode,
    ) -> DriverResult<()> {
        self.must_run(stream);
        // SAFETY: the stream is of this row.
        unsafe { self.driver().capture_begin(device, stream, mode)? };
        self.made.lock().captures.push((device, stream));
        Ok(())
    }

    /// Ends a capture, valid or not.
    pub(crate) fn capture_end(
        &self,
        device: DeviceId,
        stream: StreamHandle,
    ) -> DriverResult<GraphHandle> {
        self.must_run(stream);
        self.made.lock().captures.retain(|&(_, captured)| captured != stream);
        // SAFETY: the stream is of this row.
        let graph = unsafe { self.driver().capture_end(device, stream)? };
        self.made.lock().graphs.push((device, graph));
        Ok(graph)
    }

    pub(crate) fn capture_status(
        &self,
        device: DeviceId,
        stream: StreamHandle,
    ) -> DriverResult<CaptureStatus> {
        self.must_run(stream);
        // SAFETY: the stream is of this row.
        Ok(unsafe { self.driver().capture_info(device, stream)? }.status)
    }

    pub(crate) fn instantiate(
        &self,
        device: DeviceId,
        graph: GraphHandle,
    ) -> DriverResult<GraphExecHandle> {
        let known = self.made.lock().graphs.contains(&(device, graph));
        assert!(known, "{graph:?} is not of this row");
        // SAFETY: the graph is of this row, which destroys it at its end only.
        let exec = unsafe { self.driver().graph_instantiate(device, graph)? };
        self.made.lock().execs.push((device, exec));
        Ok(exec)
    }

    /// Launches a graph and waits for it.
    pub(crate) fn replay(
        &self,
        device: DeviceId,
        exec: GraphExecHandle,
        stream: StreamHandle,
    ) -> DriverResult<()> {
        let known = self.made.lock().execs.contains(&(device, exec));
        assert!(known, "{exec:?} is not of this row");
        self.must_run(stream);
        // SAFETY: graph and stream are of this row, which destroys them at its end only.
        unsafe { self.driver().graph_launch(device, exec, stream)? };
        self.synchronize(device, stream)
    }
}
