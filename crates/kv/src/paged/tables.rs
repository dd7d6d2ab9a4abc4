//! [`BlockTables`]: block numbers as paged-attention kernels take them.

use std::sync::Arc;

use super::sequence::PagedSequence;
use crate::error::{KvError, check_process};

/// The tables of a batch: a matrix of 32-bit block numbers, `[rows][max_blocks]`, and the number
/// of tokens of each row. It is what the paged-attention kernels of vLLM and FlashAttention take as
/// `block_table` (`[batch, max_blocks]`, int32) and `seqused_k` or `seq_lens` (`[batch]`, int32), after
/// a copy to the device.
///
/// Entries behind a row's blocks are 0, and so are rows without a sequence: those kernels read no block
/// behind a row's tokens, and one that loads ahead finds memory there, for block 0 has memory as
/// long as any sequence has a block on the device.
///
/// ```
/// # use vmm_kv::{BlockTables, Dtype, KvShape, PagedCache};
/// # use vmm_sys::{DeviceId, object::Stream, sim::Sim};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let driver: std::sync::Arc<dyn vmm_sys::Driver> = Sim::builder().build();
/// # let pool = vmm_pool::Pool::builder(driver.clone()).build()?;
/// # let stream = Stream::create(&driver, DeviceId(0))?;
/// let shape = KvShape::new(32, 8, 128, Dtype::Bf16)?;
/// let cache = PagedCache::builder(&pool, &stream, shape).max_blocks(1000).build()?;
/// let (mut one, two) = (cache.open(20)?, cache.open(5)?);
/// let mut tables = BlockTables::new(4, 64); // as the captured graph has rows
/// assert_eq!(tables.update(&[&one, &two])?, [0, 1]);
/// one.append(1)?; // within its block: no row changes, only lengths
/// assert_eq!(tables.update(&[&one, &two])?, [0; 0]);
/// assert_eq!(tables.seq_lens(), [21, 5, 0, 0]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct BlockTables {
    max_blocks_per_row: usize,
    entries: Vec<i32>,
    seq_lens: Vec<i32>,
    /// The table that each row shows: 0 if none.
    versions: Vec<u64>,
    /// How many blocks each row shows.
    filled: Vec<usize>,
    changed: Vec<usize>,
}

impl BlockTables {
    /// A matrix of 0.
    pub fn new(rows: usize, max_blocks_per_row: usize) -> BlockTables {
        BlockTables {
            max_blocks_per_row,
            entries: vec![0; rows * max_blocks_per_row],
            seq_lens: vec![0; rows],
            versions: vec![0; rows],
            filled: vec![0; rows],
            changed: Vec::with_capacity(rows),
        }
    }

    /// Shows these sequences, in order; rows behind them are emptied. Rewrites the rows whose blocks
    /// changed since they were last shown here, and says which those are. All lengths are rewritten.
    ///
    /// Call it after the step's appends, [`pack`](super::PagedCache::pack) and parking, and before the
    /// kernels that read the tables are launched.
    ///
    /// # Errors
    /// [`KvError::TooManySequences`], [`KvError::TooLong`] if the matrix is too small;
    /// [`KvError::OtherCache`] if they are not all of one cache; [`KvError::Parked`]. The matrix is as
    /// it was then.
    pub fn update(&mut self, sequences: &[&PagedSequence]) -> Result<&[usize], KvError> {
        check_process()?;
        self.check(sequences)?;
        self.changed.clear();
        let state = sequences.first().map(|first| first.shared.state());
        for row in 0..self.seq_lens.len() {
            let sequence = sequences.get(row);
            // Lengths fit: `check` has seen to it.
            self.seq_lens[row] = sequence.map_or(0, |sequence| sequence.tokens() as i32);
            let table = sequence.and_then(|it| state.as_ref()?.tables.get(it.key));
            let version = table.map_or(0, |table| table.version);
            if self.versions[row] == version {
                continue;
            }
            let blocks = table.map_or(&[][..], |table| &table.blocks);
            let start = row * self.max_blocks_per_row;
            let entries = &mut self.entries[start..start + self.max_blocks_per_row];
            for (entry, block) in entries.iter_mut().zip(blocks) {
                // The builder refuses more blocks than these numbers count.
                *entry = *block as i32;
            }
            if let Some(behind) = entries.get_mut(blocks.len()..self.filled[row]) {
                behind.fill(0);
            }
            self.filled[row] = blocks.len();
            self.versions[row] = version;
            self.changed.push(row);
        }
        Ok(&self.changed)
    }

    fn check(&self, sequences: &[&PagedSequence]) -> Result<(), KvError> {
        let rows = self.seq_lens.len();
        if sequences.len() > rows {
            let max_sequences = u32::try_from(rows).unwrap_or(u32::MAX);
            return Err(KvError::TooManySequences { max_sequences });
        }
        let Some(first) = sequences.first() else { return Ok(()) };
        let layout = &first.shared.layout;
        let max_tokens = self.max_blocks_per_row as u64 * u64::from(layout.block_tokens());
        let max_tokens = max_tokens.min(i32::MAX as u64);
        for sequence in sequences {
            let tokens = sequence.tokens();
            if !Arc::ptr_eq(&sequence.shared, &first.shared) {
                return Err(KvError::OtherCache);
            }
            if sequence.is_parked() {
                return Err(KvError::Parked);
            }
            if tokens > max_tokens {
                return Err(KvError::TooLong { tokens, max_tokens });
            }
        }
        Ok(())
    }

    /// The matrix, row by row.
    pub fn as_slice(&self) -> &[i32] {
        &self.entries
    }

    /// One row of it; empty if there is no such row.
    pub fn row(&self, row: usize) -> &[i32] {
        let start = row.saturating_mul(self.max_blocks_per_row);
        self.entries.get(start..start.saturating_add(self.max_blocks_per_row)).unwrap_or(&[])
    }

    /// The tokens of each row.
    pub fn seq_lens(&self) -> &[i32] {
        &self.seq_lens
    }

    /// How many blocks each row shows, in order: with the rows, what FlashInfer's `kv_indices` and
    /// `kv_indptr` are made of.
    pub fn blocks_in_rows(&self) -> &[usize] {
        &self.filled
    }

    /// The length of a row, in blocks.
    pub fn max_blocks_per_row(&self) -> usize {
        self.max_blocks_per_row
    }
}
