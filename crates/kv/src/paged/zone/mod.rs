//! [`Zone`]: blocks, who has them, and the chunks that they lie in. Plain numbers.
//!
//! A block is *taken* if tables have it, or if it is *held*: on its way into a table or out of them. One
//! that is not taken is *free* if memory stands behind all of it, else *lacking*. A chunk is *empty* if
//! it stands and touches no block that is taken. Where the length of a chunk is no multiple of a block's,
//! a block touches several.

mod geometry;
mod packing;
#[cfg(test)]
mod tests;

use std::ops::Range;

pub(super) use geometry::Geometry;
pub(super) use packing::Shift;

use super::bits::Bits;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Chunk {
    stands: bool,
    /// Blocks that are taken and touch it.
    taken: u32,
}

/// The blocks of one kind of memory.
#[derive(Clone, Debug)]
pub(super) struct Zone {
    geometry: Geometry,
    /// How many tables have each block.
    refs: Vec<u32>,
    held: Bits,
    chunks: Vec<Chunk>,
    free: Bits,
    lacking: Bits,
    empty: Bits,
    standing: u64,
    taken: u64,
}

/// What is to be committed, and how many blocks become free by it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) chunks: Vec<u32>,
    pub(super) blocks: u64,
}

impl Zone {
    pub(super) fn new(geometry: Geometry) -> Zone {
        let (blocks, chunks) = (geometry.blocks, geometry.chunks());
        let mut lacking = Bits::new(blocks);
        (0..blocks).for_each(|index| lacking.set(index, true));
        Zone {
            geometry,
            refs: vec![0; blocks as usize],
            held: Bits::new(blocks),
            chunks: vec![Chunk::default(); chunks as usize],
            free: Bits::new(blocks),
            lacking,
            empty: Bits::new(chunks),
            standing: 0,
            taken: 0,
        }
    }

    pub(super) fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Whether a block is one of this zone.
    pub(super) fn has(&self, block: u32) -> bool {
        block >= self.geometry.first_block
            && block - self.geometry.first_block < self.geometry.blocks
    }

    fn index(&self, block: u32) -> u32 {
        debug_assert!(self.has(block));
        block - self.geometry.first_block
    }

    /// Blocks that can be taken at once.
    pub(super) fn free_blocks(&self) -> u64 {
        self.free.count()
    }

    /// Blocks that tables have.
    pub(super) fn owned_blocks(&self) -> u64 {
        let is_orphan = |index: &u32| self.refs[*index as usize] == 0;
        self.taken - self.held.iter().filter(is_orphan).count() as u64
    }

    /// Blocks that are not taken and that lack memory.
    pub(super) fn lacking_blocks(&self) -> u64 {
        self.lacking.count()
    }

    /// Memory that stands, in bytes.
    pub(super) fn standing_bytes(&self) -> u64 {
        self.standing * self.geometry.chunk_bytes
    }

    /// Memory that stands and holds nothing, in bytes.
    pub(super) fn empty_bytes(&self) -> u64 {
        self.empty.count() * self.geometry.chunk_bytes
    }

    /// What of that could go, in bytes.
    pub(super) fn spare_bytes(&self) -> u64 {
        let first = self.geometry.chunks_of(0);
        let kept = first.filter(|chunk| self.is_kept(*chunk) && self.empty.contains(*chunk));
        (self.empty.count() - kept.count() as u64) * self.geometry.chunk_bytes
    }

    /// How many tables have a block.
    pub(super) fn refs(&self, block: u32) -> u32 {
        self.refs[self.index(block) as usize]
    }

    fn is_taken(&self, index: u32) -> bool {
        self.refs[index as usize] > 0 || self.held.contains(index)
    }

    /// Takes the lowest free block for one table.
    pub(super) fn take(&mut self) -> Option<u32> {
        let index = self.free.first()?;
        self.occupy(index);
        self.refs[index as usize] = 1;
        Some(index + self.geometry.first_block)
    }

    /// Holds the lowest free block.
    pub(super) fn take_held(&mut self) -> Option<u32> {
        let block = self.geometry.first_block + self.free.first()?;
        self.hold(block);
        Some(block)
    }

    /// One more table has a block.
    pub(super) fn add_ref(&mut self, block: u32) {
        let index = self.index(block);
        debug_assert!(self.refs[index as usize] > 0);
        self.refs[index as usize] += 1;
    }

    /// One table fewer has a block.
    pub(super) fn drop_ref(&mut self, block: u32) {
        let index = self.index(block);
        let refs = &mut self.refs[index as usize];
        debug_assert!(*refs > 0);
        *refs -= 1;
        self.leave(index);
    }

    /// Holds a block, whoever has it: it stays taken until it is let go.
    pub(super) fn hold(&mut self, block: u32) {
        let index = self.index(block);
        if !self.is_taken(index) {
            debug_assert!(self.free.contains(index));
            self.occupy(index);
        }
        self.held.set(index, true);
    }

    /// Whether a block is held.
    pub(super) fn is_held(&self, block: u32) -> bool {
        self.held.contains(self.index(block))
    }

    /// Ends a hold.
    pub(super) fn let_go(&mut self, block: u32) {
        let index = self.index(block);
        debug_assert!(self.held.contains(index));
        self.held.set(index, false);
        self.leave(index);
    }

    /// One table has a block that was held.
    pub(super) fn settle(&mut self, block: u32) {
        let index = self.index(block);
        debug_assert!(self.refs[index as usize] == 0);
        self.refs[index as usize] = 1;
        self.let_go(block);
    }

    /// All that have one block, which is held, have the other one in its place, which was held too.
    pub(super) fn hand_over(&mut self, Shift { from, to }: Shift) {
        let (at_from, at_to) = (self.index(from) as usize, self.index(to) as usize);
        debug_assert!(self.refs[at_to] == 0);
        self.refs.swap(at_from, at_to);
        self.let_go(to);
        self.let_go(from);
    }

    fn occupy(&mut self, index: u32) {
        self.free.set(index, false);
        self.taken += 1;
        for chunk in self.geometry.chunks_of(index) {
            self.chunks[chunk as usize].taken += 1;
            self.empty.set(chunk, false);
        }
    }

    /// Frees a block that nothing keeps any more.
    fn leave(&mut self, index: u32) {
        if self.is_taken(index) {
            return;
        }
        self.taken -= 1;
        for chunk in self.geometry.chunks_of(index) {
            let it = &mut self.chunks[chunk as usize];
            it.taken -= 1;
            if it.taken == 0 && it.stands {
                self.empty.set(chunk, true);
            }
        }
        self.sort(index);
    }

    /// Puts a block that is not taken among the free or the lacking.
    fn sort(&mut self, index: u32) {
        let mut chunks = self.geometry.chunks_of(index);
        let stands = chunks.all(|chunk| self.chunks[chunk as usize].stands);
        self.free.set(index, stands);
        self.lacking.set(index, !stands);
    }

    /// The lowest chunks that have to come so that `blocks` more are free: as many as there are, if
    /// there are fewer.
    pub(super) fn plan_growth(&self, blocks: u64) -> Plan {
        let mut plan = Plan::default();
        let mut next = self.lacking.first();
        while let Some(index) = next.filter(|_| plan.blocks < blocks) {
            for chunk in self.geometry.chunks_of(index) {
                // Blocks come in order, and so do their chunks.
                let is_new = plan.chunks.last().is_none_or(|last| *last < chunk);
                if is_new && !self.chunks[chunk as usize].stands {
                    plan.chunks.push(chunk);
                }
            }
            plan.blocks += 1;
            next = self.lacking.next(index + 1);
        }
        plan
    }

    /// Memory stands in these chunks from now on.
    pub(super) fn stand(&mut self, chunks: &[u32]) {
        self.change(chunks, true);
    }

    /// The memory of these chunks, which are empty, is about to go.
    pub(super) fn vacate(&mut self, chunks: &[u32]) {
        self.change(chunks, false);
    }

    fn change(&mut self, chunks: &[u32], stands: bool) {
        for chunk in chunks {
            let it = &mut self.chunks[*chunk as usize];
            debug_assert!(it.taken == 0 && it.stands != stands);
            it.stands = stands;
            self.empty.set(*chunk, stands);
            match stands {
                true => self.standing += 1,
                false => self.standing -= 1,
            }
            for index in self.geometry.blocks_in(*chunk) {
                // One that reaches into this chunk cannot have been taken.
                self.sort(index);
            }
        }
    }

    /// Whether a chunk stays although nothing that is taken touches it.
    fn is_kept(&self, chunk: u32) -> bool {
        let is_first = self.geometry.keeps_first && self.geometry.chunks_of(0).contains(&chunk);
        is_first && self.taken > 0
    }

    /// The empty chunks that can go so that `keep_bytes` of empty ones, and `keep_blocks` free blocks,
    /// are left: the highest.
    pub(super) fn surplus(&self, keep_bytes: u64, keep_blocks: u64) -> Vec<u32> {
        let mut chunks = Vec::new();
        let mut empty_bytes = self.empty_bytes();
        let mut free_blocks = self.free.count();
        let mut counted_to = u32::MAX;
        let mut highest_first: Vec<u32> = self.empty.iter().collect();
        highest_first.reverse();
        for chunk in highest_first {
            let left_bytes = empty_bytes - self.geometry.chunk_bytes;
            if left_bytes < keep_bytes {
                break;
            }
            if self.is_kept(chunk) {
                continue;
            }
            // Those at and above `counted_to` are counted with a higher chunk.
            let blocks = self.geometry.blocks_in(chunk);
            let lost = (blocks.start..blocks.end.min(counted_to))
                .filter(|index| self.free.contains(*index))
                .count() as u64;
            if free_blocks < keep_blocks + lost {
                break;
            }
            (empty_bytes, free_blocks) = (left_bytes, free_blocks - lost);
            counted_to = blocks.start;
            chunks.push(chunk);
        }
        chunks.reverse();
        chunks
    }

    /// Neighbours among chunks, which are in order, as one range of the buffer's bytes.
    pub(super) fn ranges(&self, chunks: &[u32]) -> Vec<Range<u64>> {
        let runs = chunks.chunk_by(|one, next| one + 1 == *next);
        runs.map(|run| self.range_of(run)).collect()
    }

    /// The bytes of the buffer that a run of neighbours takes.
    pub(super) fn range_of(&self, run: &[u32]) -> Range<u64> {
        let start = run.first().map_or(0, |first| self.offset_of(*first));
        start..start + run.len() as u64 * self.geometry.chunk_bytes
    }

    fn offset_of(&self, chunk: u32) -> u64 {
        (self.geometry.first_chunk() + u64::from(chunk)) * self.geometry.chunk_bytes
    }

    /// Which offsets of the buffer chunks stand at.
    pub(super) fn standing_offsets(&self) -> impl Iterator<Item = u64> + '_ {
        let stands = |chunk: &u32| self.chunks[*chunk as usize].stands;
        (0..self.geometry.chunks()).filter(stands).map(|chunk| self.offset_of(chunk))
    }

    /// Checks that the figures are those of the blocks, of which `refs` says how many tables have each.
    pub(super) fn verify(&self, refs: &[u32]) -> Result<(), String> {
        if let Some(at) = (0..self.refs.len()).find(|at| self.refs[*at] != refs[*at]) {
            let block = self.geometry.first_block as usize + at;
            return Err(format!("block {block}: {} have it, {} say so", refs[at], self.refs[at]));
        }
        let mut taken = vec![0; self.chunks.len()];
        for index in 0..self.geometry.blocks {
            let chunks = self.geometry.chunks_of(index);
            let stands = chunks.clone().all(|chunk| self.chunks[chunk as usize].stands);
            let is_taken = self.is_taken(index);
            if is_taken {
                chunks.for_each(|chunk| taken[chunk as usize] += 1);
            }
            let expected = (!is_taken && stands, !is_taken && !stands);
            let found = (self.free.contains(index), self.lacking.contains(index));
            if expected != found || is_taken && !stands {
                return Err(format!("block {index}: stands {stands}, free and lacking {found:?}"));
            }
        }
        for (at, chunk) in self.chunks.iter().enumerate() {
            let is_empty = chunk.stands && chunk.taken == 0;
            if chunk.taken != taken[at] || self.empty.contains(at as u32) != is_empty {
                return Err(format!("chunk {at}: {chunk:?}, but {} blocks touch it", taken[at]));
            }
        }
        let standing = self.standing_offsets().count() as u64;
        let taken = (0..self.geometry.blocks).filter(|index| self.is_taken(*index)).count() as u64;
        if (standing, taken) != (self.standing, self.taken) {
            return Err(format!("{standing} chunks stand, {taken} blocks are taken: {self:?}"));
        }
        if taken > 0 && self.geometry.keeps_first {
            let mut first = self.geometry.chunks_of(0);
            if !first.all(|chunk| self.chunks[chunk as usize].stands) {
                return Err("the first block has no memory although blocks are taken".to_owned());
            }
        }
        Ok(())
    }
}
