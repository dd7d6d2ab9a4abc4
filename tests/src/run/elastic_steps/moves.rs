//! Memory changes place: moves, sleep, wake.

use std::ops::Range;
use std::time::Duration;

use vmm_pool::{Contents, Error, Migration, MigrationState, Move, Moved, Place};
use vmm_sys::Access;

use super::judge::Kind;
use super::memory::LONG;
use super::{Elastic, Runner, Step};

/// Where contents are kept.
const HOST: Place = Place::HostNuma(0);

/// A move as it was asked for.
struct Asked {
    to: Place,
    part: Option<Range<u32>>,
    /// Slots whose memory lies elsewhere.
    slots: Vec<u32>,
    must: Vec<Kind>,
    patience: Duration,
    /// Calls that were failed before.
    fired: u64,
}

impl Asked {
    fn order(&self, chunk_bytes: u64) -> Move {
        let order = Move::to(self.to).patience(self.patience);
        match &self.part {
            Some(part) => {
                order.range(u64::from(part.start) * chunk_bytes..u64::from(part.end) * chunk_bytes)
            }
            None => order,
        }
    }
}

impl Runner<'_> {
    fn ask(&self, number: u32, to: Place, part: Option<Range<u32>>) -> Option<Asked> {
        let elastic = self.elastics.get(&number)?;
        let model = &elastic.model;
        let range = part.clone().unwrap_or(elastic.all());
        let mut must = elastic.refusals();
        must.extend((!self.knows(to)).then_some(Kind::UnknownPlace));
        must.extend((range.end > model.slots).then_some(Kind::Beyond));
        let slots = model.elsewhere(range, to);
        let in_use = must.is_empty() && !slots.is_empty() && !elastic.guards.is_empty();
        must.extend(in_use.then_some(Kind::InUse));
        // Who comes late may have a guard for a moment. Those that the run keeps do not end.
        let patience = if elastic.guards.is_empty() { LONG } else { Duration::ZERO };
        Some(Asked { to, part, slots, must, patience, fired: self.faults_fired() })
    }

    pub(super) fn move_now(&mut self, number: u32, to: Place, part: Option<Range<u32>>) -> Step {
        let Some(elastic) = self.elastics.get(&number) else { return Ok(()) };
        let holders = elastic.model.holders();
        self.let_go(holders)?;
        let Some(asked) = self.ask(number, to, part) else { return Ok(()) };
        let Elastic { buffer, model, .. } = &self.elastics[&number];
        let outcome = buffer.migrate(asked.order(model.chunk_bytes));
        self.moved(number, &asked, outcome, None)
    }

    /// A move in the background. It has to wait for streams that are held, which are let go one by
    /// one; `late` begins to use the buffer before.
    pub(super) fn move_ahead(
        &mut self,
        number: u32,
        to: Place,
        part: Option<Range<u32>>,
        late: Option<u32>,
    ) -> Step {
        if self.may_be_short() {
            self.release_all()?;
        }
        let Some(asked) = self.ask(number, to, part) else { return Ok(()) };
        let Elastic { buffer, model, .. } = &self.elastics[&number];
        let (holders, users) = (model.holders(), model.held_users());
        let migration = match buffer.migrate_async(asked.order(model.chunk_bytes)) {
            Ok(migration) => migration,
            Err(error) => return self.moved(number, &asked, Err(error), None),
        };
        // One that is held itself could not be told from one that the move holds; and a device may
        // have access from some moment of the move on.
        let may_write = |stream: &u32| {
            let device = self.streams.get(stream).map(|slot| slot.device);
            device.is_some_and(|it| self.elastics[&number].model.access_of(it) == Access::ReadWrite)
        };
        // Nor where the driver may refuse to bring memory back after a failure: streams that a move
        // holds are let go then, and their work finds nothing mapped.
        let late = late.filter(|stream| !self.faulty && may_write(stream));
        let late = late.filter(|it| asked.must.is_empty() && !self.model.is_held(*it));
        let late_slot = asked.slots.first().copied().unwrap_or(0);
        // Nor whether it came while the slot still shared its chunk.
        let late = late.filter(|_| !self.elastics[&number].model.is_shared(late_slot));
        if let Some(stream) = late {
            self.write_slot(number, stream, late_slot)?;
        }
        let waits = !asked.slots.is_empty() && asked.must.is_empty();
        for holder in holders {
            let is_over = matches!(migration.state(), MigrationState::Done(_));
            if waits && users.contains(&holder) && is_over {
                return Err(format!("e{number} has moved, and s{holder} may still write to it"));
            }
            self.release(holder)?;
        }
        self.tally.waited += u64::from(waits && !users.is_empty());
        let outcome = ended(number, &migration)?;
        self.moved(number, &asked, outcome, late)
    }

    /// Takes over what a move did, and compares all contents.
    fn moved(
        &mut self,
        number: u32,
        asked: &Asked,
        outcome: Result<Moved, Error>,
        late: Option<u32>,
    ) -> Step {
        let moved = self.judge(outcome, &asked.must, &[])?;
        let faults = self.faults_fired() - asked.fired;
        let Some(elastic) = self.elastics.get_mut(&number) else { return Ok(()) };
        let Some(moved) = moved else {
            elastic.failed_move(&asked.slots, asked.to, faults)?;
            return self.check_at_home(number);
        };
        let expected = asked.slots.len() as u64 * elastic.model.chunk_bytes;
        if moved.bytes != expected || moved.generation != elastic.buffer.generation() {
            return Err(format!("{moved:?}, where {expected} bytes lay elsewhere"));
        }
        elastic.age(expected > 0)?;
        for slot in &asked.slots {
            if let Some(chunk) = elastic.model.chunks.get_mut(slot) {
                (chunk.place, chunk.now) = (asked.to, asked.to);
                // Everybody was waited for, but who came later.
                chunk.writers.retain(|stream| Some(*stream) == late);
            }
            elastic.model.own(*slot);
        }
        if let (Some(device), None) = (asked.to.device(), &asked.part) {
            elastic.model.home = device.0;
            elastic.model.access.insert(device.0, Access::ReadWrite);
        }
        self.tally.moves += u64::from(expected > 0);
        self.check_at_home(number)
    }

    /// Buffers with a tag.
    fn tagged(&self, tag: u32) -> Vec<u32> {
        let with = self.elastics.iter().filter(|(_, elastic)| elastic.model.tag == tag);
        with.map(|(number, _)| *number).collect()
    }

    pub(super) fn sleep(&mut self, tag: u32, kept: bool) -> Step {
        let Some(pool) = self.pool.clone() else { return Ok(()) };
        let numbers = self.tagged(tag);
        let holders = numbers.iter().flat_map(|it| self.elastics[it].model.holders()).collect();
        self.let_go(holders)?;
        let contents = if kept { Contents::Kept { node: 0 } } else { Contents::Dropped };
        let mut must = Vec::new();
        must.extend(numbers.is_empty().then_some(Kind::UnknownTag));
        for elastic in numbers.iter().map(|it| &self.elastics[it]) {
            if elastic.model.asleep.is_some() {
                continue;
            }
            must.extend((kept && !self.knows(HOST)).then_some(Kind::UnknownPlace));
            must.extend((!elastic.guards.is_empty()).then_some(Kind::InUse));
        }
        let fired = self.faults_fired();
        let outcome = pool.sleep(&format!("t{tag}"), contents, Duration::ZERO);
        let slept = self.judge(outcome, &must, &[])?;
        let faults = self.faults_fired() - fired;
        let mut fell = 0;
        for number in &numbers {
            let Some(elastic) = self.elastics.get_mut(number) else { continue };
            let was_awake = elastic.model.asleep.is_none();
            if elastic.fall_asleep(contents, slept.is_some(), faults)? {
                fell += u64::from(was_awake);
            }
        }
        if slept.is_some_and(|slept| slept.buffers != fell) {
            return Err(format!("{fell} buffers fell asleep: {slept:?}"));
        }
        self.tally.sleeps += fell;
        Ok(())
    }

    pub(super) fn wake(&mut self, tag: u32) -> Step {
        let Some(pool) = self.pool.clone() else { return Ok(()) };
        let numbers = self.tagged(tag);
        let holders = numbers.iter().flat_map(|it| self.elastics[it].model.holders()).collect();
        self.let_go(holders)?;
        let must: &[Kind] = if numbers.is_empty() { &[Kind::UnknownTag] } else { &[] };
        let fired = self.faults_fired();
        let woken = self.judge(pool.wake(&format!("t{tag}")), must, &[])?;
        let faults = self.faults_fired() - fired;
        let mut woke = 0;
        for number in numbers {
            let Some(elastic) = self.elastics.get_mut(&number) else { continue };
            woke += u64::from(elastic.wake_up(woken.is_some(), faults)?);
            self.check_at_home(number)?;
        }
        if woken.is_some_and(|woken| woken.buffers != woke) {
            return Err(format!("{woke} buffers woke: {woken:?}"));
        }
        self.tally.sleeps += woke;
        Ok(())
    }
}

/// Waits for the end of a move.
fn ended(number: u32, migration: &Migration) -> Result<Result<Moved, Error>, String> {
    match migration.wait(LONG) {
        MigrationState::Done(moved) => Ok(Ok(moved)),
        MigrationState::Failed(error) => Ok(Err(error)),
        state => Err(format!("the move of e{number} does not end: {state:?}")),
    }
}

impl Elastic {
    /// A move that failed has changed nothing. Only where calls failed while it was taken back, too,
    /// a chunk may have stayed at its new place, and access may be left: the same bytes.
    fn failed_move(&mut self, slots: &[u32], to: Place, faults: u64) -> Step {
        if faults < 2 {
            return self.age(false);
        }
        let stayed = self.stayed(|slot, _| slots.contains(&slot).then_some(to));
        for chunk in self.model.chunks.values_mut() {
            chunk.place = chunk.now;
        }
        if let Some(device) = to.device()
            && self.buffer.access(device) == Access::ReadWrite
        {
            self.model.access.insert(device.0, Access::ReadWrite);
        }
        self.age(stayed)
    }

    /// Takes over which chunks are at the place where they were to go, all the same.
    fn stayed(&mut self, to: impl Fn(u32, Place) -> Option<Place>) -> bool {
        let mut moved = Vec::new();
        for piece in self.buffer.pieces() {
            let slot = (piece.offset / self.model.chunk_bytes) as u32;
            let Some(chunk) = self.model.chunks.get_mut(&slot) else { continue };
            if chunk.now != piece.place && to(slot, chunk.place) == Some(piece.place) {
                chunk.now = piece.place;
                moved.push(slot);
            }
        }
        moved.iter().for_each(|slot| self.model.own(*slot));
        !moved.is_empty()
    }

    /// Takes over that the buffer fell asleep, if it did; it must have, if the whole tag did.
    fn fall_asleep(&mut self, contents: Contents, done: bool, faults: u64) -> Result<bool, String> {
        let (before, now) = (self.model.asleep, self.buffer.asleep());
        // What was dropped cannot be kept.
        let expected = if before == Some(Contents::Dropped) { Contents::Dropped } else { contents };
        if now != Some(expected) && (done || now != before) {
            return Err(format!("{before:?} became {now:?}, where {expected:?} is due"));
        }
        if now == before {
            let slots: Vec<u32> = self.model.chunks.keys().copied().collect();
            match before {
                None => self.failed_move(&slots, HOST, faults)?,
                Some(_) => self.age(false)?,
            }
            return Ok(false);
        }
        let moves =
            expected == Contents::Dropped || !self.model.elsewhere(self.all(), HOST).is_empty();
        self.model.asleep = now;
        if expected == Contents::Dropped {
            self.model.forget();
        }
        let slots: Vec<u32> = self.model.chunks.keys().copied().collect();
        for slot in slots {
            let Some(chunk) = self.model.chunks.get_mut(&slot) else { continue };
            // Everybody was waited for.
            chunk.writers.clear();
            if std::mem::replace(&mut chunk.now, HOST) != HOST || expected == Contents::Dropped {
                self.model.own(slot);
            }
        }
        self.age(moves)?;
        Ok(true)
    }

    /// Takes over that the buffer woke, if it did; it must have, if the whole tag did.
    fn wake_up(&mut self, done: bool, faults: u64) -> Result<bool, String> {
        let (before, now) = (self.model.asleep, self.buffer.asleep());
        if now.is_some() && (done || now != before) {
            return Err(format!("{before:?} became {now:?}"));
        }
        let chunks = &mut self.model.chunks;
        let moves = match before {
            None => false,
            Some(Contents::Dropped) => !chunks.is_empty(),
            Some(_) => chunks.values().any(|chunk| chunk.now != chunk.place),
        };
        if now.is_none() {
            self.model.asleep = None;
            chunks.values_mut().for_each(|chunk| chunk.now = chunk.place);
            self.age(moves)?;
            return Ok(before.is_some());
        }
        if before == Some(Contents::Dropped) {
            // Memory that came for a part, and was taken away again, counts as changes.
            self.model.generation = self.buffer.generation();
            return Ok(false);
        }
        let stayed = faults >= 2 && self.stayed(|_, place| Some(place));
        self.age(stayed)?;
        Ok(false)
    }
}
