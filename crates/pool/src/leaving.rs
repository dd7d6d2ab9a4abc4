//! [`Leaving`]: mappings that belong to nobody any more, on their way to the shelf of their place.
//!
//! A lane that ends hands its mappings over with the gates of their last users; what the driver
//! refused to unmap comes here too, and is tried again. So ending a lane never waits for the GPU.

use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Weak};

use vmm_sys::object::{Chunk, Mapping, RelaxedCapture};
use vmm_sys::{ChunkProps, StreamId};

use crate::depot::{Depot, Footing};
use crate::device::Device;
use crate::events::Events;
use crate::lane::{Asker, Gate, Pending, Wait, Waited};
use crate::obstacle;
use crate::stranded;
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::{Mutex, MutexGuard, across_calls};
use crate::turn::Turn;

/// One mapping on its way.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) mapping: Mapping,
    /// All must have passed.
    gates: Vec<Gate>,
    /// Alive while the chunk stands in another slot of its elastic buffer.
    elsewhere: Weak<Footing>,
}

/// A mapping that is taken back before it was gone.
#[derive(Debug)]
pub(crate) struct Returned {
    pub(crate) mapping: Mapping,
    /// Its last users.
    pub(crate) gates: Vec<Gate>,
    /// Where else its chunk is mapped.
    pub(crate) aliases: Vec<Mapping>,
}

/// The mappings of a place's chunks that belong to nobody.
#[derive(Debug)]
pub(crate) struct Leaving {
    /// By address: a buffer that grows again looks for each of its slots.
    entries: Mutex<BTreeMap<u64, Entry>>,
    /// How many there are, those in the hands of a sweep included.
    count: AtomicUsize,
    /// Held while entries are in a sweep's hands: whoever waits for memory must not miss them.
    sweep: Mutex<()>,
}

impl Default for Leaving {
    fn default() -> Leaving {
        let (entries, count) = (Mutex::default(), AtomicUsize::new(0));
        Leaving { entries, count, sweep: across_calls(()) }
    }
}

impl Leaving {
    /// Takes mappings over, until all the gates have passed.
    pub(crate) fn add(&self, mappings: impl Iterator<Item = Mapping>, gates: Vec<Gate>) {
        self.add_shared(mappings, gates, &Weak::new());
    }

    /// The same for mappings of a chunk that counts elsewhere while that footing lives.
    pub(crate) fn add_shared(
        &self,
        mappings: impl Iterator<Item = Mapping>,
        gates: Vec<Gate>,
        footing: &Weak<Footing>,
    ) {
        let mut entries = self.entries.lock();
        let before = entries.len();
        entries.extend(mappings.map(|mapping| {
            let (gates, elsewhere) = (gates.clone(), footing.clone());
            (mapping.address(), Entry { mapping, gates, elsewhere })
        }));
        self.count.fetch_add(entries.len() - before, Ordering::Relaxed);
    }

    /// Whether a mapping stands at `address`.
    pub(crate) fn has(&self, address: u64) -> bool {
        // A sweep may have it in its hands.
        let _alone = self.sweep.lock();
        self.entries.lock().contains_key(&address)
    }

    /// Takes the mapping that stands at `address` back, with the gates of its last users, if its
    /// chunk has these properties and nobody uses it at another address. The inner answer is `None` if
    /// that is not so, and it stays; the outer one if nothing stands there.
    #[expect(clippy::option_option, reason = "nothing there, or something of another kind")]
    pub(crate) fn reclaim(&self, address: u64, props: &ChunkProps) -> Option<Option<Returned>> {
        // A sweep may have it in its hands.
        let _alone = self.sweep.lock();
        let mut entries = self.entries.lock();
        let entry = entries.get(&address)?;
        let chunk = entry.mapping.chunk();
        // Other mappings of the chunk, which few have.
        let others: Vec<u64> = match Arc::strong_count(chunk) {
            1 => Vec::new(),
            _ => {
                let same = |it: &Entry| Arc::ptr_eq(it.mapping.chunk(), chunk);
                let same = entries.iter().filter(|(at, it)| **at != address && same(it));
                same.map(|(at, _)| *at).collect()
            }
        };
        if chunk.props() != props
            || entry.is_elsewhere()
            || others.iter().any(|at| entries.get(at).is_some_and(|it| !it.gates.is_empty()))
        {
            return Some(None);
        }
        let Entry { mapping, gates, .. } = entries.remove(&address)?;
        // The chunk is counted where it stands, and nowhere else.
        let others = others.iter().filter_map(|at| entries.remove(at));
        let aliases: Vec<Mapping> = others.map(|it| it.mapping).collect();
        self.count.fetch_sub(1 + aliases.len(), Ordering::Relaxed);
        Some(Some(Returned { mapping, gates, aliases }))
    }

    /// Whether nothing is on its way.
    pub(crate) fn is_empty(&self) -> bool {
        self.count.load(Ordering::Relaxed) == 0
    }

    /// What is on its way.
    pub(crate) fn entries(&self) -> MutexGuard<'_, BTreeMap<u64, Entry>> {
        self.entries.lock()
    }

    /// Bytes of the chunks that stand here and in no buffer, each counted once.
    pub(crate) fn bytes(&self) -> u64 {
        let entries = self.entries.lock();
        let mut known: HashSet<*const Chunk> = HashSet::new();
        let mappings = entries.values().filter(|it| !it.is_elsewhere()).map(|it| &it.mapping);
        mappings.filter(|it| known.insert(Arc::as_ptr(it.chunk()))).map(Mapping::bytes).sum()
    }

    /// Unmaps what has passed its gates and settles the chunks; with [`Wait::Yes`], everything that
    /// is here now. Waiting takes nothing out, so that what is finished is there for other threads.
    /// `keeper` lends its events; the place is `depot`.
    pub(crate) fn sweep(&self, keeper: &Device, depot: &Depot, wait: Wait, turn: Turn) {
        stranded::sweep(&keeper.driver, turn);
        if self.entries.lock().is_empty() && wait == Wait::No {
            return;
        }
        match wait {
            Wait::No => {
                if let Some(_alone) = self.sweep.try_lock() {
                    self.sweep_once(keeper, depot, turn);
                }
            }
            Wait::Yes => {
                let alone = self.sweep.lock();
                self.sweep_once(keeper, depot, turn);
                drop(alone);
                let pending = Pending::of(self.entries.lock().values().flat_map(|it| &it.gates));
                if pending.wait(&keeper.events) {
                    let _alone = self.sweep.lock();
                    self.sweep_once(keeper, depot, turn);
                }
            }
        }
    }

    /// The same as without waiting, but for a sweep that another thread makes: what it has in its hands
    /// is not missed.
    pub(crate) fn sweep_now(&self, keeper: &Device, depot: &Depot, turn: Turn) {
        let _alone = self.sweep.lock();
        self.sweep_once(keeper, depot, turn);
    }

    /// Records every gate that is still to be recorded on a stream, and waits for nothing but other
    /// sweeps. Returns whether there is none left: a capture of the stream is in the way of it.
    pub(crate) fn is_done_with(&self, keeper: &Device, depot: &Depot, stream: StreamId) -> bool {
        let _alone = self.sweep.lock();
        let is_due = || self.entries.lock().values().any(|it| it.is_due_on(stream));
        let mut due = is_due();
        if due {
            self.sweep_once(keeper, depot, Turn::Requester);
            due = is_due();
        }
        !due
    }

    fn sweep_once(&self, keeper: &Device, depot: &Depot, turn: Turn) {
        let _carrying = depot.carries.begin();
        let entries: Vec<Entry> = std::mem::take(&mut *self.entries.lock()).into_values().collect();
        if entries.is_empty() {
            return;
        }
        let mut in_hand = InHand { leaving: self, count: entries.len(), entries };
        // Without the relaxed mode a query could end somebody's capture: then nothing is asked.
        let Ok(_relaxed) = RelaxedCapture::enter(&keeper.driver).inspect_err(obstacle::note) else {
            return;
        };
        sweep_entries(&keeper.events, &mut in_hand.entries, turn, |chunk| {
            depot.settle(chunk, turn);
        });
    }

    /// The end of the place: waits for the users of what is left in whatever way there is, and
    /// lets it go. What a capture keeps from being waited for is left to later pools; what cannot
    /// be waited for otherwise belongs to a context that is lost.
    pub(crate) fn end(&self, keeper: &Device, depot: &Depot) {
        self.sweep(keeper, depot, Wait::Yes, Turn::Requester);
        let entries = std::mem::take(&mut *self.entries.lock());
        if entries.is_empty() {
            return;
        }
        let relaxed = RelaxedCapture::enter(&keeper.driver);
        if let Err(error) = &relaxed {
            vmm_sys::say!(debug, %error, "captures are not kept from harm");
        }
        let (held_up, done): (Vec<_>, Vec<_>) =
            entries.into_values().partition(Entry::is_held_up_by_a_capture);
        drop(done); // each mapping unmaps itself
        if !held_up.is_empty() {
            vmm_sys::say!(debug, mappings = held_up.len(), "a capture outlives its pool");
            stranded::keep(keeper.events.clone(), held_up);
        }
    }
}

/// What a sweep has in its hands. What is left goes back when it is dropped, whatever happened.
struct InHand<'a> {
    leaving: &'a Leaving,
    /// How many there were.
    count: usize,
    entries: Vec<Entry>,
}

impl Drop for InHand<'_> {
    fn drop(&mut self) {
        let kept = std::mem::take(&mut self.entries);
        self.leaving.count.fetch_sub(self.count - kept.len(), Ordering::Relaxed);
        let kept = kept.into_iter().map(|entry| (entry.mapping.address(), entry));
        self.leaving.entries.lock().extend(kept);
    }
}

/// Unmaps those that have passed their gates, and hands their chunks to `settle`.
pub(crate) fn sweep_entries(
    events: &Arc<Events>,
    entries: &mut Vec<Entry>,
    turn: Turn,
    mut settle: impl FnMut(Arc<Chunk>),
) {
    let mut asker = Asker::new(events);
    let mut refused = Vec::new();
    for entry in entries.extract_if(.., |entry| entry.has_passed(&mut asker)) {
        match entry.leave(turn) {
            Ok(chunk) => settle(chunk),
            Err(entry) => refused.push(entry),
        }
    }
    asker.finish();
    entries.append(&mut refused);
}

impl Entry {
    /// Whether the chunk stands in a buffer's slot, and counts there.
    pub(crate) fn is_elsewhere(&self) -> bool {
        self.elsewhere.strong_count() > 0
    }

    fn is_due_on(&self, stream: StreamId) -> bool {
        self.gates.iter().any(|gate| gate.is_due_on(stream))
    }

    /// Asks what it still waits for.
    fn has_passed(&mut self, asker: &mut Asker<'_>) -> bool {
        self.gates.retain_mut(|gate| !asker.ask(gate));
        self.gates.is_empty()
    }

    /// Unmaps it, which has passed its gates, and gives its chunk; itself if the driver refuses.
    fn leave(self, turn: Turn) -> Result<Arc<Chunk>, Entry> {
        let Entry { mapping, gates, elsewhere } = self;
        turn.with(|| mapping.unmap()).map_err(|(mapping, error)| {
            obstacle::tell(&error, "a mapping could not be unmapped");
            Entry { mapping, gates, elsewhere }
        })
    }

    /// Waits for its users, in whatever way there is; true if a capture does not allow that.
    fn is_held_up_by_a_capture(&self) -> bool {
        let mut held_up = false;
        for gate in &self.gates {
            match gate.wait() {
                Ok(Waited::Done) => {}
                Ok(Waited::Captured) => held_up = true,
                Err(error) if error.is_driver_gone() => {}
                Err(error) => {
                    vmm_sys::say!(warn, %error, ?gate, "the end of the work is not known")
                }
            }
        }
        held_up
    }
}
