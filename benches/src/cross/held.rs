//! A stream that is held by a latch, for a limited time.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use vmm_pool_cli::replay::Cause;
use vmm_sys::object::{Latch, Stream};

use super::Ground;

/// For so long a stream is held at most. A thread of its own watches over it and makes no driver
/// call, so that a call which waits for the stream cannot keep it held.
const LIMIT: Duration = Duration::from_secs(2);

/// A stream with a latch.
#[derive(Debug)]
pub struct HeldStream {
    stream: Stream,
    latch: Arc<Latch>,
    turn: Cell<u32>,
}

impl HeldStream {
    /// A new stream, not held.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(ground: &Ground) -> Result<HeldStream, Cause> {
        let latch = Arc::new(Latch::create(ground.driver(), ground.home())?);
        Ok(HeldStream { stream: ground.stream()?, latch, turn: Cell::new(0) })
    }

    /// Prepares to hold the stream. The watch begins here: what follows is timed.
    pub fn ready(&self) -> Hold<'_> {
        self.ready_for(LIMIT)
    }

    fn ready_for(&self, limit: Duration) -> Hold<'_> {
        let turn = self.turn.get().wrapping_add(1);
        self.turn.set(turn);
        let latch = self.latch.clone();
        let (let_go, letting_go) = mpsc::channel::<()>();
        let watch = thread::spawn(move || {
            let end = letting_go.recv_timeout(limit);
            latch.open(turn);
            end == Err(RecvTimeoutError::Timeout)
        });
        Hold { held: self, turn, let_go: Some(let_go), watch: Some(watch) }
    }
}

impl Drop for HeldStream {
    fn drop(&mut self) {
        // The latch may only go when nothing waits for it any more; every turn is open by now.
        if let Err(error) = self.stream.synchronize() {
            eprintln!("a stream was not waited for: {error}");
        }
    }
}

/// A stream that is about to be held, or is. Opened on every path.
#[derive(Debug)]
pub struct Hold<'a> {
    held: &'a HeldStream,
    turn: u32,
    let_go: Option<Sender<()>>,
    watch: Option<JoinHandle<bool>>,
}

impl Hold<'_> {
    /// The stream.
    pub fn stream(&self) -> &Stream {
        &self.held.stream
    }

    /// Later work of the stream waits.
    ///
    /// # Errors
    /// The driver's.
    pub fn close(&self) -> Result<(), Cause> {
        Ok(self.held.latch.hold(&self.held.stream, self.turn)?)
    }

    /// Lets the stream go on.
    pub fn open(&self) {
        self.held.latch.open(self.turn);
    }

    /// The end of the watch.
    ///
    /// # Errors
    /// The stream was let go because the limit had passed: a call had waited for it.
    pub fn end(mut self) -> Result<(), Cause> {
        match self.finish() {
            Some(false) => Ok(()),
            _ => Err("the stream was held for as long as it may be: a call waited for it".into()),
        }
    }

    /// Whether the limit had passed; `None` if the watch has ended before, or badly.
    fn finish(&mut self) -> Option<bool> {
        self.open();
        // An end that is dropped is the signal.
        self.let_go = None;
        self.watch.take()?.join().ok()
    }
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        self.finish();
    }
}

#[cfg(test)]
mod tests {
    use vmm_sys::sim::Sim;
    use vmm_sys::{DeviceId, Driver};

    use super::*;

    #[test]
    fn a_stream_goes_on_however_its_hold_ends() {
        let sim = Sim::builder().build();
        let driver: Arc<dyn Driver> = sim.clone();
        let ground = Ground::new(&driver, DeviceId(0), None, 0).unwrap();
        let held = HeldStream::new(&ground).unwrap();
        let event = ground.event().unwrap();
        let close = |limit| {
            let hold = held.ready_for(limit);
            hold.close().unwrap();
            event.record(hold.stream()).unwrap();
            hold
        };
        let hold = close(Duration::from_secs(60));
        assert!(!event.passed().unwrap());
        hold.open();
        assert!(event.passed().unwrap());
        hold.end().unwrap();

        drop(close(Duration::from_secs(60)));
        assert!(event.passed().unwrap(), "dropped unopened, as on an error");

        let hold = close(Duration::from_millis(1));
        event.wait().unwrap();
        assert!(hold.end().is_err(), "nobody opened it but the watch");
        drop((event, held, ground));
        sim.check_clean().unwrap();
    }
}
