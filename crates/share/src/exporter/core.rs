//! What the threads of an exporter share.

use std::collections::{HashMap, HashSet, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::event::{EventfdFlags, eventfd};
use rustix::rand::{GetRandomFlags, getrandom};

use super::keeper::Keeper;
use super::offer::OfferCore;
use super::rule::PeerRule;
use crate::error::{AtStep, ShareError};

/// The settings, validated.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) rule: PeerRule,
    pub(super) clients_max: usize,
    pub(super) descriptors_max: usize,
    pub(super) reserve: usize,
    pub(super) ahead: bool,
    pub(super) timeout: Duration,
}

/// Descriptors that a client waits for.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) client: u64,
    pub(super) offer: Arc<OfferCore>,
    pub(super) pieces: Vec<u64>,
}

/// What the maker has to do, in the order of importance.
#[derive(Debug)]
pub(super) enum Task {
    Describe(Arc<OfferCore>),
    Make(Job),
    Ahead(Arc<OfferCore>),
}

#[derive(Debug, Default)]
struct Work {
    dirty: Vec<Arc<OfferCore>>,
    jobs: VecDeque<Job>,
    ahead: VecDeque<Arc<OfferCore>>,
    /// The offer and the client that the maker works for now.
    in_hand: Option<(u64, Option<u64>)>,
    /// Clients that wait for descriptors.
    waiting: HashSet<u64>,
    /// Those whose descriptors could not be made, and why.
    failed: HashMap<u64, String>,
    /// Threads that run.
    running: usize,
}

#[derive(Debug, Default)]
struct Offers {
    by_name: HashMap<String, Arc<OfferCore>>,
    last_export: u64,
}

/// Figures of an exporter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExporterStats {
    /// Connections that are open.
    pub clients: u64,
    /// Connections that were ever accepted.
    pub accepted: u64,
    /// Connections that were cut, for what they sent, or did not send, or did not read.
    pub cut: u64,
    /// Peers that were refused by the rule or for the number of clients.
    pub refused: u64,
    /// Descriptors of pieces that are open now.
    pub descriptors: u64,
    /// Descriptors that were ever made.
    pub made: u64,
    /// Offers.
    pub offers: u64,
}

/// Counters behind [`ExporterStats`].
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) clients: AtomicU64,
    pub(super) accepted: AtomicU64,
    pub(super) cut: AtomicU64,
    pub(super) refused: AtomicU64,
    pub(super) made: AtomicU64,
}

/// Adds one to a figure.
pub(super) fn count(figure: &AtomicU64) {
    figure.fetch_add(1, Ordering::Relaxed);
}

#[derive(Debug)]
pub(super) struct Core {
    pub(super) id: [u8; 16],
    pub(super) plan: Plan,
    /// Of an owner process.
    pub(super) keeper: Option<Arc<dyn Keeper>>,
    pub(super) counts: Counts,
    /// Wakes the service thread.
    pub(super) waker: OwnedFd,
    offers: Mutex<Offers>,
    work: Mutex<Work>,
    changed: Condvar,
    stop: AtomicBool,
    last_piece: AtomicU64,
}

impl Core {
    pub(super) fn new(plan: Plan, keeper: Option<Arc<dyn Keeper>>) -> Result<Core, ShareError> {
        const STEP: &str = "starting an exporter";
        let mut id = [0; 16];
        getrandom(&mut id, GetRandomFlags::empty()).at(STEP)?;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Core {
            id,
            plan,
            keeper,
            counts: Counts::default(),
            waker: eventfd(0, flags).at(STEP)?,
            offers: Mutex::default(),
            work: Mutex::default(),
            changed: Condvar::new(),
            stop: AtomicBool::new(false),
            last_piece: AtomicU64::new(0),
        })
    }

    pub(super) fn next_piece(&self) -> u64 {
        self.last_piece.fetch_add(1, Ordering::Relaxed) + 1
    }

    // ---- offers ----

    /// Enters what `make` makes of a new number, unless the name is taken.
    pub(super) fn add(
        &self,
        name: &str,
        make: impl FnOnce(u64) -> Result<OfferCore, ShareError>,
    ) -> Result<Arc<OfferCore>, ShareError> {
        let mut offers = self.offers.lock();
        if offers.by_name.contains_key(name) {
            return Err(ShareError::BadArgument {
                what: "name",
                value: name.to_owned(),
                expected: "a name under which nothing else is offered".to_owned(),
            });
        }
        offers.last_export += 1;
        let offer = Arc::new(make(offers.last_export)?);
        offers.by_name.insert(name.to_owned(), offer.clone());
        Ok(offer)
    }

    pub(super) fn remove(&self, offer: &Arc<OfferCore>) {
        let removed = self.offers.lock().by_name.remove(&offer.name);
        let mut work = self.work.lock();
        let is_it = |it: &Arc<OfferCore>| Arc::ptr_eq(it, offer);
        work.dirty.retain(|it| !is_it(it));
        work.ahead.retain(|it| !is_it(it));
        drop(work);
        drop(removed);
        self.wake_service();
    }

    pub(super) fn by_name(&self, name: &str) -> Option<Arc<OfferCore>> {
        self.offers.lock().by_name.get(name).cloned()
    }

    pub(super) fn by_export(&self, export: u64) -> Option<Arc<OfferCore>> {
        self.offers.lock().by_name.values().find(|it| it.export == export).cloned()
    }

    pub(super) fn all(&self) -> Vec<Arc<OfferCore>> {
        self.offers.lock().by_name.values().cloned().collect()
    }

    /// Descriptors that are open, and those of them that wait for an answer.
    pub(super) fn open_descriptors(&self) -> (usize, usize) {
        let each = self.all().into_iter().map(|offer| {
            let shelf = offer.shelf.lock();
            (shelf.open(), shelf.open_once())
        });
        each.fold((0, 0), |sum, it| (sum.0 + it.0, sum.1 + it.1))
    }

    pub(super) fn stats(&self) -> ExporterStats {
        let read = |figure: &AtomicU64| figure.load(Ordering::Relaxed);
        ExporterStats {
            clients: read(&self.counts.clients),
            accepted: read(&self.counts.accepted),
            cut: read(&self.counts.cut),
            refused: read(&self.counts.refused),
            descriptors: self.open_descriptors().0 as u64,
            made: read(&self.counts.made),
            offers: self.all().len() as u64,
        }
    }

    // ---- work for the maker ----

    /// The memory of the offer has changed, or the offer is new.
    pub(super) fn look_again(&self, offer: &Arc<OfferCore>) {
        let mut work = self.work.lock();
        if !work.dirty.iter().any(|it| Arc::ptr_eq(it, offer)) {
            work.dirty.push(offer.clone());
        }
        drop(work);
        self.changed.notify_all();
    }

    /// Has descriptors made, unless that client waits for some already.
    pub(super) fn request(&self, job: Job) {
        let mut work = self.work.lock();
        let waits = work.jobs.iter().any(|it| it.client == job.client);
        let in_hand = work.in_hand.is_some_and(|(_, client)| client == Some(job.client));
        work.waiting.insert(job.client);
        if !waits && !in_hand {
            work.jobs.push_back(job);
        }
        drop(work);
        self.changed.notify_all();
    }

    /// A client is gone, or has what it waited for.
    pub(super) fn forget_client(&self, client: u64) {
        let mut work = self.work.lock();
        work.jobs.retain(|job| job.client != client);
        work.failed.remove(&client);
        work.waiting.remove(&client);
        drop(work);
        self.drop_made_for(client);
    }

    /// Closes what was made for one answer to a client.
    fn drop_made_for(&self, client: u64) {
        for offer in self.all() {
            offer.shelf.lock().forget_client(client);
        }
        // Through the lock, so that the maker does not miss it between its look and its wait.
        drop(self.work.lock());
        self.changed.notify_all();
    }

    /// Descriptors were made for a client, or could not be. If it does not wait for them any more,
    /// nothing stays of that.
    pub(super) fn made_for(&self, client: u64, failure: Option<String>) {
        let mut work = self.work.lock();
        let waits = work.waiting.contains(&client);
        if let Some(why) = failure.filter(|_| waits) {
            work.failed.insert(client, why);
        }
        drop(work);
        if !waits {
            self.drop_made_for(client);
        }
    }

    /// Why the descriptors of that client could not be made, told once.
    pub(super) fn take_failure(&self, client: u64) -> Option<String> {
        self.work.lock().failed.remove(&client)
    }

    /// A client has what it waited for; what was made for that answer went with it.
    pub(super) fn note_sent(&self, client: u64) {
        // As above: under the lock.
        let mut work = self.work.lock();
        work.waiting.remove(&client);
        // It may have asked once more while the answer was being made.
        work.jobs.retain(|job| job.client != client);
        drop(work);
        self.changed.notify_all();
    }

    /// The next thing to do; waits for one. `None` at the end.
    pub(super) fn next_task(&self) -> Option<Task> {
        let mut work = self.work.lock();
        work.in_hand = None;
        self.changed.notify_all();
        loop {
            if self.stops() {
                return None;
            }
            if let Some(task) = self.pick(&mut work) {
                return Some(task);
            }
            self.changed.wait(&mut work);
        }
    }

    fn pick(&self, work: &mut MutexGuard<'_, Work>) -> Option<Task> {
        if let Some(offer) = work.dirty.pop() {
            work.in_hand = Some((offer.export, None));
            return Some(Task::Describe(offer));
        }
        // One answer's descriptors at a time, so that their number is bounded.
        if !work.jobs.is_empty()
            && self.open_descriptors().1 == 0
            && let Some(job) = work.jobs.pop_front()
        {
            work.in_hand = Some((job.offer.export, Some(job.client)));
            return Some(Task::Make(job));
        }
        let offer = work.ahead.pop_front()?;
        work.in_hand = Some((offer.export, None));
        Some(Task::Ahead(offer))
    }

    pub(super) fn add_ahead(&self, offer: Arc<OfferCore>) {
        if self.plan.ahead {
            let mut work = self.work.lock();
            if !work.ahead.iter().any(|it| Arc::ptr_eq(it, &offer)) {
                work.ahead.push_back(offer);
            }
        }
    }

    pub(super) fn wait_ready(
        &self,
        offer: &Arc<OfferCore>,
        timeout: Duration,
    ) -> Result<(), ShareError> {
        let deadline = Instant::now() + timeout;
        let mut work = self.work.lock();
        loop {
            let is_it = |it: &Arc<OfferCore>| Arc::ptr_eq(it, offer);
            let in_hand = work.in_hand.is_some_and(|(export, _)| export == offer.export);
            let pending = work.dirty.iter().any(is_it) || work.ahead.iter().any(is_it) || in_hand;
            if !pending && offer.layout().is_some() {
                return Ok(());
            }
            if self.changed.wait_until(&mut work, deadline).timed_out() {
                return Err(ShareError::Timeout { step: "making descriptors", after: timeout });
            }
        }
    }

    // ---- threads ----

    pub(super) fn wake_service(&self) {
        // Full is as good as one more: the thread wakes up.
        let _ = rustix::io::write(&self.waker, &1u64.to_ne_bytes());
    }

    pub(super) fn stops(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// A thread begins.
    pub(super) fn begin_thread(&self) {
        self.work.lock().running += 1;
    }

    /// A thread ends.
    pub(super) fn end_thread(&self) {
        self.work.lock().running -= 1;
        self.changed.notify_all();
    }

    /// Has the threads end, and waits for them. Says whether they did in time.
    pub(super) fn stop(&self, timeout: Duration) -> bool {
        self.stop.store(true, Ordering::Release);
        self.wake_service();
        let deadline = Instant::now() + timeout;
        let mut work = self.work.lock();
        self.changed.notify_all();
        while work.running > 0 {
            if self.changed.wait_until(&mut work, deadline).timed_out() {
                return false;
            }
        }
        true
    }
}
