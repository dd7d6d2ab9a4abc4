//! The thread that turns records into lines.

use std::time::Duration;

use super::file::TraceFile;
use super::{Record, Shared};

/// How far behind the file may be.
const PERIOD: Duration = Duration::from_millis(100);

/// Says that the writer has ended, also if it panicked.
struct Ended<'a>(&'a Shared);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.ended = true;
        state.broken = true;
        state.pending = Vec::new();
        state.live.clear();
        self.0.written.notify_all();
    }
}

pub(super) fn run(file: TraceFile, shared: &Shared) {
    let _ended = Ended(shared);
    // Moved in after the guard, so that it is closed before: whoever waits for the end finds all of
    // the file.
    let mut file = file;
    let mut batch: Vec<Record> = Vec::new();
    loop {
        let stop = {
            let mut state = shared.state.lock();
            if state.pending.is_empty() && !state.stop {
                shared.wake.wait_for(&mut state, PERIOD);
            }
            std::mem::swap(&mut batch, &mut state.pending);
            shared.written.notify_all();
            state.stop
        };
        if let Err(error) = file.append(&batch) {
            let path = file.path().display();
            vmm_sys::say!(error, %error, %path, "the trace cannot be written: recording ends here");
            return;
        }
        // Nothing can have come after the last lane was gone.
        if stop {
            return;
        }
        batch.clear();
    }
}
