//! What a client and an owner process say beyond what an importer and an exporter do.

use std::time::Duration;

use vmm_sys::Uuid;

use super::parts::{Reader, Writer};
use super::{HELD_MAX, HOLDERS_MAX, NAME_BYTES_MAX, WireError};
use crate::owner::{HeldBuffer, Holder, LeaseState, OwnerDevice};

/// Bytes of a [`Holder`].
const HOLDER_BYTES: usize = 9;
/// The fewest bytes of a [`HeldBuffer`].
const HELD_BYTES: usize = 2 + 8 + 8 + 16 + 8 + 4 + 1 + 4;
const NAME: &str = "a name of at most 255 bytes";

/// Questions of a client, then answers of an owner process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum OwnerMessage {
    Create {
        name: String,
        bytes: u64,
        /// 0: the owner chooses.
        chunk_bytes: u64,
        device: OwnerDevice,
        others_write: bool,
        succeed: bool,
    },
    Leave {
        name: String,
    },
    Release {
        name: String,
    },
    Status {
        first: u32,
    },
    Created {
        created: bool,
        /// Whether the client may write.
        write: bool,
    },
    Done,
    Holding {
        total: u32,
        first: u32,
        clients: u32,
        /// `u64::MAX`: no limit.
        total_bytes_max: u64,
        buffers: Vec<HeldBuffer>,
    },
}

impl OwnerMessage {
    pub(super) fn kind(&self) -> u16 {
        match self {
            OwnerMessage::Create { .. } => 5,
            OwnerMessage::Leave { .. } => 6,
            OwnerMessage::Release { .. } => 7,
            OwnerMessage::Status { .. } => 8,
            OwnerMessage::Created { .. } => 106,
            OwnerMessage::Done => 107,
            OwnerMessage::Holding { .. } => 108,
        }
    }

    pub(super) fn name(&self) -> &'static str {
        match self {
            OwnerMessage::Create { .. } => "create",
            OwnerMessage::Leave { .. } => "leave",
            OwnerMessage::Release { .. } => "release",
            OwnerMessage::Status { .. } => "status",
            OwnerMessage::Created { .. } => "created",
            OwnerMessage::Done => "done",
            OwnerMessage::Holding { .. } => "holding",
        }
    }

    pub(super) fn write(&self, out: &mut Writer) {
        match self {
            OwnerMessage::Create { name, bytes, chunk_bytes, device, others_write, succeed } => {
                out.text(name, NAME_BYTES_MAX);
                out.u64(*bytes);
                out.u64(*chunk_bytes);
                write_device(device, out);
                out.u8((*others_write).into());
                out.u8((*succeed).into());
            }
            OwnerMessage::Leave { name } | OwnerMessage::Release { name } => {
                out.text(name, NAME_BYTES_MAX);
            }
            OwnerMessage::Status { first } => out.u32(*first),
            OwnerMessage::Created { created, write } => {
                out.u8((*created).into());
                out.u8((*write).into());
            }
            OwnerMessage::Done => {}
            OwnerMessage::Holding { total, first, clients, total_bytes_max, buffers } => {
                out.u32(*total);
                out.u32(*first);
                out.u32(*clients);
                out.u64(*total_bytes_max);
                out.u32(buffers.len() as u32);
                buffers.iter().for_each(|buffer| write_held(buffer, out));
            }
        }
    }

    pub(super) fn read(kind: u16, body: &mut Reader<'_>) -> Result<OwnerMessage, WireError> {
        Ok(match kind {
            5 => OwnerMessage::Create {
                name: body.text(NAME_BYTES_MAX, NAME)?,
                bytes: body.u64("the length of a buffer")?,
                chunk_bytes: body.u64("the length of a chunk")?,
                device: read_device(body)?,
                others_write: body.flag("0 or 1 for others' writing")?,
                succeed: body.flag("0 or 1 for a successor")?,
            },
            6 => OwnerMessage::Leave { name: body.text(NAME_BYTES_MAX, NAME)? },
            7 => OwnerMessage::Release { name: body.text(NAME_BYTES_MAX, NAME)? },
            8 => OwnerMessage::Status { first: body.u32("the index of a buffer")? },
            106 => OwnerMessage::Created {
                created: body.flag("0 or 1 for created")?,
                write: body.flag("0 or 1 for writing")?,
            },
            107 => OwnerMessage::Done,
            108 => OwnerMessage::Holding {
                total: body.u32("the number of buffers")?,
                first: body.u32("the index of a buffer")?,
                clients: body.u32("the number of clients")?,
                total_bytes_max: body.u64("a limit")?,
                buffers: {
                    let count = body.count(HELD_MAX, HELD_BYTES, "at most 16 buffers")?;
                    (0..count).map(|_| read_held(body)).collect::<Result<_, _>>()?
                },
            },
            other => return Err(WireError::malformed("a kind of message that is known", other)),
        })
    }
}

fn write_device(device: &OwnerDevice, out: &mut Writer) {
    match device {
        OwnerDevice::Uuid(uuid) => {
            out.u8(0);
            out.raw(&uuid.0);
        }
        OwnerDevice::Index(index) => {
            out.u8(1);
            out.u32(*index);
        }
    }
}

fn read_device(body: &mut Reader<'_>) -> Result<OwnerDevice, WireError> {
    match body.u8("the kind of a GPU's name")? {
        0 => Ok(OwnerDevice::Uuid(Uuid(body.array("the identity of a GPU")?))),
        1 => Ok(OwnerDevice::Index(body.u32("the index of a GPU")?)),
        other => Err(WireError::malformed("0 for an identity or 1 for an index", other)),
    }
}

fn write_held(held: &HeldBuffer, out: &mut Writer) {
    out.text(&held.name, NAME_BYTES_MAX);
    out.u64(held.bytes);
    out.u64(held.chunk_bytes);
    out.raw(&held.device.0);
    out.u64(held.generation);
    out.u32(held.descriptors);
    match held.lease {
        LeaseState::Held => out.u8(0),
        LeaseState::Ends(left) => {
            out.u8(1);
            // A lease is shorter than that.
            out.u64(left.as_millis() as u64);
        }
        LeaseState::UntilReleased => out.u8(2),
    }
    out.u32(held.holders.len() as u32);
    for holder in &held.holders {
        out.u32(holder.pid);
        out.u32(holder.uid);
        out.u8(holder.writes.into());
    }
}

fn read_held(body: &mut Reader<'_>) -> Result<HeldBuffer, WireError> {
    Ok(HeldBuffer {
        name: body.text(NAME_BYTES_MAX, NAME)?,
        bytes: body.u64("the length of a buffer")?,
        chunk_bytes: body.u64("the length of a chunk")?,
        device: Uuid(body.array("the identity of a GPU")?),
        generation: body.u64("a generation")?,
        descriptors: body.u32("the number of descriptors")?,
        lease: match body.u8("the kind of a lease")? {
            0 => LeaseState::Held,
            1 => LeaseState::Ends(Duration::from_millis(body.u64("milliseconds")?)),
            2 => LeaseState::UntilReleased,
            other => return Err(WireError::malformed("0, 1 or 2 for a lease", other)),
        },
        holders: {
            let count = body.count(HOLDERS_MAX, HOLDER_BYTES, "at most 256 holders")?;
            (0..count).map(|_| read_holder(body)).collect::<Result<_, _>>()?
        },
    })
}

fn read_holder(body: &mut Reader<'_>) -> Result<Holder, WireError> {
    Ok(Holder {
        pid: body.u32("the number of a process")?,
        uid: body.u32("the number of a user")?,
        writes: body.flag("0 or 1 for writing")?,
    })
}
