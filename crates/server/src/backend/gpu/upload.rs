//! [`Upload`]: what the kernels of one step are told, in one copy to the device.

use super::{Batch, Layout};
use crate::backend::BackendError;

/// Sections begin at multiples of it.
const ALIGN: usize = 16;
/// Bytes of a `Place` of kernels.cu: two addresses.
const PLACE_BYTES: usize = 16;

/// What a step's kernels are told: sections of one run of bytes.
#[derive(Debug, Default)]
pub(super) struct Upload {
    pub(super) bytes: Vec<u8>,
    /// Where each section begins.
    pub(super) lengths_at: u64,
    pub(super) sequences_at: u64,
    pub(super) positions_at: u64,
    pub(super) tokens_at: u64,
    tables_at: usize,
    /// Tokens that are written.
    pub(super) new_tokens: u32,
    /// The longest sequence, in tokens.
    pub(super) longest: u32,
}

impl Upload {
    /// Of a batch; what depends on where it will lie is filled in by [`Upload::settle`].
    pub(super) fn of(batch: &Batch<'_>) -> Result<Upload, BackendError> {
        let mut upload = Upload::default();
        let count = batch.sequences.len();
        upload.bytes.resize(count * PLACE_BYTES, 0);
        let lengths: Vec<u32> = batch.sequences.iter().map(|it| it.tokens.len() as u32).collect();
        upload.longest = lengths.iter().copied().max().unwrap_or(0);
        upload.lengths_at = upload.section(&lengths);
        let (mut sequences, mut positions, mut tokens) = (Vec::new(), Vec::new(), Vec::new());
        for (number, sequence) in (0u32..).zip(batch.sequences) {
            let new = sequence.tokens.get(sequence.new_from..).unwrap_or(&[]);
            sequences.resize(sequences.len() + new.len(), number);
            positions.extend((sequence.new_from as u32..).take(new.len()));
            tokens.extend_from_slice(new);
        }
        upload.new_tokens = u32::try_from(tokens.len()).map_err(|_| BackendError::Unsupported {
            what: format!("{} new tokens in a step", tokens.len()),
            expected: "less than 2^32".to_owned(),
        })?;
        upload.sequences_at = upload.section(&sequences);
        upload.positions_at = upload.section(&positions);
        upload.tokens_at = upload.section(&tokens);
        upload.tables_at = upload.bytes.len();
        if let Layout::Paged { layout, table, row_entries, .. } = batch.layout {
            for sequence in batch.sequences {
                let first = sequence.place as usize * row_entries;
                let blocks = layout.blocks_for(sequence.tokens.len() as u64) as usize;
                let row =
                    table.get(first..first + blocks).ok_or_else(|| BackendError::Unsupported {
                        what: format!("row {} of a table of {}", sequence.place, table.len()),
                        expected: format!("{blocks} entries there"),
                    })?;
                upload.bytes.extend(row.iter().flat_map(|block| block.to_ne_bytes()));
            }
        }
        Ok(upload)
    }

    /// Fills in the places, for an upload to `address`.
    pub(super) fn settle(&mut self, batch: &Batch<'_>, address: u64) {
        let mut table_at = address + self.tables_at as u64;
        for (place, sequence) in self.bytes.chunks_exact_mut(PLACE_BYTES).zip(batch.sequences) {
            let (base, table) = match batch.layout {
                Layout::Contiguous(_) => (sequence.place, 0),
                Layout::Paged { layout, address, .. } => {
                    let table = table_at;
                    table_at += 4 * layout.blocks_for(sequence.tokens.len() as u64);
                    (address, table)
                }
            };
            place[..8].copy_from_slice(&base.to_ne_bytes());
            place[8..].copy_from_slice(&table.to_ne_bytes());
        }
    }

    fn section(&mut self, words: &[u32]) -> u64 {
        let at = self.bytes.len();
        self.bytes.extend(words.iter().flat_map(|word| word.to_ne_bytes()));
        self.bytes.resize(self.bytes.len().next_multiple_of(ALIGN), 0);
        at as u64
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use vmm_kv::{BlockLayout, Dtype, KvShape};
    use vmm_pool::Pool;
    use vmm_sys::object::Stream;
    use vmm_sys::{DeviceId, Driver, sim::Sim};

    use super::*;
    use crate::backend::{ReadBytes, SequenceStep};

    #[test]
    fn tables_lie_where_the_places_point() {
        let driver: Arc<dyn Driver> = Sim::builder().build();
        let pool = Pool::builder(driver.clone()).build().unwrap();
        let buffer = pool.elastic(DeviceId(0)).capacity_bytes(2 << 20).build().unwrap();
        let stream = Stream::create(&driver, DeviceId(0)).unwrap();
        let layout = BlockLayout::new(KvShape::new(1, 1, 2, Dtype::F16).unwrap(), 2).unwrap();
        let table = [10, 11, -1, 20, 21, 22];
        let sequence = |place, tokens, new_from| SequenceStep {
            place,
            tokens,
            new_from,
            expected: 0,
            whole: false,
        };
        let sequences = [sequence(0, &[1, 2, 3], 2), sequence(1, &[4, 5, 6, 7, 8], 3)];
        let batch = Batch {
            buffer: &buffer,
            stream: &stream,
            layout: Layout::Paged {
                layout: &layout,
                address: 0x7000,
                table: &table,
                row_entries: 3,
            },
            sequences: &sequences,
            read: ReadBytes::default(),
            weights: None,
        };
        let mut upload = Upload::of(&batch).unwrap();
        upload.settle(&batch, 0x10_0000);
        let word = |at: usize| u32::from_ne_bytes(upload.bytes[at..at + 4].try_into().unwrap());
        let address = |at: usize| u64::from_ne_bytes(upload.bytes[at..at + 8].try_into().unwrap());
        let words =
            |at: u64, count| (0..count).map(|i| word(at as usize + 4 * i)).collect::<Vec<_>>();
        assert_eq!((upload.new_tokens, upload.longest), (3, 5));
        assert_eq!(words(upload.lengths_at, 2), [3, 5]);
        assert_eq!(words(upload.sequences_at, 3), [0, 1, 1]);
        assert_eq!(words(upload.positions_at, 3), [2, 3, 4]);
        assert_eq!(words(upload.tokens_at, 3), [3, 7, 8]);
        assert_eq!((address(0), address(16)), (0x7000, 0x7000));
        let tables = [address(8), address(24)].map(|it| it - 0x10_0000);
        assert_eq!(words(tables[0], 2), [10, 11]);
        assert_eq!(words(tables[1], 3), [20, 21, 22]);
        // A row that is too short is refused, and nothing read beyond it.
        let batch = Batch {
            layout: Layout::Paged {
                layout: &layout,
                address: 0,
                table: &table[..5],
                row_entries: 3,
            },
            ..batch
        };
        assert!(matches!(Upload::of(&batch), Err(BackendError::Unsupported { .. })));
    }
}
