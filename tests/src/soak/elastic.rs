//! What threads do with the elastic buffers that they share.

use std::sync::Arc;
use std::time::Duration;

use vmm_pool::{AheadState, ElasticError, Error, Growth, Move, Place};
use vmm_sys::object::Stream;
use vmm_sys::{Access, DeviceId};

use super::item::{Item, Slot, Slots};
use super::sleep::{TAGS, tag_name};
use super::trouble::{NOTHING, Step, Trouble};
use super::worker::Worker;
use super::world::{KEPT, NODE, lock};

/// Buffers that are alive at most.
const ITEMS: usize = 14;
/// How long guards of others are waited for.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);
/// Moves that a thread has under way.
const MOVES: usize = 3;

pub(super) fn make(worker: &mut Worker<'_>) -> Step {
    if lock(&worker.world.items).len() >= ITEMS {
        return NOTHING;
    }
    let (pool, device) = (worker.pool(), worker.device());
    let tag = worker.rng.below(TAGS as u64) as usize;
    let granule = worker.world.machine.granularity_bytes();
    let chunk = granule * worker.rng.pick(&[1, 1, 2, 4]);
    let chunks = 3 + worker.rng.below(10);
    // No buffer comes to a tag while its contents are dropped.
    let asleep = lock(&worker.world.tags[tag]);
    let builder = worker.world.pools[pool].elastic(device);
    let buffer = builder
        .capacity_bytes(chunk * chunks)
        .chunk_bytes(chunk)
        .tag(&tag_name(tag))
        .movable(worker.rng.chance(500))
        .build()?;
    let item = Arc::new(Item::new(buffer, tag));
    let mut every = lock(&worker.world.every);
    every.retain(|item| item.strong_count() > 0);
    every.push(Arc::downgrade(&item));
    drop(every);
    lock(&worker.world.items).push(item);
    drop(asleep);
    Ok(())
}

pub(super) fn item(worker: &mut Worker<'_>) -> Option<Arc<Item>> {
    let items = lock(&worker.world.items);
    let count = items.len() as u64;
    (count > 0).then(|| items[worker.rng.below(count) as usize].clone())
}

/// Checks a buffer, and ends it once nobody looks at it any more.
pub(super) fn end(worker: &mut Worker<'_>) -> Step {
    let taken = Worker::take(&mut worker.rng, &mut lock(&worker.world.items));
    let Some(item) = taken else { return NOTHING };
    let slots = item.read();
    let outcome = look(worker, &item, &slots, usize::MAX);
    drop(slots);
    outcome
}

/// A stream of a device that may use the buffer, and it may not lose that while slots are held.
fn user(worker: &mut Worker<'_>, item: &Item) -> Option<Stream> {
    let device = worker.device();
    let may = item.buffer.access(device) != Access::None;
    let device = if may { device } else { item.buffer.device() };
    Some(worker.track_of(device)?.stream.clone())
}

fn look(worker: &mut Worker<'_>, item: &Item, slots: &Slots, count: usize) -> Step {
    if slots.filled().is_empty() {
        return NOTHING;
    }
    let Some(stream) = user(worker, item) else { return NOTHING };
    item.check(slots, worker, &stream, count)
}

pub(super) fn check(worker: &mut Worker<'_>) -> Step {
    let Some(item) = item(worker) else { return NOTHING };
    let slots = item.read();
    look(worker, &item, &slots, 6)
}

/// Reads single words from the host.
pub(super) fn read_from_host(worker: &mut Worker<'_>) -> Step {
    let Some(item) = item(worker) else { return NOTHING };
    let slots = item.read();
    let Some(slot) = slots.pick(worker, |slot| matches!(slot, Slot::Filled { .. })) else {
        return NOTHING;
    };
    let Slot::Filled { value, .. } = slots.of[slot] else { return NOTHING };
    slots.wait_written()?;
    let mut found = [0; 4];
    item.buffer.read(item.bytes_of(slot..slot).start, &mut found)?;
    let found = u32::from_le_bytes(found);
    if found != value {
        let text =
            format!("slot {slot} of {:?} begins with {found:#x}, not {value:#x}", item.buffer);
        return Err(Trouble::Wrong(text));
    }
    Ok(())
}

// ---- memory comes and goes ----

/// Commits a neighbourhood, and fills what came.
fn grown(
    worker: &mut Worker<'_>,
    grow: impl FnOnce(&mut Worker<'_>, &Item, std::ops::Range<u64>) -> Result<(), Trouble>,
) -> Step {
    let Some(item) = item(worker) else { return NOTHING };
    let mut slots = item.write();
    let some = slots.some(worker);
    let bytes = item.bytes_of(some.clone());
    let bytes = bytes.start..bytes.end.min(item.buffer.capacity_bytes());
    worker.say(format_args!("{:?} {bytes:?}", item.buffer));
    grow(worker, &item, bytes)?;
    slots.committed(some);
    let home = item.buffer.device();
    item.fill_unknown(&mut slots, worker, home)
}

pub(super) fn commit(worker: &mut Worker<'_>) -> Step {
    grown(worker, |_, item, bytes| Ok(item.buffer.commit(bytes).map(drop)?))
}

pub(super) fn place(worker: &mut Worker<'_>) -> Place {
    if worker.rng.chance(250) { NODE } else { worker.device().into() }
}

pub(super) fn commit_from(worker: &mut Worker<'_>) -> Step {
    grown(worker, |worker, item, bytes| {
        let place = place(worker);
        worker.say(place);
        Ok(item.buffer.commit_from(place, bytes).map(drop)?)
    })
}

pub(super) fn borrow(worker: &mut Worker<'_>) -> Step {
    grown(worker, |_, item, bytes| {
        Ok(item.buffer.grow(Growth::range(bytes).borrow_from_any()).map(drop)?)
    })
}

/// Grows from the start, in the background where there is a thread for it.
pub(super) fn grow_ahead(worker: &mut Worker<'_>) -> Step {
    let Some(item) = item(worker) else { return NOTHING };
    let mut slots = item.write();
    let end = slots.some(worker).end;
    let ahead = item.buffer.grow_ahead(item.bytes_of(0..end).end)?;
    match ahead.wait(super::HANG) {
        AheadState::Done => slots.committed(0..end),
        AheadState::Failed(error) => return Err(error.into()),
        state => return Err(Trouble::Wrong(format!("growth ahead has not ended: {state:?}"))),
    }
    let home = item.buffer.device();
    item.fill_unknown(&mut slots, worker, home)
}

pub(super) fn decommit(worker: &mut Worker<'_>) -> Step {
    let Some(item) = item(worker) else { return NOTHING };
    let mut slots = item.write();
    let some = slots.some(worker);
    let some = if worker.rng.chance(100) { 0..slots.of.len() } else { some };
    let full = slots.of[some.clone()].iter().filter(|slot| **slot != Slot::Empty).count() as u64;
    let taken = item.buffer.decommit(item.bytes_of(some.clone()))?;
    if taken != full * item.chunk_bytes() {
        let text = format!("{full} chunks of {:?}, {taken} bytes taken", item.buffer);
        return Err(Trouble::Wrong(text));
    }
    slots.of[some].fill(Slot::Empty);
    Ok(())
}

// ---- contents ----

/// Writes everything anew that stands at one address only.
pub(super) fn refill(worker: &mut Worker<'_>) -> Step {
    let Some(item) = item(worker) else { return NOTHING };
    let mut slots = item.write();
    if slots.filled().is_empty() {
        return NOTHING;
    }
    let Some(stream) = user(worker, &item) else { return NOTHING };
    for slot in &mut slots.of {
        if matches!(slot, Slot::Filled { shared: false, .. }) {
            *slot = Slot::Unknown;
        }
    }
    item.fill_unknown(&mut slots, worker, stream.device())
}

fn own(slot: Slot) -> bool {
    matches!(slot, Slot::Filled { shared: false, .. })
}

fn filled(slot: Slot) -> bool {
    matches!(slot, Slot::Filled { .. })
}

/// Copies one chunk's contents over another's.
pub(super) fn copy(worker: &mut Worker<'_>) -> Step {
    let Some(item) = item(worker) else { return NOTHING };
    let mut slots = item.write();
    let (Some(from), Some(to)) = (slots.pick(worker, filled), slots.pick(worker, own)) else {
        return NOTHING;
    };
    let Slot::Filled { value, .. } = slots.of[from] else { return NOTHING };
    if from == to {
        return NOTHING;
    }
    let Some(stream) = user(worker, &item) else { return NOTHING };
    slots.after_written(&stream)?;
    item.after_readers(&stream)?;
    let (source, target) = (item.bytes_of(from..from + 1), item.bytes_of(to..to).start);
    item.buffer.copy_on(&stream, source, target)?;
    slots.of[to] = Slot::Filled { value, shared: false };
    slots.wrote(&stream)
}

/// Has a chunk stand at a second address.
pub(super) fn share(worker: &mut Worker<'_>) -> Step {
    let Some(item) = item(worker) else { return NOTHING };
    let mut slots = item.write();
    let empty = slots.pick(worker, |slot| slot == Slot::Empty);
    let (Some(from), Some(to)) = (slots.pick(worker, filled), empty) else { return NOTHING };
    let Slot::Filled { value, .. } = slots.of[from] else { return NOTHING };
    let (source, target) = (item.bytes_of(from..from + 1), item.bytes_of(to..to).start);
    item.buffer.share(source, target)?;
    for slot in [from, to] {
        slots.of[slot] = Slot::Filled { value, shared: true };
    }
    drop(slots);
    look(worker, &item, &item.read(), 2)
}

pub(super) fn unshare(worker: &mut Worker<'_>) -> Step {
    let Some(item) = item(worker) else { return NOTHING };
    let slots = item.read();
    item.buffer.unshare(item.bytes_of(0..slots.of.len()), PATIENCE)?;
    look(worker, &item, &slots, 4)
}

// ---- access ----

pub(super) fn grant(worker: &mut Worker<'_>) -> Step {
    let Some(item) = item(worker) else { return NOTHING };
    let device = worker.device();
    let slots = item.read();
    match item.buffer.grant(device, Access::ReadWrite) {
        // Its home has it.
        Err(Error::Elastic(ElasticError::HomeAccess { .. })) => return NOTHING,
        other => other?,
    }
    look(worker, &item, &slots, 2)
}

/// Work of a device that loses its access would fault, so it is waited for.
pub(super) fn revoke(worker: &mut Worker<'_>) -> Step {
    let Some(item) = item(worker) else { return NOTHING };
    let device = worker.device();
    let slots = item.write();
    item.wait_for_work(&slots)?;
    match item.buffer.revoke(device) {
        Err(Error::Elastic(ElasticError::HomeAccess { .. })) => NOTHING,
        other => Ok(other?),
    }
}

// ---- moves ----

fn a_move(worker: &mut Worker<'_>, item: &Item, slots: &Slots) -> Move {
    let to = Move::to(place(worker)).patience(PATIENCE);
    if worker.rng.chance(500) {
        let some = slots.some(worker);
        return to.range(item.bytes_of(some));
    }
    to
}

pub(super) fn migrate(worker: &mut Worker<'_>) -> Step {
    let Some(item) = item(worker) else { return NOTHING };
    let slots = item.read();
    let to = a_move(worker, &item, &slots);
    worker.say(format_args!("{:?} {to:?}", item.buffer));
    item.buffer.migrate(to)?;
    look(worker, &item, &slots, 6)
}

pub(super) fn migrate_async(worker: &mut Worker<'_>) -> Step {
    if worker.moves.len() >= MOVES {
        worker.finish_moves()?;
    }
    let Some(item) = item(worker) else { return NOTHING };
    let slots = item.read();
    let to = a_move(worker, &item, &slots);
    worker.say(format_args!("{:?} {to:?}", item.buffer));
    let migration = item.buffer.migrate_async(to)?;
    worker.moves.push(migration);
    look(worker, &item, &slots, 6)
}

pub(super) fn come_home(worker: &mut Worker<'_>) -> Step {
    let Some(item) = item(worker) else { return NOTHING };
    let slots = item.read();
    item.buffer.come_home(PATIENCE)?;
    look(worker, &item, &slots, 6)
}

pub(super) fn recall(worker: &mut Worker<'_>) -> Step {
    let lender = place(worker);
    let bytes = if worker.rng.chance(300) { u64::MAX } else { 16 << 20 };
    let recalled = worker.world.pools[KEPT].recall(lender, bytes, PATIENCE)?;
    for refused in recalled.refused {
        if let trouble @ Trouble::Wrong(_) = refused.why.into() {
            return Err(trouble);
        }
    }
    Ok(())
}

pub(super) fn rebalance(worker: &mut Worker<'_>) -> Step {
    worker.world.pools[KEPT].rebalance();
    Ok(())
}

/// The device that a check of all of a buffer at the end is made on, and all of it.
pub(super) fn check_all(worker: &mut Worker<'_>, item: &Item) -> Step {
    let slots = item.read();
    let count = slots.filled().len();
    let home: DeviceId = item.buffer.device();
    if count == 0 {
        return Ok(());
    }
    let Some(track) = worker.track_of(home) else { return Ok(()) };
    item.check(&slots, worker, &track.stream, count)
}
