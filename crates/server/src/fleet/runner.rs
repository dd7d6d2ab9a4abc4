//! [`Runner`]: the thread of one model.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use super::{Command, Model};
use crate::engine::{Counts, Engine, Tick};
use crate::meters::ModelMeters;

/// How old published figures get.
const PUBLISH_EVERY: Duration = Duration::from_millis(100);
/// How long a thread without requests waits for a command, before it looks whether to sleep.
const IDLE_WAIT: Duration = Duration::from_millis(20);
/// How long requests without memory wait for the next try.
const STUCK_WAIT: Duration = Duration::from_millis(1);

/// Longer than any server runs.
const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// The thread of one model.
pub(super) struct Runner {
    engine: Engine,
    meters: ModelMeters,
    commands: Receiver<Command>,
    model: Arc<Model>,
    models: Arc<[Arc<Model>]>,
    idle: Option<Duration>,
    idle_since: Instant,
    published: Instant,
    /// Something happened since.
    changed: bool,
    /// Until when requests may go on, once the server ends.
    deadline: Option<Instant>,
}

impl Runner {
    pub(super) fn new(
        engine: Engine,
        meters: ModelMeters,
        commands: Receiver<Command>,
        model: &Arc<Model>,
        models: &Arc<[Arc<Model>]>,
        idle: Option<Duration>,
    ) -> Runner {
        let (idle_since, published) = (Instant::now(), Instant::now());
        let (model, models) = (model.clone(), models.clone());
        Runner {
            engine,
            meters,
            commands,
            model,
            models,
            idle,
            idle_since,
            published,
            changed: false,
            deadline: None,
        }
    }

    /// Until the server ends.
    pub(super) fn run(mut self) -> Counts {
        self.publish();
        loop {
            self.take_commands();
            if self.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                self.engine.refuse_all("the server ends");
            }
            let wait = match self.engine.tick() {
                Tick::Stepped(figures) => {
                    self.meters.step(&figures);
                    self.changed = true;
                    // Whoever is still short says so again.
                    self.model.sleep_wanted.store(false, Ordering::Relaxed);
                    self.idle_since = Instant::now();
                    None
                }
                Tick::Stuck => {
                    self.ask_others();
                    self.idle_since = Instant::now();
                    Some(STUCK_WAIT)
                }
                Tick::Idle if self.deadline.is_some() => break,
                Tick::Idle => {
                    self.fall_asleep();
                    Some(IDLE_WAIT)
                }
            };
            let is_new = self.changed && self.engine.requests() == 0;
            if is_new || self.published.elapsed() >= PUBLISH_EVERY {
                self.publish();
            }
            if let Some(wait) = wait {
                self.wait(wait);
            }
        }
        self.publish();
        *self.engine.counts()
    }

    fn take_commands(&mut self) {
        loop {
            match self.commands.try_recv() {
                Ok(command) => self.obey(command),
                Err(TryRecvError::Empty) => return,
                Err(TryRecvError::Disconnected) => return self.begin_to_end(Duration::ZERO),
            }
        }
    }

    fn wait(&mut self, wait: Duration) {
        match self.commands.recv_timeout(wait) {
            Ok(command) => self.obey(command),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => self.begin_to_end(Duration::ZERO),
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Submit(job) => {
                self.changed = true;
                self.engine.submit(job);
            }
            Command::Sleep(reply) => {
                let slept = self.engine.sleep().map(drop);
                self.publish();
                reply(slept);
            }
            Command::Wake(reply) => {
                let woke = self.engine.wake();
                if woke.is_err() {
                    self.ask_others();
                }
                self.idle_since = Instant::now();
                self.publish();
                reply(woke);
            }
            Command::Stop { grace } => self.begin_to_end(grace),
        }
    }

    fn begin_to_end(&mut self, grace: Duration) {
        self.engine.stop();
        let now = Instant::now();
        // No clock reaches so far as some say: a century is as good.
        let deadline = now.checked_add(grace).unwrap_or(now + CENTURY);
        self.deadline = Some(self.deadline.map_or(deadline, |known| known.min(deadline)));
    }

    /// Memory is short: models without requests make room.
    fn ask_others(&self) {
        let others = self.models.iter().filter(|model| !Arc::ptr_eq(model, &self.model));
        others.for_each(|model| model.want_sleep());
    }

    /// Without requests, after a while, or when another is short.
    fn fall_asleep(&mut self) {
        let is_wanted = self.model.sleep_wanted.swap(false, Ordering::Relaxed);
        let is_idle = self.idle.is_some_and(|idle| self.idle_since.elapsed() >= idle);
        if !self.engine.is_asleep()
            && (is_wanted || is_idle)
            && let Err(error) = self.engine.sleep()
        {
            tracing::warn!(%error, model = self.model.spec().name, "cannot fall asleep");
            self.idle_since = Instant::now();
        }
    }

    fn publish(&mut self) {
        let figures = self.engine.figures();
        self.meters.publish(&figures);
        *self.model.figures.lock() = figures;
        self.published = Instant::now();
        self.changed = false;
    }
}
