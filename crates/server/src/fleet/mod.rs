//! [`Fleet`]: the models of a server on one pool, an engine and a thread each.
//!
//! A model that has no requests sleeps after a while, or at once when another is short of memory; a
//! request wakes it.

mod runner;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use vmm_pool::Pool;

use crate::engine::{
    Counts, Engine, EngineError, EngineFigures, Job, Outcome, Refusal, RefusalKind,
};
use crate::meters::ModelMeters;
use crate::model::ModelSpec;
use runner::Runner;

/// How long memory that is still held is waited for, and how often it is looked at.
const JUDGE_PATIENCE: Duration = Duration::from_secs(1);
const JUDGE_PAUSE: Duration = Duration::from_millis(5);

/// What a model's thread is told.
pub(crate) enum Command {
    Submit(Job),
    Sleep(Reply),
    Wake(Reply),
    Stop { grace: Duration },
}

/// Called with the answer, in the model's thread.
pub(crate) type Reply = Box<dyn FnOnce(Result<(), EngineError>) + Send>;

/// A model of a server.
pub struct Model {
    spec: ModelSpec,
    commands: Sender<Command>,
    figures: Mutex<EngineFigures>,
    /// Another model is short of memory.
    sleep_wanted: AtomicBool,
}

/// The models of a server.
pub struct Fleet {
    pool: Pool,
    models: Arc<[Arc<Model>]>,
    threads: Mutex<Vec<JoinHandle<Counts>>>,
}

/// How a fleet ended.
#[derive(Clone, Debug)]
pub struct Stopped {
    /// What each model counted.
    pub counts: Vec<(String, Counts)>,
    /// Memory that the pool still holds, on all devices, after everything was given back: small
    /// mappings that keep links to peers up.
    pub held_bytes: u64,
    /// Whether the pool is whole, and empty.
    pub verdict: Result<(), String>,
}

impl Fleet {
    /// Starts a thread for each engine. `idle` is how long a model stays awake without requests;
    /// until another is short of memory if none.
    ///
    /// # Errors
    /// The system's, for threads.
    pub fn start(
        pool: &Pool,
        engines: Vec<(Engine, ModelMeters)>,
        idle: Option<Duration>,
    ) -> io::Result<Fleet> {
        let mut models = Vec::new();
        let mut parts: Vec<(Engine, ModelMeters, Receiver<Command>)> = Vec::new();
        for (engine, meters) in engines {
            let (commands, receiver) = channel();
            models.push(Arc::new(Model {
                spec: engine.spec().clone(),
                commands,
                figures: Mutex::new(engine.figures()),
                sleep_wanted: AtomicBool::new(false),
            }));
            parts.push((engine, meters, receiver));
        }
        let models: Arc<[Arc<Model>]> = models.into();
        let mut threads = Vec::new();
        for (model, (engine, meters, receiver)) in models.iter().zip(parts) {
            let runner = Runner::new(engine, meters, receiver, model, &models, idle);
            let name = format!("vmm-{}", model.spec.name);
            threads.push(std::thread::Builder::new().name(name).spawn(move || runner.run())?);
        }
        Ok(Fleet { pool: pool.clone(), models, threads: Mutex::new(threads) })
    }

    /// The pool.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// The models.
    pub fn models(&self) -> &[Arc<Model>] {
        &self.models
    }

    /// The model of this name.
    pub fn model(&self, name: &str) -> Option<&Arc<Model>> {
        self.models.iter().find(|model| model.spec.name == name)
    }

    /// Takes no more requests, lets those that it has end for `grace`, then gives everything back and
    /// checks the pool. A second call finds nothing to stop.
    pub fn stop(&self, grace: Duration) -> Stopped {
        for model in self.models.iter() {
            // A thread that has ended takes no command.
            let _ = model.commands.send(Command::Stop { grace });
        }
        let threads = std::mem::take(&mut *self.threads.lock());
        let (mut counts, mut panicked) = (Vec::new(), Ok(()));
        for (model, thread) in self.models.iter().zip(threads) {
            let name = model.spec.name.clone();
            match thread.join() {
                Ok(counted) => counts.push((name, counted)),
                Err(_) => panicked = Err(format!("the thread of model {name} panicked")),
            }
        }
        let (held_bytes, verdict) = self.judge();
        let verdict = panicked.and(verdict);
        Stopped { counts, held_bytes, verdict }
    }

    /// Ends the grace of a [`Fleet::stop`] that another thread waits in.
    pub fn hurry(&self) {
        for model in self.models.iter() {
            let _ = model.commands.send(Command::Stop { grace: Duration::ZERO });
        }
    }

    /// Gives what is idle back to the driver, and looks whether that was everything. A buffer that the
    /// pool's thread is growing ends when that is done.
    fn judge(&self) -> (u64, Result<(), String>) {
        let begun = Instant::now();
        loop {
            let judged = self.look();
            if judged.1.is_ok() || begun.elapsed() >= JUDGE_PATIENCE {
                return judged;
            }
            std::thread::sleep(JUDGE_PAUSE);
        }
    }

    fn look(&self) -> (u64, Result<(), String>) {
        let mut verdict = self.pool.verify();
        let mut held_bytes = 0;
        let devices: Vec<_> = self.pool.devices().collect();
        for device in devices {
            if let Err(error) = self.pool.trim(device) {
                verdict = verdict.and(Err(error.to_string()));
            }
            let Some(stats) = self.pool.device_stats(device) else { continue };
            held_bytes += stats.held_bytes;
            if !stats.adds_up() || stats.held_bytes != stats.anchor_bytes {
                verdict = verdict.and(Err(format!("{device} still holds memory: {stats:?}")));
            }
        }
        for host in self.pool.stats().hosts {
            if !host.adds_up() || host.elastic_bytes > 0 {
                verdict = verdict.and(Err(format!("the host still holds memory: {host:?}")));
            }
        }
        (held_bytes, verdict)
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        self.hurry();
        for thread in std::mem::take(self.threads.get_mut()) {
            let _ = thread.join();
        }
    }
}

impl Model {
    /// What it is.
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// Its figures, as they were at most a tenth of a second ago.
    pub fn figures(&self) -> EngineFigures {
        *self.figures.lock()
    }

    /// Hands a request over. If the model's thread has ended it is refused.
    pub fn submit(&self, job: Job) {
        if let Err(error) = self.commands.send(Command::Submit(job))
            && let Command::Submit(mut job) = error.0
        {
            job.sink.done(Outcome::Refused(Refusal {
                kind: RefusalKind::Stopping,
                reason: "the server ends".to_owned(),
                needed_tokens: job.prompt.len() as u64,
                room: Default::default(),
                running: 0,
                waiting: 0,
            }));
        }
    }

    /// Asks it to sleep; `reply` is called with the answer in its thread, or dropped if that has
    /// ended.
    pub fn sleep(&self, reply: impl FnOnce(Result<(), EngineError>) + Send + 'static) {
        let _ = self.commands.send(Command::Sleep(Box::new(reply)));
    }

    /// Asks it to wake; see [`Model::sleep`].
    pub fn wake(&self, reply: impl FnOnce(Result<(), EngineError>) + Send + 'static) {
        let _ = self.commands.send(Command::Wake(Box::new(reply)));
    }

    /// Another model is short of memory: this one sleeps as soon as it has no requests.
    fn want_sleep(&self) {
        self.sleep_wanted.store(true, Ordering::Relaxed);
    }
}
