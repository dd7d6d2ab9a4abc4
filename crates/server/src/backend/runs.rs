//! [`runs`]: tokens of a sequence as bytes of the buffer that lie in a row.

use std::ops::Range;

use vmm_kv::{Order, Part};

use super::{BackendError, Batch, Layout};
use crate::pattern::Pattern;

/// Bytes in a row: some tokens' words, token after token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// From the start of the buffer.
    pub(crate) offset: u64,
    /// Positions.
    pub(crate) tokens: Range<usize>,
    /// Of which layer's keys or values; all words of the tokens if none.
    pub(crate) row: Option<(u32, Part)>,
}

impl Run {
    /// What the words of each of its tokens have in common.
    pub(crate) fn bases<'a>(&self, pattern: &'a Pattern) -> &'a [u32] {
        match self.row {
            Some((layer, part)) => pattern.row(layer, part),
            None => pattern.token(),
        }
    }
}

/// Where these tokens of a sequence lie.
pub(crate) fn runs(
    batch: &Batch<'_>,
    place: u64,
    tokens: Range<usize>,
) -> Result<Vec<Run>, BackendError> {
    if tokens.is_empty() {
        return Ok(Vec::new());
    }
    let start = batch.buffer.address();
    match batch.layout {
        Layout::Contiguous(layout) => {
            let offset = place.wrapping_sub(start);
            let ranges = layout.ranges(tokens.start as u64..tokens.end as u64);
            let row = |index: usize| match layout.order() {
                Order::TokenMajor => None,
                Order::LayerMajor => Some(row(index)),
            };
            let run = |(index, range): (usize, Range<u64>)| Run {
                offset: offset.wrapping_add(range.start),
                tokens: tokens.clone(),
                row: row(index),
            };
            Ok(ranges.enumerate().map(run).collect())
        }
        Layout::Paged { layout, address, table, row_entries } => {
            let first = (place as usize).saturating_mul(row_entries);
            let blocks = table.get(first..first + row_entries).unwrap_or(&[]);
            let rows = 2 * layout.shape().layers() as usize;
            let mut runs = Vec::new();
            for (index, tokens) in blockwise(tokens, layout.block_tokens() as usize) {
                let block = blocks.get(index).and_then(|block| u32::try_from(*block).ok());
                let block = block.ok_or_else(|| no_block(place, index))?;
                let base = address.wrapping_sub(start) + layout.bytes_of(block).start;
                let within = tokens.start as u64 % u64::from(layout.block_tokens());
                for row in (0..rows).map(row) {
                    let layer_offset = layout.layer_offset(row.0, row.1);
                    let offset = base + layer_offset + within * layout.token_stride_bytes();
                    runs.push(Run { offset, tokens: tokens.clone(), row: Some(row) });
                }
            }
            Ok(runs)
        }
    }
}

/// The layer and part with this number.
fn row(index: usize) -> (u32, Part) {
    // Below twice the number of layers.
    ((index / 2) as u32, if index.is_multiple_of(2) { Part::Key } else { Part::Value })
}

/// Positions split where blocks end, with the number of the block.
fn blockwise(tokens: Range<usize>, each: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
    (tokens.start / each..tokens.end.div_ceil(each)).map(move |index| {
        let (first, end) = (index * each, (index + 1) * each);
        (index, tokens.start.max(first)..tokens.end.min(end))
    })
}

fn no_block(place: u64, index: usize) -> BackendError {
    BackendError::Unsupported {
        what: format!("row {place} of the table has no block {index}"),
        expected: "a block for each token".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_split_where_blocks_end() {
        let split: Vec<_> = blockwise(5..33, 16).collect();
        assert_eq!(split, [(0, 5..16), (1, 16..32), (2, 32..33)]);
        assert_eq!(blockwise(16..32, 16).collect::<Vec<_>>(), [(1, 16..32)]);
    }
}
