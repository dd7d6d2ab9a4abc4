//! Numbers and texts of a message.

use super::WireError;

/// Reads from a slice; each call takes what it names or says that it is not there.
pub(super) struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Reader<'a> {
        Reader { rest: bytes }
    }

    pub(super) fn take(
        &mut self,
        bytes: usize,
        expected: &'static str,
    ) -> Result<&'a [u8], WireError> {
        let Some((taken, rest)) = self.rest.split_at_checked(bytes) else {
            let got = format!("{} bytes where {bytes} belong", self.rest.len());
            return Err(WireError::malformed(expected, got));
        };
        self.rest = rest;
        Ok(taken)
    }

    pub(super) fn array<const N: usize>(
        &mut self,
        expected: &'static str,
    ) -> Result<[u8; N], WireError> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N, expected)?);
        Ok(out)
    }

    pub(super) fn u8(&mut self, expected: &'static str) -> Result<u8, WireError> {
        Ok(u8::from_le_bytes(self.array(expected)?))
    }

    pub(super) fn u16(&mut self, expected: &'static str) -> Result<u16, WireError> {
        Ok(u16::from_le_bytes(self.array(expected)?))
    }

    pub(super) fn u32(&mut self, expected: &'static str) -> Result<u32, WireError> {
        Ok(u32::from_le_bytes(self.array(expected)?))
    }

    pub(super) fn u64(&mut self, expected: &'static str) -> Result<u64, WireError> {
        Ok(u64::from_le_bytes(self.array(expected)?))
    }

    /// A yes or no.
    pub(super) fn flag(&mut self, expected: &'static str) -> Result<bool, WireError> {
        match self.u8(expected)? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(WireError::malformed(expected, other)),
        }
    }

    /// A text of at most `max` bytes, its length before it.
    pub(super) fn text(&mut self, max: usize, expected: &'static str) -> Result<String, WireError> {
        let bytes = usize::from(self.u16(expected)?);
        if bytes > max {
            return Err(WireError::malformed(expected, format!("a text of {bytes} bytes")));
        }
        match std::str::from_utf8(self.take(bytes, expected)?) {
            Ok(text) => Ok(text.to_owned()),
            Err(error) => Err(WireError::malformed(expected, error)),
        }
    }

    /// How many things of `each` bytes follow: as many as the rest of the message has room for, and
    /// no more than `max`.
    pub(super) fn count(
        &mut self,
        max: usize,
        each: usize,
        expected: &'static str,
    ) -> Result<usize, WireError> {
        let count = self.u32(expected)? as usize;
        if count > max || count.saturating_mul(each) > self.rest.len() {
            let got = format!("{count} in {} bytes", self.rest.len());
            return Err(WireError::malformed(expected, got));
        }
        Ok(count)
    }

    /// Nothing may be left.
    pub(super) fn end(&self) -> Result<(), WireError> {
        match self.rest.len() {
            0 => Ok(()),
            left => Err(WireError::malformed("the end of the message", format!("{left} bytes"))),
        }
    }
}

/// Writes what [`Reader`] reads.
#[derive(Default)]
pub(super) struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    pub(super) fn raw(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    pub(super) fn u8(&mut self, value: u8) {
        self.bytes.push(value);
    }

    pub(super) fn u16(&mut self, value: u16) {
        self.raw(&value.to_le_bytes());
    }

    pub(super) fn u32(&mut self, value: u32) {
        self.raw(&value.to_le_bytes());
    }

    pub(super) fn u64(&mut self, value: u64) {
        self.raw(&value.to_le_bytes());
    }

    /// At most `max` bytes of the text, cut between characters.
    pub(super) fn text(&mut self, text: &str, max: usize) {
        let mut bytes = text.len().min(max);
        while !text.is_char_boundary(bytes) {
            bytes -= 1;
        }
        // The limits are below 64 KiB.
        self.u16(bytes as u16);
        self.raw(&text.as_bytes()[..bytes]);
    }

    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }
}
