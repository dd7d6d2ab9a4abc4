//! What can be wrong with a trace file.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// A trace that could not be read, and where.
#[derive(Debug)]
pub struct TraceError {
    file: PathBuf,
    /// Counted from 1; 0 for the file as a whole.
    line: u64,
    problem: Problem,
}

/// What was expected, and what was found.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    /// The file cannot be opened or read.
    #[error("cannot be read: {0}")]
    Io(String),
    /// Neither an allocation, nor a free, nor a comment.
    #[error(
        "expected a line `a ID BYTES STREAM T_US`, `f ID T_US` or `# comment`, found `{found}`"
    )]
    Shape {
        /// The line.
        found: String,
    },
    /// A field that should be a number is not, or is out of range.
    #[error("expected {field} as a decimal number from 0 to {}, found `{found}`", u64::MAX)]
    Number {
        /// The field's name in the format.
        field: &'static str,
        /// What stands there.
        found: String,
    },
    /// An allocation of a block that is live.
    #[error("expected an ID that is not live, found {id}, allocated on line {line} and not freed")]
    StillLive {
        /// The block.
        id: u64,
        /// Where it was allocated.
        line: u64,
    },
    /// A free of a block that is not live.
    #[error("expected the ID of a live block, found {id}, which is not allocated here")]
    NotLive {
        /// The block.
        id: u64,
    },
    /// The live bytes do not fit 64 bits.
    #[error("expected a sum of live bytes below 2^64, found {live_bytes} + {bytes}")]
    TooManyBytes {
        /// Live before this line.
        live_bytes: u64,
        /// Asked for on this line.
        bytes: u64,
    },
    /// More blocks or streams than the replay can index.
    #[error("expected at most {most} {what} in a trace, found more")]
    TooMany {
        /// Blocks, or streams.
        what: &'static str,
        /// The limit.
        most: u64,
    },
    /// A line without an end: not a trace at all.
    #[error("expected lines of at most {most} bytes, found a longer one: is this a trace file?")]
    LongLine {
        /// The limit.
        most: usize,
    },
    /// Nothing to replay.
    #[error("expected at least one allocation of at least one byte, found none in the whole file")]
    Empty,
}

impl TraceError {
    pub(super) fn new(file: &Path, line: u64, problem: Problem) -> TraceError {
        TraceError { file: file.to_owned(), line, problem }
    }

    pub(super) fn of_file(file: &Path, error: &io::Error) -> TraceError {
        TraceError::new(file, 0, Problem::Io(error.to_string()))
    }

    /// The line, counted from 1, or 0 if the file as a whole is meant.
    pub fn line(&self) -> u64 {
        self.line
    }

    /// What was wrong.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }
}

impl fmt::Display for TraceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.file.display())?;
        if self.line != 0 {
            write!(f, ", line {}", self.line)?;
        }
        write!(f, ": {}", self.problem)
    }
}

impl std::error::Error for TraceError {}
