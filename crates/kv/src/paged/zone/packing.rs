//! Which blocks to move so that chunks become empty. Plain numbers.

use super::Zone;

/// One block's move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Shift {
    pub(in super::super) from: u32,
    pub(in super::super) to: u32,
}

/// A plan that grows chunk by chunk, from the emptiest.
struct Packing<'a> {
    zone: &'a Zone,
    /// How many blocks touch each chunk once all that is planned is done.
    taken: Vec<u32>,
    /// Chunks that are to become empty.
    source: Vec<bool>,
    /// Blocks that something is to move into, or out of.
    planned: Vec<bool>,
    shifts: Vec<Shift>,
}

impl Zone {
    /// At most `max_blocks` moves, out of the chunks that fewest blocks touch, the highest first among
    /// equals, into free blocks of those that most do. A chunk is begun only if there is room for all
    /// that it holds. No chunk that holds nothing is begun to be used.
    pub(in super::super) fn plan_pack(&self, max_blocks: u64) -> Vec<Shift> {
        let mut order: Vec<u32> =
            (0..self.chunks.len() as u32).filter(|chunk| self.holds(*chunk)).collect();
        // What stays in any case is filled first.
        let key = |chunk: &u32| {
            let taken = self.chunks[*chunk as usize].taken;
            (self.is_kept(*chunk), taken, std::cmp::Reverse(*chunk))
        };
        order.sort_by_key(key);
        let mut packing = Packing {
            zone: self,
            taken: self.chunks.iter().map(|chunk| chunk.taken).collect(),
            source: vec![false; self.chunks.len()],
            planned: vec![false; self.refs.len()],
            shifts: Vec::new(),
        };
        let (mut emptiest, mut fullest) = (0, order.len());
        while emptiest < fullest && (packing.shifts.len() as u64) < max_blocks {
            if !packing.empty_out(&order, emptiest, &mut fullest) {
                break;
            }
            emptiest += 1;
        }
        packing.shifts.truncate(usize::try_from(max_blocks).unwrap_or(usize::MAX));
        packing.shifts
    }

    /// Whether a chunk stands for something.
    fn holds(&self, chunk: u32) -> bool {
        let it = self.chunks[chunk as usize];
        it.stands && (it.taken > 0 || self.is_kept(chunk))
    }
}

impl Packing<'_> {
    /// Plans to move all out of the chunk `order[emptiest]`, into chunks of `order` after it and before
    /// `fullest`, from behind; those that are filled are left out of `fullest`. Says whether there is
    /// room.
    fn empty_out(&mut self, order: &[u32], emptiest: usize, fullest: &mut usize) -> bool {
        let zone = self.zone;
        let chunk = order[emptiest];
        if zone.is_kept(chunk) {
            return false;
        }
        // Where chunks share a block, something may be to move into this one: it stays. So does what
        // is on its way already.
        let stays = |index| self.is_target(index) || zone.held.contains(index);
        if zone.geometry().blocks_in(chunk).any(stays) {
            return true;
        }
        self.source[chunk as usize] = true;
        let is_in = |index: &u32| zone.is_taken(*index) && !self.planned[*index as usize];
        let from: Vec<u32> = zone.geometry().blocks_in(chunk).filter(is_in).collect();
        let mut to = Vec::new();
        while *fullest > emptiest + 1 && to.len() < from.len() {
            let target = order[*fullest - 1];
            let room = zone.geometry().blocks_in(target).filter(|index| self.is_room(*index));
            to.extend(room.filter(|index| !to.contains(index)).collect::<Vec<_>>());
            if to.len() < from.len() {
                *fullest -= 1;
            }
        }
        if to.len() < from.len() {
            return false;
        }
        for (from, to) in from.into_iter().zip(to) {
            self.plan(from, to);
        }
        true
    }

    /// Whether something is to move into a block.
    fn is_target(&self, index: u32) -> bool {
        self.planned[index as usize] && !self.zone.is_taken(index)
    }

    /// Whether a block can take one: it is free, and each of its chunks is used anyhow.
    fn is_room(&self, index: u32) -> bool {
        let is_used = |chunk: u32| {
            let is_used = self.taken[chunk as usize] > 0 || self.zone.is_kept(chunk);
            is_used && !self.source[chunk as usize]
        };
        self.zone.free.contains(index)
            && !self.planned[index as usize]
            && self.zone.geometry().chunks_of(index).all(is_used)
    }

    fn plan(&mut self, from: u32, to: u32) {
        self.planned[from as usize] = true;
        self.planned[to as usize] = true;
        for chunk in self.zone.geometry().chunks_of(from) {
            self.taken[chunk as usize] -= 1;
        }
        for chunk in self.zone.geometry().chunks_of(to) {
            self.taken[chunk as usize] += 1;
        }
        let first = self.zone.geometry().first_block;
        self.shifts.push(Shift { from: from + first, to: to + first });
    }
}
