//! The forms of cache side by side: the same load, the same memory, the same engine, no network.
//!
//! On the simulated device time is virtual, driver calls and steps take what their models say, and a
//! run is the same every time; growth happens in the engine's own thread there, so step times have
//! all of it in them. On a GPU time is real, and growth has a thread of its own.

mod args;
mod report;

use std::collections::HashMap;
use std::sync::Arc;

use hdrhistogram::Histogram;
use vmm_pool::Pool;
use vmm_pool_cli::driver_choice::{DriverChoice, choose_all};
use vmm_sys::DeviceId;
use vmm_sys::object::Stream;

pub use args::{CompareArgs, CompareError, Growth};
pub use report::{Row, table};

use crate::backend;
use crate::cache::{CacheSettings, Form};
use crate::clock::{Clock, SimClock, WallClock};
use crate::engine::{Answer, Engine, EngineSettings, Job, Outcome, Tick};
use crate::lengths::{Lengths, Wanted};
use crate::model::VOCABULARY;
use crate::serve::{check_tables, chunk_bytes, pool};

/// Longest step that is told apart, in microseconds: an hour.
const LONGEST_US: u64 = 3_600_000_000;
/// How long nothing happens when no request has memory, in microseconds.
const STUCK_US: f64 = 1000.0;

/// Runs one form.
///
/// # Errors
/// Settings that cannot be; no memory for the weights, or a slot.
pub fn run(args: &CompareArgs, form: Form, growth: Growth, lend: u64) -> Result<Row, CompareError> {
    let choice = choose_all(args.driver, 2)?;
    let is_simulated = choice.sim.is_some();
    let pool = pool(&choice, Some(args.memory), args.host_memory, lend, !is_simulated)?;
    let clock: Arc<dyn Clock> = match &choice.sim {
        Some(sim) => Arc::new(SimClock(sim.clone())),
        None => Arc::new(WallClock::new(false)),
    };
    let engine = engine(args, &choice, &pool, form, growth, lend, clock)?;
    let spec = engine.spec().clone();
    let (prompt, output) = (args.prompt_tokens, args.output_tokens);
    let lengths = Lengths::new(args.seed, prompt, output, args.sigma, spec.max_tokens)?;
    let mut run = Run::new(engine, lengths, args, lend > 0)?;
    run.drive();
    let mut row = run.row(form, growth, lend);
    row.driver = if is_simulated { "sim" } else { "cuda" };
    row.memory_bytes = args.memory;
    drop(run);
    pool.verify().map_err(CompareError::Broken)?;
    Ok(row)
}

fn engine(
    args: &CompareArgs,
    choice: &DriverChoice,
    pool: &Pool,
    form: Form,
    growth: Growth,
    lend: u64,
    clock: Arc<dyn Clock>,
) -> Result<Engine, CompareError> {
    let spec = args.spec()?;
    check_tables(&spec, form, args.concurrency)?;
    let stream = Stream::create(&choice.driver, DeviceId(0))?;
    let mut cache = CacheSettings::new(form, &spec, chunk_bytes(choice)?);
    cache.max_sequences = args.concurrency;
    cache.borrows = lend > 0;
    cache.host_bytes = args.host_memory;
    cache.background = choice.sim.is_none();
    if growth == Growth::Off {
        cache.keep_idle_bytes = Some(u64::MAX);
    }
    let settings = EngineSettings {
        max_running: args.concurrency as usize,
        max_waiting: args.concurrency as usize,
        ..EngineSettings::default()
    };
    let make = backend::maker(pool, choice.sim.is_some(), args.bytes);
    let engine = Engine::build(pool, &stream, spec, &cache, settings, clock, &make)?;
    if growth == Growth::Off {
        engine.cache().warm()?;
    }
    Ok(engine)
}

/// A run under way: as many requests as the concurrency says are with the engine at any time.
struct Run {
    engine: Engine,
    lengths: Lengths,
    requests: u64,
    concurrency: usize,
    next: u64,
    open: HashMap<u64, (Wanted, Answer)>,
    steps_us: Histogram<u64>,
    begun_us: f64,
    lends: bool,
    sum_us: f64,
    growth_us: f64,
    peak_running: u64,
    peak_committed_bytes: u64,
    peak_borrowed_bytes: u64,
    wrong: u64,
}

impl Run {
    fn new(
        engine: Engine,
        lengths: Lengths,
        args: &CompareArgs,
        lends: bool,
    ) -> Result<Run, CompareError> {
        Ok(Run {
            begun_us: engine.now_us(),
            lends,
            engine,
            lengths,
            requests: args.requests,
            concurrency: args.concurrency as usize,
            next: 0,
            open: HashMap::new(),
            steps_us: Histogram::new_with_bounds(1, LONGEST_US, 3)?,
            sum_us: 0.0,
            growth_us: 0.0,
            peak_running: 0,
            peak_committed_bytes: 0,
            peak_borrowed_bytes: 0,
            wrong: 0,
        })
    }

    fn drive(&mut self) {
        loop {
            while self.open.len() < self.concurrency && self.next < self.requests {
                let wanted = self.lengths.nth(self.next);
                let answer = Answer::default();
                let (prompt, max_tokens) = (wanted.prompt.clone(), wanted.max_tokens);
                self.open.insert(self.next, (wanted, answer.clone()));
                self.engine.submit(Job { prompt, max_tokens, sink: Box::new(answer) });
                self.next += 1;
            }
            match self.engine.tick() {
                Tick::Stepped(figures) => {
                    self.sum_us += figures.step_us;
                    self.growth_us += figures.growth_us;
                    // A conversion saturates.
                    self.steps_us.saturating_record((figures.step_us.round() as u64).max(1));
                }
                Tick::Stuck => self.engine.pass(STUCK_US),
                Tick::Idle if self.next >= self.requests => break,
                Tick::Idle => {}
            }
            self.look();
        }
        self.look();
    }

    /// Peaks; and answers that are there.
    fn look(&mut self) {
        let buffer = self.engine.cache().buffer();
        let committed_bytes = buffer.committed_bytes();
        if committed_bytes > self.peak_committed_bytes {
            self.peak_committed_bytes = committed_bytes;
            // It looks at every chunk.
            if self.lends {
                let borrowed = buffer.stats().borrowed;
                let bytes = borrowed.iter().map(|(_, bytes)| bytes).sum();
                self.peak_borrowed_bytes = self.peak_borrowed_bytes.max(bytes);
            }
        }
        self.peak_running = self.peak_running.max(self.engine.active_requests() as u64);
        let wrong = &mut self.wrong;
        let pattern = self.engine.pattern();
        self.open.retain(|_, (wanted, answer)| {
            let Some(outcome) = answer.outcome() else { return true };
            let count = wanted.max_tokens as usize;
            let is_right = || answer.tokens() == pattern.answer(&wanted.prompt, count, VOCABULARY);
            *wrong += u64::from(outcome == Outcome::Finished && !is_right());
            false
        });
    }

    fn row(&self, form: Form, growth: Growth, lend: u64) -> Row {
        let counts = *self.engine.counts();
        let cache = self.engine.figures().cache;
        let elapsed_us = self.engine.now_us() - self.begun_us;
        let quantile = |quantile| self.steps_us.value_at_quantile(quantile);
        Row {
            driver: "",
            model: self.engine.spec().name.clone(),
            form,
            growth,
            memory_bytes: 0,
            lend_bytes: lend,
            peak_running: self.peak_running,
            tokens_per_s: counts.answered_tokens as f64 * 1e6 / elapsed_us.max(1.0),
            steps: counts.steps,
            step_mean_us: self.sum_us / (counts.steps.max(1) as f64),
            step_p50_us: quantile(0.5),
            step_p99_us: quantile(0.99),
            step_p999_us: quantile(0.999),
            step_max_us: self.steps_us.max(),
            growth_us: self.growth_us,
            finished: counts.finished,
            refused: counts.refused,
            failed: counts.failed,
            wrong: self.wrong,
            parked: counts.parked,
            dropped: counts.dropped,
            answered_tokens: counts.answered_tokens,
            peak_committed_bytes: self.peak_committed_bytes,
            peak_borrowed_bytes: self.peak_borrowed_bytes,
            growths_ahead: cache.background_growths,
            growths_waited: cache.foreground_growths,
            elapsed_s: elapsed_us / 1e6,
        }
    }
}
