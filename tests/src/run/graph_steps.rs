//! Steps that concern captures with memory of their own, and the graphs that come of them.
//!
//! What a graph does: it writes the contents of its *out* buffer, an ordinary one from before, into
//! memory of the capture and copies them from there. Memory that is asked for in the capture is
//! filled by the graph too. So a launch writes over everything that the graph was given: whoever
//! else has a byte of it finds a foreign value, and a graph whose memory is gone faults.

use vmm_pool::{CaptureScope, GraphMemory, Request};
use vmm_sys::object::{Event, Stream};
use vmm_sys::{CaptureMode, CaptureStatus, DeviceId, GraphExecHandle, Transfer};

use super::{Runner, Step};
use crate::contents::Contents;
use crate::memory::Memory;

/// Out buffers have numbers that the script's own do not reach.
const OUT_NUMBERS: u32 = 1 << 24;
/// Three areas of contents, and something between.
const OUT_BYTES: u64 = 40_000;

/// A capture in progress, or its graph.
pub(super) struct GraphSlot {
    pub(super) device: u32,
    /// The streams that take part, the one that it began in first.
    pub(super) joined: Vec<u32>,
    /// Its capture, while that is open.
    scope: Option<CaptureScope>,
    pub(super) memory: GraphMemory,
    exec: Option<GraphExecHandle>,
}

impl GraphSlot {
    pub(super) fn is_open(&self) -> bool {
        self.scope.is_some()
    }
}

fn in_words(error: impl std::fmt::Display) -> String {
    error.to_string()
}

impl Runner<'_> {
    /// The open capture that a stream takes part in.
    pub(super) fn capture_of(&self, stream: u32) -> Option<u32> {
        let mut open = self.graphs.iter().filter(|(_, graph)| graph.is_open());
        open.find(|(_, graph)| graph.joined.contains(&stream)).map(|(number, _)| *number)
    }

    /// Physical memory that graphs of a device keep from every request, in bytes.
    pub(super) fn kept_for_graphs(&self, device: u32) -> u64 {
        let mine = self.graphs.values().filter(|graph| graph.device == device);
        mine.map(|graph| graph.memory.mapped_bytes()).sum()
    }

    pub(super) fn begin_scope(&mut self, number: u32, stream: u32, mode: CaptureMode) -> Step {
        let free = self.streams.contains_key(&stream)
            && !self.graphs.contains_key(&number)
            && !self.model.is_held(stream)
            && self.capture_of(stream).is_none();
        if !free {
            return Ok(());
        }
        let out = OUT_NUMBERS + number;
        self.alloc(out, stream, Request::new(OUT_BYTES), false)?;
        if self.model.entry(out).is_none() {
            return Ok(()); // no memory to be had
        }
        let Some(lane) = self.lane(stream)? else { return Ok(()) };
        let _calm = self.calm()?;
        let scope = lane.capture().map_err(|error| format!("no scope: {error}"))?;
        let slot = &self.streams[&stream];
        let driver = self.machine.driver();
        // SAFETY: the stream is live, and kept until the capture is ended.
        unsafe { driver.capture_begin(DeviceId(slot.device), slot.stream.handle(), mode) }
            .map_err(|error| format!("no capture: {error}"))?;
        let (device, memory) = (slot.device, scope.memory().clone());
        let graph =
            GraphSlot { device, joined: vec![stream], scope: Some(scope), memory, exec: None };
        self.graphs.insert(number, graph);
        self.tally.captures += 1;
        self.write_out(number, stream)
    }

    /// Captures the work of a graph: contents come to `out` through memory of the capture, if there
    /// is any left.
    fn write_out(&mut self, number: u32, stream: u32) -> Step {
        let Some(lane) = self.lane(stream)? else { return Ok(()) };
        let out = OUT_NUMBERS + number;
        let (Some(entry), Some(to)) = (self.model.entry(out), self.buffers.get(&out)) else {
            return Ok(());
        };
        let stream = &self.streams[&stream].stream;
        let Ok(scratch) = lane.try_alloc(OUT_BYTES) else {
            return entry.contents.enqueue(to, stream);
        };
        let scratch = Memory::Buffer(scratch);
        entry.contents.enqueue(&scratch, stream)?;
        let transfer = Transfer::DeviceToDevice {
            dst: to.address(),
            src: scratch.address(),
            bytes: OUT_BYTES,
        };
        // SAFETY: the stream is live, and the pool gave both addresses out.
        unsafe { stream.driver().copy_async(stream.device(), &transfer, stream.handle()) }
            .map_err(in_words)?;
        self.model.given_to_graph(number, scratch.address(), OUT_BYTES)
    }

    /// Lets a capture spread to another stream of its device.
    pub(super) fn join_scope(&mut self, number: u32, stream: u32) -> Step {
        let Some(graph) = self.graphs.get(&number) else { return Ok(()) };
        let device = self.streams.get(&stream).map(|slot| slot.device);
        let free = graph.is_open()
            && device == Some(graph.device)
            && !self.model.is_held(stream)
            && self.capture_of(stream).is_none();
        if !free {
            return Ok(());
        }
        let origin = graph.joined[0];
        let Some(lane) = self.lane(stream)? else { return Ok(()) };
        order(&self.streams[&origin].stream, &self.streams[&stream].stream)?;
        let Some(graph) = self.graphs.get_mut(&number) else { return Ok(()) };
        if let Some(scope) = &graph.scope {
            scope.join(&lane).map_err(|error| format!("not joined: {error}"))?;
        }
        graph.joined.push(stream);
        self.write_out(number, stream)
    }

    /// Ends a capture, which must be unharmed.
    pub(super) fn finish_scope(&mut self, number: u32) -> Step {
        let _calm = self.calm()?;
        let Some(graph) = self.graphs.get_mut(&number) else { return Ok(()) };
        let Some(scope) = graph.scope.take() else { return Ok(()) };
        let streams: Vec<&Stream> =
            graph.joined.iter().map(|stream| &self.streams[stream].stream).collect();
        let origin = streams[0];
        for branch in &streams[1..] {
            order(branch, origin)?;
        }
        let status = origin.capture_info().map_err(in_words)?.status;
        if status != CaptureStatus::Active {
            return Err(format!("a capture was harmed: {status:?}"));
        }
        let (driver, device) = (self.machine.driver(), DeviceId(graph.device));
        // SAFETY: the stream is live and being captured; the graph is not used afterwards.
        let exec = unsafe {
            let ended = driver.capture_end(device, origin.handle()).map_err(in_words)?;
            let exec = driver.graph_instantiate(device, ended).map_err(in_words)?;
            driver.graph_destroy(device, ended).map_err(in_words)?;
            exec
        };
        graph.exec = Some(exec);
        graph.memory = scope.finish();
        Ok(())
    }

    /// Launches a graph and looks at what it wrote, unless somebody is held.
    pub(super) fn launch(&mut self, number: u32, stream: u32) -> Step {
        if self.capture_of(stream).is_some() {
            return Ok(());
        }
        let (Some(graph), Some(slot)) = (self.graphs.get(&number), self.streams.get(&stream))
        else {
            return Ok(());
        };
        let Some(exec) = graph.exec.filter(|_| slot.device == graph.device) else { return Ok(()) };
        if !graph.joined.contains(&stream) {
            graph.memory.launched_on(&slot.stream).map_err(in_words)?;
        }
        let out = OUT_NUMBERS + number;
        let looks = !self.model.any_held() && self.can_copy(graph.device);
        if let Some(to) = self.buffers.get(&out).filter(|_| looks) {
            // So that it is the launch that writes what is found.
            // SAFETY: the pool gave the address out, for as many bytes.
            unsafe { slot.stream.fill(to.address(), to.bytes(), 0) }.map_err(in_words)?;
        }
        let driver = self.machine.driver();
        // SAFETY: both are live.
        unsafe { driver.graph_launch(DeviceId(slot.device), exec, slot.stream.handle()) }
            .map_err(|error| format!("not launched: {error}"))?;
        self.model.launched(number, stream);
        self.tally.launches += 1;
        if looks {
            let _calm = self.calm()?;
            slot.stream.synchronize().map_err(|error| format!("a launch went wrong: {error}"))?;
            self.check(out)?;
        }
        Ok(())
    }

    /// Drops a graph and its memory, in flight or not.
    pub(super) fn drop_graph(&mut self, number: u32) -> Step {
        self.finish_scope(number)?;
        let out = OUT_NUMBERS + number;
        if self.model.entry(out).is_some_and(|entry| entry.lane_closed) {
            // As with any last buffer of a closed lane.
            self.release_all()?;
        }
        let Some(graph) = self.graphs.remove(&number) else { return Ok(()) };
        let _calm = self.calm()?;
        if let Some(exec) = graph.exec {
            let (driver, device) = (self.machine.driver(), DeviceId(graph.device));
            // SAFETY: the graph is live, and not used afterwards.
            unsafe { driver.graph_exec_destroy(device, exec) }.map_err(in_words)?;
        }
        self.model.graph_is_gone(number);
        // The graph uses it, too: it goes with the memory, behind the launches.
        match self.buffers.remove(&out) {
            Some(Memory::Buffer(buffer)) => {
                self.model.freed(out, false)?;
                graph.memory.keep(buffer);
            }
            Some(Memory::Raw(_)) | None => {}
        }
        drop(graph);
        Ok(())
    }

    /// Ends every capture and drops every graph; each is launched once more.
    pub(super) fn drop_graphs(&mut self) -> Step {
        let numbers: Vec<u32> = self.graphs.keys().copied().collect();
        for &number in &numbers {
            self.finish_scope(number)?;
        }
        for number in numbers {
            let origin = self.graphs[&number].joined[0];
            self.launch(number, origin)?;
            self.drop_graph(number)?;
        }
        Ok(())
    }

    /// What memory of a capture is filled with: by the graph, not by the host.
    pub(super) fn born_in_capture(
        &mut self,
        graph: u32,
        buffer: &Memory,
        contents: Contents,
    ) -> Step {
        self.model.given_to_graph(graph, buffer.address(), contents.bytes)
    }
}

/// Lets `to` wait for what `from` has now, as programs spread a capture.
fn order(from: &Stream, to: &Stream) -> Step {
    let event = Event::create(from.driver(), from.device()).map_err(in_words)?;
    event.record(from).map_err(in_words)?;
    to.wait_event(&event).map_err(in_words)
}
