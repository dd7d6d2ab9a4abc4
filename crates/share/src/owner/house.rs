//! [`House`]: which buffers there are, who holds them, and for how long they stay. Nothing here calls
//! the pool or the driver.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};
use vmm_pool::ElasticBuffer;
use vmm_sys::caught::thrown;
use vmm_sys::{DeviceId, Uuid};

use super::{HeldBuffer, Holder, LeaseState, Limits, NAMES_MAX, OwnerDevice, OwnerStatus};
use crate::error::Refusal;
use crate::exporter::{Keeper, Offer};
use crate::os::PeerCredentials;
use crate::steps::step;
use crate::wire::{HELD_MAX, Message, OwnerMessage};

/// How often the clock is looked at while a lease runs: it need not be the system's.
const LOOK: Duration = Duration::from_millis(250);

/// Time since any moment.
#[derive(Clone)]
pub(super) struct Clock(pub(super) Arc<dyn Fn() -> Duration + Send + Sync>);

/// Why a client does not get what it asked for.
pub(super) type Refused = (Refusal, String);

/// What a client wants to have.
#[derive(Clone, Debug)]
pub(super) struct Wanted {
    pub(super) name: String,
    pub(super) bytes: u64,
    pub(super) chunk_bytes: u64,
    pub(super) device: OwnerDevice,
    pub(super) others_write: bool,
    pub(super) succeed: bool,
}

/// A buffer that is there. Fields are dropped in this order.
pub(super) struct Entry {
    pub(super) offer: Offer,
    pub(super) buffer: Arc<ElasticBuffer>,
    pub(super) bytes: u64,
    pub(super) device: Uuid,
    pub(super) others_write: bool,
    /// The user who made it.
    pub(super) uid: u32,
    /// The client that made it, or its successor, while it is connected.
    writer: Option<u64>,
    /// Clients, and whether they write.
    holders: BTreeMap<u64, bool>,
    idle_since: Option<Duration>,
}

/// What the working thread has to do.
pub(super) enum Task {
    Create {
        client: u64,
        wanted: Wanted,
    },
    Release {
        client: u64,
        name: String,
    },
    /// Their leases are over.
    End(Vec<Entry>),
}

#[derive(Default)]
struct State {
    clients: HashMap<u64, PeerCredentials>,
    entries: BTreeMap<String, Entry>,
    tasks: VecDeque<Task>,
    answers: HashMap<u64, Message>,
    stops: bool,
}

pub(super) struct House {
    limits: Limits,
    gpus: Vec<(u32, Uuid, DeviceId)>,
    clock: Clock,
    state: Mutex<State>,
    changed: Condvar,
}

impl Entry {
    pub(super) fn new(
        (offer, buffer): (Offer, Arc<ElasticBuffer>),
        (bytes, device): (u64, Uuid),
        (uid, others_write): (u32, bool),
    ) -> Entry {
        let (writer, holders, idle_since) = (None, BTreeMap::new(), None);
        Entry { offer, buffer, bytes, device, others_write, uid, writer, holders, idle_since }
    }

    fn may_write(&self, client: u64) -> bool {
        self.others_write || self.writer == Some(client)
    }

    fn hold(&mut self, client: u64, write: bool) {
        *self.holders.entry(client).or_default() |= write;
        self.idle_since = None;
    }

    fn leave(&mut self, client: u64, now: Duration) {
        if self.holders.remove(&client).is_some() && self.holders.is_empty() {
            self.idle_since = Some(now);
        }
        if self.writer == Some(client) {
            self.writer = None;
        }
    }
}

impl House {
    pub(super) fn new(limits: Limits, gpus: Vec<(u32, Uuid, DeviceId)>, clock: Clock) -> House {
        House { limits, gpus, clock, state: Mutex::default(), changed: Condvar::new() }
    }

    fn now(&self) -> Duration {
        // It may be anybody's function: one that throws stands still, and no lease ends by it.
        thrown(|| (self.clock.0)()).unwrap_or_default()
    }

    /// The GPU, if it is served.
    pub(super) fn gpu(&self, device: OwnerDevice) -> Result<(Uuid, DeviceId), Refused> {
        let is_it = |(index, uuid, _): &&(u32, Uuid, DeviceId)| match device {
            OwnerDevice::Index(asked) => asked == *index,
            OwnerDevice::Uuid(asked) => asked == *uuid,
        };
        match self.gpus.iter().find(is_it) {
            Some((_, uuid, device)) => Ok((*uuid, *device)),
            None => Err((Refusal::Device, format!("{device:?} is not served here"))),
        }
    }

    /// Whether the client may have so much more; looked at before any memory is made.
    pub(super) fn check_limits(&self, client: u64, bytes: u64) -> Result<(), Refused> {
        let state = self.state.lock();
        if state.entries.len() >= NAMES_MAX {
            return Err((Refusal::Limit, format!("there are {NAMES_MAX} buffers already")));
        }
        let sum = |sum: u64, entry: &Entry| sum.saturating_add(entry.bytes);
        let all = state.entries.values().fold(0, sum);
        let pid = |client| state.clients.get(&client).map(|peer| peer.pid);
        let asked = pid(client);
        let own = state.entries.values().filter(|it| it.writer.and_then(pid) == asked);
        let own = own.fold(0, sum);
        for (what, has, max) in [
            ("this process", own, self.limits.client_bytes),
            ("all together", all, self.limits.total_bytes),
        ] {
            if has.saturating_add(bytes) > max {
                let why = format!("{bytes} bytes more for {what}, which has {has} of {max}");
                return Err((Refusal::Limit, why));
            }
        }
        Ok(())
    }

    /// Finds what is there by that name, and has the client hold it. Says whether it may write.
    pub(super) fn find(&self, client: u64, wanted: &Wanted) -> Result<Option<bool>, Refused> {
        let device = self.gpu(wanted.device)?.0;
        let mut state = self.state.lock();
        let Some(peer) = state.clients.get(&client).copied() else { return Ok(None) };
        let Some(entry) = state.entries.get_mut(&wanted.name) else { return Ok(None) };
        let chunk_bytes = entry.buffer.chunk_bytes();
        let same_chunk = [0, chunk_bytes].contains(&wanted.chunk_bytes);
        let rounded = wanted.bytes.checked_next_multiple_of(chunk_bytes);
        if rounded != Some(entry.bytes) || !same_chunk || entry.device != device {
            let why = format!(
                "{:?} has {} bytes in chunks of {chunk_bytes} on {}",
                wanted.name, entry.bytes, entry.device
            );
            return Err((Refusal::Differs, why));
        }
        if wanted.succeed && entry.writer.is_none() && entry.uid == peer.uid {
            entry.writer = Some(client);
        }
        let write = entry.may_write(client);
        entry.hold(client, write);
        Ok(Some(write))
    }

    /// Enters a new buffer, held by the client that asked for it, unless that has gone meanwhile:
    /// then its lease begins.
    pub(super) fn enter(&self, client: u64, name: String, mut entry: Entry) {
        let now = self.now();
        let mut state = self.state.lock();
        if state.clients.contains_key(&client) {
            entry.writer = Some(client);
            entry.hold(client, true);
        } else {
            entry.idle_since = Some(now);
        }
        state.entries.insert(name, entry);
    }

    /// Takes a buffer out, for its creator's user and for root.
    pub(super) fn take(&self, client: u64, name: &str) -> Result<Entry, Refused> {
        let mut state = self.state.lock();
        let uid = state.clients.get(&client).map(|peer| peer.uid);
        let Some(entry) = state.entries.get(name) else { return Err(unknown(name)) };
        if uid != Some(entry.uid) && uid != Some(0) {
            return Err((Refusal::Access, format!("{name:?} is user {}'s", entry.uid)));
        }
        state.entries.remove(name).ok_or_else(|| unknown(name))
    }

    /// The user of a client that is connected.
    pub(super) fn uid_of(&self, client: u64) -> Option<u32> {
        self.state.lock().clients.get(&client).map(|peer| peer.uid)
    }

    pub(super) fn put_answer(&self, client: u64, answer: Message) {
        let mut state = self.state.lock();
        if state.clients.contains_key(&client) {
            state.answers.insert(client, answer);
        }
    }

    /// The next thing to do; waits for one. `None` at the end.
    pub(super) fn next_task(&self) -> Option<Task> {
        let mut state = self.state.lock();
        loop {
            if state.stops {
                return None;
            }
            if let Some(task) = state.tasks.pop_front() {
                return Some(task);
            }
            // Not under the lock: the clock may be anybody's function.
            let now = MutexGuard::unlocked(&mut state, || self.now());
            if !state.tasks.is_empty() || state.stops {
                continue;
            }
            let ended = self.take_ended(&mut state, now);
            if !ended.is_empty() {
                return Some(Task::End(ended));
            }
            match self.first_end(&state) {
                Some(end) => {
                    self.changed.wait_for(&mut state, end.saturating_sub(now).min(LOOK));
                }
                None => self.changed.wait(&mut state),
            }
        }
    }

    /// When the lease of a buffer is over, if nobody holds it.
    fn end_of(&self, entry: &Entry) -> Option<Duration> {
        let lease = Some(self.limits.lease).filter(|lease| !lease.is_zero())?;
        Some(entry.idle_since?.saturating_add(lease))
    }

    fn first_end(&self, state: &State) -> Option<Duration> {
        state.entries.values().filter_map(|entry| self.end_of(entry)).min()
    }

    fn take_ended(&self, state: &mut State, now: Duration) -> Vec<Entry> {
        let is_over = |entry: &Entry| self.end_of(entry).is_some_and(|end| end <= now);
        let ended = state.entries.iter().filter(|(_, entry)| is_over(entry));
        let names: Vec<String> = ended.map(|(name, _)| name.clone()).collect();
        names.iter().filter_map(|name| state.entries.remove(name)).collect()
    }

    /// Everything that is there, at the end.
    pub(super) fn take_all(&self) -> Vec<Entry> {
        std::mem::take(&mut self.state.lock().entries).into_values().collect()
    }

    pub(super) fn stop(&self) {
        self.state.lock().stops = true;
        self.changed.notify_all();
    }

    pub(super) fn status(&self) -> OwnerStatus {
        let now = self.now();
        let state = self.state.lock();
        let held = |(name, entry): (&String, &Entry)| self.held(&state, (name, entry), now);
        let max = self.limits.total_bytes;
        OwnerStatus {
            buffers: state.entries.iter().map(held).collect(),
            clients: state.clients.len() as u32,
            total_bytes_max: (max != u64::MAX).then_some(max),
        }
    }

    fn held(&self, state: &State, (name, entry): (&String, &Entry), now: Duration) -> HeldBuffer {
        let holder = |(client, writes): (&u64, &bool)| {
            let peer = state.clients.get(client)?;
            Some(Holder { pid: peer.pid, uid: peer.uid, writes: *writes })
        };
        let lease = match (entry.idle_since, self.end_of(entry)) {
            (None, _) => LeaseState::Held,
            (_, None) => LeaseState::UntilReleased,
            (_, Some(end)) => LeaseState::Ends(end.saturating_sub(now)),
        };
        HeldBuffer {
            name: name.clone(),
            bytes: entry.bytes,
            chunk_bytes: entry.buffer.chunk_bytes(),
            device: entry.device,
            generation: entry.buffer.generation(),
            descriptors: entry.offer.descriptors() as u32,
            lease,
            holders: entry.holders.iter().filter_map(holder).collect(),
        }
    }

    /// Has the working thread do something.
    fn queue(&self, task: Task) {
        self.state.lock().tasks.push_back(task);
        self.changed.notify_all();
    }
}

pub(super) fn unknown(name: &str) -> Refused {
    (Refusal::Unknown, format!("{name:?} is not held"))
}

impl Keeper for House {
    fn came(&self, client: u64, peer: PeerCredentials) {
        self.state.lock().clients.insert(client, peer);
    }

    fn gone(&self, client: u64) {
        let now = self.now();
        let mut state = self.state.lock();
        state.clients.remove(&client);
        state.answers.remove(&client);
        state.entries.values_mut().for_each(|entry| entry.leave(client, now));
        drop(state);
        self.changed.notify_all();
    }

    fn open(&self, client: u64, name: &str, write: bool) -> Result<(), Refused> {
        let mut state = self.state.lock();
        let entry = state.entries.get_mut(name).ok_or_else(|| unknown(name))?;
        if write && !entry.may_write(client) {
            let why = format!("{name:?} may only be read by those who did not create it");
            return Err((Refusal::Access, why));
        }
        entry.hold(client, write);
        Ok(())
    }

    fn ask(&self, client: u64, question: OwnerMessage) -> Option<Message> {
        match question {
            OwnerMessage::Create { name, bytes, chunk_bytes, device, others_write, succeed } => {
                let wanted = Wanted { name, bytes, chunk_bytes, device, others_write, succeed };
                self.queue(Task::Create { client, wanted });
                None
            }
            OwnerMessage::Release { name } => {
                self.queue(Task::Release { client, name });
                None
            }
            OwnerMessage::Leave { name } => {
                step!("owner-leave");
                let now = self.now();
                if let Some(entry) = self.state.lock().entries.get_mut(&name) {
                    entry.leave(client, now);
                }
                step!("owner-left");
                self.changed.notify_all();
                Some(Message::Owner(OwnerMessage::Done))
            }
            OwnerMessage::Status { first } => {
                step!("owner-status");
                let OwnerStatus { buffers, clients, total_bytes_max } = self.status();
                let total = buffers.len() as u32;
                let buffers = buffers.into_iter().skip(first as usize).take(HELD_MAX).collect();
                let total_bytes_max = total_bytes_max.unwrap_or(u64::MAX);
                let holding =
                    OwnerMessage::Holding { total, first, clients, total_bytes_max, buffers };
                Some(Message::Owner(holding))
            }
            other => {
                let text = format!("{other:?} is no question");
                Some(Message::Refused { reason: Refusal::Request, text })
            }
        }
    }

    fn answer(&self, client: u64) -> Option<Message> {
        self.state.lock().answers.remove(&client)
    }
}

impl fmt::Debug for House {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("House").field("limits", &self.limits).finish_non_exhaustive()
    }
}
