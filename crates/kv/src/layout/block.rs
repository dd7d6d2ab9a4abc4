//! [`BlockLayout`]: the paged form. A block holds so many tokens of all layers.

use super::shape::{KvShape, LayoutError, Part, within};

/// A cache of fixed blocks: `[block][layer][key or value][token in block][head][element]`.
///
/// What a paged-attention kernel takes for one layer is an address (that of the cache plus
/// [`layer_offset`](BlockLayout::layer_offset)), the stride from block to block
/// ([`block_bytes`](BlockLayout::block_bytes)), and a table of block numbers: the layout
/// `[num_blocks, block_tokens, kv_heads, head_dim]` of FlashAttention and vLLM, with a stride for the
/// first dimension. All layers of a block lie together, so a block that is free frees its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockLayout {
    shape: KvShape,
    block_tokens: u32,
}

impl BlockLayout {
    /// Blocks of `block_tokens` tokens.
    ///
    /// # Errors
    /// No tokens; a block of more than 2^63 bytes.
    pub fn new(shape: KvShape, block_tokens: u32) -> Result<BlockLayout, LayoutError> {
        if block_tokens == 0 {
            return Err(LayoutError::Zero { what: "block_tokens" });
        }
        within(shape.token_bytes().checked_mul(u64::from(block_tokens)), "a block")?;
        Ok(BlockLayout { shape, block_tokens })
    }

    /// What a token takes.
    pub fn shape(&self) -> &KvShape {
        &self.shape
    }

    /// Tokens of a block.
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    /// Bytes of a block, and from one block to the next.
    pub fn block_bytes(&self) -> u64 {
        self.shape.token_bytes() * u64::from(self.block_tokens)
    }

    /// Bytes from one token of a block to the next, within a layer.
    pub fn token_stride_bytes(&self) -> u64 {
        self.shape.row_bytes()
    }

    /// How many blocks a sequence of so many tokens has.
    pub fn blocks_for(&self, tokens: u64) -> u64 {
        tokens.div_ceil(u64::from(self.block_tokens))
    }

    /// Which of a sequence's blocks a token lies in, and where there.
    pub fn locate(&self, token: u64) -> (u64, u32) {
        let block_tokens = u64::from(self.block_tokens);
        // The remainder is below `block_tokens`.
        (token / block_tokens, (token % block_tokens) as u32)
    }

    /// Where a layer's keys, or values, begin within a block.
    pub fn layer_offset(&self, layer: u32, part: Part) -> u64 {
        debug_assert!(layer < self.shape.layers());
        let rows = (2 * u64::from(layer) + part.index()) * u64::from(self.block_tokens);
        rows * self.shape.row_bytes()
    }

    /// Where one head of one token lies within a block.
    pub fn offset_in_block(&self, layer: u32, part: Part, token_in_block: u32, head: u32) -> u64 {
        debug_assert!(token_in_block < self.block_tokens && head < self.shape.kv_heads());
        self.layer_offset(layer, part)
            + u64::from(token_in_block) * self.token_stride_bytes()
            + u64::from(head) * self.shape.head_bytes()
    }

    /// The bytes of so many blocks.
    ///
    /// # Errors
    /// More than 2^63.
    pub fn blocks_bytes(&self, blocks: u64) -> Result<u64, LayoutError> {
        within(self.block_bytes().checked_mul(blocks), "the cache")
    }

    /// The blocks that bytes of the cache touch, and the other way round: where a block lies.
    pub fn bytes_of(&self, block: u32) -> std::ops::Range<u64> {
        let start = u64::from(block) * self.block_bytes();
        start..start + self.block_bytes()
    }
}
