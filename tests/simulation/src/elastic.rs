//! Slots of elastic buffers: each actor has some of each buffer to itself, and knows what must be there.
//! Memory behind them moves, sleeps and is called back by anybody.

use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use vmm_pool::{Growth, Place, Use};
use vmm_sys::object::Stream;
use vmm_sys::{Access, DeviceId};

use crate::actor::Actor;
use crate::judge::Kind;
use crate::part::{Backing, Known, Slot};

/// Longer than a run lasts.
pub(crate) const LONG: Duration = Duration::from_secs(1000);
/// Refusals that others cause, of whatever changes memory.
const OTHERS: &[Kind] = &[Kind::Asleep, Kind::StillUsed, Kind::Quota];

fn committed(slot: &Slot) -> bool {
    slot.backing == Backing::Committed
}

impl Actor {
    pub(crate) fn any_part(&mut self) -> usize {
        self.rng.below(self.parts.len() as u64) as usize
    }

    /// A stream whose device may use a part.
    pub(crate) fn stream_for(&mut self, part: usize) -> Stream {
        let buffer = &self.parts[part].elastic.buffer;
        let may = |stream: &&Stream| {
            let device = stream.device();
            device == buffer.device() || buffer.access(device) == Access::ReadWrite
        };
        let mut fit: Vec<&Stream> = self.world.streams.iter().filter(may).collect();
        fit.extend(Some(&self.own).filter(may));
        self.rng.pick(&fit).clone()
    }

    pub(crate) fn any_place(&mut self) -> Place {
        let devices = u64::from(self.world.setup.devices);
        match self.world.setup.host_bytes {
            Some(_) if self.rng.chance(300) => Place::HostNuma(0),
            _ => Place::Device(DeviceId(self.rng.below(devices) as u32)),
        }
    }

    pub(crate) fn commit(&mut self) {
        let number = self.any_part();
        let count = self.parts[number].slots.len();
        let at = self.rng.below(count as u64) as usize;
        let length = (1 + self.rng.below(3) as usize).min(count - at);
        let (form, place) = (self.rng.below(4), self.any_place());
        let part = &self.parts[number];
        let (buffer, bytes) = (&part.elastic.buffer, part.bytes(at, length));
        let may = [OTHERS, &[Kind::Stuck]].concat();
        let done = match form {
            0 => self.judge("commit", buffer.commit(bytes), &may),
            1 => self.judge("commit from a place", buffer.commit_from(place, bytes), &may),
            2 => {
                let growth = Growth::range(bytes).borrow_from_any();
                let grown = buffer.grow(growth).map(|grown| grown.bytes);
                self.judge("grow and borrow", grown, &may)
            }
            _ if part.is_whole => return self.grow(number, at + length),
            _ => self.judge("commit", buffer.commit(bytes), &may),
        };
        self.committed(number, at..at + length, done);
    }

    fn committed(&mut self, number: usize, slots: std::ops::Range<usize>, done: Option<u64>) {
        let failed = done.is_none() && self.any_failed();
        let part = &mut self.parts[number];
        let absent =
            slots.clone().filter(|at| part.slots[*at].backing == Backing::Absent).count() as u64;
        let unknown = slots.clone().any(|at| part.slots[at].backing == Backing::Unknown);
        if let Some(bytes) = done {
            let fits = unknown || bytes == absent * part.slot_bytes;
            assert!(fits, "actor {}: {bytes} bytes came to {absent} slots", self.number);
        }
        for at in slots {
            match done {
                Some(_) => part.came(at),
                None if failed && part.slots[at].backing == Backing::Absent => {
                    part.went(at, Backing::Unknown);
                }
                None => {}
            }
        }
    }

    /// Growth from the start, by the buffer's own thread now and then.
    fn grow(&mut self, number: usize, slots: usize) {
        let part = &self.parts[number];
        let (buffer, bytes) = (&part.elastic.buffer, part.bytes(0, slots).end);
        if self.rng.chance(400) {
            let done = self.judge("grow", buffer.grow_to(bytes), OTHERS);
            return self.committed(number, 0..slots, done);
        }
        let may = [OTHERS, &[Kind::Busy]].concat();
        let Some(ahead) = self.judge("ask to grow ahead", buffer.grow_ahead(bytes), OTHERS) else {
            return;
        };
        let before = self.parts[number].slots[..slots].to_vec();
        match ahead.wait(LONG) {
            vmm_pool::AheadState::Done => {
                self.judge("grow ahead", Ok(()), &[]);
                (0..slots).for_each(|at| self.parts[number].came(at));
            }
            vmm_pool::AheadState::Failed(error) => {
                self.judge::<()>("grow ahead", Err(error), &may);
                self.committed(number, 0..slots, None);
            }
            other => panic!("a growth ahead of {} slots is {other:?}", before.len()),
        }
    }

    pub(crate) fn decommit(&mut self) {
        let number = self.any_part();
        let part = &self.parts[number];
        let count = part.slots.len();
        let at = self.rng.below(count as u64) as usize;
        let shrinks = part.is_whole && self.rng.chance(500);
        let length = if shrinks { count - at } else { 1 + self.rng.below(2) as usize };
        let end = (at + length).min(count);
        let part = &self.parts[number];
        let bytes = part.bytes(at, end - at);
        let done = match shrinks {
            true => {
                self.judge("shrink", part.elastic.buffer.shrink_to(bytes.start), &[Kind::Asleep])
            }
            false => self.judge("decommit", part.elastic.buffer.decommit(bytes), &[Kind::Asleep]),
        };
        let Some(bytes) = done else { return };
        let part = &mut self.parts[number];
        let stood = part.slots[at..end].iter().filter(|slot| committed(slot)).count() as u64;
        let unknown = part.slots[at..end].iter().any(|slot| slot.backing == Backing::Unknown);
        assert!(unknown || bytes == stood * part.slot_bytes, "{bytes} bytes of {stood} slots went");
        (at..end).for_each(|at| part.went(at, Backing::Absent));
    }

    /// Begins a use of a part by a stream.
    pub(crate) fn begin(&mut self, number: usize, stream: &Stream) -> Option<Use> {
        let begun = self.parts[number].elastic.buffer.use_on(stream);
        let may = [Kind::Asleep, Kind::StillUsed, Kind::Stuck];
        self.judge("use", begun, &may)
    }

    /// A kernel writes a slot, and others are compared; the guard may live on for a while.
    pub(crate) fn use_slots(&mut self) {
        let number = self.any_part();
        let stream = self.stream_for(number);
        let Some(guard) = self.begin(number, &stream) else { return };
        for _ in 0..1 + self.rng.below(3) {
            let choice = self.rng.next_u64();
            let Some(at) = self.parts[number].pick(choice, committed) else { break };
            self.look_at(number, at, &stream);
            if self.rng.chance(500) {
                self.write_slot(number, at, &stream);
            }
            if self.rng.chance(300) {
                // Whoever moves it waits, or is refused.
                (0..self.rng.below(20)).for_each(|_| shuttle::thread::yield_now());
                self.feature("guards held over other work");
            }
        }
        drop(guard);
    }

    /// Compares a slot, under a guard.
    pub(crate) fn look_at(&mut self, number: usize, at: usize, stream: &Stream) {
        let world = self.world.clone();
        let part = &self.parts[number];
        let slot = &part.slots[at];
        let (Some(known), Some(epoch)) = (slot.known.clone(), part.elastic.epoch()) else { return };
        if known.epoch != epoch || slot.backing != Backing::Committed {
            return;
        }
        if let Some(last) = &slot.last
            && self.drive("an event", world.order(last, stream)).is_none()
        {
            return;
        }
        let what = format!("actor {}, slot {at} of {}", self.number, part.elastic.name);
        let (contents, notes) = (part.contents(at, known.version), world.notes.clone());
        let checker = contents.checker_of_any(notes, what, known.or.clone());
        let checked = world.enqueue(stream, checker);
        if self.drive("a check", checked).is_none() {
            return;
        }
        self.feature("slots compared");
        let piece = part.piece(at);
        let piece = piece.unwrap_or_else(|| panic!("slot {at} of {} is gone", part.elastic.name));
        if piece.generation != known.generation {
            self.feature("slots compared after a move");
        }
        if self.parts[number].elastic.wakes.load(SeqCst) != known.wakes {
            self.feature("slots compared after a sleep");
        }
        if piece.borrowed {
            self.feature("slots compared at a borrowed place");
        }
        if piece.place.device().is_none() {
            self.feature("slots compared on the host");
        }
        self.parts[number].slots[at].last = Some(stream.clone());
    }

    /// Writes a slot, under a guard.
    pub(crate) fn write_slot(&mut self, number: usize, at: usize, stream: &Stream) {
        let version = self.world.next_version();
        let contents = self.parts[number].contents(at, version);
        if let Some(last) = self.parts[number].slots[at].last.clone()
            && self.drive("an event", self.world.order(&last, stream)).is_none()
        {
            return;
        }
        if self.drive("a write", self.world.write(stream, contents)).is_some() {
            self.wrote(number, at, version, stream);
        }
    }

    /// Notes that work of `stream`, enqueued under a guard, writes a slot.
    pub(crate) fn wrote(&mut self, number: usize, at: usize, version: u32, stream: &Stream) {
        let Some(piece) = self.parts[number].piece(at) else { panic!("slot {at} is gone") };
        let part = &mut self.parts[number];
        if piece.shared && part.slots[at].mate.is_some() {
            self.world.notes.cover(|it| it.feature("slots written at two addresses"));
        }
        let (generation, wakes) = (piece.generation, part.elastic.wakes.load(SeqCst));
        let known = part.elastic.epoch().map(|epoch| Known {
            version,
            or: Vec::new(),
            epoch,
            generation,
            wakes,
        });
        part.set(at, known, stream);
        self.say(&format!(
            "slot {at} of {} is of version {version}",
            self.parts[number].elastic.name
        ));
    }

    pub(crate) fn copy_slot(&mut self) {
        let number = self.any_part();
        let stream = self.stream_for(number);
        let (one, two) = (self.rng.next_u64(), self.rng.next_u64());
        let part = &self.parts[number];
        let alone = |slot: &Slot| committed(slot) && slot.mate.is_none();
        let from = part.pick(one, |slot| alone(slot) && slot.known.is_some());
        let (Some(from), Some(to)) = (from, part.pick(two, alone)) else { return };
        let Some(known) = part.slots[from].known.clone().filter(|_| from != to) else { return };
        for last in [from, to].map(|at| part.slots[at].last.clone()).into_iter().flatten() {
            if self.drive("an event", self.world.order(&last, &stream)).is_none() {
                return;
            }
        }
        let part = &self.parts[number];
        let (bytes, target) = (part.bytes(from, 1), part.bytes(to, 1).start);
        let copied = part.elastic.buffer.copy_on(&stream, bytes, target);
        let may = [Kind::Asleep, Kind::Hole, Kind::StillUsed, Kind::Stuck];
        let done = self.judge("copy", copied, &may).is_some();
        let part = &mut self.parts[number];
        let is_kept = part.elastic.epoch() == Some(known.epoch);
        let generation = part.piece(to).map_or(0, |piece| piece.generation);
        if done {
            part.set(to, Some(Known { generation, ..known }).filter(|_| is_kept), &stream);
            part.slots[from].last = Some(stream);
        }
    }

    pub(crate) fn share(&mut self) {
        let number = self.any_part();
        let (one, two) = (self.rng.next_u64(), self.rng.next_u64());
        let part = &self.parts[number];
        let from = part.pick(one, |slot| committed(slot) && slot.mate.is_none());
        let to = part.pick(two, |slot| slot.backing == Backing::Absent);
        let (Some(from), Some(to)) = (from, to) else { return };
        let shared = part.elastic.buffer.share(part.bytes(from, 1), part.bytes(to, 1).start);
        let may = [OTHERS, &[Kind::Stuck]].concat();
        let done = self.judge("share", shared, &may).is_some();
        let failed = !done && self.any_failed();
        let part = &mut self.parts[number];
        if done {
            part.slots[to] = Slot { mate: Some(from), ..part.slots[from].clone() };
            part.slots[from].mate = Some(to);
        } else if failed {
            part.went(to, Backing::Unknown);
        }
    }

    pub(crate) fn unshare(&mut self) {
        let number = self.any_part();
        let choice = self.rng.next_u64();
        let Some(at) = self.parts[number].pick(choice, |slot| slot.mate.is_some()) else { return };
        let patience = self.patience();
        let part = &self.parts[number];
        let unshared = part.elastic.buffer.unshare(part.bytes(at, 1), patience);
        let may = [Kind::Asleep, Kind::StillUsed, Kind::InUse, Kind::Stuck];
        if self.judge("unshare", unshared, &may).is_some() {
            self.parts[number].part(at);
        }
    }

    /// All slots are as the actor has them; nobody does anything any more.
    pub(crate) fn check_parts(&mut self) {
        for number in 0..self.parts.len() {
            let part = &self.parts[number];
            if part.elastic.buffer.asleep().is_some() {
                continue;
            }
            for (at, slot) in part.slots.iter().enumerate() {
                let stands = part.piece(at).is_some();
                let wanted = slot.backing == Backing::Committed;
                let fits = slot.backing == Backing::Unknown || stands == wanted;
                assert!(fits, "slot {at} of {}: {slot:?}, found {stands}", part.elastic.name);
            }
            let stream = self.stream_for(number);
            let Some(guard) = self.begin(number, &stream) else { continue };
            (0..self.parts[number].slots.len()).for_each(|at| self.look_at(number, at, &stream));
            drop(guard);
        }
    }
}
