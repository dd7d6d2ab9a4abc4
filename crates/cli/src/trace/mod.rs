//! Traces: what an allocator was asked, in order.
//!
//! A trace is a text file, plain or gzip-compressed (told apart by the first two bytes):
//!
//! ```text
//! # a comment
//! a ID BYTES STREAM T_US      allocates BYTES as block ID on stream STREAM at T_US microseconds
//! f ID T_US                   frees block ID
//! ```
//!
//! Numbers are decimal. An ID may come back after its block was freed. Blocks that are live at the
//! end of the file are freed by the replay, outside of everything that is counted. Times are kept
//! out of a replay, which runs as fast as the allocator lets it.
//!
//! A [`Trace`] is complete or does not exist: a malformed line makes the whole file an error, so
//! that nothing is ever half replayed.

mod error;
mod parse;
mod source;

use std::fs::File;
use std::io::Read;
use std::path::Path;

pub use error::{Problem, TraceError};

/// One step of a trace. Blocks are named by dense slots that are used again after a free, so that
/// a replay needs one array as long as the largest number of live blocks, and no hash map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Allocates the next block of [`Trace::blocks`] into `slot`.
    Alloc {
        /// Where the block is kept until it is freed.
        slot: u32,
    },
    /// Frees the block in `slot`.
    Free {
        /// Where the block is.
        slot: u32,
    },
}

/// One block of a trace, in the order of allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Its ID in the file.
    pub id: u64,
    /// Bytes asked for.
    pub bytes: u64,
    /// Its stream, as a dense index: the first stream of the file is 0, the next new one is 1.
    pub stream: u32,
}

/// A whole trace, checked: every free names a live block, and no block is allocated twice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// The file's name without `.gz` and `.trace`.
    pub name: String,
    /// What happened, in order.
    pub ops: Vec<Op>,
    /// The blocks; the n-th [`Op::Alloc`] allocates the n-th.
    pub blocks: Vec<Block>,
    /// Number of slots that `ops` use.
    pub slots: usize,
    /// Number of streams that `blocks` use.
    pub streams: usize,
    /// The largest sum of live bytes, as asked for.
    pub peak_live_bytes: u64,
    /// Blocks that are never freed.
    pub left_live: usize,
}

impl Trace {
    /// Reads and checks a file, plain or gzip-compressed.
    ///
    /// # Errors
    /// The file cannot be read, or a line is not what the format says: the error names the file,
    /// the line, what was expected there and what was found.
    pub fn open(path: &Path) -> Result<Trace, TraceError> {
        let file = File::open(path).map_err(|error| TraceError::of_file(path, &error))?;
        Trace::read(file, path)
    }

    /// Reads and checks a trace from any source; `path` is its name in errors and reports.
    ///
    /// # Errors
    /// As [`Trace::open`].
    pub fn read(source: impl Read, path: &Path) -> Result<Trace, TraceError> {
        let mut lines = source::Lines::new(source, path)?;
        let mut builder = parse::Builder::default();
        while let Some(line) = lines.next_line()? {
            builder.line(line).map_err(|problem| lines.fail(problem))?;
        }
        builder.finish(name_of(path)).map_err(|problem| lines.fail(problem))
    }
}

/// The name of a trace in reports.
fn name_of(path: &Path) -> String {
    let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
    let name = name.strip_suffix(".gz").unwrap_or(&name);
    name.strip_suffix(".trace").unwrap_or(name).to_owned()
}

#[cfg(test)]
mod tests;
