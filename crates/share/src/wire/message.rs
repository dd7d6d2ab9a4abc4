//! What the two sides say.

use vmm_sys::Uuid;

use super::owner::OwnerMessage;
use super::parts::{Reader, Writer};
use super::{DESCRIPTORS_MAX, LAYOUT_PIECES_MAX, NAME_BYTES_MAX, TEXT_BYTES_MAX, WireError};
use crate::error::Refusal;

/// Where a piece lies, in words that mean the same in every process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Home {
    Gpu(Uuid),
    HostNuma(u32),
}

/// One physical piece of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PieceEntry {
    /// Never given twice by an exporter: the same number is the same memory.
    pub(crate) id: u64,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
    pub(crate) home: Home,
}

/// Bytes of a [`PieceEntry`].
const ENTRY_BYTES: usize = 41;

/// How the work of one side is ordered after that of the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ordering {
    /// By the number in the notice page, which a host function stores.
    Host,
    /// By an event that both processes have.
    Event { device: Uuid, handle: [u8; 64] },
}

/// All messages: questions of an importer, then answers of an exporter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    Hello,
    Open {
        name: String,
        write: bool,
    },
    Describe {
        export: u64,
        first: u32,
    },
    Fetch {
        export: u64,
        generation: u64,
        pieces: Vec<u64>,
    },
    Welcome {
        exporter: [u8; 16],
    },
    /// With the notice page.
    Opened {
        export: u64,
        write: bool,
        chunk_bytes: u64,
        ordering: Ordering,
    },
    Layout {
        generation: u64,
        total: u32,
        first: u32,
        pieces: Vec<PieceEntry>,
    },
    /// With a descriptor for each.
    Pieces {
        generation: u64,
        pieces: Vec<u64>,
    },
    Refused {
        reason: Refusal,
        text: String,
    },
    /// Between an owner process and its clients.
    Owner(OwnerMessage),
}

impl Message {
    pub(super) fn kind(&self) -> u16 {
        match self {
            Message::Hello => 1,
            Message::Open { .. } => 2,
            Message::Describe { .. } => 3,
            Message::Fetch { .. } => 4,
            Message::Welcome { .. } => 101,
            Message::Opened { .. } => 102,
            Message::Layout { .. } => 103,
            Message::Pieces { .. } => 104,
            Message::Refused { .. } => 105,
            Message::Owner(message) => message.kind(),
        }
    }

    /// What it is, for errors.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Message::Hello => "hello",
            Message::Open { .. } => "open",
            Message::Describe { .. } => "describe",
            Message::Fetch { .. } => "fetch",
            Message::Welcome { .. } => "welcome",
            Message::Opened { .. } => "opened",
            Message::Layout { .. } => "layout",
            Message::Pieces { .. } => "pieces",
            Message::Refused { .. } => "refused",
            Message::Owner(message) => message.name(),
        }
    }

    pub(super) fn write(&self, out: &mut Writer) {
        match self {
            Message::Hello => {}
            Message::Open { name, write } => {
                out.text(name, NAME_BYTES_MAX);
                out.u8((*write).into());
            }
            Message::Describe { export, first } => {
                out.u64(*export);
                out.u32(*first);
            }
            Message::Fetch { export, generation, pieces } => {
                out.u64(*export);
                out.u64(*generation);
                write_ids(pieces, out);
            }
            Message::Welcome { exporter } => out.raw(exporter),
            Message::Opened { export, write, chunk_bytes, ordering } => {
                out.u64(*export);
                out.u8((*write).into());
                out.u64(*chunk_bytes);
                write_ordering(ordering, out);
            }
            Message::Layout { generation, total, first, pieces } => {
                out.u64(*generation);
                out.u32(*total);
                out.u32(*first);
                out.u32(pieces.len() as u32);
                pieces.iter().for_each(|piece| write_piece(piece, out));
            }
            Message::Pieces { generation, pieces } => {
                out.u64(*generation);
                write_ids(pieces, out);
            }
            Message::Refused { reason, text } => {
                out.u16(reason.code());
                out.text(text, TEXT_BYTES_MAX);
            }
            Message::Owner(message) => message.write(out),
        }
    }

    pub(super) fn read(kind: u16, body: &mut Reader<'_>) -> Result<Message, WireError> {
        Ok(match kind {
            1 => Message::Hello,
            2 => {
                let name = body.text(NAME_BYTES_MAX, "a name of at most 255 bytes")?;
                Message::Open { name, write: body.flag("0 or 1 for writing")? }
            }
            3 => Message::Describe {
                export: body.u64("the number of an export")?,
                first: body.u32("the index of a piece")?,
            },
            4 => Message::Fetch {
                export: body.u64("the number of an export")?,
                generation: body.u64("a generation")?,
                pieces: read_ids(body)?,
            },
            101 => Message::Welcome { exporter: body.array("the exporter's number")? },
            102 => Message::Opened {
                export: body.u64("the number of an export")?,
                write: body.flag("0 or 1 for writing")?,
                chunk_bytes: body.u64("the length of a chunk")?,
                ordering: read_ordering(body)?,
            },
            103 => Message::Layout {
                generation: body.u64("a generation")?,
                total: body.u32("the number of pieces")?,
                first: body.u32("the index of a piece")?,
                pieces: {
                    let count =
                        body.count(LAYOUT_PIECES_MAX, ENTRY_BYTES, "at most 1400 pieces")?;
                    (0..count).map(|_| read_piece(body)).collect::<Result<_, _>>()?
                },
            },
            104 => {
                Message::Pieces { generation: body.u64("a generation")?, pieces: read_ids(body)? }
            }
            105 => {
                let code = body.u16("the reason of a refusal")?;
                let unknown = WireError::malformed("the reason of a refusal", code);
                let reason = Refusal::from_code(code).ok_or(unknown)?;
                Message::Refused { reason, text: body.text(TEXT_BYTES_MAX, "a text")? }
            }
            other => Message::Owner(OwnerMessage::read(other, body)?),
        })
    }
}

fn write_ids(ids: &[u64], out: &mut Writer) {
    out.u32(ids.len() as u32);
    ids.iter().for_each(|id| out.u64(*id));
}

fn read_ids(body: &mut Reader<'_>) -> Result<Vec<u64>, WireError> {
    let count = body.count(DESCRIPTORS_MAX, 8, "at most 128 pieces")?;
    (0..count).map(|_| body.u64("the number of a piece")).collect()
}

fn write_piece(piece: &PieceEntry, out: &mut Writer) {
    out.u64(piece.id);
    out.u64(piece.offset);
    out.u64(piece.bytes);
    match piece.home {
        Home::Gpu(uuid) => {
            out.u8(0);
            out.raw(&uuid.0);
        }
        Home::HostNuma(node) => {
            out.u8(1);
            out.u32(node);
            out.raw(&[0; 12]);
        }
    }
}

fn read_piece(body: &mut Reader<'_>) -> Result<PieceEntry, WireError> {
    let id = body.u64("the number of a piece")?;
    let offset = body.u64("the offset of a piece")?;
    let bytes = body.u64("the length of a piece")?;
    let home = match body.u8("the kind of a place")? {
        0 => Home::Gpu(Uuid(body.array("the identity of a GPU")?)),
        1 => {
            let node = body.u32("the number of a host node")?;
            match body.array::<12>("twelve zeros")? {
                [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0] => Home::HostNuma(node),
                other => return Err(WireError::malformed("twelve zeros", format!("{other:?}"))),
            }
        }
        other => return Err(WireError::malformed("0 for a GPU or 1 for the host", other)),
    };
    Ok(PieceEntry { id, offset, bytes, home })
}

fn write_ordering(ordering: &Ordering, out: &mut Writer) {
    match ordering {
        Ordering::Host => out.u8(0),
        Ordering::Event { device, handle } => {
            out.u8(1);
            out.raw(&device.0);
            out.raw(handle);
        }
    }
}

fn read_ordering(body: &mut Reader<'_>) -> Result<Ordering, WireError> {
    match body.u8("the kind of order")? {
        0 => Ok(Ordering::Host),
        1 => Ok(Ordering::Event {
            device: Uuid(body.array("the identity of a GPU")?),
            handle: body.array("the handle of an event")?,
        }),
        other => Err(WireError::malformed("0 for the host or 1 for an event", other)),
    }
}
