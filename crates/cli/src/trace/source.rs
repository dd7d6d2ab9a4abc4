//! Lines out of a file, unpacked on the way, so that a trace of any length needs one buffer.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use flate2::bufread::MultiGzDecoder;

use super::error::{Problem, TraceError};

/// Longer than any line of the format; a file of other things must not be read into memory whole.
const LINE_BYTES_MAX: usize = 4096;

const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// The lines of a source, with their numbers.
pub(super) struct Lines<'a> {
    reader: Box<dyn BufRead + 'a>,
    path: &'a Path,
    buffer: Vec<u8>,
    line: u64,
}

impl<'a> Lines<'a> {
    pub(super) fn new(source: impl Read + 'a, path: &'a Path) -> Result<Lines<'a>, TraceError> {
        let mut source = source;
        // One read may return a single byte (a pipe), so the magic is read on its own and put
        // back in front.
        let mut magic = Vec::with_capacity(GZIP_MAGIC.len());
        (&mut source)
            .take(GZIP_MAGIC.len() as u64)
            .read_to_end(&mut magic)
            .map_err(|error| TraceError::of_file(path, &error))?;
        let packed = magic == GZIP_MAGIC;
        let whole = BufReader::with_capacity(1 << 16, std::io::Cursor::new(magic).chain(source));
        let reader: Box<dyn BufRead + 'a> = if packed {
            // Multi: files of several members (as `cat a.gz b.gz` makes) are legal gzip.
            Box::new(BufReader::with_capacity(1 << 16, MultiGzDecoder::new(whole)))
        } else {
            Box::new(whole)
        };
        Ok(Lines { reader, path, buffer: Vec::new(), line: 0 })
    }

    /// The next line without its end, or `None` after the last.
    pub(super) fn next_line(&mut self) -> Result<Option<&[u8]>, TraceError> {
        self.buffer.clear();
        self.line += 1;
        let mut limited = (&mut self.reader).take(LINE_BYTES_MAX as u64 + 1);
        let read = limited.read_until(b'\n', &mut self.buffer);
        if let Err(error) = read {
            return Err(self.fail(Problem::Io(error.to_string())));
        }
        if self.buffer.len() > LINE_BYTES_MAX {
            return Err(self.fail(Problem::LongLine { most: LINE_BYTES_MAX }));
        }
        if self.buffer.is_empty() {
            self.line = 0; // what is found wrong from here on concerns the whole file
            return Ok(None);
        }
        Ok(Some(&self.buffer))
    }

    /// An error at the current line.
    pub(super) fn fail(&self, problem: Problem) -> TraceError {
        TraceError::new(self.path, self.line, problem)
    }
}
