//! A pool on the simulated device, and an engine on it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::sync::Arc;

use clap::ValueEnum;
use vmm_pool::Pool;
use vmm_server::backend::sim::{Bytes, SimBackend};
use vmm_server::backend::{Backend, BackendError, Batch, StepDone};
use vmm_server::cache::{CacheSettings, Form};
use vmm_server::clock::SimClock;
use vmm_server::engine::{Answer, Engine, EngineError, EngineSettings, Job, Outcome, Tick};
use vmm_server::model::{ModelSpec, VOCABULARY};
use vmm_sys::object::Stream;
use vmm_sys::sim::Sim;
use vmm_sys::{DeviceId, Driver};

pub(crate) const HOME: DeviceId = DeviceId(0);

/// All forms.
pub(crate) fn forms() -> Vec<Form> {
    Form::value_variants().to_vec()
}

/// A machine with a pool that does everything in the calling thread.
pub(crate) struct Rig {
    pub(crate) sim: Arc<Sim>,
    pub(crate) pool: Pool,
    pub(crate) stream: Stream,
}

impl Rig {
    /// With `limit_bytes` on each of two devices, and as much of the host.
    pub(crate) fn new(limit_bytes: u64) -> Rig {
        let sim = Sim::builder().devices(2).device_bytes(8 << 30).build();
        let driver: Arc<dyn Driver> = sim.clone();
        let pool = Pool::builder(driver.clone())
            .device(HOME)
            .device(DeviceId(1))
            .limit_bytes(limit_bytes)
            .host_memory(0, limit_bytes, 0)
            .lend(DeviceId(1), limit_bytes)
            .background(false)
            .build()
            .unwrap();
        let stream = Stream::create(&driver, HOME).unwrap();
        Rig { sim, pool, stream }
    }

    pub(crate) fn cache(&self, form: Form, spec: &ModelSpec) -> CacheSettings {
        let mut settings = CacheSettings::new(form, spec, 2 << 20);
        settings.background = false;
        settings
    }

    pub(crate) fn engine(
        &self,
        spec: &ModelSpec,
        cache: &CacheSettings,
        set: EngineSettings,
    ) -> Engine {
        self.engine_with(spec, cache, set, |backend| backend)
    }

    /// With a backend around the simulated one.
    pub(crate) fn engine_with(
        &self,
        spec: &ModelSpec,
        cache: &CacheSettings,
        settings: EngineSettings,
        around: impl Fn(Box<dyn Backend>) -> Box<dyn Backend>,
    ) -> Engine {
        self.try_engine_with(spec, cache, settings, around).unwrap()
    }

    /// The same, if that can be.
    pub(crate) fn try_engine_with(
        &self,
        spec: &ModelSpec,
        cache: &CacheSettings,
        settings: EngineSettings,
        around: impl Fn(Box<dyn Backend>) -> Box<dyn Backend>,
    ) -> Result<Engine, EngineError> {
        let clock = Arc::new(SimClock(self.sim.clone()));
        Engine::build(
            &self.pool,
            &self.stream,
            spec.clone(),
            cache,
            settings,
            clock,
            &|spec, pattern, _| {
                let backend = SimBackend::new(pattern.clone(), spec.weights_bytes, Bytes::Checked);
                Ok(around(Box::new(backend)))
            },
        )
    }

    /// Everything was given back, and the pool is whole.
    pub(crate) fn check_empty(&self) {
        self.pool.verify().unwrap();
        for device in self.pool.devices() {
            let stats = self.pool.device_stats(device).unwrap();
            assert!(stats.adds_up(), "{stats:?}");
            assert_eq!((stats.live_bytes, stats.elastic_bytes, stats.lent_bytes), (0, 0, 0));
            self.pool.trim(device).unwrap();
            let stats = self.pool.device_stats(device).unwrap();
            assert_eq!(stats.held_bytes, stats.anchor_bytes, "{stats:?}");
        }
        for host in self.pool.stats().hosts {
            assert!(host.adds_up() && host.elastic_bytes == 0, "{host:?}");
        }
    }
}

pub(crate) fn tiny() -> ModelSpec {
    ModelSpec::preset("tiny").unwrap()
}

/// A request, and what it is answered.
pub(crate) struct Asked {
    pub(crate) prompt: Vec<u32>,
    pub(crate) max_tokens: u32,
    pub(crate) answer: Answer,
}

impl Asked {
    pub(crate) fn of(engine: &mut Engine, prompt: Vec<u32>, max_tokens: u32) -> Asked {
        Asked::by(|job| engine.submit(job), prompt, max_tokens)
    }

    pub(crate) fn by(submit: impl FnOnce(Job), prompt: Vec<u32>, max_tokens: u32) -> Asked {
        let answer = Answer::default();
        let sink = Box::new(answer.clone());
        submit(Job { prompt: prompt.clone(), max_tokens, sink });
        Asked { prompt, max_tokens, answer }
    }

    /// `index` tells the prompt.
    pub(crate) fn nth(
        engine: &mut Engine,
        index: u32,
        prompt_tokens: u32,
        max_tokens: u32,
    ) -> Asked {
        let prompt = (0..prompt_tokens).map(|i| (index * 31 + i * 7) % VOCABULARY).collect();
        Asked::of(engine, prompt, max_tokens)
    }

    pub(crate) fn check_right(&self, spec: &ModelSpec) {
        assert_eq!(self.answer.outcome(), Some(Outcome::Finished));
        let pattern = spec.pattern().unwrap();
        let right = pattern.answer(&self.prompt, self.max_tokens as usize, VOCABULARY);
        assert_eq!(self.answer.tokens(), right);
    }
}

/// Ticks until nothing is left, with a bound.
pub(crate) fn run(engine: &mut Engine) {
    for _ in 0..100_000 {
        match engine.tick() {
            Tick::Idle => return,
            Tick::Stuck => engine.pass(1000.0),
            Tick::Stepped(_) => {}
        }
    }
    panic!("the engine does not come to an end");
}

/// A backend that spoils one byte before a step.
pub(crate) struct Spoiler {
    pub(crate) inner: Box<dyn Backend>,
    pub(crate) steps: u32,
    pub(crate) at_step: u32,
}

impl Backend for Spoiler {
    fn is_modelled(&self) -> bool {
        self.inner.is_modelled()
    }

    fn step(&mut self, batch: &Batch<'_>) -> Result<StepDone, BackendError> {
        self.steps += 1;
        if self.steps == self.at_step {
            let piece = batch.buffer.pieces()[0];
            let mut byte = [0];
            batch.buffer.read(piece.offset, &mut byte)?;
            batch.buffer.write(piece.offset, &[byte[0] ^ 1])?;
        }
        self.inner.step(batch)
    }
}
