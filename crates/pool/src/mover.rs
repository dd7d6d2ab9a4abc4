//! [`Mover`]: the thread that moves elastic buffers in the background.
//!
//! A thread of its own: while a move holds streams, whoever is to let them go may wait for nobody
//! who could be waiting for them. It is started by the first move.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmm_sys::caught::thrown;

use crate::elastic::homecoming::Homecoming;
use crate::elastic::migrate::Task;
use crate::elastic::operation::is_operating;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Condvar, Mutex, thread};

/// How long the end of a pool waits for a move that is under way.
const END_WAIT: Duration = Duration::from_secs(5);

/// A move.
#[derive(Debug)]
pub(crate) enum Job {
    /// Somebody asked for it.
    Move(Task),
    /// Borrowed memory comes home.
    Home(Homecoming),
}

impl Job {
    fn run(self) {
        match self {
            Job::Move(task) => task.run(),
            Job::Home(homecoming) => homecoming.run(),
        }
    }
}

/// The moves that nobody has begun, and the thread.
#[derive(Debug, Default)]
pub(crate) struct Mover {
    queue: Mutex<Queue>,
    changed: Condvar,
    /// How often threads of the pool panicked.
    panics: Arc<AtomicU64>,
}

#[derive(Debug, Default)]
struct Queue {
    jobs: VecDeque<Job>,
    runs: bool,
    stop: bool,
}

impl Mover {
    pub(crate) fn new(panics: Arc<AtomicU64>) -> Mover {
        Mover { panics, ..Mover::default() }
    }

    /// Has the thread do it; where there is none to be had, the calling thread does what somebody asked
    /// for.
    pub(crate) fn submit(self: &Arc<Mover>, job: Job) {
        let mut queue = self.queue.lock();
        if queue.stop {
            drop(queue);
            drop(job); // has failed
            return;
        }
        queue.jobs.push_back(job);
        if queue.runs {
            self.changed.notify_all();
            return;
        }
        queue.runs = true;
        drop(queue);
        let shared = self.clone();
        let name = || thread::Builder::new().name("vmm-pool-move".into());
        if let Err(error) = name().spawn(move || shared.run(true)) {
            vmm_sys::say!(warn, %error, "no thread for moves; who asks for one does it");
            let jobs = std::mem::take(&mut self.queue.lock().jobs);
            let (asked, others): (VecDeque<_>, VecDeque<_>) =
                jobs.into_iter().partition(|job| matches!(job, Job::Move(_)));
            self.queue.lock().jobs.extend(asked);
            drop(others);
            self.run(false);
        }
    }

    /// Does what is asked for, and what will be.
    fn run(&self, stays: bool) {
        loop {
            let mut queue = self.queue.lock();
            while queue.jobs.is_empty() && stays && !queue.stop {
                self.changed.wait(&mut queue);
            }
            let job = if queue.stop { None } else { queue.jobs.pop_front() };
            let Some(job) = job else {
                queue.runs = false;
                self.changed.notify_all();
                return;
            };
            drop(queue);
            if let Err(words) = thrown(|| job.run()) {
                self.panics.fetch_add(1, Ordering::Relaxed);
                vmm_sys::say!(error, words, "a move panicked: its buffer is broken");
            }
        }
    }

    /// Ends the thread. What was not begun has failed. Waits for a move that is under way, unless it is
    /// called from within a change of some buffer, as a hook that drops the last handle does: that may be
    /// this very move, or one that it waits for.
    pub(crate) fn end(&self) {
        let deadline = Instant::now() + END_WAIT;
        let mut queue = self.queue.lock();
        queue.stop = true;
        self.changed.notify_all();
        while queue.runs && !is_operating() {
            if self.changed.wait_until(&mut queue, deadline).timed_out() {
                break; // stuck in the driver: it ends by itself when the call returns
            }
        }
        let left = std::mem::take(&mut queue.jobs);
        drop(queue);
        // A buffer may end here, which takes locks.
        drop(left);
    }
}
