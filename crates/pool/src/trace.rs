//! [`Recorder`]: writes down what a pool was asked, as `vmm-pool replay` reads it.
//!
//! Recording is for bug reports: all lanes share one lock and one clock then, so that the file has
//! one order. A pool that does not record pays one comparison an operation, of a word that the
//! lane has in hand anyway.
//!
//! Lines are written by a thread of their own, a fraction of a second behind at most, so that a
//! program that crashes leaves what led there. What cannot be written is said once; recording then
//! ends, and the pool goes on.

mod file;
mod writer;

use std::collections::HashMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmm_sys::{DeviceId, StreamId, process};

use crate::config::Settings;
use crate::error::Error;
use crate::sync::thread::{self, JoinHandle};
use crate::sync::{Condvar, Mutex, MutexGuard};
use file::TraceFile;

/// Records that may wait for the writer before those who make them have to wait too.
const PENDING_MAX: usize = 1 << 18;
/// Records that are worth waking the writer for.
const PENDING_MANY: usize = 1 << 12;
/// How long the end of a pool waits for a disk that does not answer.
const END_WAIT: Duration = Duration::from_secs(10);

/// One line of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Record {
    /// A comment: the first time that a stream is seen.
    Stream {
        number: u64,
        device: DeviceId,
        stream: StreamId,
    },
    Alloc {
        id: u64,
        bytes: u64,
        stream: u64,
        time_us: u64,
    },
    Free {
        id: u64,
        time_us: u64,
    },
}

/// A block for as long as it is live: the lane's number and the offset in it.
type Place = (u64, u64);

#[derive(Debug, Default)]
struct State {
    pending: Vec<Record>,
    next_id: u64,
    live: HashMap<Place, u64>,
    streams: HashMap<(DeviceId, StreamId), u64>,
    /// The pool and its last lane are gone.
    stop: bool,
    /// Nothing more is recorded: the file could not be written.
    broken: bool,
    /// The writer is done.
    ended: bool,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// There is something to write, or an end.
    wake: Condvar,
    /// Something was written, or the writer has ended.
    written: Condvar,
}

/// The recording of one pool. The last of the pool and its lanes to go ends it.
pub(crate) struct Recorder {
    shared: Arc<Shared>,
    start: Instant,
    _thread: JoinHandle<()>,
}

impl fmt::Debug for Recorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.shared.state.lock();
        write!(f, "Recorder({} live, broken: {})", state.live.len(), state.broken)
    }
}

/// What a lane needs to record: the recorder, and which lane it is.
#[derive(Clone, Debug)]
pub(crate) struct LaneTrace {
    recorder: Arc<Recorder>,
    lane: u64,
    device: DeviceId,
    stream: StreamId,
}

impl Recorder {
    /// Makes the file, and the thread that writes it.
    pub(crate) fn start(path: &Path, settings: &Settings) -> Result<Arc<Recorder>, Error> {
        let refuse = |error: std::io::Error| Error::BadSetting {
            setting: Settings::TRACE,
            value: path.display().to_string(),
            expected: format!("the path of a file that can be written: {error}"),
        };
        let mut file = TraceFile::create(path).map_err(refuse)?;
        // Written at once, so that a file that cannot be written is found out at once.
        file.header(settings).map_err(refuse)?;
        Recorder::write_to(file).map_err(refuse)
    }

    fn write_to(file: TraceFile) -> std::io::Result<Arc<Recorder>> {
        let shared = Arc::new(Shared::default());
        let theirs = shared.clone();
        let thread = thread::Builder::new()
            .name("vmm-pool-trace".into())
            .spawn(move || writer::run(file, &theirs))?;
        Ok(Arc::new(Recorder { shared, start: Instant::now(), _thread: thread }))
    }

    /// The recorder's state, unless nothing is recorded any more. Waits while the writer is far
    /// behind: the list of records has an end.
    fn recording(&self) -> Option<MutexGuard<'_, State>> {
        let mut state = self.shared.state.lock();
        while state.pending.len() >= PENDING_MAX && !state.broken {
            self.shared.wake.notify_one();
            self.shared.written.wait(&mut state);
        }
        (!state.broken).then_some(state)
    }

    fn add(&self, mut state: MutexGuard<'_, State>, record: Record) {
        state.pending.push(record);
        if state.pending.len() == PENDING_MANY {
            self.shared.wake.notify_one();
        }
    }

    fn time_us(&self) -> u64 {
        // 2^64 us are half a million years.
        self.start.elapsed().as_micros() as u64
    }
}

impl LaneTrace {
    pub(crate) fn new(
        recorder: &Arc<Recorder>,
        lane: u64,
        device: DeviceId,
        stream: StreamId,
    ) -> LaneTrace {
        LaneTrace { recorder: recorder.clone(), lane, device, stream }
    }

    /// A block was handed out.
    #[cold]
    pub(crate) fn alloc(&self, offset: u64, bytes: u64) {
        let Some(mut state) = self.recorder.recording() else { return };
        let next = state.streams.len() as u64;
        let stream = *state.streams.entry((self.device, self.stream)).or_insert(next);
        if stream == next {
            let LaneTrace { device, stream, .. } = *self;
            state.pending.push(Record::Stream { number: next, device, stream });
        }
        let id = state.next_id;
        state.next_id += 1;
        state.live.insert((self.lane, offset), id);
        let time_us = self.recorder.time_us();
        self.recorder.add(state, Record::Alloc { id, bytes, stream, time_us });
    }

    /// It was freed: from the caller's side, whatever still uses its memory.
    #[cold]
    pub(crate) fn free(&self, offset: u64) {
        let Some(mut state) = self.recorder.recording() else { return };
        let Some(id) = state.live.remove(&(self.lane, offset)) else { return };
        let time_us = self.recorder.time_us();
        self.recorder.add(state, Record::Free { id, time_us });
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        if process::is_forked_child() {
            return; // the thread and the lines are the parent's
        }
        let mut state = self.shared.state.lock();
        state.stop = true;
        self.shared.wake.notify_one();
        let deadline = Instant::now() + END_WAIT;
        while !state.ended {
            if self.shared.written.wait_until(&mut state, deadline).timed_out() {
                vmm_sys::say!(warn, "the end of a trace is not written yet");
                break;
            }
        }
    }
}

#[cfg(test)]
mod tests;
