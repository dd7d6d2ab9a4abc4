//! [`Engine`]: continuous batching of one model's requests, in one thread.
//!
//! Each [`tick`](Engine::tick) is one step: requests are admitted as far as the cache has room for
//! their prompts, and begin once memory for these has come, which no other waits for; memory grows by a token for those that run, the backend writes and reads, and what
//! it read is checked. When memory is short the youngest is preempted: parked on the host, or its
//! memory is dropped and written anew later. Given the same requests, cache and clock it does the
//! same.
//!
//! `admit`: who runs. `step`: one step. `answer`: a sink for tests and comparisons. `sleep`: the weights, and memory for other models. `task`:
//! requests.

mod admit;
mod answer;
mod sleep;
mod step;
mod task;

use std::collections::VecDeque;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use vmm_kv::KvError;
use vmm_pool::{Error, Pool};
use vmm_sys::object::Stream;

pub use answer::Answer;
pub use sleep::{SleepMode, Weights};
pub use task::{Job, Outcome, Refusal, RefusalKind, Sink};

use crate::backend::{Backend, BackendError};
use crate::cache::{Cache, CacheFigures, CacheSettings, Room};
use crate::clock::Clock;
use crate::model::{ModelError, ModelSpec};
use crate::pattern::Pattern;
use task::Task;

/// Settings of an engine.
#[derive(Clone, Debug)]
pub struct EngineSettings {
    /// Requests that run at a time, at most.
    pub max_running: usize,
    /// Requests that wait at a time beside those that could run, at most.
    pub max_waiting: usize,
    /// Tokens of prompts that one step writes, at most.
    pub prefill_tokens: usize,
    /// Room that is left for each request that runs when another is admitted, in tokens.
    pub margin_tokens: u64,
    /// How many steps of others a request that was admitted waits for its memory to come in the background.
    /// Then, or if no other runs, the engine's thread gets it.
    pub ahead_ticks: u32,
    /// How long requests wait for memory that others have, in microseconds of the clock.
    pub patience_us: f64,
    /// What becomes of the weights in a sleep.
    pub sleep_mode: SleepMode,
}

impl Default for EngineSettings {
    fn default() -> EngineSettings {
        EngineSettings {
            max_running: 256,
            max_waiting: 256,
            prefill_tokens: 2048,
            margin_tokens: 64,
            ahead_ticks: 32,
            patience_us: 2e6,
            sleep_mode: SleepMode::Drop,
        }
    }
}

/// An engine that could not be made, or an operation on it that could not be done.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The cache.
    #[error(transparent)]
    Kv(#[from] KvError),
    /// The pool.
    #[error(transparent)]
    Pool(#[from] Error),
    /// The driver.
    #[error(transparent)]
    Driver(#[from] vmm_sys::DriverError),
    /// The backend.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// The model has requests, and cannot sleep.
    #[error("{model} has {requests} requests: expected none")]
    Busy {
        /// The model.
        model: String,
        /// How many.
        requests: usize,
    },
}

impl EngineError {
    /// Whether memory is short: what a later try can help against.
    pub fn is_shortage(&self) -> bool {
        match self {
            EngineError::Kv(error) => error.is_shortage(),
            EngineError::Pool(error) => error.is_out_of_memory(),
            EngineError::Driver(error) => error.is_out_of_memory(),
            _ => false,
        }
    }
}

/// What a tick did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Tick {
    /// A step.
    Stepped(StepFigures),
    /// There are requests, and no memory for any of them.
    Stuck,
    /// There is no request.
    Idle,
}

/// One step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepFigures {
    /// What it took, in microseconds: what the engine did before, growth that it waited for above all,
    /// and the device's work.
    pub step_us: f64,
    /// Of that, before the device's work: admission, and growth.
    pub growth_us: f64,
    /// Sequences in it.
    pub sequences: usize,
    /// Tokens that were written.
    pub written_tokens: usize,
    /// Tokens that were answered.
    pub answered_tokens: usize,
}

/// What an engine counts, since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Requests that were given all their tokens.
    pub finished: u64,
    /// Requests that were refused.
    pub refused: u64,
    /// Requests that failed, mismatches included.
    pub failed: u64,
    /// Requests that nobody waited for any more.
    pub cancelled: u64,
    /// Sequences in whose memory something else was found than was written.
    pub mismatches: u64,
    /// Tokens of prompts that were written.
    pub prompt_tokens: u64,
    /// Tokens that were answered.
    pub answered_tokens: u64,
    /// Steps.
    pub steps: u64,
    /// Sequences that were moved to the host for want of memory.
    pub parked: u64,
    /// Sequences that came back from there.
    pub resumed: u64,
    /// Sequences whose memory was dropped for want of memory, to be written anew.
    pub dropped: u64,
    /// Sleeps.
    pub sleeps: u64,
    /// Wakes.
    pub wakes: u64,
}

/// An engine at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineFigures {
    /// Requests with memory, parked ones included.
    pub running: u64,
    /// Of these, parked.
    pub parked: u64,
    /// Requests that wait.
    pub waiting: u64,
    /// Whether the model sleeps.
    pub is_asleep: bool,
    /// Memory of the weights.
    pub weights_bytes: u64,
    /// Memory of the cache.
    pub cache: CacheFigures,
    /// What more it could take.
    pub room: Room,
    /// What was counted.
    pub counts: Counts,
}

/// The engine of one model.
pub struct Engine {
    spec: ModelSpec,
    pattern: Arc<Pattern>,
    cache: Cache,
    weights: Weights,
    backend: Box<dyn Backend>,
    clock: Arc<dyn Clock>,
    settings: EngineSettings,
    waiting: VecDeque<Task>,
    /// The oldest first.
    running: Vec<Task>,
    next_number: u64,
    /// Since when requests wait for memory.
    stuck_since_us: Option<f64>,
    is_stopping: bool,
    counts: Counts,
}

/// Makes the backend of an engine from its pattern, stream and model.
pub type MakeBackend<'a> =
    &'a dyn Fn(&ModelSpec, &Arc<Pattern>, &Stream) -> Result<Box<dyn Backend>, BackendError>;

impl Engine {
    /// An engine whose model is awake.
    ///
    /// # Errors
    /// No memory for the weights, or the cache; settings that cannot be.
    pub fn build(
        pool: &Pool,
        stream: &Stream,
        spec: ModelSpec,
        cache: &CacheSettings,
        settings: EngineSettings,
        clock: Arc<dyn Clock>,
        make_backend: MakeBackend<'_>,
    ) -> Result<Engine, EngineError> {
        let pattern = Arc::new(spec.pattern()?);
        let weights = Weights::build(pool, stream.device(), &spec)?;
        // The fixed form leaves nothing for those that come later.
        let backend = make_backend(&spec, &pattern, stream)?;
        let cache = Cache::build(pool, stream, spec.shape()?, cache)?;
        let mut engine = Engine {
            spec,
            pattern,
            cache,
            weights,
            backend,
            clock,
            settings,
            waiting: VecDeque::new(),
            running: Vec::new(),
            next_number: 0,
            stuck_since_us: None,
            is_stopping: false,
            counts: Counts::default(),
        };
        engine.load_weights()?;
        Ok(engine)
    }

    /// The model.
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// The cache.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// What is written for its tokens.
    pub fn pattern(&self) -> &Pattern {
        &self.pattern
    }

    /// Requests that have memory on the device.
    pub fn active_requests(&self) -> usize {
        self.active()
    }

    /// Requests that it has.
    pub fn requests(&self) -> usize {
        self.waiting.len() + self.running.len()
    }

    /// The time, in microseconds of its clock.
    pub fn now_us(&self) -> f64 {
        self.clock.now_us()
    }

    /// Nothing is to be done for so long.
    pub fn pass(&self, us: f64) {
        self.clock.idle(us);
    }

    /// What it counted.
    pub fn counts(&self) -> &Counts {
        &self.counts
    }

    /// Takes a request, or tells its sink that it is refused. The caller has checked its length.
    pub fn submit(&mut self, mut job: Job) {
        let kind = match () {
            () if self.is_stopping => Some((RefusalKind::Stopping, "the server ends")),
            () if self.requests() >= self.settings.max_running + self.settings.max_waiting => {
                Some((RefusalKind::QueueFull, "as many requests wait as may"))
            }
            () => None,
        };
        if let Some((kind, reason)) = kind {
            let refusal = self.refusal(kind, reason.to_owned(), job.prompt.len() as u64);
            self.counts.refused += 1;
            job.sink.done(Outcome::Refused(refusal));
            return;
        }
        self.next_number += 1;
        self.waiting.push_back(Task::new(self.next_number, job, self.clock.now_us()));
    }

    /// Does one step, if there is anything to do.
    pub fn tick(&mut self) -> Tick {
        self.drop_gone();
        if self.requests() == 0 {
            self.stuck_since_us = None;
            if !self.is_asleep()
                && let Err(error) = self.cache.rest()
            {
                tracing::debug!(%error, "idle memory is given back later");
            }
            return Tick::Idle;
        }
        if let Err(error) = self.wake_up() {
            return self.stuck(Some(&error));
        }
        let begun_us = self.clock.now_us();
        self.resume_parked();
        let refused = self.admit();
        let short = self.begin().or(refused);
        match self.step(begun_us) {
            Some(figures) => {
                self.stuck_since_us = None;
                Tick::Stepped(figures)
            }
            // The last request has just failed.
            None if self.requests() == 0 => Tick::Idle,
            None => self.stuck(short.map(EngineError::Kv).as_ref()),
        }
    }

    /// No new requests from now on.
    pub fn stop(&mut self) {
        self.is_stopping = true;
    }

    /// Ends every request now.
    pub fn refuse_all(&mut self, reason: &str) {
        while let Some(task) = self.running.pop().or_else(|| self.waiting.pop_back()) {
            self.refuse(task, RefusalKind::Stopping, reason);
        }
    }

    /// The figures.
    pub fn figures(&self) -> EngineFigures {
        let tokens = self.running.iter().map(|task| task.written as u64).sum();
        EngineFigures {
            running: self.running.len() as u64,
            parked: self.running.iter().filter(|task| task.is_parked).count() as u64,
            waiting: self.waiting.len() as u64,
            is_asleep: self.weights.is_asleep(),
            weights_bytes: self.weights.device_bytes(),
            cache: self.cache.figures(tokens),
            room: self.cache.room(),
            counts: self.counts,
        }
    }

    fn refusal(&self, kind: RefusalKind, reason: String, needed_tokens: u64) -> Refusal {
        Refusal {
            kind,
            reason,
            needed_tokens,
            room: self.cache.room(),
            running: self.running.len() as u64,
            waiting: self.waiting.len() as u64,
        }
    }

    fn refuse(&mut self, mut task: Task, kind: RefusalKind, reason: &str) {
        let needed_tokens = task.tokens.len() as u64;
        task.forget();
        let refusal = self.refusal(kind, reason.to_owned(), needed_tokens);
        self.counts.refused += 1;
        task.sink.done(Outcome::Refused(refusal));
    }

    fn fail(&mut self, mut task: Task, reason: String) {
        task.forget();
        self.counts.failed += 1;
        task.sink.done(Outcome::Failed(reason));
    }
}
