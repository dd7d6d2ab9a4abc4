//! An elastic buffer that threads share, and what it must hold.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use vmm_pool::ElasticBuffer;
use vmm_sys::object::{Event, Stream};
use vmm_sys::{DeviceId, StreamId};

use super::board::Words;
use super::trouble::{Step, Trouble};
use super::worker::Worker;
use super::world::lock;

/// Who changes contents, or takes memory away, writes; who only looks at contents reads, and so does
/// who moves the memory: contents stay, and others may look at them meanwhile.
pub(super) struct Item {
    pub(super) buffer: Arc<ElasticBuffer>,
    pub(super) tag: usize,
    slots: RwLock<Slots>,
    /// The last look of each stream.
    readers: Mutex<HashMap<StreamId, Event>>,
}

/// What a chunk's addresses hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Slot {
    Empty,
    /// Memory, with anything in it.
    Unknown,
    Filled {
        value: u32,
        /// The chunk stands at another address too, or did: it is not written.
        shared: bool,
    },
}

pub(super) struct Slots {
    pub(super) of: Vec<Slot>,
    /// After all that was written.
    written: Option<Event>,
}

impl Item {
    pub(super) fn new(buffer: ElasticBuffer, tag: usize) -> Item {
        let count = buffer.capacity_bytes().div_ceil(buffer.chunk_bytes()) as usize;
        let slots = Slots { of: vec![Slot::Empty; count], written: None };
        let buffer = Arc::new(buffer);
        Item { buffer, tag, slots: RwLock::new(slots), readers: Mutex::default() }
    }

    pub(super) fn read(&self) -> RwLockReadGuard<'_, Slots> {
        self.slots.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn write(&self) -> RwLockWriteGuard<'_, Slots> {
        self.slots.write().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn chunk_bytes(&self) -> u64 {
        self.buffer.chunk_bytes()
    }

    /// The bytes of some slots.
    pub(super) fn bytes_of(&self, slots: std::ops::Range<usize>) -> std::ops::Range<u64> {
        slots.start as u64 * self.chunk_bytes()..slots.end as u64 * self.chunk_bytes()
    }

    pub(super) fn words(&self, slot: usize, value: u32, all: bool) -> impl Iterator<Item = Words> {
        let address = self.buffer.address() + slot as u64 * self.chunk_bytes();
        Words::over(address, self.chunk_bytes(), value).areas(all)
    }

    /// Notes that a stream has enqueued looks at it.
    pub(super) fn looked(&self, stream: &Stream) -> Result<(), Trouble> {
        let mut readers = lock(&self.readers);
        let event = match readers.entry(stream.id()) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(Event::create(stream.driver(), stream.device())?),
        };
        Ok(event.record(stream)?)
    }

    /// Lets work of `stream` come after every look.
    pub(super) fn after_readers(&self, stream: &Stream) -> Result<(), Trouble> {
        for (_, event) in lock(&self.readers).drain() {
            stream.wait_event(&event)?;
        }
        Ok(())
    }

    /// Waits until all that was enqueued for it is done.
    pub(super) fn wait_for_work(&self, slots: &Slots) -> Result<(), Trouble> {
        for (_, event) in lock(&self.readers).drain() {
            event.wait()?;
        }
        slots.wait_written()
    }

    /// Fills what holds anything. With the right to write, and no guard.
    pub(super) fn fill_unknown(
        &self,
        slots: &mut Slots,
        worker: &mut Worker<'_>,
        device: DeviceId,
    ) -> Step {
        if !slots.of.contains(&Slot::Unknown) {
            return Ok(());
        }
        let Some(track) = worker.track_of(device) else { return Ok(()) };
        let all = worker.rng.chance(100);
        let using = self.buffer.use_on(&track.stream)?;
        slots.after_written(&track.stream)?;
        self.after_readers(&track.stream)?;
        for slot in 0..slots.of.len() {
            if slots.of[slot] == Slot::Unknown {
                let value = worker.value();
                for part in self.words(slot, value, all) {
                    part.fill(&track.stream)?;
                }
                slots.of[slot] = Slot::Filled { value, shared: false };
            }
        }
        slots.wrote(&track.stream)?;
        drop(using);
        Ok(())
    }

    /// Enqueues comparisons of some of what is filled, under a guard.
    pub(super) fn check(
        &self,
        slots: &Slots,
        worker: &mut Worker<'_>,
        stream: &Stream,
        count: usize,
    ) -> Step {
        let filled = slots.filled();
        let first = worker.rng.below(filled.len() as u64) as usize;
        let using = self.buffer.use_on(stream)?;
        slots.after_written(stream)?;
        for n in 0..count.min(filled.len()).min(worker.checks_left() / 3) {
            let (slot, value) = filled[(first + n) % filled.len()];
            for part in self.words(slot, value, false) {
                worker.enqueue_check(stream, part)?;
            }
        }
        self.looked(stream)?;
        drop(using);
        Ok(())
    }
}

impl Slots {
    /// What holds something that is known.
    pub(super) fn filled(&self) -> Vec<(usize, u32)> {
        let of = self.of.iter().enumerate();
        of.filter_map(|(slot, it)| match it {
            Slot::Filled { value, .. } => Some((slot, *value)),
            Slot::Empty | Slot::Unknown => None,
        })
        .collect()
    }

    /// One of those that `wanted` says.
    pub(super) fn pick(
        &self,
        worker: &mut Worker<'_>,
        wanted: impl Fn(Slot) -> bool,
    ) -> Option<usize> {
        let all: Vec<usize> = (0..self.of.len()).filter(|slot| wanted(self.of[*slot])).collect();
        (!all.is_empty()).then(|| worker.rng.pick(&all))
    }

    /// A neighbourhood of slots.
    pub(super) fn some(&self, worker: &mut Worker<'_>) -> std::ops::Range<usize> {
        let start = worker.rng.below(self.of.len() as u64) as usize;
        let length = 1 + worker.rng.below(6) as usize;
        start..(start + length).min(self.of.len())
    }

    /// Memory came to these slots, where there was none.
    pub(super) fn committed(&mut self, range: std::ops::Range<usize>) {
        for slot in &mut self.of[range] {
            if *slot == Slot::Empty {
                *slot = Slot::Unknown;
            }
        }
    }

    pub(super) fn after_written(&self, stream: &Stream) -> Result<(), Trouble> {
        self.written.iter().try_for_each(|event| Ok(stream.wait_event(event)?))
    }

    pub(super) fn wait_written(&self) -> Result<(), Trouble> {
        self.written.iter().try_for_each(|event| Ok(event.wait()?))
    }

    /// A stream, which waited for earlier writes, has enqueued further ones.
    pub(super) fn wrote(&mut self, stream: &Stream) -> Result<(), Trouble> {
        let event = Event::create(stream.driver(), stream.device())?;
        event.record(stream)?;
        self.written = Some(event);
        Ok(())
    }
}
