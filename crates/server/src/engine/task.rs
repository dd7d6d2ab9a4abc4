//! What an engine is asked, and what becomes of it.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::cache::{Room, Seq};

/// A request.
pub struct Job {
    /// The prompt. Never empty.
    pub prompt: Vec<u32>,
    /// Tokens to answer with. At least 1.
    pub max_tokens: u32,
    /// Who is told.
    pub sink: Box<dyn Sink>,
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Job({} tokens, at most {} more)", self.prompt.len(), self.max_tokens)
    }
}

/// Who is told of a request's tokens and its end, in the engine's thread: it must not wait.
pub trait Sink: Send {
    /// One token more.
    fn token(&mut self, id: u32);

    /// The end. Nothing follows.
    fn done(&mut self, outcome: Outcome);

    /// Nobody listens any more: the request may be dropped.
    fn is_gone(&self) -> bool;
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All tokens were given.
    Finished,
    /// The request was not taken, or not kept; it can be made again later.
    Refused(Refusal),
    /// Something is wrong: what was read is not what was written, or the device failed.
    Failed(String),
    /// Nobody listened any more.
    Cancelled,
}

/// Why a request was refused, with the numbers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// The kind.
    pub kind: RefusalKind,
    /// In words, the pool's where memory is short.
    pub reason: String,
    /// Tokens that the request needed room for at once.
    pub needed_tokens: u64,
    /// What there was.
    pub room: Room,
    /// Requests that ran.
    pub running: u64,
    /// Requests that waited.
    pub waiting: u64,
}

/// Kinds of refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RefusalKind {
    /// As many requests wait as may.
    QueueFull,
    /// Memory was short for longer than the request may wait.
    NoMemory,
    /// The server ends.
    Stopping,
}

/// A request in an engine.
pub(crate) struct Task {
    /// Age: smaller is older, and goes first.
    pub(crate) number: u64,
    pub(crate) prompt_tokens: usize,
    /// The prompt, and the answer so far.
    pub(crate) tokens: Vec<u32>,
    /// With the whole answer.
    pub(crate) end_tokens: usize,
    /// Of the tokens, those whose keys and values are in memory.
    pub(crate) written: usize,
    /// The check of those.
    pub(crate) check: u32,
    pub(crate) sequence: Option<Seq>,
    pub(crate) is_parked: bool,
    /// How long it has waited for memory that is to come ahead.
    pub(crate) waited_ticks: u32,
    /// Since when it has no memory on the device, by the engine's clock.
    pub(crate) since_us: f64,
    pub(crate) sink: Box<dyn Sink>,
}

impl Task {
    pub(crate) fn new(number: u64, job: Job, now_us: f64) -> Task {
        Task {
            number,
            prompt_tokens: job.prompt.len(),
            end_tokens: job.prompt.len().saturating_add(job.max_tokens as usize),
            tokens: job.prompt,
            written: 0,
            check: 0,
            sequence: None,
            is_parked: false,
            waited_ticks: 0,
            since_us: now_us,
            sink: job.sink,
        }
    }

    /// Tokens that are still to be written.
    pub(crate) fn unwritten(&self) -> usize {
        self.tokens.len() - self.written
    }

    /// Whether it has memory for its tokens, and takes part in steps unless it is parked. Before, memory
    /// is on its way.
    pub(crate) fn has_begun(&self) -> bool {
        self.sequence.as_ref().is_some_and(|sequence| sequence.tokens() > 0)
    }

    /// Frees its memory. It can begin anew.
    pub(crate) fn forget(&mut self) {
        self.sequence = None;
        self.is_parked = false;
        self.waited_ticks = 0;
        self.written = 0;
        self.check = 0;
    }
}
