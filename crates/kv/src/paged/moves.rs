//! Contents that change their blocks: a copy of one's own, to the host and back, packing.

use std::ops::Range;

use super::shared::{Shared, Side};
use super::state::{State, new_version};
use super::zone::Shift;
use crate::error::KvError;
use crate::settings::refuse;

/// What a pass of packing did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Packed {
    /// Blocks that moved; one that several sequences have is one (count).
    pub blocks: u64,
    /// Their bytes, which are copied on the cache's stream.
    pub bytes: u64,
    /// Memory that holds nothing any more because of that, in bytes. What is beyond the cache's idle
    /// memory is given back.
    pub emptied_bytes: u64,
}

impl Shared {
    /// How many blocks so many tokens take.
    pub(super) fn blocks_for(&self, tokens: u64) -> Result<u64, KvError> {
        let max_tokens = self.max_tokens();
        match tokens <= max_tokens {
            true => Ok(self.layout.blocks_for(tokens)),
            false => Err(KvError::TooLong { tokens, max_tokens }),
        }
    }

    /// How many tokens so many blocks hold.
    pub(super) fn tokens_of(&self, blocks: u64) -> u64 {
        blocks * u64::from(self.layout.block_tokens())
    }

    /// Whether no other table has this block of a table.
    pub(super) fn sole_owner(&self, key: usize, at: usize) -> bool {
        let state = self.state();
        let block = state.tables.get(key).and_then(|table| table.blocks.get(at).copied());
        block.is_none_or(|block| state.device.refs(block) <= 1)
    }

    /// Enqueues a copy of a block to another one, which is held, and puts that in its place. The
    /// whole block is one copy, though the tokens in it are few: what they take lies apart, layer by
    /// layer. The caller has `motion`.
    pub(super) fn copy_out(&self, key: usize, at: usize, to: u32) -> Result<(), KvError> {
        let block = {
            let state = self.state();
            state.tables.get(key).and_then(|table| table.blocks.get(at).copied())
        };
        let Some(block) = block else { return Ok(()) };
        self.memory.buffer.copies_on(&self.memory.stream, [self.copy(block, to)])?;
        self.state().replace(key, std::iter::once((at, to)));
        Ok(())
    }

    fn copy(&self, from: u32, to: u32) -> (Range<u64>, u64) {
        (self.layout.bytes_of(from), self.layout.bytes_of(to).start)
    }

    /// Moves the blocks of a table that no other has to the host. Returns the bytes.
    pub(super) fn park(&self, key: usize) -> Result<u64, KvError> {
        if self.host.is_none() {
            let expected = "blocks on the host, where parked sequences lie";
            return Err(refuse("host_blocks", "none", expected));
        }
        // What is ahead of a sequence that does not grow is others' to have.
        self.state().forget_ahead(key);
        let own = self.state().entries_where(key, |state, block| state.device.refs(block) == 1);
        let held = self.obtain_on_host(own.len() as u64)?;
        // Blocks of its own stay its own; where they lie may have changed meanwhile.
        self.shift(key, own.into_iter().zip(held).collect(), true)
    }

    /// Moves the blocks of a table that lie on the host to the device. Returns the bytes.
    pub(super) fn resume(&self, key: usize) -> Result<u64, KvError> {
        let away = self.state().entries_where(key, State::is_on_host);
        let blocks = away.len() as u64;
        let held = self.obtain(blocks, self.tokens_of(blocks))?;
        self.shift(key, away.into_iter().zip(held).collect(), false)
    }

    /// Copies blocks of a table to others, which are held, and puts these in their place.
    fn shift(&self, key: usize, to: Vec<(usize, u32)>, is_parked: bool) -> Result<u64, KvError> {
        let motion = self.motion();
        let copies: Vec<(Range<u64>, u64)> = {
            let state = self.state();
            let table = state.tables.get(key);
            let from = |at: usize| table.and_then(|table| table.blocks.get(at).copied());
            to.iter().filter_map(|(at, block)| Some(self.copy(from(*at)?, *block))).collect()
        };
        let copied = match copies.is_empty() {
            true => Ok(()),
            false => self.memory.buffer.copies_on(&self.memory.stream, copies),
        };
        let mut state = self.state();
        if let Err(error) = copied {
            let held: Vec<u32> = to.into_iter().map(|(_, block)| block).collect();
            state.let_go(&held);
            drop(motion);
            self.after_freeing(state);
            return Err(error.into());
        }
        let bytes = to.len() as u64 * self.layout.block_bytes();
        state.replace(key, to.into_iter());
        if let Some(table) = state.tables.get_mut(key) {
            table.is_parked = is_parked;
            table.version = new_version();
        }
        drop(motion);
        self.after_freeing(state);
        Ok(bytes)
    }

    /// Moves at most so many blocks so that chunks become empty.
    pub(super) fn pack(&self, max_blocks: u64) -> Result<Packed, KvError> {
        let motion = self.motion();
        let (shifts, spare_bytes) = {
            let mut state = self.state();
            let shifts = state.device.plan_pack(max_blocks);
            for Shift { from, to } in &shifts {
                // Whoever has them may go meanwhile, and nobody takes them.
                state.device.hold(*from);
                state.device.hold(*to);
            }
            (shifts, state.device.spare_bytes())
        };
        if shifts.is_empty() {
            return Ok(Packed::default());
        }
        let copies: Vec<_> = shifts.iter().map(|it| self.copy(it.from, it.to)).collect();
        let copied = self.memory.buffer.copies_on(&self.memory.stream, copies);
        let mut state = self.state();
        if let Err(error) = copied {
            let held: Vec<u32> = shifts.iter().flat_map(|it| [it.from, it.to]).collect();
            state.let_go(&held);
            drop(motion);
            self.after_freeing(state);
            return Err(error.into());
        }
        state.rewrite(&shifts);
        let blocks = shifts.len() as u64;
        let bytes = blocks * self.layout.block_bytes();
        let emptied_bytes = state.device.spare_bytes().saturating_sub(spare_bytes);
        drop(motion);
        self.after_freeing(state);
        Ok(Packed { blocks, bytes, emptied_bytes })
    }

    /// Gives memory without tokens back, until so much is left on the device. Returns the bytes.
    pub(super) fn release_idle(&self, keep_bytes: u64) -> Result<u64, KvError> {
        let hands = self.memory.hands.take()?;
        let device = self.release(&hands, Side::Device, keep_bytes, 0);
        Ok(device + self.release(&hands, Side::Host, 0, 0))
    }
}
