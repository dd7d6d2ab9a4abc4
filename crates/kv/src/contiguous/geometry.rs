//! [`Geometry`]: which chunks of the buffer belong to which sequence. Plain numbers.

use std::ops::Range;

use crate::layout::SequenceLayout;

/// Where the addresses of each sequence lie, and how many chunks tokens take.
///
/// A slot has one part, or one for the keys and one for the values of each layer. All parts of a slot
/// grow alike, from their beginning, so one number of chunks says what stands.
#[derive(Clone, Copy, Debug)]
pub(super) struct Geometry {
    pub(super) layout: SequenceLayout,
    pub(super) chunk_bytes: u64,
    /// Places at which a sequence grows.
    parts: u64,
}

impl Geometry {
    /// `layout` has parts that are multiples of a chunk.
    pub(super) fn new(layout: SequenceLayout, chunk_bytes: u64) -> Geometry {
        let parts = match layout.order() {
            crate::layout::Order::TokenMajor => 1,
            crate::layout::Order::LayerMajor => 2 * u64::from(layout.shape().layers()),
        };
        Geometry { layout, chunk_bytes, parts }
    }

    /// The longest that a sequence can be, in tokens.
    pub(super) fn max_tokens(&self) -> u64 {
        self.layout.max_tokens()
    }

    /// Addresses of one part, in bytes.
    fn part_bytes(&self) -> u64 {
        self.layout.span_bytes() / self.parts
    }

    /// Chunks of one part that so many tokens take. At most `max_tokens`.
    pub(super) fn chunks_for(&self, tokens: u64) -> u64 {
        let tokens = tokens.min(self.max_tokens());
        (tokens * self.layout.token_stride_bytes()).div_ceil(self.chunk_bytes)
    }

    /// Tokens that so many chunks of each part hold.
    pub(super) fn tokens_in(&self, chunks: u64) -> u64 {
        self.layout.tokens_within(chunks * self.chunk_bytes)
    }

    /// Which chunk of a part a token begins in.
    pub(super) fn chunk_of(&self, token: u64) -> u64 {
        self.offset_of(token) / self.chunk_bytes
    }

    /// Where a token begins in a part.
    pub(super) fn offset_of(&self, token: u64) -> u64 {
        token * self.layout.token_stride_bytes()
    }

    /// What so many chunks of each part take.
    pub(super) fn bytes(&self, chunks: u64) -> u64 {
        self.mappings(chunks) * self.chunk_bytes
    }

    /// How many chunks of the driver that is.
    pub(super) fn mappings(&self, chunks: u64) -> u64 {
        chunks * self.parts
    }

    /// The addresses of a slot, from the start of the buffer.
    pub(super) fn span(&self, slot: u32) -> Range<u64> {
        let bytes = self.layout.span_bytes();
        let start = u64::from(slot) * bytes;
        start..start + bytes
    }

    /// Where these chunks of each part lie, from the start of the buffer.
    pub(super) fn ranges(
        &self,
        slot: u32,
        chunks: Range<u64>,
    ) -> impl Iterator<Item = Range<u64>> + use<> {
        let Geometry { chunk_bytes, parts, .. } = *self;
        let (start, part_bytes) = (self.span(slot).start, self.part_bytes());
        let parts = if chunks.is_empty() { 0 } else { parts };
        (0..parts).map(move |part| {
            let part = start + part * part_bytes;
            part + chunks.start * chunk_bytes..part + chunks.end * chunk_bytes
        })
    }

    /// Everything behind the first `chunks` of each part.
    pub(super) fn beyond(
        &self,
        slot: u32,
        chunks: u64,
    ) -> impl Iterator<Item = Range<u64>> + use<> {
        self.ranges(slot, chunks..self.part_bytes() / self.chunk_bytes)
    }
}
