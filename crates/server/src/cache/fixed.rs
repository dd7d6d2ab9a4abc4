//! [`FixedCache`]: what servers do that cannot grow: each slot has memory for the longest context,
//! committed when the cache is made.

use std::sync::Arc;

use parking_lot::Mutex;
use vmm_kv::{KvError, KvShape, Order, SequenceLayout};
use vmm_pool::{ElasticBuffer, Error, Pool};
use vmm_sys::object::Stream;

use super::CacheSettings;

/// A cache of slots of one length. Clones share it.
///
/// Who owns the memory: the cache, all of it, whether there are sequences or not. A slot's address
/// is stable for the life of its sequence.
#[derive(Clone, Debug)]
pub struct FixedCache(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    buffer: ElasticBuffer,
    stream: Stream,
    layout: SequenceLayout,
    slots: u32,
    /// The lowest is at the end.
    free: Mutex<Vec<u32>>,
}

/// A sequence in a slot, which is free again when it is dropped.
#[derive(Debug)]
pub struct FixedSequence {
    cache: FixedCache,
    slot: u32,
    tokens: u64,
}

impl FixedCache {
    /// As many slots as memory has room for, at most as many as the settings say.
    ///
    /// # Errors
    /// No room for one slot ([`KvError::NoMemory`]); the pool's.
    pub fn build(
        pool: &Pool,
        stream: &Stream,
        shape: KvShape,
        settings: &CacheSettings,
    ) -> Result<FixedCache, KvError> {
        let max_tokens = u64::from(settings.max_tokens);
        let chunk_bytes = settings.chunk_bytes;
        let layout = SequenceLayout::aligned(shape, max_tokens, Order::TokenMajor, chunk_bytes)?;
        let span_bytes = layout.span_bytes();
        let fit = pool.room(stream.device())?.own_bytes / span_bytes;
        let mut slots = fit.min(u64::from(settings.max_sequences)).max(1) as u32; // a u32 or less
        let buffer = pool
            .elastic(stream.device())
            .capacity_bytes(span_bytes.saturating_mul(u64::from(slots)))
            .chunk_bytes(chunk_bytes)
            .tag(&settings.tag)
            .build()?;
        loop {
            match buffer.grow_to(u64::from(slots) * span_bytes) {
                Ok(_) => break,
                // An estimate: others take memory too.
                Err(cause) if cause.is_out_of_memory() && slots > 1 => slots -= 1,
                Err(cause) if cause.is_out_of_memory() => {
                    return Err(KvError::NoMemory { tokens: max_tokens, bytes: span_bytes, cause });
                }
                Err(error) => return Err(error.into()),
            }
        }
        let free = Mutex::new((0..slots).rev().collect());
        let stream = stream.clone();
        Ok(FixedCache(Arc::new(Inner { buffer, stream, layout, slots, free })))
    }

    /// Takes a slot.
    ///
    /// # Errors
    /// [`KvError::TooLong`], [`KvError::TooManySequences`].
    pub fn open(&self, tokens: u64) -> Result<FixedSequence, KvError> {
        let max_tokens = self.0.layout.max_tokens();
        if tokens > max_tokens {
            return Err(KvError::TooLong { tokens, max_tokens });
        }
        let slot = self.0.free.lock().pop();
        let slot = slot.ok_or(KvError::TooManySequences { max_sequences: self.0.slots })?;
        Ok(FixedSequence { cache: self.clone(), slot, tokens })
    }

    /// The memory.
    pub fn buffer(&self) -> &ElasticBuffer {
        &self.0.buffer
    }

    /// Whose order the memory is in.
    pub fn stream(&self) -> &Stream {
        &self.0.stream
    }

    /// Where tokens lie in a slot.
    pub fn layout(&self) -> &SequenceLayout {
        &self.0.layout
    }

    /// Slots.
    pub fn slots(&self) -> u32 {
        self.0.slots
    }

    /// Slots that no sequence has.
    pub fn free_slots(&self) -> u32 {
        self.0.free.lock().len() as u32 // at most `slots`
    }

    /// Gives all memory back; only without sequences. Returns the bytes.
    pub(crate) fn sleep(&self) -> Result<u64, Error> {
        self.0.buffer.shrink_to(0)
    }

    /// Takes it again.
    pub(crate) fn wake(&self) -> Result<u64, Error> {
        self.0.buffer.grow_to(self.0.layout.span_bytes() * u64::from(self.0.slots))
    }
}

impl FixedSequence {
    /// Its address, for its whole life.
    pub fn address(&self) -> u64 {
        let offset = self.cache.0.layout.span_bytes() * u64::from(self.slot);
        self.cache.0.buffer.address() + offset
    }

    /// Its tokens.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Room for `count` tokens more, which is there. Returns the position of the first.
    ///
    /// # Errors
    /// [`KvError::TooLong`].
    pub fn append(&mut self, count: u64) -> Result<u64, KvError> {
        let (first, max_tokens) = (self.tokens, self.cache.0.layout.max_tokens());
        let tokens = first.saturating_add(count);
        if tokens > max_tokens {
            return Err(KvError::TooLong { tokens, max_tokens });
        }
        self.tokens = tokens;
        Ok(first)
    }
}

impl Drop for FixedSequence {
    fn drop(&mut self) {
        let mut free = self.cache.0.free.lock();
        let at = free.partition_point(|slot| *slot > self.slot);
        free.insert(at, self.slot);
    }
}
