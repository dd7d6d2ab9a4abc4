//! [`Geometry`]: which chunks a block touches, and the other way round.

use std::ops::Range;

/// Where a zone's blocks and chunks lie in the buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Geometry {
    pub(in super::super) first_block: u32,
    pub(in super::super) blocks: u32,
    pub(in super::super) block_bytes: u64,
    pub(in super::super) chunk_bytes: u64,
    /// Whether the first block's memory stays while any block is taken.
    pub(in super::super) keeps_first: bool,
}

impl Geometry {
    /// The zone's bytes, those of chunks it touches at its ends included.
    pub(in super::super) fn bytes(&self) -> Range<u64> {
        let start = u64::from(self.first_block) * self.block_bytes;
        let end = start + u64::from(self.blocks) * self.block_bytes;
        start / self.chunk_bytes * self.chunk_bytes..end.next_multiple_of(self.chunk_bytes)
    }

    pub(super) fn first_chunk(&self) -> u64 {
        self.bytes().start / self.chunk_bytes
    }

    pub(super) fn chunks(&self) -> u32 {
        let bytes = self.bytes();
        // The builder has refused more.
        ((bytes.end - bytes.start) / self.chunk_bytes) as u32
    }

    /// The chunks, counted from the zone's first, that a block, counted so too, touches.
    pub(super) fn chunks_of(&self, index: u32) -> Range<u32> {
        let start = u64::from(self.first_block + index) * self.block_bytes;
        let (first, last) =
            (start / self.chunk_bytes, (start + self.block_bytes - 1) / self.chunk_bytes);
        // Below `chunks`.
        (first - self.first_chunk()) as u32..(last - self.first_chunk() + 1) as u32
    }

    /// The blocks that touch a chunk.
    pub(super) fn blocks_in(&self, chunk: u32) -> Range<u32> {
        let start = (self.first_chunk() + u64::from(chunk)) * self.chunk_bytes;
        let end = start + self.chunk_bytes;
        let first_block = u64::from(self.first_block);
        let first = (start / self.block_bytes).saturating_sub(first_block);
        let last = end.div_ceil(self.block_bytes).saturating_sub(first_block);
        // At most `blocks`.
        first as u32..last.min(u64::from(self.blocks)) as u32
    }
}
