//! Stream capture and graphs.

use std::ptr;

use super::ffi::{capture_mode_from_driver, capture_mode_to_driver, capture_status_from_driver};
use super::{Cuda, have};
use crate::call::Call;
use crate::error::DriverResult;
use crate::types::{
    CaptureInfo, CaptureMode, CaptureStatus, DeviceId, GraphExecHandle, GraphHandle, StreamHandle,
};

impl Cuda {
    /// # Safety
    /// As [`crate::Driver::capture_begin`].
    pub(super) unsafe fn capture_begin(
        &self,
        device: DeviceId,
        stream: StreamHandle,
        mode: CaptureMode,
    ) -> DriverResult<()> {
        let begin = have(Call::StreamBeginCapture, self.entry.stream_begin_capture)?;
        let _scope = self.enter(device)?;
        self.door(Call::StreamBeginCapture, Some(device), || {
            // SAFETY: the caller says that the stream is live.
            unsafe { begin(stream.0, capture_mode_to_driver(mode)) }
        })
    }

    /// # Safety
    /// As [`crate::Driver::capture_end`].
    pub(super) unsafe fn capture_end(
        &self,
        device: DeviceId,
        stream: StreamHandle,
    ) -> DriverResult<GraphHandle> {
        let end = have(Call::StreamEndCapture, self.entry.stream_end_capture)?;
        let _scope = self.enter(device)?;
        let mut graph = 0;
        self.door(Call::StreamEndCapture, Some(device), || {
            // SAFETY: the caller says that the stream is live.
            unsafe { end(stream.0, &mut graph) }
        })?;
        Ok(GraphHandle(graph))
    }

    /// # Safety
    /// As [`crate::Driver::capture_info`].
    pub(super) unsafe fn capture_info(
        &self,
        device: DeviceId,
        stream: StreamHandle,
    ) -> DriverResult<CaptureInfo> {
        let get = have(Call::StreamGetCaptureInfo, self.entry.stream_capture_info)?;
        let _scope = self.enter(device)?;
        let (mut status, mut id) = (0, 0);
        let none = ptr::null_mut();
        self.door(Call::StreamGetCaptureInfo, Some(device), || {
            // SAFETY: the caller says that the stream is live; null means not wanted.
            unsafe { get(stream.0, &mut status, &mut id, none, none, none) }
        })?;
        let status = capture_status_from_driver(status)?;
        // The driver writes the id only while the capture is active.
        Ok(CaptureInfo { status, id: if status == CaptureStatus::Active { id } else { 0 } })
    }

    pub(super) fn exchange_capture_mode(&self, mode: CaptureMode) -> DriverResult<CaptureMode> {
        let exchange =
            have(Call::ThreadExchangeStreamCaptureMode, self.entry.exchange_capture_mode)?;
        let mut value = capture_mode_to_driver(mode);
        self.door(Call::ThreadExchangeStreamCaptureMode, None, || exchange(&mut value))?;
        capture_mode_from_driver(value)
    }

    /// # Safety
    /// As [`crate::Driver::graph_instantiate`].
    pub(super) unsafe fn graph_instantiate(
        &self,
        device: DeviceId,
        graph: GraphHandle,
    ) -> DriverResult<GraphExecHandle> {
        let instantiate = have(Call::GraphInstantiate, self.entry.graph_instantiate)?;
        let _scope = self.enter(device)?;
        let mut exec = 0;
        self.door(Call::GraphInstantiate, Some(device), || {
            // SAFETY: the caller says that the graph is live.
            unsafe { instantiate(&mut exec, graph.0, 0) }
        })?;
        Ok(GraphExecHandle(exec))
    }

    /// # Safety
    /// As [`crate::Driver::graph_launch`].
    pub(super) unsafe fn graph_launch(
        &self,
        device: DeviceId,
        graph: GraphExecHandle,
        stream: StreamHandle,
    ) -> DriverResult<()> {
        let launch = have(Call::GraphLaunch, self.entry.graph_launch)?;
        let _scope = self.enter(device)?;
        self.door(Call::GraphLaunch, Some(device), || {
            // SAFETY: the caller says that both are live.
            unsafe { launch(graph.0, stream.0) }
        })
    }

    /// # Safety
    /// As [`crate::Driver::graph_destroy`].
    pub(super) unsafe fn graph_destroy(
        &self,
        device: DeviceId,
        graph: GraphHandle,
    ) -> DriverResult<()> {
        let destroy = have(Call::GraphDestroy, self.entry.graph_destroy)?;
        let _scope = self.enter(device)?;
        self.door(Call::GraphDestroy, Some(device), || {
            // SAFETY: the caller owns the live graph and gives it up.
            unsafe { destroy(graph.0) }
        })
    }

    /// # Safety
    /// As [`crate::Driver::graph_exec_destroy`].
    pub(super) unsafe fn graph_exec_destroy(
        &self,
        device: DeviceId,
        graph: GraphExecHandle,
    ) -> DriverResult<()> {
        let destroy = have(Call::GraphExecDestroy, self.entry.graph_exec_destroy)?;
        let _scope = self.enter(device)?;
        self.door(Call::GraphExecDestroy, Some(device), || {
            // SAFETY: the caller owns the live graph and gives it up.
            unsafe { destroy(graph.0) }
        })
    }
}
