//! The messages as bytes: little endian, each with a header, decoded totally.
//!
//! Whatever the bytes are, decoding answers with a message or a typed error: it never panics, never
//! allocates more than a small multiple of the message, and takes nothing that it does not know.

mod message;
mod owner;
mod parts;

pub(crate) use message::{Home, Message, Ordering, PieceEntry};
pub(crate) use owner::OwnerMessage;
use parts::{Reader, Writer};

/// `VMSH`.
const MAGIC: u32 = 0x4853_4d56;
/// Both sides have to speak the same.
pub(crate) const VERSION: u16 = 1;
const HEADER_BYTES: usize = 16;
/// The longest message.
pub(crate) const MESSAGE_BYTES_MAX: usize = 64 << 10;
/// The longest name of an offer.
pub(crate) const NAME_BYTES_MAX: usize = 255;
/// The longest reason of a refusal.
pub(crate) const TEXT_BYTES_MAX: usize = 1024;
/// Pieces in one description.
pub(crate) const LAYOUT_PIECES_MAX: usize = 1400;
/// Buffers in one answer about what an owner process holds.
pub(crate) const HELD_MAX: usize = 16;
/// Their holders, each.
pub(crate) const HOLDERS_MAX: usize = 256;
/// Descriptors beside one message.
pub(crate) const DESCRIPTORS_MAX: usize = 128;

/// Why bytes are no message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum WireError {
    /// Another version of the protocol.
    Version(u16),
    /// Anything else.
    Malformed { expected: &'static str, got: String },
}

impl WireError {
    fn malformed(expected: &'static str, got: impl std::fmt::Display) -> WireError {
        WireError::Malformed { expected, got: got.to_string() }
    }

    /// The same for whoever waited for the message.
    pub(crate) fn at(self, step: &'static str) -> crate::ShareError {
        match self {
            WireError::Version(theirs) => {
                crate::ShareError::Version { step, ours: VERSION, theirs }
            }
            WireError::Malformed { expected, got } => {
                crate::ShareError::Protocol { step, expected: expected.to_owned(), got }
            }
        }
    }
}

/// A message and the number of its request: an answer carries that of its question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) request: u32,
    pub(crate) message: Message,
}

impl Frame {
    /// The bytes. Fields beyond their limits are cut off where they are texts, and have been checked
    /// by whoever made the message where they are not.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut body = Writer::default();
        self.message.write(&mut body);
        let body = body.into_bytes();
        let mut out = Writer::default();
        out.u32(MAGIC);
        out.u16(VERSION);
        out.u16(self.message.kind());
        out.u32(self.request);
        // Below the limit of a message.
        out.u32(body.len() as u32);
        let mut bytes = out.into_bytes();
        bytes.extend_from_slice(&body);
        bytes
    }

    /// Reads one message, which has to be all of `bytes`.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Frame, WireError> {
        if bytes.len() > MESSAGE_BYTES_MAX {
            let got = format_args!("{} bytes", bytes.len()).to_string();
            return Err(WireError::malformed("a message of at most 65536 bytes", got));
        }
        let mut header = Reader::new(bytes);
        let magic = header.u32("a header of 16 bytes")?;
        if magic != MAGIC {
            return Err(WireError::malformed("the mark of a message", format!("{magic:#x}")));
        }
        let version = header.u16("a header of 16 bytes")?;
        if version != VERSION {
            return Err(WireError::Version(version));
        }
        let kind = header.u16("a header of 16 bytes")?;
        let request = header.u32("a header of 16 bytes")?;
        let body_bytes = header.u32("a header of 16 bytes")?;
        let body = bytes.get(HEADER_BYTES..).unwrap_or_default();
        if body.len() as u64 != u64::from(body_bytes) {
            let got = format!("{} bytes, not {body_bytes}", body.len());
            return Err(WireError::malformed("a body as long as the header says", got));
        }
        let mut reader = Reader::new(body);
        let message = Message::read(kind, &mut reader)?;
        reader.end()?;
        Ok(Frame { request, message })
    }
}

/// Decodes what a fuzzer gives, and what it decodes to once more. Nothing may panic, and a message
/// has one form only. Whether it was one.
#[doc(hidden)]
pub fn fuzz_decode(bytes: &[u8]) -> bool {
    let Ok(frame) = Frame::decode(bytes) else { return false };
    let again = frame.encode();
    assert!(again == bytes, "a message with two forms: {frame:?}");
    true
}

#[cfg(test)]
mod tests;
