//! Captured graphs by handle: made executable, launched, destroyed.

use std::sync::Arc;

use super::Sim;
use super::answer::{Answer, Refused};
use super::graphs::Graph;
use super::state::State;
use super::timeline::Op;
use crate::call::Call;
use crate::error::DriverResult;
use crate::types::{DeviceId, GraphExecHandle, GraphHandle, StreamHandle};

const GRAPH_BASE: u64 = 0x64A9_0000_0000;
const EXEC_BASE: u64 = 0x64AE_0000_0000;
const HANDLE_STEP: u64 = 0x40;

fn index_from(handle: u64, base: u64) -> Option<usize> {
    let offset = handle.checked_sub(base)?;
    offset.is_multiple_of(HANDLE_STEP).then_some((offset / HANDLE_STEP) as usize)
}

impl State {
    /// Gives a graph a handle.
    pub(super) fn add_graph(&mut self, graph: Graph) -> GraphHandle {
        let index = self.captures.graphs.insert(Arc::new(graph));
        GraphHandle(GRAPH_BASE + index as u64 * HANDLE_STEP)
    }

    /// The graph behind a handle.
    fn graph_index(&self, graph: GraphHandle) -> Answer<usize> {
        index_from(graph.0, GRAPH_BASE)
            .filter(|index| self.captures.graphs.contains(*index))
            .ok_or_else(|| Refused::invalid_handle(format_args!("no graph {:#x}", graph.0)))
    }

    /// The executable behind a handle.
    fn exec_index(&self, graph: GraphExecHandle) -> Answer<usize> {
        index_from(graph.0, EXEC_BASE)
            .filter(|index| self.captures.execs.contains(*index))
            .ok_or_else(|| Refused::invalid_handle(format_args!("no graph {:#x}", graph.0)))
    }
}

impl Sim {
    /// Shares the nodes: a graph never changes.
    pub(super) fn do_graph_instantiate(
        &self,
        device: DeviceId,
        graph: GraphHandle,
    ) -> DriverResult<GraphExecHandle> {
        self.call_on(Call::GraphInstantiate, device, |state| {
            let index = state.graph_index(graph)?;
            let exec = Arc::clone(&state.captures.graphs[index]);
            let index = state.captures.execs.insert(exec);
            Ok(GraphExecHandle(EXEC_BASE + index as u64 * HANDLE_STEP))
        })
    }

    /// One item of the stream, which runs the nodes one after another.
    pub(super) fn do_graph_launch(
        &self,
        device: DeviceId,
        graph: GraphExecHandle,
        stream: StreamHandle,
    ) -> DriverResult<()> {
        self.call_on(Call::GraphLaunch, device, |state| {
            let stream = state.stream(device, stream)?;
            let exec = Arc::clone(&state.captures.execs[state.exec_index(graph)?]);
            state.submit(stream, Op::Graph(exec))
        })
    }

    /// Executables made from it live on.
    pub(super) fn do_graph_destroy(
        &self,
        device: DeviceId,
        graph: GraphHandle,
    ) -> DriverResult<()> {
        self.call_on(Call::GraphDestroy, device, |state| {
            let index = state.graph_index(graph)?;
            state.captures.graphs.remove(index);
            Ok(())
        })
    }

    /// A launch in flight keeps its nodes.
    pub(super) fn do_graph_exec_destroy(
        &self,
        device: DeviceId,
        graph: GraphExecHandle,
    ) -> DriverResult<()> {
        self.call_on(Call::GraphExecDestroy, device, |state| {
            // A launch in flight keeps its nodes.
            let index = state.exec_index(graph)?;
            state.captures.execs.remove(index);
            Ok(())
        })
    }
}
