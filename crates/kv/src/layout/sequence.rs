//! [`SequenceLayout`]: the contiguous form. A sequence has addresses for its longest context.

use std::ops::Range;

use super::shape::{KvShape, LayoutError, Part, within};

/// What lies next to what in a sequence's addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Order {
    /// `[token][layer][key or value][head][element]`: a token's bytes lie together, so memory grows
    /// at one end and hardly any is idle. A kernel needs a stride from token to token.
    TokenMajor,
    /// `[layer][key or value][token][head][element]`: each layer is dense, for kernels that take no
    /// stride. Memory grows at `2 * layers` places, and each has an unfinished chunk.
    LayerMajor,
}

/// A sequence's keys and values at addresses that lie in a row, reserved for its longest context.
///
/// A kernel takes one address for each layer ([`layer_offset`](SequenceLayout::layer_offset), for
/// the sequence's whole life) and the stride from token to token
/// ([`token_stride_bytes`](SequenceLayout::token_stride_bytes)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SequenceLayout {
    shape: KvShape,
    max_tokens: u64,
    order: Order,
    /// From one layer's keys to its values, and to the next layer's keys.
    part_stride_bytes: u64,
    span_bytes: u64,
}

impl SequenceLayout {
    /// Sequences of at most `max_tokens` tokens.
    ///
    /// # Errors
    /// No tokens; more than 2^63 bytes.
    pub fn new(
        shape: KvShape,
        max_tokens: u64,
        order: Order,
    ) -> Result<SequenceLayout, LayoutError> {
        SequenceLayout::aligned(shape, max_tokens, order, 1)
    }

    /// The same, with each part that grows by itself a multiple of `align_bytes` long, so that
    /// it grows by whole chunks of its own.
    ///
    /// # Errors
    /// As [`SequenceLayout::new`]; an alignment of 0.
    pub fn aligned(
        shape: KvShape,
        max_tokens: u64,
        order: Order,
        align_bytes: u64,
    ) -> Result<SequenceLayout, LayoutError> {
        if max_tokens == 0 {
            return Err(LayoutError::Zero { what: "max_tokens" });
        }
        if align_bytes == 0 {
            return Err(LayoutError::Zero { what: "align_bytes" });
        }
        const WHAT: &str = "a sequence";
        let parts = 2 * u64::from(shape.layers());
        let (part_stride_bytes, span_bytes) = match order {
            Order::TokenMajor => {
                let bytes = shape.token_bytes().checked_mul(max_tokens);
                let bytes = bytes.and_then(|bytes| bytes.checked_next_multiple_of(align_bytes));
                (shape.row_bytes(), within(bytes, WHAT)?)
            }
            Order::LayerMajor => {
                let bytes = shape.row_bytes().checked_mul(max_tokens);
                let bytes = bytes.and_then(|bytes| bytes.checked_next_multiple_of(align_bytes));
                let part = within(bytes, WHAT)?;
                (part, within(part.checked_mul(parts), WHAT)?)
            }
        };
        Ok(SequenceLayout { shape, max_tokens, order, part_stride_bytes, span_bytes })
    }

    /// What a token takes.
    pub fn shape(&self) -> &KvShape {
        &self.shape
    }

    /// The longest context.
    pub fn max_tokens(&self) -> u64 {
        self.max_tokens
    }

    /// What lies next to what.
    pub fn order(&self) -> Order {
        self.order
    }

    /// The addresses of one sequence, in bytes.
    pub fn span_bytes(&self) -> u64 {
        self.span_bytes
    }

    /// From one token to the next, within a layer.
    pub fn token_stride_bytes(&self) -> u64 {
        match self.order {
            Order::TokenMajor => self.shape.token_bytes(),
            Order::LayerMajor => self.shape.row_bytes(),
        }
    }

    /// Where a layer's keys, or values, begin.
    pub fn layer_offset(&self, layer: u32, part: Part) -> u64 {
        debug_assert!(layer < self.shape.layers());
        (2 * u64::from(layer) + part.index()) * self.part_stride_bytes
    }

    /// Where one head of one token lies.
    pub fn offset(&self, layer: u32, part: Part, token: u64, head: u32) -> u64 {
        debug_assert!(token < self.max_tokens && head < self.shape.kv_heads());
        self.layer_offset(layer, part)
            + token * self.token_stride_bytes()
            + u64::from(head) * self.shape.head_bytes()
    }

    /// Where the bytes of these tokens lie: one range, or one for each part of each layer. Tokens
    /// beyond the longest context are left out.
    pub fn ranges(&self, tokens: Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
        let (start, end) = (tokens.start.min(self.max_tokens), tokens.end.min(self.max_tokens));
        let stride = self.token_stride_bytes();
        let (first, last) = (start * stride, end.max(start) * stride);
        let (parts, part_stride) = match self.order {
            Order::TokenMajor => (1, 0),
            Order::LayerMajor => (2 * u64::from(self.shape.layers()), self.part_stride_bytes),
        };
        let parts = if start < end { parts } else { 0 };
        (0..parts).map(move |part| part * part_stride + first..part * part_stride + last)
    }

    /// How many tokens have all their bytes below `bytes` in every part that grows by itself.
    pub fn tokens_within(&self, bytes: u64) -> u64 {
        (bytes / self.token_stride_bytes()).min(self.max_tokens)
    }
}
