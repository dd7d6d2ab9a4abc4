//! [`Links`]: which chunks stand in several slots. Plain numbers.

use slab::Slab;

/// What slots have in common. A chunk is one of each part; the parts of a slot are alike.
#[derive(Debug)]
pub(super) struct Links {
    /// By slot, and by chunk as far as there are any: the group of slots that share it.
    of: Vec<Vec<Option<usize>>>,
    /// In how many slots a shared chunk stands.
    groups: Slab<u32>,
    /// Chunks that are another slot's too, once for each slot but the first.
    extra: u64,
}

impl Links {
    pub(super) fn new(slots: u32) -> Links {
        let of = (0..slots).map(|_| Vec::new()).collect();
        Links { of, groups: Slab::new(), extra: 0 }
    }

    /// Chunks that are another slot's too, once for each slot but the first.
    pub(super) fn extra(&self) -> u64 {
        self.extra
    }

    /// The first `chunks` of `from` stand in `to` as well, which has none.
    pub(super) fn link(&mut self, from: u32, to: u32, chunks: u64) {
        let chunks = chunks as usize; // slots of a buffer are counted in 32 bits
        let mut links = std::mem::take(&mut self.of[from as usize]);
        if links.len() < chunks {
            links.resize(chunks, None);
        }
        let mut others = Vec::with_capacity(chunks);
        for link in links.iter_mut().take(chunks) {
            let group = *link.get_or_insert_with(|| self.groups.insert(1));
            if let Some(count) = self.groups.get_mut(group) {
                *count += 1;
                self.extra += 1;
            }
            others.push(Some(group));
        }
        self.of[from as usize] = links;
        self.of[to as usize] = others;
    }

    /// Chunks from `first` on have nothing to do with other slots any more.
    pub(super) fn unlink(&mut self, slot: u32, first: u64) {
        let links = &mut self.of[slot as usize];
        let gone: Vec<usize> = links.drain(links.len().min(first as usize)..).flatten().collect();
        gone.into_iter().for_each(|group| self.part(group));
    }

    /// The same for one chunk.
    pub(super) fn unlink_one(&mut self, slot: u32, chunk: u64) {
        let link = self.of[slot as usize].get_mut(chunk as usize).and_then(Option::take);
        link.into_iter().for_each(|group| self.part(group));
    }

    fn part(&mut self, group: usize) {
        let Some(count) = self.groups.get_mut(group) else { return };
        *count -= 1;
        match *count {
            0 => drop(self.groups.try_remove(group)),
            _ => self.extra -= 1,
        }
    }

    /// Whether another slot has that chunk too.
    pub(super) fn is_chunk_shared(&self, slot: u32, chunk: u64) -> bool {
        let link = self.of[slot as usize].get(chunk as usize).copied().flatten();
        link.is_some_and(|group| self.groups.get(group).is_some_and(|count| *count > 1))
    }

    /// Whether another slot has any of its chunks too.
    pub(super) fn is_shared(&self, slot: u32) -> bool {
        (0..self.chunks(slot)).any(|chunk| self.is_chunk_shared(slot, chunk))
    }

    /// Behind so many chunks of a slot nothing was ever shared.
    pub(super) fn chunks(&self, slot: u32) -> u64 {
        self.of[slot as usize].len() as u64
    }

    /// Whether the counts are what the slots say.
    pub(super) fn verify(&self) -> Result<(), String> {
        let mut counts = vec![0u32; self.groups.iter().map(|(at, _)| at + 1).max().unwrap_or(0)];
        for group in self.of.iter().flatten().flatten() {
            let count = counts.get_mut(*group).ok_or(format!("group {group} is gone"))?;
            *count += 1;
        }
        for (group, count) in &self.groups {
            if counts[group] != *count {
                return Err(format!("group {group}: {count} slots, found {}", counts[group]));
            }
        }
        let extra: u64 = counts.iter().map(|count| u64::from(count.saturating_sub(1))).sum();
        if extra != self.extra {
            return Err(format!("{} chunks more than there are, found {extra}", self.extra));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_is_shared_until_all_but_one_have_parted() {
        let mut links = Links::new(4);
        links.link(0, 1, 3);
        links.link(1, 2, 2);
        assert_eq!(links.extra(), 5);
        links.verify().unwrap();
        links.unlink_one(0, 1);
        assert!(links.is_chunk_shared(1, 1) && !links.is_chunk_shared(0, 1));
        links.unlink(1, 0);
        assert!(!links.is_chunk_shared(2, 1), "the last has it alone");
        assert!(links.is_chunk_shared(0, 0) && !links.is_chunk_shared(0, 2));
        links.unlink_one(2, 7);
        links.link(2, 3, 2);
        assert_eq!(links.extra(), 3);
        (0..4).for_each(|slot| links.unlink(slot, 0));
        assert_eq!((links.extra(), links.is_shared(0)), (0, false));
        links.verify().unwrap();
        assert!(links.groups.is_empty());
    }
}
