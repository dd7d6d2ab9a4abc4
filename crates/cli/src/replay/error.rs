//! Why a replay stopped.

use std::error::Error;
use std::fmt;

/// The allocator's own report of a failure.
pub type Cause = Box<dyn Error + Send + Sync>;

/// A block of the trace and where the allocator put it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockAt {
    /// Its ID in the trace.
    pub id: u64,
    /// Its first byte.
    pub address: u64,
    /// Bytes the trace asked for.
    pub bytes: u64,
}

impl fmt::Display for BlockAt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let end = self.address.wrapping_add(self.bytes);
        write!(f, "block {} ({} bytes at {:#x}..{end:#x})", self.id, self.bytes, self.address)
    }
}

/// A replay that did not finish.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The allocator could not be made.
    #[error("cannot start the allocator: {0}")]
    Start(#[source] Cause),
    /// An operation of the trace failed.
    #[error("pass {pass}, operation {op}: {what} of block {id} ({bytes} bytes) failed: {cause}")]
    Operation {
        /// Counted from 1.
        pass: u32,
        /// The operation of the trace, counted from 1.
        op: usize,
        /// Which operation.
        what: &'static str,
        /// The block's ID in the trace.
        id: u64,
        /// Bytes the trace asked for.
        bytes: u64,
        /// The allocator's report.
        #[source]
        cause: Cause,
    },
    /// A step between operations failed.
    #[error("pass {pass}: {what} failed: {cause}")]
    Between {
        /// Counted from 1.
        pass: u32,
        /// What was tried.
        what: &'static str,
        /// The report.
        #[source]
        cause: Cause,
    },
    /// Two live blocks share bytes.
    #[error("pass {pass}, operation {op}: {fresh} overlaps the live {live}")]
    Overlap {
        /// Counted from 1.
        pass: u32,
        /// The operation that allocated `fresh`, counted from 1.
        op: usize,
        /// The block just allocated.
        fresh: BlockAt,
        /// The block whose bytes it shares.
        live: BlockAt,
    },
    /// A block is not where or what was promised.
    #[error("pass {pass}, operation {op}: {block} {wrong}")]
    BadBlock {
        /// Counted from 1.
        pass: u32,
        /// The operation that allocated it, counted from 1.
        op: usize,
        /// The block.
        block: BlockAt,
        /// What is wrong with it.
        wrong: String,
    },
}
