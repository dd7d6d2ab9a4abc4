//! Lines to operations: every line is checked against the format and against the blocks that are
//! live at that point.

use std::collections::HashMap;

use super::error::Problem;
use super::{Block, Op, Trace};

/// How much of a bad line an error shows.
const SHOWN_BYTES: usize = 60;

/// Streams are kept as small numbers beside each operation.
const STREAMS_MAX: usize = u16::MAX as usize;

/// A live block while the file is read.
struct Live {
    slot: u32,
    bytes: u64,
    /// Where it was allocated.
    line: u64,
}

/// A trace being read.
#[derive(Default)]
pub(super) struct Builder {
    line: u64,
    ops: Vec<Op>,
    blocks: Vec<Block>,
    live: HashMap<u64, Live>,
    streams: HashMap<u64, u32>,
    /// Slots given back, the newest first: a hot slot is in the host's cache.
    free_slots: Vec<u32>,
    slots: u32,
    live_bytes: u64,
    peak_live_bytes: u64,
}

impl Builder {
    /// Takes in the next line.
    pub(super) fn line(&mut self, line: &[u8]) -> Result<(), Problem> {
        self.line += 1;
        let line = line.trim_ascii();
        if line.is_empty() || line[0] == b'#' {
            return Ok(());
        }
        let shape = || Problem::Shape { found: shown(line) };
        let mut fields = [&[][..]; 5];
        let mut count = 0;
        for field in line.split(u8::is_ascii_whitespace).filter(|field| !field.is_empty()) {
            *fields.get_mut(count).ok_or_else(shape)? = field;
            count += 1;
        }
        match (fields[0], count) {
            (b"a", 5) => self.alloc(fields),
            (b"f", 3) => self.free(fields),
            _ => Err(shape()),
        }
    }

    fn alloc(&mut self, fields: [&[u8]; 5]) -> Result<(), Problem> {
        let id = number("ID", fields[1])?;
        let bytes = number("BYTES", fields[2])?;
        let stream = number("STREAM", fields[3])?;
        number("T_US", fields[4])?;
        if let Some(live) = self.live.get(&id) {
            return Err(Problem::StillLive { id, line: live.line });
        }
        let live_bytes = self
            .live_bytes
            .checked_add(bytes)
            .ok_or(Problem::TooManyBytes { live_bytes: self.live_bytes, bytes })?;
        let stream = self.stream(stream)?;
        let slot = self.take_slot()?;
        self.live_bytes = live_bytes;
        self.peak_live_bytes = self.peak_live_bytes.max(live_bytes);
        self.live.insert(id, Live { slot, bytes, line: self.line });
        self.blocks.push(Block { id, bytes, stream });
        self.ops.push(Op::Alloc { slot });
        Ok(())
    }

    fn free(&mut self, fields: [&[u8]; 5]) -> Result<(), Problem> {
        let id = number("ID", fields[1])?;
        number("T_US", fields[2])?;
        let live = self.live.remove(&id).ok_or(Problem::NotLive { id })?;
        self.live_bytes -= live.bytes;
        self.free_slots.push(live.slot);
        self.ops.push(Op::Free { slot: live.slot });
        Ok(())
    }

    /// The dense index of a stream of the file.
    fn stream(&mut self, stream: u64) -> Result<u32, Problem> {
        let next = self.streams.len();
        if next >= STREAMS_MAX && !self.streams.contains_key(&stream) {
            return Err(Problem::TooMany { what: "streams", most: STREAMS_MAX as u64 });
        }
        // Fits: `next` is below STREAMS_MAX.
        Ok(*self.streams.entry(stream).or_insert(next as u32))
    }

    fn take_slot(&mut self) -> Result<u32, Problem> {
        if let Some(slot) = self.free_slots.pop() {
            return Ok(slot);
        }
        let slot = self.slots;
        self.slots = slot
            .checked_add(1)
            .ok_or(Problem::TooMany { what: "live blocks", most: u32::MAX.into() })?;
        Ok(slot)
    }

    /// The trace, once all lines were taken in.
    pub(super) fn finish(self, name: String) -> Result<Trace, Problem> {
        if self.peak_live_bytes == 0 {
            return Err(Problem::Empty);
        }
        Ok(Trace {
            name,
            ops: self.ops,
            blocks: self.blocks,
            slots: self.slots as usize,
            streams: self.streams.len(),
            peak_live_bytes: self.peak_live_bytes,
            left_live: self.live.len(),
        })
    }
}

/// A field of digits. Signs, fractions and other notations are refused: another reader of the
/// format may not know them.
fn number(field: &'static str, text: &[u8]) -> Result<u64, Problem> {
    let wrong = || Problem::Number { field, found: shown(text) };
    let mut value = 0_u64;
    for byte in text {
        let digit = byte.is_ascii_digit().then(|| u64::from(byte - b'0')).ok_or_else(wrong)?;
        value =
            value.checked_mul(10).and_then(|value| value.checked_add(digit)).ok_or_else(wrong)?;
    }
    Ok(value)
}

/// A piece of the file for an error message: one line, of printable characters.
fn shown(bytes: &[u8]) -> String {
    let cut = &bytes[..bytes.len().min(SHOWN_BYTES)];
    let mut text = cut.escape_ascii().to_string();
    if cut.len() < bytes.len() {
        text.push('…');
    }
    text
}
