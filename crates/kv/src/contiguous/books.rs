//! [`Books`]: which slots are open, what stands in them, and which chunks several of them share. Plain
//! numbers; no driver call, no wait.
//!
//! Memory that goes is written off first and taken away afterwards, by whoever holds the hands; memory
//! that comes is written down once it stands. So what the books say is always there.

use std::collections::{BTreeSet, VecDeque};

use super::links::Links;

/// What becomes of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    /// A sequence has it.
    Open,
    /// Nobody has it; what stands in it is kept for the next.
    Free,
    /// Its sequence is gone, and memory in it is of no use to the next: it is to be taken away.
    Left,
}

/// What the books know of one slot.
#[derive(Debug)]
struct Entry {
    used: Use,
    /// Chunks of each part that stand, from the first on.
    stands: u64,
    /// Some of its memory may lie elsewhere than at home.
    is_elsewhere: bool,
    /// There may be memory behind what stands, to be taken away.
    has_rest: bool,
}

/// The books of a cache. Chunks are counted of one part; all parts of a slot are alike.
#[derive(Debug)]
pub(super) struct Books {
    entries: Vec<Entry>,
    /// Free slots in which something stands, by how much.
    warm: BTreeSet<(u64, u32)>,
    /// Free slots in which nothing stands, the longest so first: their addresses are least likely to be
    /// in use still.
    cold: VecDeque<u32>,
    left: Vec<u32>,
    rests: Vec<u32>,
    asks: Vec<u32>,
    /// Which chunks are another slot's too.
    pub(super) links: Links,
    /// Chunks in free slots, and in those that were left.
    idle: u64,
    /// Chunks in all slots.
    standing: u64,
    open: u64,
}

impl Books {
    pub(super) fn new(slots: u32) -> Books {
        let entry = |_| Entry { used: Use::Free, stands: 0, is_elsewhere: false, has_rest: false };
        Books {
            entries: (0..slots).map(entry).collect(),
            warm: BTreeSet::new(),
            cold: (0..slots).collect(),
            left: Vec::new(),
            rests: Vec::new(),
            asks: Vec::new(),
            links: Links::new(slots),
            idle: 0,
            standing: 0,
            open: 0,
        }
    }

    fn entry(&mut self, slot: u32) -> &mut Entry {
        &mut self.entries[slot as usize]
    }

    pub(super) fn slots(&self) -> u32 {
        self.entries.len() as u32 // it was made of a u32
    }

    pub(super) fn used(&self, slot: u32) -> Use {
        self.entries[slot as usize].used
    }

    /// Chunks of each part that stand in a slot.
    pub(super) fn stands(&self, slot: u32) -> u64 {
        self.entries[slot as usize].stands
    }

    pub(super) fn has_rest(&self, slot: u32) -> bool {
        self.entries[slot as usize].has_rest
    }

    pub(super) fn open_count(&self) -> u64 {
        self.open
    }

    /// Slots that can be opened, those included that are yet to be emptied.
    pub(super) fn free_count(&self) -> u64 {
        self.entries.len() as u64 - self.open
    }

    pub(super) fn idle(&self) -> u64 {
        self.idle
    }

    pub(super) fn standing(&self) -> u64 {
        self.standing
    }

    /// Opens a free slot for who needs `chunks` of each part: the shortest that has enough, else the
    /// longest, else an empty one.
    pub(super) fn open(&mut self, chunks: u64) -> Option<u32> {
        let enough = self.warm.range((chunks, 0)..).next().copied();
        match enough.or_else(|| self.warm.last().copied()) {
            Some((stands, slot)) => {
                self.warm.remove(&(stands, slot));
                self.begin(slot);
                Some(slot)
            }
            None => self.open_empty(),
        }
    }

    /// Opens a free slot in which nothing stands.
    pub(super) fn open_empty(&mut self) -> Option<u32> {
        let at = self.cold.iter().position(|slot| !self.has_rest(*slot))?;
        let slot = self.cold.remove(at)?;
        self.begin(slot);
        Some(slot)
    }

    fn begin(&mut self, slot: u32) {
        let entry = self.entry(slot);
        entry.used = Use::Open;
        let stands = entry.stands;
        self.idle -= stands;
        self.open += 1;
    }

    /// A sequence is gone. Its memory is kept for the next, if it is its own and lies at home.
    pub(super) fn leave(&mut self, slot: u32) {
        self.open -= 1;
        self.idle += self.stands(slot);
        let is_linked = self.links.is_shared(slot);
        if !is_linked {
            self.links.unlink(slot, 0);
        }
        let entry = self.entry(slot);
        if is_linked || entry.is_elsewhere {
            entry.used = Use::Left;
            self.left.push(slot);
        } else {
            entry.used = Use::Free;
            self.shelve(slot);
        }
    }

    /// Puts a free slot where it is found.
    fn shelve(&mut self, slot: u32) {
        match self.stands(slot) {
            0 => self.cold.push_back(slot),
            stands => drop(self.warm.insert((stands, slot))),
        }
    }

    /// Takes a free slot from where it is found.
    fn unshelve(&mut self, slot: u32) {
        match self.stands(slot) {
            0 => self.cold.retain(|it| *it != slot),
            stands => drop(self.warm.remove(&(stands, slot))),
        }
    }

    /// So much stands in a slot now.
    pub(super) fn set_stands(&mut self, slot: u32, chunks: u64) {
        let (before, used) = (self.stands(slot), self.used(slot));
        if before == chunks {
            return;
        }
        if used == Use::Free {
            self.unshelve(slot);
        }
        self.entry(slot).stands = chunks;
        self.standing = self.standing - before + chunks;
        if used != Use::Open {
            self.idle = self.idle - before + chunks;
        }
        if used == Use::Free {
            self.shelve(slot);
        }
    }

    pub(super) fn set_elsewhere(&mut self, slot: u32, is_elsewhere: bool) {
        self.entry(slot).is_elsewhere = is_elsewhere;
    }

    /// Some of what stands in a slot is a lender's now: it is not kept for the next, also if its sequence
    /// went before it came.
    pub(super) fn borrows(&mut self, slot: u32) {
        self.set_elsewhere(slot, true);
        if self.used(slot) == Use::Free {
            self.unshelve(slot);
            self.entry(slot).used = Use::Left;
            self.left.push(slot);
        }
    }

    /// What stands in `to` lies where that of `from` does.
    pub(super) fn follow(&mut self, from: u32, to: u32) {
        let is_elsewhere = self.entry(from).is_elsewhere;
        self.set_elsewhere(to, is_elsewhere);
    }

    /// Writes off what stands behind `chunks`. It is to be taken away.
    pub(super) fn write_off(&mut self, slot: u32, chunks: u64) {
        if self.stands(slot) > chunks {
            self.set_stands(slot, chunks);
            self.set_rest(slot);
        }
    }

    fn set_rest(&mut self, slot: u32) {
        if !std::mem::replace(&mut self.entry(slot).has_rest, true) {
            self.rests.push(slot);
        }
    }

    /// Slots with memory to be taken away behind what stands.
    pub(super) fn rests(&self) -> Vec<u32> {
        self.rests.clone()
    }

    /// There is nothing behind the first `chunks` any more.
    pub(super) fn rest_is_gone(&mut self, slot: u32, chunks: u64) {
        self.links.unlink(slot, chunks);
        // Its sequence may have written more off meanwhile.
        if self.stands(slot) == chunks {
            self.entry(slot).has_rest = false;
            self.rests.retain(|it| *it != slot);
        }
    }

    /// Whether chunks behind what stands are shared, and must not be used for what is there.
    pub(super) fn rest_is_linked(&self, slot: u32) -> bool {
        let entry = &self.entries[slot as usize];
        entry.has_rest && self.links.chunks(slot) > entry.stands
    }

    /// Writes off part of a free slot, the longest, if more than `keep` chunks are idle. Returns how
    /// many.
    pub(super) fn write_off_idle(&mut self, keep: u64) -> Option<u64> {
        let excess = self.idle.saturating_sub(keep);
        let (stands, slot) = *self.warm.last()?;
        let chunks = excess.min(stands);
        if chunks == 0 {
            return None;
        }
        self.write_off(slot, stands - chunks);
        Some(chunks)
    }

    /// Writes off all of a free slot, the shortest, so that it can be emptied. False if there is none.
    pub(super) fn write_off_one(&mut self) -> bool {
        let shortest = self.warm.first().copied();
        if let Some((_, slot)) = shortest {
            self.write_off(slot, 0);
        }
        shortest.is_some()
    }

    /// Slots that were left.
    pub(super) fn left(&self) -> Vec<u32> {
        self.left.clone()
    }

    /// What stood in a slot that was left is gone.
    pub(super) fn is_emptied(&mut self, slot: u32) {
        self.links.unlink(slot, 0);
        self.set_stands(slot, 0);
        self.rest_is_gone(slot, 0);
        let entry = self.entry(slot);
        (entry.used, entry.is_elsewhere) = (Use::Free, false);
        self.left.retain(|it| *it != slot);
        self.shelve(slot);
    }

    /// A sequence asks for growth.
    pub(super) fn ask(&mut self, slot: u32) {
        self.asks.push(slot);
    }

    /// Those who asked.
    pub(super) fn take_asks(&mut self) -> Vec<u32> {
        let mut asks = std::mem::take(&mut self.asks);
        asks.sort_unstable();
        asks.dedup();
        asks
    }

    /// Whether something waits for somebody with the hands.
    pub(super) fn has_work(&self, keep: u64) -> bool {
        let is_idle = self.idle > keep && !self.warm.is_empty();
        is_idle || !(self.asks.is_empty() && self.left.is_empty() && self.rests.is_empty())
    }

    /// Whether the columns are what the slots say.
    pub(super) fn verify(&self) -> Result<(), String> {
        self.links.verify()?;
        let sum = |of: &dyn Fn(&Entry) -> u64| self.entries.iter().map(of).sum::<u64>();
        let standing = sum(&|it| it.stands);
        let idle = sum(&|it| if it.used == Use::Open { 0 } else { it.stands });
        let open = sum(&|it| u64::from(it.used == Use::Open));
        let found = (standing, idle, open);
        let known = (self.standing, self.idle, self.open);
        if found != known {
            return Err(format!("standing, idle, open: {known:?}, found {found:?}"));
        }
        for (slot, entry) in (0u32..).zip(&self.entries) {
            let places = usize::from(self.warm.contains(&(entry.stands, slot)))
                + self.cold.iter().filter(|it| **it == slot).count();
            let left = self.left.iter().filter(|it| **it == slot).count();
            let wanted = match entry.used {
                Use::Open => (0, 0),
                Use::Free => (1, 0),
                Use::Left => (0, 1),
            };
            if (places, left) != wanted {
                return Err(format!("slot {slot} is {:?} and listed {places}, {left}", entry.used));
            }
            if entry.used == Use::Free && self.links.chunks(slot) > 0 && !entry.has_rest {
                return Err(format!("slot {slot} is free and linked"));
            }
            if entry.has_rest != self.rests.contains(&slot) {
                return Err(format!("slot {slot}: what is behind what stands is forgotten"));
            }
        }
        Ok(())
    }
}
