//! Buffers that sleep and wake by their tags.

use std::sync::{MutexGuard, Weak};

use vmm_pool::Contents;

use super::elastic::PATIENCE;
use super::item::Slot;
use super::trouble::{NOTHING, Step, Trouble};
use super::worker::Worker;
use super::world::{World, lock};

/// Tags that buffers have.
pub(super) const TAGS: usize = 3;

pub(super) fn tag_name(tag: usize) -> String {
    format!("tag {tag}")
}

/// What is known of a tag, if nobody changes it: whether it may be asleep.
fn a_tag<'a>(worker: &mut Worker<'a>) -> Option<(usize, MutexGuard<'a, bool>)> {
    let tag = worker.rng.below(TAGS as u64) as usize;
    Some((tag, worker.world.tags[tag].try_lock().ok()?))
}

/// Wakes a tag in every pool. What is short of memory sleeps on.
fn wake_tag(world: &World, tag: usize, asleep: &mut bool) -> Step {
    let mut outcome = Ok(());
    for pool in &world.pools {
        match pool.wake(&tag_name(tag)).map_err(Trouble::from) {
            Ok(_) | Err(Trouble::Refused("no such tag")) => {}
            Err(trouble) => outcome = Err(trouble),
        }
    }
    *asleep = outcome.is_err();
    outcome
}

fn sleep_tag(worker: &mut Worker<'_>, tag: usize, contents: Contents) -> Step {
    let pool = worker.pool();
    worker.world.pools[pool].sleep(&tag_name(tag), contents, PATIENCE)?;
    Ok(())
}

/// The contents go to the host. Others, who find the buffers asleep, are refused meanwhile.
pub(super) fn kept(worker: &mut Worker<'_>) -> Step {
    let Some((tag, mut asleep)) = a_tag(worker) else { return NOTHING };
    *asleep = true;
    let slept = sleep_tag(worker, tag, Contents::Kept { node: 0 });
    if worker.rng.chance(500) && slept.is_ok() {
        return Ok(()); // somebody wakes it
    }
    wake_tag(worker.world, tag, &mut asleep)?;
    slept
}

/// The contents are gone afterwards, so nobody else may be at the buffers.
pub(super) fn dropped(worker: &mut Worker<'_>) -> Step {
    let Some((tag, mut asleep)) = a_tag(worker) else { return NOTHING };
    // Those that have ended for most, too: somebody may still be looking at them.
    let items: Vec<_> = lock(&worker.world.every).iter().filter_map(Weak::upgrade).collect();
    let items: Vec<_> = items.into_iter().filter(|item| item.tag == tag).collect();
    // Nobody who has one of them waits for another, or for a tag.
    let mut held: Vec<_> = items.iter().map(|item| item.write()).collect();
    *asleep = true;
    let slept = sleep_tag(worker, tag, Contents::Dropped);
    // Those of another pool, and those that could not sleep, are as they were.
    let gone = items.iter().map(|item| item.buffer.asleep() == Some(Contents::Dropped));
    let gone: Vec<bool> = gone.collect();
    let woken = wake_tag(worker.world, tag, &mut asleep);
    for (slots, _) in held.iter_mut().zip(&gone).filter(|(_, gone)| **gone) {
        for slot in &mut slots.of {
            if *slot != Slot::Empty {
                *slot = Slot::Unknown;
            }
        }
    }
    woken?;
    for (item, slots) in items.iter().zip(&mut held) {
        let home = item.buffer.device();
        item.fill_unknown(slots, worker, home)?;
    }
    slept
}

pub(super) fn wake(worker: &mut Worker<'_>) -> Step {
    let Some((tag, mut asleep)) = a_tag(worker) else { return NOTHING };
    if !*asleep {
        return NOTHING;
    }
    wake_tag(worker.world, tag, &mut asleep)
}

/// Wakes everything: at a quiet point, where nothing else has memory.
pub(super) fn wake_all(world: &World) -> Step {
    for (tag, asleep) in world.tags.iter().enumerate() {
        wake_tag(world, tag, &mut lock(asleep))?;
    }
    Ok(())
}
