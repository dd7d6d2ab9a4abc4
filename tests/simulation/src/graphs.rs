//! Captures and their graphs: memory of their own that nobody else may have, and slots of elastic buffers
//! that move under them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use vmm_pool::{Buffer, GraphMemory, Lane};
use vmm_sys::object::Stream;
use vmm_sys::{Access, CaptureMode, GraphExecHandle};

use crate::actor::Actor;
use crate::coverage::Outcome;
use crate::judge::Kind;
use crate::kernels::Contents;
use crate::part::Backing;

/// A graph that was captured.
pub(crate) struct Graph {
    exec: GraphExecHandle,
    memory: GraphMemory,
    /// Given out in the capture and kept, so that no node of the graph has it but those for it.
    kept: Vec<Buffer>,
    was_launched: bool,
    /// The slot that it writes: part, slot, version.
    slot: Option<(usize, usize, u32)>,
    /// Where it was launched last.
    last: Stream,
    /// The generation of the slot's buffer when it was captured.
    generation: u64,
}

impl Actor {
    /// Captures a graph on the actor's own stream.
    pub(crate) fn capture(&mut self) {
        let stream = self.own.clone();
        let Some(lane) = self.lane_of(&stream) else { return };
        let Some(scope) = self.judge("capture", lane.capture(), &[Kind::Closed]) else { return };
        let mode = self.rng.pick(&[CaptureMode::ThreadLocal, CaptureMode::Relaxed]);
        let driver = self.world.driver.clone();
        // SAFETY: a live stream, kept until the capture is ended.
        let begun = unsafe { driver.capture_begin(stream.device(), stream.handle(), mode) };
        if self.drive("a capture", begun).is_none() {
            return;
        }
        let mut kept = Vec::new();
        for _ in 0..1 + self.rng.below(2) {
            let bytes = self.rng.pick(&[700, 5000, 300 << 10]);
            kept.extend(self.captured_buffer(&lane, bytes));
            (0..self.rng.below(10)).for_each(|_| shuttle::thread::yield_now());
        }
        self.scratch(&lane);
        let slot = self.captured_slot(&stream);
        // SAFETY: a live stream that is being captured; the graph is not used afterwards.
        let exec = unsafe {
            driver.capture_end(stream.device(), stream.handle()).and_then(|graph| {
                let exec = driver.graph_instantiate(stream.device(), graph);
                driver.graph_destroy(stream.device(), graph).and(exec)
            })
        };
        let memory = scope.finish();
        let Some(exec) = self.drive("the end of a capture", exec) else { return };
        let generation = slot.map_or(0, |(part, ..)| self.parts[part].elastic.buffer.generation());
        let last = stream;
        self.graphs.push(Graph { exec, memory, kept, was_launched: false, slot, last, generation });
    }

    /// A buffer whose contents the graph compares, from its second launch on, and writes.
    fn captured_buffer(&self, lane: &Lane, bytes: u64) -> Option<Buffer> {
        let buffer = self.judge("alloc in a capture", lane.alloc(bytes), &[Kind::Closed])?;
        let version = self.world.next_version();
        let contents = Contents { address: buffer.address(), bytes, version };
        let what = format!("actor {}, memory of a graph", self.number);
        // The first launch has nothing to compare, whenever its turn comes.
        let written = Arc::new(AtomicBool::new(false));
        let (compared, was_written) = (self.world.notes.clone(), written.clone());
        let checker = contents.checker(compared, what, move || was_written.load(SeqCst));
        self.drive("a check", self.world.enqueue(lane.stream(), checker))?;
        let writer = contents.writer(move || written.store(true, SeqCst));
        self.drive("a write", self.world.enqueue(lane.stream(), writer))?;
        Some(buffer)
    }

    /// Memory that is freed within the capture: its next user in the graph comes after.
    fn scratch(&self, lane: &Lane) {
        for _ in 0..2 {
            let asked = lane.alloc(6000);
            let Some(buffer) = self.judge("alloc in a capture", asked, &[Kind::Closed]) else {
                return;
            };
            let version = self.world.next_version();
            let contents = Contents { address: buffer.address(), bytes: buffer.bytes(), version };
            let what = format!("actor {}, scratch memory of a graph", self.number);
            let written = self.drive("a write", self.world.write(lane.stream(), contents));
            if written.is_some() {
                self.drive("a check", self.world.check(lane.stream(), contents, what));
            }
        }
    }

    /// A slot that the graph writes.
    fn captured_slot(&mut self, stream: &Stream) -> Option<(usize, usize, u32)> {
        let number = self.any_part();
        let (choice, version) = (self.rng.next_u64(), self.world.next_version());
        let part = &self.parts[number];
        let device = stream.device();
        let buffer = &part.elastic.buffer;
        let may = device == buffer.device() || buffer.access(device) == Access::ReadWrite;
        let at = part.pick(choice, |slot| slot.backing == Backing::Committed).filter(|_| may)?;
        let contents = part.contents(at, version);
        self.drive("a write", self.world.write(stream, contents))?;
        self.feature("graphs that write slots");
        Some((number, at, version))
    }

    pub(crate) fn launch(&mut self) {
        if self.graphs.is_empty() {
            return;
        }
        let at = self.rng.below(self.graphs.len() as u64) as usize;
        let mut graph = self.graphs.swap_remove(at);
        self.launch_graph(&mut graph);
        self.graphs.push(graph);
    }

    fn launch_graph(&mut self, graph: &mut Graph) {
        let near: Vec<Stream> =
            self.world.streams_of(self.own.device()).chain([&self.own]).cloned().collect();
        let stream = near[self.rng.below(near.len() as u64) as usize].clone();
        let mut guard = None;
        if let Some((number, at, _)) = graph.slot {
            let slot = &self.parts[number].slots[at];
            let buffer = &self.parts[number].elastic.buffer;
            let may = stream.device() == buffer.device()
                || buffer.access(stream.device()) == Access::ReadWrite;
            if slot.backing != Backing::Committed || !may {
                return;
            }
            let last = self.parts[number].last(at).cloned();
            guard = self.begin(number, &stream);
            if guard.is_none() {
                return;
            }
            if let Some(last) = last
                && self.drive("an event", self.world.order(&last, &stream)).is_none()
            {
                return;
            }
        }
        if self.drive("an event", self.world.order(&graph.last, &stream)).is_none() {
            return;
        }
        let told = graph.memory.launched_on(&stream);
        if self.judge("launch", told, &[]).is_none() {
            return;
        }
        // SAFETY: live handles.
        let launched =
            unsafe { self.world.driver.graph_launch(stream.device(), graph.exec, stream.handle()) };
        if self.drive("a launch", launched).is_none() {
            return;
        }
        graph.last = stream.clone();
        if std::mem::replace(&mut graph.was_launched, true) && !graph.kept.is_empty() {
            self.feature("graph memory compared");
        }
        if let Some((number, at, version)) = graph.slot {
            self.wrote(number, at, version, &stream);
            if self.parts[number].elastic.buffer.generation() != graph.generation {
                self.feature("graphs launched after a move");
            }
        }
        drop(guard);
    }

    pub(crate) fn drop_graph(&mut self) {
        if let Some(graph) = self.graphs.pop() {
            self.end_graph(graph);
        }
    }

    fn end_graph(&self, graph: Graph) {
        let Graph { exec, memory, kept, .. } = graph;
        // SAFETY: a live graph, not used afterwards.
        let ended = unsafe { self.world.driver.graph_exec_destroy(self.own.device(), exec) };
        self.drive("the end of a graph", ended);
        drop(kept);
        drop(memory);
        self.came_out("drop a graph", Outcome::Done, "done");
    }

    /// Each graph is launched once more, and dropped.
    pub(crate) fn end_graphs(&mut self) {
        while let Some(mut graph) = self.graphs.pop() {
            self.launch_graph(&mut graph);
            self.end_graph(graph);
        }
    }
}
