//! What can go wrong with a KV cache.

use crate::layout::LayoutError;

/// Refuses what a forked child asks: another thread of the parent may have held any lock when it was made.
pub(crate) fn check_process() -> Result<(), KvError> {
    match vmm_sys::process::is_forked_child() {
        true => Err(vmm_pool::Error::DriverGone.into()),
        false => Ok(()),
    }
}

/// An operation of a KV cache that did not succeed. The cache is as it was before.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KvError {
    /// The layout does not exist.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// A setting was refused when the cache was built.
    #[error("{setting} = {value}: expected {expected}")]
    BadSetting {
        /// Its name.
        setting: &'static str,
        /// What was given.
        value: String,
        /// What would be accepted.
        expected: String,
    },
    /// The sequence would be longer than the cache was built for.
    #[error("{tokens} tokens are more than a sequence of this cache can have, {max_tokens}")]
    TooLong {
        /// How long it would be.
        tokens: u64,
        /// The longest.
        max_tokens: u64,
    },
    /// As many sequences are open as the cache was built for.
    #[error("all {max_sequences} sequences of this cache are open")]
    TooManySequences {
        /// How many it has at most.
        max_sequences: u32,
    },
    /// Memory is short, after everything that could help was tried.
    #[error("no memory for {tokens} more tokens ({bytes} bytes): {cause}")]
    NoMemory {
        /// Tokens that have no place.
        tokens: u64,
        /// What they take.
        bytes: u64,
        /// What the pool says.
        cause: vmm_pool::Error,
    },
    /// The sequence is shorter than that.
    #[error("the first {tokens} tokens of a sequence that has {has_tokens}")]
    BeyondEnd {
        /// Asked for.
        tokens: u64,
        /// What there are.
        has_tokens: u64,
    },
    /// The handle belongs to another cache.
    #[error("the sequence belongs to another cache")]
    OtherCache,
    /// The sequence is parked: resume it first.
    #[error("the sequence is parked on the host: resume it first")]
    Parked,
    /// The pool's answer.
    #[error(transparent)]
    Pool(#[from] vmm_pool::Error),
    /// The driver's answer.
    #[error(transparent)]
    Driver(#[from] vmm_sys::DriverError),
}

impl KvError {
    /// Whether memory, or a place for one more sequence, is short: what eviction, or a later try,
    /// can help against.
    pub fn is_shortage(&self) -> bool {
        matches!(self, KvError::NoMemory { .. } | KvError::TooManySequences { .. })
    }
}
