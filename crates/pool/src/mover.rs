//! [`Mover`]: the thread that moves elastic buffers in the background.
//!
//! A thread of its own: while a move holds streams, whoever is to let them go may wait for nobody
//! who could be waiting for them. It is started by the first move.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::elastic::migrate::Task;
use crate::sync::{Condvar, Mutex, thread};

/// How long the end of a pool waits for a move that is under way.
const END_WAIT: Duration = Duration::from_secs(5);

/// The moves that nobody has begun, and the thread.
#[derive(Debug, Default)]
pub(crate) struct Mover {
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    tasks: VecDeque<Task>,
    runs: bool,
    stop: bool,
}

impl Mover {
    /// Has the thread do it; where there is none to be had, the calling thread does.
    pub(crate) fn submit(self: &Arc<Mover>, task: Task) {
        let mut queue = self.queue.lock();
        if queue.stop {
            drop(queue);
            drop(task); // has failed
            return;
        }
        queue.tasks.push_back(task);
        if queue.runs {
            self.changed.notify_all();
            return;
        }
        queue.runs = true;
        drop(queue);
        let shared = self.clone();
        let name = || thread::Builder::new().name("vmm-pool-move".into());
        if let Err(error) = name().spawn(move || shared.run(true)) {
            tracing::warn!(%error, "no thread for moves; who asks for one does it");
            self.run(false);
        }
    }

    /// Does what is asked for, and what will be.
    fn run(&self, stays: bool) {
        loop {
            let mut queue = self.queue.lock();
            while queue.tasks.is_empty() && stays && !queue.stop {
                self.changed.wait(&mut queue);
            }
            let task = if queue.stop { None } else { queue.tasks.pop_front() };
            let Some(task) = task else {
                queue.runs = false;
                self.changed.notify_all();
                return;
            };
            drop(queue);
            if catch_unwind(AssertUnwindSafe(|| task.run())).is_err() {
                tracing::warn!("a move panicked; its buffer is as it was");
            }
        }
    }

    /// Ends the thread. What was not begun has failed.
    pub(crate) fn end(&self) {
        let deadline = Instant::now() + END_WAIT;
        let mut queue = self.queue.lock();
        queue.stop = true;
        self.changed.notify_all();
        while queue.runs {
            if self.changed.wait_until(&mut queue, deadline).timed_out() {
                break; // stuck in the driver: it ends by itself when the call returns
            }
        }
        let left = std::mem::take(&mut queue.tasks);
        drop(queue);
        // A buffer may end here, which takes locks.
        drop(left);
    }
}
