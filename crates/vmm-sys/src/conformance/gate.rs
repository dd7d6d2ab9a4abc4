//! Holding a stream until the row lets go, and never longer than a limit.
//!
//! A gate is a `cuStreamWaitValue32` on page-locked memory, or a host function that waits. Each has
//! a thread that opens it and does nothing else, so that no driver call that waits for the gate can
//! keep it closed. Every path opens it: [`Gate::open`], `Drop`, and the limit if both are missed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

use crate::error::DriverResult;
use crate::types::{DeviceId, DriverKind, StreamHandle};

use super::scratch::Scratch;

/// How long a stream is held at most. No row comes near it unless a call waited for the gate; on a
/// GPU nothing is held for longer, and a busy machine without one may take its time.
pub(crate) fn hold_limit(scratch: &Scratch<'_>) -> Duration {
    match scratch.driver().kind() {
        DriverKind::Cuda => Duration::from_secs(2),
        DriverKind::Sim => Duration::from_secs(20),
    }
}

/// Holds a stream: what is behind the gate runs only after it was opened.
pub(crate) struct Gate {
    timed_out: Arc<AtomicBool>,
    /// Carries a new limit; dropped to let go.
    let_go: Option<Sender<Duration>>,
    /// `None` for a host function, which may not have begun: it finds its gate open then.
    opened: Option<Receiver<()>>,
}

impl Gate {
    /// Closes a gate on `stream` for `limit` at most.
    pub(crate) fn close(
        scratch: &Scratch<'_>,
        device: DeviceId,
        stream: StreamHandle,
        limit: Duration,
    ) -> DriverResult<Gate> {
        let word = scratch.pinned_word(device)?;
        let (gate, wait) = Gate::new(limit);
        // The opener stands before the gate is closed: nothing can go wrong in between.
        scratch.adopt_opener(thread::spawn(move || {
            wait.until_let_go();
            // SAFETY: the word is 4-aligned page-locked memory, which the scratch frees only after
            // this thread has ended; beside it, only the device reads the word.
            unsafe { AtomicU32::from_ptr(word.0 as *mut u32) }.store(1, Ordering::Release);
        }));
        scratch.wait_value(device, stream, word, 1)?;
        Ok(gate)
    }

    /// Holds `stream` by a host function that returns once the gate is opened.
    pub(crate) fn close_by_host_function(
        scratch: &Scratch<'_>,
        device: DeviceId,
        stream: StreamHandle,
        limit: Duration,
    ) -> DriverResult<Gate> {
        let (mut gate, wait) = Gate::new(limit);
        gate.opened = None;
        scratch.host_function(device, stream, Box::new(move || wait.until_let_go()))?;
        Ok(gate)
    }

    fn new(limit: Duration) -> (Gate, Wait) {
        let timed_out = Arc::new(AtomicBool::new(false));
        let (let_go, letting_go) = mpsc::channel();
        let (opens, opened) = mpsc::channel();
        let wait = Wait { timed_out: Arc::clone(&timed_out), letting_go, limit, _opens: opens };
        (Gate { timed_out, let_go: Some(let_go), opened: Some(opened) }, wait)
    }

    /// Lets the stream go on; returns when the gate stands open.
    pub(crate) fn open(&mut self) {
        // An end that is dropped is the signal, on both channels.
        self.let_go = None;
        if let Some(opened) = self.opened.take() {
            let _ = opened.recv();
        }
    }

    /// Lets the stream go on after `limit` from now, if it is not opened before: for a call that is
    /// expected to wait.
    pub(crate) fn open_in(&self, limit: Duration) {
        if let Some(let_go) = &self.let_go {
            // Fails only if the limit has passed, and then the stream goes on already.
            let _ = let_go.send(limit);
        }
    }

    /// Whether the limit passed before the row opened the gate: a call waited for the stream.
    pub(crate) fn timed_out(&self) -> bool {
        self.timed_out.load(Ordering::Acquire)
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.open();
    }
}

/// The other side of a gate, on the thread that opens it.
struct Wait {
    timed_out: Arc<AtomicBool>,
    letting_go: Receiver<Duration>,
    limit: Duration,
    /// Dropped with this, after the opener's work: see [`Gate::open`].
    _opens: Sender<()>,
}

impl Wait {
    fn until_let_go(&self) {
        let mut limit = self.limit;
        let end = loop {
            match self.letting_go.recv_timeout(limit) {
                Ok(from_now) => limit = from_now,
                Err(end) => break end,
            }
        };
        if end == RecvTimeoutError::Timeout {
            self.timed_out.store(true, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gate_opens_when_told_and_says_so_when_it_was_the_limit() {
        let (mut gate, wait) = Gate::new(Duration::from_secs(60));
        let opener = thread::spawn(move || wait.until_let_go());
        gate.open();
        assert!(opener.join().is_ok() && !gate.timed_out());

        let (gate, wait) = Gate::new(Duration::from_millis(1));
        wait.until_let_go();
        assert!(gate.timed_out());
        drop(wait);
        drop(gate);

        let (gate, wait) = Gate::new(Duration::from_secs(60));
        gate.open_in(Duration::from_millis(1));
        wait.until_let_go();
        assert!(gate.timed_out());
        gate.open_in(Duration::from_millis(1));
        drop(wait);
    }
}
