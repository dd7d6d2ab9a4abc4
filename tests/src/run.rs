//! Runs a script on a pool and compares every step with the model.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::AddAssign;
use std::panic::{AssertUnwindSafe, catch_unwind};

use vmm_pool::{Error, Lane, Pool, Request};
use vmm_sys::object::{RelaxedCapture, Stream};
use vmm_sys::sim::FaultPlan;
use vmm_sys::{CaptureMode, CaptureStatus, DeviceId};

use crate::action::Action;
use crate::contents::Contents;
use crate::hold::{Hold, keep_busy};
use crate::honesty;
use crate::machine::Machine;
use crate::memory::Memory;
use crate::model::{Entry, Model};
use crate::script::Script;

/// What a run did, so that a test can see that it did something.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Runs.
    pub runs: u64,
    /// Requests served.
    pub served: u64,
    /// Requests refused for want of memory.
    pub short: u64,
    /// Requests refused for what they asked.
    pub refused: u64,
    /// Requests that the driver's failures ended.
    pub failed: u64,
    /// Contents compared.
    pub checked: u64,
    /// Steps after which memory was in limbo.
    pub limbo: u64,
    /// Steps after which a replaced mapping stood.
    pub retired: u64,
    /// Driver calls that were made to fail.
    pub faults: u64,
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Tally) {
        self.runs += other.runs;
        self.served += other.served;
        self.short += other.short;
        self.refused += other.refused;
        self.failed += other.failed;
        self.checked += other.checked;
        self.limbo += other.limbo;
        self.retired += other.retired;
        self.faults += other.faults;
    }
}

/// Where a run went wrong, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The step, from 1; one more than there are if it was the end.
    pub step: usize,
    /// In words.
    pub text: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step {}: {}", self.step, self.text)
    }
}

/// Runs a script on a machine that fits it.
///
/// # Errors
/// The first step after which pool and model differ, or that panicked.
pub fn run(script: &Script, machine: &Machine) -> Result<Tally, Failure> {
    let mut runner = Runner::new(script, machine);
    let mut step = 0;
    let outcome = catch_unwind(AssertUnwindSafe(|| runner.all(&mut step)));
    let text = match outcome {
        Ok(Ok(())) => return runner.leave().map_err(|text| Failure { step: step + 1, text }),
        Ok(Err(text)) => text,
        Err(panic) => {
            // Whatever panicked may panic again when it is dropped.
            std::mem::forget(runner);
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
            format!("panicked: {}", text.unwrap_or("with no text"))
        }
    };
    Err(Failure { step, text })
}

struct StreamSlot {
    stream: Stream,
    device: u32,
    lane: Option<Lane>,
    hold: Option<Hold>,
}

struct Runner<'a> {
    script: &'a Script,
    machine: &'a Machine,
    model: Model,
    buffers: BTreeMap<u32, Memory>,
    streams: BTreeMap<u32, StreamSlot>,
    /// Streams that are being captured, by device.
    captured: BTreeMap<u32, Stream>,
    pool: Option<Pool>,
    /// Pools made so far.
    pools: u64,
    /// Requests served so far.
    served: u64,
    /// Faults are installed now, and were ever.
    faulty: bool,
    was_faulty: bool,
    tally: Tally,
}

type Step = Result<(), String>;

impl<'a> Runner<'a> {
    fn new(script: &'a Script, machine: &'a Machine) -> Runner<'a> {
        Runner {
            script,
            machine,
            model: Model::default(),
            buffers: BTreeMap::new(),
            streams: BTreeMap::new(),
            captured: BTreeMap::new(),
            pool: None,
            pools: 0,
            served: 0,
            faulty: false,
            was_faulty: false,
            tally: Tally { runs: 1, ..Tally::default() },
        }
    }

    fn all(&mut self, step: &mut usize) -> Step {
        for action in &self.script.actions {
            *step += 1;
            self.act(action)?;
            self.compare()?;
        }
        *step += 1;
        self.finish()
    }

    fn act(&mut self, action: &Action) -> Step {
        match action {
            Action::Stream { stream, device } => self.make_stream(*stream, *device),
            Action::Alloc { buffer, stream, bytes, align, wait, raw } => {
                let request = Request::new(*bytes).align(*align);
                self.alloc(*buffer, *stream, if *wait { request } else { request.no_wait() }, *raw)
            }
            Action::Free { buffer } => self.free(*buffer),
            Action::Record { buffer, stream } => self.record(*buffer, *stream).map(|_| ()),
            Action::Use { buffer, stream } => self.use_on(*buffer, *stream),
            Action::Check { buffer } => self.check(*buffer),
            Action::Hold { stream } => self.hold(*stream),
            Action::Release { stream } => self.release(*stream),
            Action::Busy { stream, us } => match self.streams.get(stream) {
                Some(slot) => keep_busy(&slot.stream, *us).map_err(|error| error.to_string()),
                None => Ok(()),
            },
            Action::Trim { device } => self.trim(*device),
            Action::Prefill { device, bytes } => self.prefill(*device, *bytes),
            Action::CloseLane { stream } => self.close_lane(*stream),
            Action::Capture { device } => self.capture(*device),
            Action::EndCapture { device } => self.end_capture(*device),
            Action::ResetPeaks => {
                if let Some(pool) = &self.pool {
                    pool.reset_peaks();
                }
                Ok(())
            }
            Action::DropPool => self.drop_pool(),
            Action::Fault { call, at, code, times } => {
                if let Ok(sim) = self.machine.sim() {
                    sim.inject(FaultPlan::fail(*code).on(*call).at(*at).times(*times));
                    self.faulty = true;
                    self.was_faulty = true;
                }
                Ok(())
            }
            Action::ClearFaults => {
                self.clear_faults();
                Ok(())
            }
        }
    }

    fn clear_faults(&mut self) {
        if let Ok(sim) = self.machine.sim() {
            sim.clear_faults();
        }
        self.faulty = false;
    }

    fn make_stream(&mut self, number: u32, device: u32) -> Step {
        if device < self.script.setup.devices && !self.streams.contains_key(&number) {
            let stream = self.machine.stream(device);
            self.streams.insert(number, StreamSlot { stream, device, lane: None, hold: None });
        }
        Ok(())
    }

    /// The pool, made if there is none. `None` where faults prevent that.
    fn pool(&mut self) -> Result<Option<Pool>, String> {
        if self.pool.is_none() {
            match self.script.setup.build_pool(self.machine) {
                Ok(pool) => {
                    self.pools += 1;
                    self.pool = Some(pool);
                }
                Err(_) if self.faulty => {}
                Err(error) => return Err(format!("the pool was not built: {error}")),
            }
        }
        Ok(self.pool.clone())
    }

    fn lane(&mut self, stream: u32) -> Result<Option<Lane>, String> {
        let Some(pool) = self.pool()? else { return Ok(None) };
        let Some(slot) = self.streams.get_mut(&stream) else { return Ok(None) };
        if slot.lane.is_none() {
            slot.lane = Some(pool.lane(&slot.stream).map_err(|error| error.to_string())?);
        }
        Ok(slot.lane.clone())
    }

    fn alloc(&mut self, number: u32, stream: u32, request: Request, raw: bool) -> Step {
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

    fn born(&mut self, number: u32, stream: u32, request: &Request, buffer: Memory) -> Step {
        if honesty::must_refuse(&self.script.setup, request).is_some() {
            return Err(format!("{request:?} was served"));
        }
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
                Memory::Buffer(_) => request.bytes(),
                Memory::Raw(_) => request.bytes().next_multiple_of(512),
            },
            align: request.align_bytes(),
            address: buffer.address(),
            device: slot.device,
            stream,
            pool: self.pools,
            lane_closed: false,
            contents,
            recorded: Default::default(),
        };
        self.model.born(number, entry)?;
        // In stream order, or from the host where the stream has nothing more to do.
        if self.served.is_multiple_of(2) || self.model.is_held(stream) {
            contents.enqueue(&buffer, &slot.stream)?;
        } else {
            let _calm = self.calm()?;
            slot.stream.synchronize().map_err(|error| error.to_string())?;
            contents.write(&buffer)?;
        }
        self.buffers.insert(number, buffer);
        Ok(())
    }

    fn refused(&mut self, lane: &Lane, request: &Request, error: &Error) -> Step {
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
                honesty::check_largest(lane, request, facts)?;
                if request.may_wait() {
                    let entries = self.model.entries();
                    let setup = &self.script.setup;
                    honesty::check_shortage(setup, lane, self.pools, request, entries)?;
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

    fn free(&mut self, number: u32) -> Step {
        let Some(entry) = self.model.entry(number) else { return Ok(()) };
        if entry.lane_closed {
            // The last drop of a closed lane waits for its streams.
            self.release_all()?;
        }
        let due = self.model.entry(number).is_some_and(|e| !e.contents.number.is_multiple_of(3));
        if due {
            self.check(number)?;
        }
        self.model.freed(number)?;
        self.buffers.remove(&number).map_or(Ok(()), Memory::free)
    }

    /// Whether there was something to record.
    fn record(&mut self, number: u32, stream: u32) -> Result<bool, String> {
        let (Some(buffer), Some(slot)) = (self.buffers.get_mut(&number), self.streams.get(&stream))
        else {
            return Ok(false);
        };
        buffer.record_stream(&slot.stream).map_err(|error| format!("not recorded: {error}"))?;
        self.model.record(number, stream);
        Ok(true)
    }

    fn use_on(&mut self, number: u32, stream: u32) -> Step {
        if !self.record(number, stream)? {
            return Ok(());
        }
        let (Some(entry), Some(buffer)) = (self.model.entry(number), self.buffers.get(&number))
        else {
            return Ok(());
        };
        let slot = &self.streams[&stream];
        // Other devices have no access to the memory.
        match slot.device == entry.device {
            true => entry.contents.enqueue(buffer, &slot.stream),
            false => Ok(()),
        }
    }

    fn check(&mut self, number: u32) -> Step {
        let (Some(entry), Some(buffer)) = (self.model.entry(number), self.buffers.get(&number))
        else {
            return Ok(());
        };
        if self.model.is_held(entry.stream) {
            return Ok(()); // not written yet
        }
        let _calm = self.calm()?;
        let stream = &self.streams[&entry.stream].stream;
        stream.synchronize().map_err(|error| error.to_string())?;
        self.tally.checked += 1;
        entry.contents.check(buffer)
    }

    fn hold(&mut self, number: u32) -> Step {
        let _calm = self.calm()?;
        let Some(slot) = self.streams.get_mut(&number) else { return Ok(()) };
        if slot.hold.is_none() {
            slot.hold = Some(self.machine.hold(&slot.stream).map_err(|error| error.to_string())?);
            self.model.hold(number);
        }
        Ok(())
    }

    fn release(&mut self, number: u32) -> Step {
        let hold = self.streams.get_mut(&number).and_then(|slot| slot.hold.take());
        let Some(hold) = hold else { return Ok(()) };
        let _calm = self.calm()?;
        hold.release().map_err(|error| format!("held work went wrong: {error}"))?;
        self.model.release(number)
    }

    fn release_all(&mut self) -> Step {
        let numbers: Vec<u32> = self.streams.keys().copied().collect();
        numbers.into_iter().try_for_each(|number| self.release(number))
    }

    fn capture(&mut self, device: u32) -> Step {
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

    fn end_capture(&mut self, device: u32) -> Step {
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
    fn calm(&self) -> Result<Option<RelaxedCapture>, String> {
        if self.captured.is_empty() {
            return Ok(None);
        }
        let relaxed = RelaxedCapture::enter(self.machine.driver());
        relaxed.map(Some).map_err(|error| error.to_string())
    }

    fn trim(&mut self, device: u32) -> Step {
        self.release_all()?;
        match &self.pool {
            Some(pool) if device < self.script.setup.devices => {
                let trimmed = pool.trim(DeviceId(device));
                trimmed.map(|_| ()).map_err(|error| format!("not trimmed: {error}"))
            }
            _ => Ok(()),
        }
    }

    fn prefill(&mut self, device: u32, bytes: u64) -> Step {
        let Some(pool) = self.pool()? else { return Ok(()) };
        match pool.prefill(DeviceId(device), bytes) {
            Ok(_) => Ok(()),
            Err(error) if error.is_out_of_memory() || self.faulty => Ok(()),
            Err(Error::UnknownDevice { .. }) if device >= self.script.setup.devices => Ok(()),
            Err(error) => Err(format!("not filled: {error}")),
        }
    }

    fn close_lane(&mut self, number: u32) -> Step {
        self.release_all()?;
        let (Some(pool), Some(slot)) = (&self.pool, self.streams.get_mut(&number)) else {
            return Ok(());
        };
        pool.close_lane(&slot.stream);
        self.model.close(self.pools, Some(number));
        match slot.lane.take().map(|lane| lane.alloc(1)) {
            None | Some(Err(Error::LaneClosed)) => Ok(()),
            Some(other) => Err(format!("a closed lane answers {other:?}")),
        }
    }

    fn drop_pool(&mut self) -> Step {
        self.release_all()?;
        for slot in self.streams.values_mut() {
            slot.lane = None;
        }
        self.model.close(self.pools, None);
        drop(self.pool.take());
        Ok(())
    }

    /// The figures and the walker, after every step.
    fn compare(&mut self) -> Step {
        let Some(pool) = &self.pool else { return Ok(()) };
        for (device, stats) in pool.stats().devices {
            self.model.check(self.pools, device.0, &stats)?;
            self.tally.limbo += u64::from(stats.limbo_buffers > 0);
            self.tally.retired += u64::from(stats.retired_mappings > 0);
        }
        pool.verify()
    }

    /// Everything is given back, while the pool is still there.
    fn finish(&mut self) -> Step {
        self.clear_faults();
        self.release_all()?;
        for device in 0..self.script.setup.devices {
            self.end_capture(device)?;
        }
        for slot in self.streams.values() {
            slot.stream.synchronize().map_err(|error| error.to_string())?;
        }
        for number in self.model.numbers() {
            self.check(number)?;
            self.model.freed(number)?;
            self.buffers.remove(&number).map_or(Ok(()), Memory::free)?;
            self.compare()?;
        }
        let Some(pool) = &self.pool else { return Ok(()) };
        for (device, _) in pool.stats().devices {
            pool.trim(device).map_err(|error| format!("not trimmed: {error}"))?;
            let stats = pool.device_stats(device).unwrap_or_default();
            let left = stats.held_bytes + stats.limbo_buffers + stats.retired_mappings;
            // With its thread, a pool may be filling its stock again.
            if left != 0 && !self.script.setup.background {
                return Err(format!("not given back by trim: {stats:?}"));
            }
        }
        pool.verify()
    }

    /// Drops everything in the usual order, and asks the machine what is left.
    fn leave(self) -> Result<Tally, String> {
        let Runner { machine, streams, pool, mut tally, .. } = self;
        drop(pool);
        drop(streams);
        if let Ok(sim) = machine.sim() {
            tally.faults = sim.faults_fired();
        }
        machine.check_clean()?;
        Ok(tally)
    }
}
