//! Stream capture: what is recorded, what is forbidden meanwhile, and what poisons a capture.
//!
//! What may be called meanwhile depends on three things: the mode of the capture, whether the
//! caller is the capturing thread, and the mode that the calling thread has chosen for itself. Rows
//! D-G2 to D-G4 were measured with allocations, event queries and event waits; this file holds
//! stream queries and waits, synchronous copies and page-locked allocations to the same rule, which
//! is the strict reading. The VMM calls are never refused (row D-G1).
//!
//! A capture starts in one stream and spreads to others through events. Each stream in it has a
//! frontier: the nodes that its next node comes after. A capture that an illegal call spoilt stays
//! until it is ended, and says so to every call in its streams.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use slab::Slab;

use super::Sim;
use super::answer::{Answer, Refused};
use super::graphs::{Graph, Node};
use super::state::State;
use super::timeline::{Op, StreamKind};
use crate::call::Call;
use crate::error::{DriverResult, ResultCode};
use crate::sync::thread::{self, ThreadId};
use crate::types::{CaptureInfo, CaptureMode, CaptureStatus, DeviceId, GraphHandle, StreamHandle};

/// A captured node and the nodes it comes after.
#[derive(Debug)]
struct CapturedNode {
    node: Node,
    after: BTreeSet<usize>,
}

/// A capture in progress.
#[derive(Debug)]
struct Capture {
    origin: u64,
    thread: ThreadId,
    mode: CaptureMode,
    spoilt: bool,
    nodes: Vec<CapturedNode>,
    /// The streams in it, with what their next node comes after.
    frontiers: BTreeMap<u64, BTreeSet<usize>>,
}

/// What an event that was recorded in a capture stands for.
#[derive(Clone, Debug)]
pub(super) struct EventCapture {
    capture: u64,
    frontier: BTreeSet<usize>,
}

/// All captures in progress, and the graphs that came of them.
#[derive(Debug, Default)]
pub(super) struct Captures {
    active: BTreeMap<u64, Capture>,
    last_id: u64,
    pub(super) graphs: Slab<Arc<Graph>>,
    pub(super) execs: Slab<Arc<Graph>>,
}

impl Captures {
    /// The capture that a stream is in.
    fn of(&self, stream: u64) -> Option<u64> {
        let holds = |capture: &Capture| capture.frontiers.contains_key(&stream);
        self.active.iter().find(|(_, capture)| holds(capture)).map(|(id, _)| *id)
    }

    pub(super) fn active_count(&self) -> usize {
        self.active.len()
    }

    fn spoil(&mut self, id: u64) {
        if let Some(capture) = self.active.get_mut(&id) {
            capture.spoilt = true;
        }
    }
}

impl Capture {
    /// Whether every node is before the end of the origin stream.
    fn joined(&self) -> bool {
        let mut reached = BTreeSet::new();
        let mut open: Vec<usize> =
            self.frontiers.get(&self.origin).into_iter().flatten().copied().collect();
        while let Some(node) = open.pop() {
            if reached.insert(node) {
                open.extend(self.nodes[node].after.iter().copied());
            }
        }
        reached.len() == self.nodes.len()
    }
}

fn invalidated() -> Refused {
    Refused::new(ResultCode::STREAM_CAPTURE_INVALIDATED)
        .because("an illegal call has spoilt the capture")
}

fn implicit() -> Refused {
    Refused::new(ResultCode::STREAM_CAPTURE_IMPLICIT)
        .because("the legacy stream would wait for a captured stream")
}

fn unsupported(why: &str) -> Refused {
    Refused::new(ResultCode::STREAM_CAPTURE_UNSUPPORTED).because(why)
}

impl State {
    /// Whether a stream is being captured; an error if it is in a spoilt capture.
    pub(super) fn capturing(&self, stream: u64) -> Answer<bool> {
        match self.captures.of(stream) {
            None => Ok(false),
            Some(id) if self.captures.active[&id].spoilt => Err(invalidated()),
            Some(_) => Ok(true),
        }
    }

    /// Adds work to the capture that the stream is in.
    pub(super) fn capture_op(&mut self, stream: u64, op: Op) -> Answer<()> {
        let Some(id) = self.captures.of(stream) else { return Ok(()) };
        let nodes: Vec<Node> = match op {
            Op::Work(node) => vec![node],
            Op::Graph(graph) => graph.nodes.clone(),
            other => {
                self.captures.spoil(id);
                return Err(unsupported(&format!("{} cannot be captured here", other.name())));
            }
        };
        let Some(capture) = self.captures.active.get_mut(&id) else { return Ok(()) };
        let frontier = capture.frontiers.entry(stream).or_default();
        for node in nodes {
            let after = std::mem::take(frontier);
            frontier.insert(capture.nodes.len());
            capture.nodes.push(CapturedNode { node, after });
        }
        Ok(())
    }

    /// What an event recorded now in a captured stream stands for.
    pub(super) fn capture_point(&self, stream: u64) -> EventCapture {
        let capture = self.captures.of(stream).unwrap_or(0);
        let frontier = self.captures.active.get(&capture).and_then(|it| it.frontiers.get(&stream));
        EventCapture { capture, frontier: frontier.cloned().unwrap_or_default() }
    }

    /// A stream waits for an event of a capture: it joins the capture.
    pub(super) fn capture_join(&mut self, stream: u64, event: &EventCapture) -> Answer<()> {
        let inside = self.captures.of(stream);
        let Some(capture) = self.captures.active.get(&event.capture) else {
            if let Some(id) = inside {
                self.captures.spoil(id);
            }
            return Err(Refused::invalid_value("the event was captured, and the capture is over"));
        };
        if inside.is_some_and(|id| id != event.capture) {
            self.captures.spoil(event.capture);
            self.captures.spoil(inside.unwrap_or(0));
            return Err(Refused::new(ResultCode::STREAM_CAPTURE_MERGE)
                .because("the wait would join two captures"));
        }
        if capture.spoilt {
            return Err(invalidated());
        }
        if self.timeline.streams.get(&stream).is_some_and(|it| it.kind == StreamKind::Legacy) {
            self.captures.spoil(event.capture);
            return Err(Refused::new(ResultCode::STREAM_CAPTURE_IMPLICIT)
                .because("the legacy stream cannot join a capture"));
        }
        if let Some(capture) = self.captures.active.get_mut(&event.capture) {
            capture.frontiers.entry(stream).or_default().extend(&event.frontier);
        }
        Ok(())
    }

    /// A captured stream was told to wait for work outside the capture.
    pub(super) fn isolate_capture(&mut self, stream: u64) -> Refused {
        if let Some(id) = self.captures.of(stream) {
            self.captures.spoil(id);
        }
        Refused::new(ResultCode::STREAM_CAPTURE_ISOLATION)
            .because("a captured stream cannot wait for work outside the capture")
    }

    /// What a query of, or a wait for, an event of a capture answers.
    pub(super) fn captured_event(&self, event: &EventCapture) -> Refused {
        if self.captures.active.contains_key(&event.capture) {
            Refused::new(ResultCode::CAPTURED_EVENT).because("the event was recorded in a capture")
        } else {
            Refused::invalid_value("the event was captured, and the capture is over")
        }
    }

    /// Refuses a call that could disturb a capture, and spoils the captures that forbid it (rows
    /// D-G2, D-G3), unless the thread is in relaxed mode (row D-G4).
    pub(super) fn refuse_unsafe_in_capture(&mut self) -> Answer<()> {
        if self.captures.active.is_empty() {
            return Ok(());
        }
        let me = thread::current().id();
        let mine = self.thread_capture_mode();
        let forbids = |capture: &Capture| match (mine, capture.mode) {
            (CaptureMode::Relaxed, _) | (_, CaptureMode::Relaxed) => false,
            _ if capture.thread == me => true,
            (CaptureMode::Global, CaptureMode::Global) => true,
            _ => false,
        };
        let mut refused = false;
        for capture in self.captures.active.values_mut().filter(|capture| forbids(capture)) {
            capture.spoilt = true;
            refused = true;
        }
        if refused {
            return Err(unsupported("a stream is being captured, and its mode forbids this call"));
        }
        Ok(())
    }

    /// Refuses a question about the progress of a captured stream.
    pub(super) fn refuse_captured_stream(&mut self, stream: u64) -> Answer<()> {
        let Some(id) = self.captures.of(stream) else { return Ok(()) };
        self.captures.spoil(id);
        Err(unsupported("the stream is being captured"))
    }

    /// Refuses to wait for a whole device while one of its streams is captured.
    pub(super) fn refuse_while_capturing(&mut self, device: DeviceId) -> Answer<()> {
        let timeline = &self.timeline;
        let here = |capture: &Capture| {
            let of_device = |id| timeline.streams.get(id).is_some_and(|it| it.device == device);
            capture.frontiers.keys().any(of_device)
        };
        let mut refused = false;
        for capture in self.captures.active.values_mut().filter(|capture| here(capture)) {
            capture.spoilt = true;
            refused = true;
        }
        if refused {
            return Err(unsupported("a stream of the device is being captured"));
        }
        Ok(())
    }

    /// The captures that a stream is ordered with by the rule of the legacy stream: none, unless
    /// this is the legacy stream and a blocking stream of its device is being captured.
    fn implicit_captures(&self, stream: u64) -> Vec<u64> {
        let timeline = &self.timeline;
        let legacy = timeline.streams.get(&stream).filter(|it| it.kind == StreamKind::Legacy);
        let Some(legacy) = legacy.filter(|_| !self.captures.active.is_empty()) else {
            return Vec::new();
        };
        let ordered = |stream: &u64| timeline.is_blocking_on(*stream, legacy.device);
        let captures = self.captures.active.iter();
        captures.filter(|(_, it)| it.frontiers.keys().any(ordered)).map(|(id, _)| *id).collect()
    }

    /// Refuses work of the legacy stream that would have to wait for a captured stream.
    pub(super) fn refuse_implicit_capture(&mut self, stream: u64) -> Answer<()> {
        let spoilt = self.implicit_captures(stream);
        if spoilt.is_empty() {
            return Ok(());
        }
        for id in spoilt {
            self.captures.spoil(id);
        }
        Err(implicit())
    }

    /// A stream goes away: a capture that began in it is over, one that it joined is spoilt.
    pub(super) fn abandon_capture(&mut self, stream: u64) {
        let Some(id) = self.captures.of(stream) else { return };
        let Some(capture) = self.captures.active.get_mut(&id) else { return };
        if capture.origin == stream {
            self.captures.active.remove(&id);
        } else {
            capture.frontiers.remove(&stream);
            capture.spoilt = true;
        }
    }

    /// The graph, if nothing spoilt the capture and every stream that joined was joined back.
    fn capture_end(&mut self, stream: u64) -> Answer<GraphHandle> {
        let unmatched = || {
            Refused::new(ResultCode::STREAM_CAPTURE_UNMATCHED)
                .because("no capture was begun in this stream")
        };
        let id = self.captures.of(stream).ok_or_else(unmatched)?;
        let capture = &self.captures.active[&id];
        if capture.origin != stream {
            self.captures.spoil(id);
            return Err(unmatched());
        }
        if capture.mode != CaptureMode::Relaxed && capture.thread != thread::current().id() {
            return Err(Refused::new(ResultCode::STREAM_CAPTURE_WRONG_THREAD)
                .because("only a relaxed capture may be ended by another thread"));
        }
        let Some(capture) = self.captures.active.remove(&id) else { return Err(unmatched()) };
        if capture.spoilt {
            return Err(invalidated());
        }
        if !capture.joined() {
            return Err(Refused::new(ResultCode::STREAM_CAPTURE_UNJOINED).because(
                "a stream that joined the capture has work that its origin never waits for",
            ));
        }
        let nodes = capture.nodes.into_iter().map(|captured| captured.node).collect();
        Ok(self.add_graph(Graph { nodes }))
    }
}

impl Sim {
    /// The capture belongs to the calling thread, which decides what its mode forbids to whom.
    pub(super) fn do_capture_begin(
        &self,
        device: DeviceId,
        stream: StreamHandle,
        mode: CaptureMode,
    ) -> DriverResult<()> {
        self.call_on(Call::StreamBeginCapture, device, |state| {
            let id = state.stream(device, stream)?;
            if state.timeline.streams[&id].kind == StreamKind::Legacy {
                return Err(unsupported("the legacy stream cannot be captured"));
            }
            if state.captures.of(id).is_some() {
                return Err(Refused::new(ResultCode::ILLEGAL_STATE)
                    .because("the stream is being captured already"));
            }
            state.captures.last_id += 1;
            let capture = Capture {
                origin: id,
                thread: thread::current().id(),
                mode,
                spoilt: false,
                nodes: Vec::new(),
                frontiers: BTreeMap::from([(id, BTreeSet::new())]),
            };
            let capture_id = state.captures.last_id;
            state.captures.active.insert(capture_id, capture);
            Ok(())
        })
    }

    /// Ends the capture in any case but two: asked in the wrong stream or by the wrong thread.
    pub(super) fn do_capture_end(
        &self,
        device: DeviceId,
        stream: StreamHandle,
    ) -> DriverResult<GraphHandle> {
        self.call_on(Call::StreamEndCapture, device, |state| {
            let id = state.stream(device, stream)?;
            state.capture_end(id)
        })
    }

    /// The id is shared by all streams of a capture. The legacy stream cannot be asked about while
    /// a stream that it is ordered with is being captured; asking harms nothing (by NVIDIA's
    /// documentation; not measured).
    pub(super) fn do_capture_info(
        &self,
        device: DeviceId,
        stream: StreamHandle,
    ) -> DriverResult<CaptureInfo> {
        self.call_on(Call::StreamGetCaptureInfo, device, |state| {
            let stream = state.stream(device, stream)?;
            if !state.implicit_captures(stream).is_empty() {
                return Err(implicit());
            }
            Ok(match state.captures.of(stream) {
                None => CaptureInfo { status: CaptureStatus::None, id: 0 },
                Some(id) if state.captures.active[&id].spoilt => {
                    CaptureInfo { status: CaptureStatus::Invalidated, id: 0 }
                }
                Some(id) => CaptureInfo { status: CaptureStatus::Active, id },
            })
        })
    }

    /// Row D-G4: how careful the calling thread wants to be.
    pub(super) fn do_exchange_capture_mode(&self, mode: CaptureMode) -> DriverResult<CaptureMode> {
        self.ask(Call::ThreadExchangeStreamCaptureMode, None, |state| {
            Ok(std::mem::replace(&mut state.thread_mut().capture_mode, mode))
        })
    }
}
