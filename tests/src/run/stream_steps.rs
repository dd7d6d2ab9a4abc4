//! Steps that concern streams: holds and captures.

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

    pub(super) fn release(&mut self, number: u32) -> Step {
        let hold = self.streams.get_mut(&number).and_then(|slot| slot.hold.take());
        let Some(hold) = hold else { return Ok(()) };
        let _calm = self.calm()?;
        hold.release().map_err(|error| format!("held work went wrong: {error}"))?;
        self.model.release(number)
    }

    pub(super) fn release_all(&mut self) -> Step {
        let numbers: Vec<u32> = self.streams.keys().copied().collect();
        numbers.into_iter().try_for_each(|number| self.release(number))
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
