//! Runs a script on a pool and compares every step with the model.

mod elastic_steps;
mod graph_steps;
mod memory_steps;
mod outcome;
mod stream_steps;

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::Duration;

use vmm_pool::{Error, Lane, Pool, Request};
use vmm_sys::DeviceId;
use vmm_sys::caught::thrown;
use vmm_sys::object::Stream;
use vmm_sys::sim::FaultPlan;

use elastic_steps::Elastic;
use graph_steps::GraphSlot;
pub use outcome::{Failure, Tally};

use crate::action::Action;
use crate::hold::{Hold, keep_busy};
use crate::machine::Machine;
use crate::memory::Memory;
use crate::model::Model;
use crate::script::Script;
use crate::setup::RunClock;

/// Runs a script on a machine that fits it.
///
/// # Errors
/// The first step after which pool and model differ, or that panicked.
pub fn run(script: &Script, machine: &Machine) -> Result<Tally, Failure> {
    let mut runner = Runner::new(script, machine);
    let mut step = 0;
    let outcome = thrown(|| runner.all(&mut step));
    let text = match outcome {
        Ok(Ok(())) => return runner.leave().map_err(|text| Failure { step: step + 1, text }),
        Ok(Err(text)) => text,
        Err(words) => {
            // Whatever panicked may panic again when it is dropped.
            std::mem::forget(runner);
            format!("panicked: {words}")
        }
    };
    Err(Failure { step, text })
}

struct StreamSlot {
    stream: Stream,
    device: u32,
    lane: Option<Lane>,
    hold: Option<Hold>,
    /// The default stream of the thread that runs the script.
    own: bool,
}

struct Runner<'a> {
    script: &'a Script,
    machine: &'a Machine,
    model: Model,
    buffers: BTreeMap<u32, Memory>,
    elastics: BTreeMap<u32, Elastic>,
    streams: BTreeMap<u32, StreamSlot>,
    /// Streams that are being captured, by device.
    captured: BTreeMap<u32, Stream>,
    graphs: BTreeMap<u32, GraphSlot>,
    pool: Option<Pool>,
    /// Pools made so far.
    pools: u64,
    clock: RunClock,
    /// Requests served so far.
    served: u64,
    /// Versions of the contents of elastic buffers so far.
    versions: u32,
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
            elastics: BTreeMap::new(),
            streams: BTreeMap::new(),
            captured: BTreeMap::new(),
            graphs: BTreeMap::new(),
            pool: None,
            pools: 0,
            clock: RunClock::default(),
            served: 0,
            versions: 0,
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
            Action::Stream { stream, device, own } => self.make_stream(*stream, *device, *own),
            Action::Alloc { buffer, stream, bytes, align, wait, raw } => {
                let request = Request::new(*bytes).align(*align);
                self.alloc(*buffer, *stream, if *wait { request } else { request.no_wait() }, *raw)
            }
            Action::Free { buffer, elsewhere } => self.free(*buffer, *elsewhere),
            Action::Record { buffer, stream } => self.record(*buffer, *stream).map(|_| ()),
            Action::Use { buffer, stream } => self.use_on(*buffer, *stream),
            Action::Check { buffer } => self.check(*buffer),
            Action::Hold { stream } => self.hold(*stream),
            Action::Release { stream } => self.release(*stream),
            Action::Busy { stream, us } => match self.streams.get(stream) {
                Some(slot) if self.capture_of(*stream).is_none() => {
                    keep_busy(&slot.stream, *us).map_err(|error| error.to_string())
                }
                _ => Ok(()),
            },
            Action::Trim { device } => self.trim(*device),
            Action::TrimIdle { device, ms } => self.trim_idle(*device, *ms),
            Action::Later { ms } => {
                self.clock.fetch_add(*ms, Ordering::Relaxed);
                Ok(())
            }
            Action::Prefill { device, bytes } => self.prefill(*device, *bytes),
            Action::CloseLane { stream } => self.close_lane(*stream),
            Action::Capture { device } => self.capture(*device),
            Action::EndCapture { device } => self.end_capture(*device),
            Action::Scope { graph, stream, mode } => self.begin_scope(*graph, *stream, *mode),
            Action::Join { graph, stream } => self.join_scope(*graph, *stream),
            Action::Finish { graph } => self.finish_scope(*graph),
            Action::Launch { graph, stream } => self.launch(*graph, *stream),
            Action::DropGraph { graph } => self.drop_graph(*graph),
            Action::ResetPeaks => {
                if let Some(pool) = &self.pool {
                    pool.reset_peaks();
                }
                Ok(())
            }
            Action::Elastic(action) => self.elastic(action),
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

    /// The pool, made if there is none. `None` where faults prevent that.
    fn pool(&mut self) -> Result<Option<Pool>, String> {
        if self.pool.is_none() {
            match self.script.setup.build_pool(self.machine, &self.clock) {
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

    /// Waits for nothing, so held streams stay held.
    fn trim_idle(&mut self, device: u32, ms: u64) -> Step {
        match &self.pool {
            Some(pool) if device < self.script.setup.devices => {
                let trimmed = pool.trim_idle(DeviceId(device), Duration::from_millis(ms));
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
        if self.capture_of(number).is_some() {
            return Ok(());
        }
        self.release_all()?;
        let (Some(pool), Some(slot)) = (&self.pool, self.streams.get_mut(&number)) else {
            return Ok(());
        };
        if !pool.close_lane(&slot.stream) {
            return Err("the handle of an owned stream is needed".into());
        }
        self.model.close(self.pools, Some(number));
        match slot.lane.take().map(|lane| lane.alloc(1)) {
            None | Some(Err(Error::LaneClosed)) => Ok(()),
            Some(other) => Err(format!("a closed lane answers {other:?}")),
        }
    }

    fn drop_pool(&mut self) -> Step {
        self.release_all()?;
        // They would keep it open.
        self.drop_graphs()?;
        self.drop_elastics()?;
        for slot in self.streams.values_mut() {
            slot.lane = None;
        }
        self.model.close(self.pools, None);
        drop(self.pool.take());
        Ok(())
    }

    /// The figures and the walker, after every step.
    fn compare(&mut self) -> Step {
        self.compare_elastics()?;
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
        self.drop_graphs()?;
        for slot in self.streams.values() {
            slot.stream.synchronize().map_err(|error| error.to_string())?;
        }
        self.end_elastics()?;
        for number in self.model.numbers() {
            self.check(number)?;
            self.model.freed(number, false)?;
            self.buffers.remove(&number).map_or(Ok(()), Memory::free)?;
            self.compare()?;
        }
        let Some(pool) = &self.pool else { return Ok(()) };
        for (device, _) in pool.stats().devices {
            pool.trim(device).map_err(|error| format!("not trimmed: {error}"))?;
            self.tally.idled += pool.device_stats(device).unwrap_or_default().idle_lanes_emptied;
            let stats = pool.device_stats(device).unwrap_or_default();
            // Links between devices that were used stay up.
            let held_bytes = stats.held_bytes - stats.anchor_bytes;
            let left = held_bytes + stats.limbo_buffers + stats.retired_mappings;
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
