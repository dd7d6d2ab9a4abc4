//! The bytes that a buffer must hold: a value of its own at its start, middle and end.
//!
//! Work on streams writes the same values again, so contents do not depend on the order of streams;
//! work that reaches memory which was handed out again shows as a foreign value.

use vmm_sys::object::Stream;

use crate::memory::Memory;

/// Bytes written at each place of a long buffer.
const AREA_BYTES: u64 = 4096;

/// The contents of one buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contents {
    /// Counts the buffers of a run, so that two neighbours in time never have the same values.
    pub number: u64,
    /// Length of the buffer.
    pub bytes: u64,
}

impl Contents {
    /// The places that are written: offset, length, value.
    fn areas(self) -> impl Iterator<Item = (u64, u64, u8)> {
        let length = AREA_BYTES.min(self.bytes);
        let last = self.bytes - length;
        let starts = if self.bytes <= AREA_BYTES { vec![0] } else { vec![0, last / 2, last] };
        let value = move |index: usize| (1 + (self.number * 3 + index as u64) % 251) as u8;
        // Where areas of a short buffer overlap, the later one counts: the earlier is cut.
        let ends: Vec<u64> = starts.iter().skip(1).copied().chain([self.bytes]).collect();
        starts
            .into_iter()
            .zip(ends)
            .enumerate()
            .map(move |(index, (start, end))| (start, length.min(end - start), value(index)))
            .filter(|(_, bytes, _)| *bytes > 0)
    }

    /// Enqueues the writing on a stream whose device may touch the buffer.
    ///
    /// # Errors
    /// The driver's, in words.
    pub fn enqueue(self, memory: &Memory, stream: &Stream) -> Result<(), String> {
        for (offset, bytes, value) in self.areas() {
            // SAFETY: the pool gave the address out, for at least as many bytes.
            let filled = unsafe { stream.fill(memory.address() + offset, bytes, value) };
            filled.map_err(|error| format!("work on {memory:?} was refused: {error}"))?;
        }
        Ok(())
    }

    /// Writes from the host. The caller orders it against work of streams.
    ///
    /// # Errors
    /// The pool's, in words.
    pub fn write(self, memory: &Memory) -> Result<(), String> {
        for (offset, bytes, value) in self.areas() {
            let written = memory.write(offset, &vec![value; bytes as usize]);
            written.map_err(|error| format!("{memory:?} cannot be written: {error}"))?;
        }
        Ok(())
    }

    /// Reads and compares. The caller orders it against work of streams.
    ///
    /// # Errors
    /// The pool's, or the first byte that differs, in words.
    pub fn check(self, memory: &Memory) -> Result<(), String> {
        for (offset, bytes, value) in self.areas() {
            let mut found = vec![0; bytes as usize];
            let read = memory.read(offset, &mut found);
            read.map_err(|error| format!("{memory:?} cannot be read: {error}"))?;
            if let Some(at) = found.iter().position(|byte| *byte != value) {
                return Err(format!(
                    "{memory:?}: byte {} is {}, not {value}",
                    offset + at as u64,
                    found[at]
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn areas_lie_in_the_buffer_do_not_overlap_and_differ() {
        for bytes in [1, 255, 4096, 4097, 6000, 12_000, 100_000, 3 << 20] {
            let contents = Contents { number: 9, bytes };
            let areas: Vec<_> = contents.areas().collect();
            let mut end = 0;
            for (offset, length, _) in &areas {
                assert!(*offset >= end && *length > 0, "{bytes}: {areas:?}");
                end = offset + length;
            }
            assert!(end <= bytes && areas[0].0 == 0, "{bytes}: {areas:?}");
            assert_eq!(end, bytes, "the last byte is written");
            let next = Contents { number: 10, bytes };
            assert!(contents.areas().zip(next.areas()).all(|(a, b)| a.2 != b.2));
        }
    }
}
