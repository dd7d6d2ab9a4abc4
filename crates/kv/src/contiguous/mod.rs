//! [`ContiguousCache`]: a sequence has addresses in a row for its longest context, and memory comes
//! behind them as it grows.
//!
//! ```
//! # use vmm_pool::Pool;
//! # use vmm_sys::{DeviceId, Driver, object::Stream, sim::Sim};
//! use vmm_kv::{ContiguousCache, Dtype, KvShape};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let driver: std::sync::Arc<dyn Driver> = Sim::builder().build();
//! # let stream = Stream::create(&driver, DeviceId(0))?;
//! # let pool = Pool::builder(driver).build()?;
//! let shape = KvShape::new(32, 8, 128, Dtype::Bf16)?;
//! let cache = ContiguousCache::builder(&pool, &stream, shape)
//!     .max_tokens(131_072)
//!     .max_sequences(256)
//!     .build()?;
//! let mut sequence = cache.open(500)?; // a prompt of 500 tokens, to be written
//! {
//!     let _using = cache.use_now()?; // one guard a step, however many sequences
//!     // … prefill: write at sequence.address() …
//! }
//! let mut other = sequence.fork()?; // the same 500 tokens, in the same memory
//! assert_eq!((sequence.append(1)?, other.append(1)?), (500, 500));
//! # Ok(())
//! # }
//! ```
//!
//! `geometry`, `books`, `links`, `slot`: which chunks are whose, in plain numbers. `core`: memory comes and goes.
//! `sequence`: the hot path. `fork`: chunks in common. `park`: other places. `figures`, `verify`: what it
//! looks like, and whether that is right. `builder`: settings.

mod books;
mod builder;
mod core;
mod figures;
mod fork;
mod geometry;
mod links;
mod park;
mod sequence;
mod slot;
mod verify;

use crate::error::check_process;
use std::fmt;
use std::sync::Arc;

use vmm_pool::{ElasticBuffer, ShortageHook, Use};
use vmm_sys::object::Stream;

pub use builder::ContiguousBuilder;
pub use figures::KvCapacity;
pub use sequence::Sequence;

use self::core::Core;
use crate::error::KvError;
use crate::grower::Grower;
use crate::layout::{KvShape, SequenceLayout};
use crate::memory::Form;
use crate::shortage::{EvictionHook, KvShortage};

/// What keeps a cache open: its handles and its sequences.
struct Handle {
    /// Asked by the pool for idle memory. Dropped first: nobody asks a cache that ends.
    _hook: ShortageHook,
    /// The thread has let the cache go when this is dropped.
    _grower: Option<Grower>,
    core: Arc<Core>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        vmm_sys::process::keep_in_forked_child(&self.core);
    }
}

/// A cache whose sequences lie at addresses in a row. Clones share it.
///
/// It is one elastic buffer of the pool, and belongs to one stream: memory that a sequence leaves is
/// another's in that stream's order. Work of other streams is for the caller to order. Kernels use it
/// under one guard a step ([`use_now`](ContiguousCache::use_now)).
///
/// Who owns the physical memory: the cache, or a lender. Is the address stable: yes, from
/// [`build`](ContiguousBuilder::build) until the last handle and the last sequence are dropped. Who may
/// access: the stream's device, and whom the pool's policy and grants of the buffer name.
#[derive(Clone)]
pub struct ContiguousCache(Arc<Handle>);

impl fmt::Debug for ContiguousCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let core = self.core();
        f.debug_struct("ContiguousCache")
            .field("address", &format_args!("{:#x}", self.address()))
            .field("layout", &core.geometry.layout)
            .finish_non_exhaustive()
    }
}

impl ContiguousCache {
    /// Starts the settings of a cache for `stream`, on its device.
    pub fn builder(pool: &vmm_pool::Pool, stream: &Stream, shape: KvShape) -> ContiguousBuilder {
        ContiguousBuilder::new(pool.clone(), stream.clone(), shape)
    }

    fn core(&self) -> &Core {
        &self.0.core
    }

    /// The device address of its first byte.
    pub fn address(&self) -> u64 {
        self.buffer().address()
    }

    /// The buffer, for grants, hooks, exports and its figures. Its memory is the cache's to commit and
    /// to take away.
    pub fn buffer(&self) -> &ElasticBuffer {
        &self.core().memory.buffer
    }

    /// The stream in whose order memory is used again.
    pub fn stream(&self) -> &Stream {
        &self.core().memory.stream
    }

    /// Where a token lies in its sequence.
    pub fn layout(&self) -> &SequenceLayout {
        &self.core().geometry.layout
    }

    /// Says that work of the cache's stream is going to use it: hold the answer until the step is
    /// enqueued. One event is recorded then, however many sequences the step uses.
    ///
    /// # Errors
    /// As [`ElasticBuffer::use_on`].
    pub fn use_now(&self) -> Result<Use, KvError> {
        Ok(self.buffer().use_on(self.stream())?)
    }

    /// Opens a sequence of so many tokens, whose contents are undefined until the caller's kernels have
    /// written them: in the memory of a sequence that ended if there is any, else in new. All or nothing.
    ///
    /// # Errors
    /// [`KvError::TooLong`], [`KvError::TooManySequences`], [`KvError::NoMemory`] after everything that
    /// could help was tried, hooks included; the pool's.
    pub fn open(&self, tokens: u64) -> Result<Sequence, KvError> {
        self.check_length(tokens)?;
        let slot = self.core().open(tokens)?;
        let mut sequence = Sequence::new(self.0.clone(), slot, tokens, 0);
        if tokens > 0 && sequence.asks_ahead() {
            self.core().wake();
        }
        Ok(sequence)
    }

    /// Opens a sequence without tokens at once, and has memory for `tokens` of them come ahead of need:
    /// once [`Sequence::is_ready`] says so, appending as many waits for nothing. Memory of sequences that
    /// ended is used first, so that it often is ready from the start; the rest comes from the cache's
    /// thread, as growth ahead does: nobody is pressed for it. If memory is short none comes, and the
    /// append finds it as any other does.
    ///
    /// With a thread it makes no driver call, unless every free slot is still to be emptied of memory
    /// that the next sequence has no use for. Without one the memory comes before it returns.
    ///
    /// # Errors
    /// [`KvError::TooLong`], [`KvError::TooManySequences`].
    pub fn open_ahead(&self, tokens: u64) -> Result<Sequence, KvError> {
        self.check_length(tokens)?;
        let slot = self.core().open_ahead(tokens)?;
        Ok(Sequence::new(self.0.clone(), slot, 0, 0))
    }

    fn check_length(&self, tokens: u64) -> Result<(), KvError> {
        check_process()?;
        let max_tokens = self.core().geometry.max_tokens();
        if tokens > max_tokens {
            return Err(KvError::TooLong { tokens, max_tokens });
        }
        Ok(())
    }

    /// Makes room for `tokens_each` tokens more in each of the sequences: see [`Sequence::append`]. What
    /// they ask for ahead of need is asked for once.
    ///
    /// # Errors
    /// Which one could not, counted from 0, and why. Those before it have grown, it and those behind it
    /// have not. [`KvError::OtherCache`].
    pub fn append_all<'a>(
        &self,
        sequences: impl IntoIterator<Item = &'a mut Sequence>,
        tokens_each: u64,
    ) -> Result<(), (usize, KvError)> {
        let mut asks = false;
        let mut append = |sequence: &mut Sequence| {
            if !Arc::ptr_eq(&sequence.handle, &self.0) {
                return Err(KvError::OtherCache);
            }
            asks |= sequence.append_quietly(tokens_each)?;
            Ok(())
        };
        let appended = sequences
            .into_iter()
            .enumerate()
            .try_for_each(|(index, sequence)| append(sequence).map_err(|error| (index, error)));
        if asks {
            self.core().wake();
        }
        appended
    }

    /// Gives memory that no open sequence has back to the pool, until `keep_bytes` of it are left.
    /// Returns the bytes. It waits for a growth that is under way, and for no work: what is still in
    /// use goes later.
    ///
    /// # Errors
    /// [`ElasticError::Busy`](vmm_pool::ElasticError::Busy) from within another change.
    pub fn release_idle(&self, keep_bytes: u64) -> Result<u64, KvError> {
        let core = self.core();
        let held = core.memory.hands.take()?;
        core.collect(&held);
        Ok(core.give_idle(&held, keep_bytes))
    }

    /// Does what was left to the background: growth that was asked for, memory that is to be given
    /// back. Waits for a growth that is under way.
    ///
    /// # Errors
    /// As [`ContiguousCache::release_idle`].
    pub fn settle(&self) -> Result<(), KvError> {
        Ok(self.core().settle()?)
    }

    /// Asked when memory is short, the cache's own idle memory gone already: for the cache itself, or
    /// for others in the pool ([`KvShortage::is_own`]). `hook` ends or parks sequences of its choice, and
    /// says whether it did; then what was short is tried again, eight times at most. It runs in the thread
    /// that is short, with no lock held.
    ///
    /// Sequences that somebody else is using at that moment are behind the caller's own locks: a hook
    /// that cannot have them says false.
    pub fn on_shortage(
        &self,
        hook: impl Fn(&KvShortage) -> bool + Send + Sync + 'static,
    ) -> EvictionHook {
        self.core().memory.hooks.add(hook)
    }
}
