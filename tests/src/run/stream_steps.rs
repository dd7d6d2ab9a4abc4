//! Steps that concern streams: holds and captures.

use std::collections::BTreeSet;

use vmm_sys::object::{RelaxedCapture, Stream};
use vmm_sys::{CaptureMode, CaptureStatus, DeviceId};

use super::{GraphSlot, Runner, Step, StreamSlot};

impl Runner<'_> {
    pub(super) fn make_stream(&mut self, number: u32, device: u32, own: bool) -> Step {
        let taken = self.streams.values().any(|slot| own && slot.own && slot.device == device);
        if device >= self.script.setup.devices || taken || self.streams.contains_key(&number) {
            return Ok(());
        }
        let stream = match own {
            true => Stream::per_thread(self.machine.driver(), DeviceId(device))
                .map_err(|error| error.to_string())?,
            false => self.machine.stream(device),
        };
        self.streams.insert(number, StreamSlot { stream, device, lane: None, hold: None, own });
        Ok(())
    }

    /// Whether the host may copy: a copy is work of the legacy stream, which would wait for a
    /// thread's own stream, and spoil its capture.
    pub(super) fn can_copy(&self, device: u32) -> bool {
        let mut own = self.streams.iter().filter(|(_, slot)| slot.own && slot.device == device);
        own.all(|(number, _)| !self.model.is_held(*number) && self.capture_of(*number).is_none())
    }

    pub(super) fn hold(&mut self, number: u32) -> Step {
        if self.capture_of(number).is_some() {
            return Ok(());
        }
        let _calm = self.calm()?;
        let Some(slot) = self.streams.get_mut(&number) else { return Ok(()) };
        if slot.hold.is_none() {
            slot.hold = Some(self.machine.hold(&slot.stream).map_err(|error| error.to_string())?);
            self.model.hold(number);
        }
        Ok(())
    }

    /// Lets a stream go, and those that it waits for.
    pub(super) fn release(&mut self, number: u32) -> Step {
        let mut due = BTreeSet::from([number]);
        loop {
            let more: BTreeSet<u32> =
                due.iter().flat_map(|stream| self.model.holders(*stream)).collect();
            if more.is_subset(&due) {
                return self.release_these(due);
            }
            due.extend(more);
        }
    }

    pub(super) fn release_all(&mut self) -> Step {
        self.release_these(self.streams.keys().copied().collect())
    }

    /// All go before one is waited for: they may wait for each other.
    fn release_these(&mut self, numbers: BTreeSet<u32>) -> Step {
        let hold = |slot: &mut StreamSlot| slot.hold.take();
        let holds: Vec<_> = numbers
            .into_iter()
            .filter_map(|number| Some((number, self.streams.get_mut(&number).and_then(hold)?)))
            .collect();
        if holds.is_empty() {
            return Ok(());
        }
        let _calm = self.calm()?;
        holds.iter().for_each(|(_, hold)| hold.releaser().now());
        for (number, hold) in holds {
            hold.release().map_err(|error| format!("held work went wrong: {error}"))?;
            self.model.release(number)?;
            self.elastics.values_mut().for_each(|elastic| elastic.model.released(number));
        }
        Ok(())
    }

    pub(super) fn capture(&mut self, device: u32) -> Step {
        if device >= self.script.setup.devices || self.captured.contains_key(&device) {
            return Ok(());
        }
        let stream = self.machine.stream(device);
        let driver = self.machine.driver();
        // SAFETY: the stream is live, and kept until the capture is ended.
        unsafe { driver.capture_begin(DeviceId(device), stream.handle(), CaptureMode::Global) }
            .map_err(|error| format!("no capture: {error}"))?;
        self.captured.insert(device, stream);
        Ok(())
    }

    pub(super) fn end_capture(&mut self, device: u32) -> Step {
        let Some(stream) = self.captured.remove(&device) else { return Ok(()) };
        let info = stream.capture_info().map_err(|error| error.to_string())?;
        let driver = self.machine.driver();
        // SAFETY: the stream is live and being captured; the graph is destroyed at once.
        let ended = unsafe {
            let graph = driver.capture_end(DeviceId(device), stream.handle());
            graph.and_then(|graph| driver.graph_destroy(DeviceId(device), graph))
        };
        match (info.status, ended) {
            (CaptureStatus::Active, Ok(())) => Ok(()),
            (status, ended) => Err(format!("a capture was harmed: {status:?}, {ended:?}")),
        }
    }

    /// What the test itself does must not harm a capture either.
    pub(super) fn calm(&self) -> Result<Option<RelaxedCapture>, String> {
        let open = self.graphs.values().any(GraphSlot::is_open);
        if self.captured.is_empty() && !open {
            return Ok(None);
        }
        let relaxed = RelaxedCapture::enter(self.machine.driver());
        relaxed.map(Some).map_err(|error| error.to_string())
    }
}
