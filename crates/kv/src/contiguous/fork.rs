//! Sequences that have their first tokens in common: in the same chunks, until one of them writes there.
//!
//! A chunk that is full is read by all and written by nobody. The last one, partly filled, goes on being
//! written by the sequence that was forked, behind what the others read. Whoever else is to write into
//! a chunk that is another's too gets one of its own first, contents kept: a forked sequence at its
//! first append, one that was cut below what it has in common at its next.

use std::time::Duration;

use vmm_pool::Error;

use super::sequence::Sequence;
use crate::error::{KvError, check_process};
use crate::memory::{Form, Need};

/// How long a chunk of its own waits for guards of other threads.
const PATIENCE: Duration = Duration::from_secs(1);

impl Sequence {
    /// A second sequence with the same tokens, in the same memory: whole chunks stand at the addresses of
    /// both, and no byte is copied. Both go on by themselves.
    ///
    /// # Errors
    /// As [`Sequence::fork_at`].
    pub fn fork(&mut self) -> Result<Sequence, KvError> {
        self.fork_at(self.tokens())
    }

    /// The same with the first `tokens` of this sequence.
    ///
    /// # Errors
    /// This sequence is as it was. [`KvError::BeyondEnd`], [`KvError::Parked`],
    /// [`KvError::TooManySequences`], [`KvError::NoMemory`] if a quota is short, for it counts addresses;
    /// the pool's.
    pub fn fork_at(&mut self, tokens: u64) -> Result<Sequence, KvError> {
        check_process()?;
        let has_tokens = self.tokens();
        if tokens > has_tokens {
            return Err(KvError::BeyondEnd { tokens, has_tokens });
        }
        if self.is_parked {
            return Err(KvError::Parked);
        }
        let core = self.core();
        let geometry = &core.geometry;
        let chunks = geometry.chunks_for(tokens);
        let number = core.open_empty()?;
        core.slot(number).begin(0, 0);
        if let Err(error) = self.share(number, tokens, chunks) {
            core.leave(number);
            return Err(error);
        }
        // Until then this sequence writes nothing.
        let common = geometry.offset_of(tokens);
        let forked_from = chunks * geometry.chunk_bytes;
        self.own_from = self.own_from.max(common);
        Ok(Sequence::new(self.handle.clone(), number, tokens, forked_from))
    }

    /// Has the first chunks of this sequence stand in another slot too.
    fn share(&self, number: u32, tokens: u64, chunks: u64) -> Result<(), KvError> {
        let core = self.core();
        let geometry = &core.geometry;
        let all = |slot| geometry.ranges(slot, 0..chunks);
        let need = Need { tokens, bytes: geometry.bytes(chunks) };
        core.with_room(need, |held| {
            // Growth that was under way for the slot's last sequence may have come.
            core.books().write_off(number, 0);
            let has_rest = core.books().has_rest(number);
            if has_rest {
                core.take_rest(held, number)?;
            }
            let shared: Result<(), Error> = all(self.number)
                .zip(all(number))
                .try_for_each(|(from, to)| core.memory.buffer.share(from, to.start).map(drop));
            if let Err(error) = shared {
                if let Err(error) = core.memory.buffer.decommit(geometry.span(number)) {
                    // Nobody else gets the slot before that is done.
                    vmm_sys::say!(debug, %error, "shared chunks are taken away later");
                    core.books().set_elsewhere(number, true);
                }
                return Err(error);
            }
            let mut books = core.books();
            books.links.link(self.number, number, chunks);
            books.set_stands(number, chunks);
            books.follow(self.number, number);
            core.publish(&books, number);
            Ok(())
        })
    }

    /// Makes sure that what is written next is written into a chunk of its own.
    pub(super) fn own_end(&mut self) -> Result<(), KvError> {
        let core = self.core();
        let geometry = &core.geometry;
        if geometry.offset_of(self.tokens()) >= self.own_from {
            return Ok(());
        }
        let chunk = geometry.chunk_of(self.tokens());
        let is_shared = core.books().links.is_chunk_shared(self.number, chunk);
        if is_shared {
            // Tokens of it that are there already need no place.
            let need = Need { tokens: geometry.tokens_in(1), bytes: geometry.bytes(1) };
            core.with_room(need, |_| {
                let ranges = geometry.ranges(self.number, chunk..chunk + 1);
                core.memory.buffer.unshare_all(ranges, PATIENCE).map(drop)
            })?;
        }
        core.books().links.unlink_one(self.number, chunk);
        self.own_from = chunk * geometry.chunk_bytes;
        Ok(())
    }
}
