//! Steps that concern one buffer.

use vmm_pool::{Error, Lane, Request};
use vmm_sys::DeviceId;

use super::{GraphSlot, Runner, Step};
use crate::contents::Contents;
use crate::honesty;
use crate::memory::Memory;
use crate::model::Entry;

impl Runner<'_> {
    pub(super) fn alloc(&mut self, number: u32, stream: u32, request: Request, raw: bool) -> Step {
        if self.buffers.contains_key(&number) {
            return Ok(());
        }
        let Some(lane) = self.lane(stream)? else { return Ok(()) };
        // What a held stream keeps cannot be waited for by the thread that holds it.
        let request = if self.model.any_held() { request.no_wait() } else { request };
        match Memory::alloc(&lane, &request, raw) {
            Ok(buffer) => self.born(number, stream, &request, buffer),
            Err(error) => self.refused(&lane, &request, &error),
        }
    }

    pub(super) fn born(
        &mut self,
        number: u32,
        stream: u32,
        request: &Request,
        buffer: Memory,
    ) -> Step {
        if honesty::must_refuse(&self.script.setup, request).is_some() {
            return Err(format!("{request:?} was served"));
        }
        let capture = self.capture_of(stream);
        let slot = &self.streams[&stream];
        self.tally.served += 1;
        self.served += 1;
        let contents = Contents { number: self.served, bytes: request.bytes() };
        if buffer.bytes() != request.bytes() || buffer.device() != DeviceId(slot.device) {
            return Err(format!("{request:?} on device {} got {buffer:?}", slot.device));
        }
        let entry = Entry {
            bytes: request.bytes(),
            counted_bytes: match buffer {
                Memory::Raw(_) if self.script.setup.guard => request.bytes(),
                Memory::Buffer(_) => request.bytes(),
                Memory::Raw(_) => request.bytes().next_multiple_of(512),
            },
            align: request.align_bytes(),
            address: buffer.address(),
            device: slot.device,
            stream,
            pool: self.pools,
            lane_closed: false,
            graph: capture,
            contents,
            recorded: Default::default(),
        };
        self.model.born(number, entry)?;
        let device = slot.device;
        if let Some(graph) = capture {
            self.born_in_capture(graph, &buffer, contents)?;
        }
        let slot = &self.streams[&stream];
        // In stream order, or from the host where the stream has nothing more to do.
        let by_stream = capture.is_some() || self.model.is_held(stream) || !self.can_copy(device);
        if self.served.is_multiple_of(2) || by_stream {
            contents.enqueue(&buffer, &slot.stream)?;
        } else {
            let _calm = self.calm()?;
            slot.stream.synchronize().map_err(|error| error.to_string())?;
            contents.write(&buffer)?;
        }
        self.buffers.insert(number, buffer);
        Ok(())
    }

    pub(super) fn refused(&mut self, lane: &Lane, request: &Request, error: &Error) -> Step {
        let expected = honesty::must_refuse(&self.script.setup, request);
        match (error, expected) {
            (Error::TooLarge { .. } | Error::BadAlignment { .. }, Some(kind))
                if kind == std::mem::discriminant(error) =>
            {
                self.tally.refused += 1;
                Ok(())
            }
            (_, Some(_)) => Err(format!("{request:?} was refused as: {error}")),
            (Error::OutOfMemory(facts), None) => {
                self.tally.short += 1;
                if self.was_faulty || self.script.setup.background {
                    return Ok(());
                }
                honesty::check_figures(facts)?;
                if self.graphs.values().any(GraphSlot::is_open) {
                    // What a capture keeps in place cannot serve meanwhile.
                    return Ok(());
                }
                // What an earlier pool still holds may come back with the next request.
                if self.pools == 1 {
                    honesty::check_largest(&self.script.setup, lane, request, facts)?;
                }
                if request.may_wait() && !self.any_guard() {
                    let entries = self.model.entries();
                    let setup = &self.script.setup;
                    let device = lane.device().0;
                    let kept_bytes = self.kept_for_graphs(device) + self.kept_elastic(device);
                    let asked = (self.pools, request);
                    honesty::check_shortage(setup, lane, asked, kept_bytes, entries)?;
                }
                Ok(())
            }
            (_, None) if self.faulty => {
                self.tally.failed += 1;
                Ok(())
            }
            (_, None) => Err(format!("{request:?} was refused: {error}")),
        }
    }

    pub(super) fn free(&mut self, number: u32, elsewhere: bool) -> Step {
        let Some(entry) = self.model.entry(number) else { return Ok(()) };
        if entry.lane_closed {
            // The last drop of a closed lane waits for its streams.
            self.release_all()?;
        }
        let due = self.model.entry(number).is_some_and(|e| !e.contents.number.is_multiple_of(3));
        if due {
            self.check(number)?;
        }
        let stream = self.model.entry(number).map(|entry| entry.stream);
        let own = stream.and_then(|it| self.streams.get(&it)).is_some_and(|slot| slot.own);
        self.model.freed(number, own && elsewhere)?;
        let Some(buffer) = self.buffers.remove(&number) else { return Ok(()) };
        if elsewhere {
            let freed = std::thread::scope(|scope| scope.spawn(|| buffer.free()).join());
            return freed.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        }
        buffer.free()
    }

    /// Whether there was something to record.
    pub(super) fn record(&mut self, number: u32, stream: u32) -> Result<bool, String> {
        let (Some(buffer), Some(slot)) = (self.buffers.get_mut(&number), self.streams.get(&stream))
        else {
            return Ok(false);
        };
        buffer.record_stream(&slot.stream).map_err(|error| format!("not recorded: {error}"))?;
        self.model.record(number, stream);
        Ok(true)
    }

    pub(super) fn use_on(&mut self, number: u32, stream: u32) -> Step {
        if !self.record(number, stream)? {
            return Ok(());
        }
        let (Some(entry), Some(buffer)) = (self.model.entry(number), self.buffers.get(&number))
        else {
            return Ok(());
        };
        let slot = &self.streams[&stream];
        // Other devices have no access to the memory.
        let captured = entry.graph.is_some() || self.capture_of(stream).is_some();
        match slot.device == entry.device && !captured {
            true => entry.contents.enqueue(buffer, &slot.stream),
            false => Ok(()),
        }
    }

    pub(super) fn check(&mut self, number: u32) -> Step {
        let (Some(entry), Some(buffer)) = (self.model.entry(number), self.buffers.get(&number))
        else {
            return Ok(());
        };
        let busy = self.model.is_held(entry.stream) || self.capture_of(entry.stream).is_some();
        if busy || entry.graph.is_some() || !self.can_copy(entry.device) {
            return Ok(()); // not written yet, or by launches only
        }
        let _calm = self.calm()?;
        let stream = &self.streams[&entry.stream].stream;
        stream.synchronize().map_err(|error| error.to_string())?;
        self.tally.checked += 1;
        entry.contents.check(buffer)
    }
}
