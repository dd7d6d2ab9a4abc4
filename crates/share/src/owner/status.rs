//! What an owner process says about itself.

use std::time::Duration;

use vmm_sys::Uuid;

use super::NAMES_MAX;
use crate::address::Address;
use crate::error::ShareError;
use crate::importer::Link;
use crate::wire::{Message, OwnerMessage};

/// A GPU, as a client names it to an owner process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OwnerDevice {
    /// As the owner process numbers them, which may not be as the client does.
    Index(u32),
    /// By what it is called in every process.
    Uuid(Uuid),
}

/// A client that holds a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Its process, as the owner process knows it.
    pub pid: u32,
    /// Its user.
    pub uid: u32,
    /// Whether it has it for writing.
    pub writes: bool,
}

/// How long a buffer still lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseState {
    /// As long as somebody holds it, and a lease beyond.
    Held,
    /// Nobody holds it; it ends after that time.
    Ends(Duration),
    /// Nobody holds it, and it stays until it is released.
    UntilReleased,
}

/// A buffer of an owner process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldBuffer {
    /// Its name.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// The length of its chunks.
    pub chunk_bytes: u64,
    /// The GPU on which it was made.
    pub device: Uuid,
    /// Counts the changes of its memory.
    pub generation: u64,
    /// Descriptors of its pieces that are open in the owner process.
    pub descriptors: u32,
    /// How long it lives.
    pub lease: LeaseState,
    /// Who holds it.
    pub holders: Vec<Holder>,
}

/// What an owner process holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct OwnerStatus {
    /// Its buffers, by name.
    pub buffers: Vec<HeldBuffer>,
    /// Connections that are open, that of the question among them.
    pub clients: u32,
    /// The most that all buffers may have.
    pub total_bytes_max: Option<u64>,
}

impl OwnerStatus {
    /// Asks the owner process at that address. No driver is needed for it.
    ///
    /// # Errors
    /// [`ShareError::Refused`], by the peer rule, or if an exporter that is no owner process listens
    /// there; [`ShareError::Timeout`], [`ShareError::Version`], [`ShareError::Protocol`]; the operating
    /// system's.
    pub fn ask(address: &Address, timeout: Duration) -> Result<OwnerStatus, ShareError> {
        const STEP: &str = "asking what is held";
        const EXPECTED: &str = "what is held, from there on";
        let link = Link::connect(address, timeout)?;
        let mut status = OwnerStatus::default();
        loop {
            let from = status.buffers.len() as u32;
            let question = Message::Owner(OwnerMessage::Status { first: from });
            let (answer, _) = link.ask(STEP, question, 0)?;
            let Message::Owner(OwnerMessage::Holding {
                total,
                first,
                clients,
                total_bytes_max,
                buffers,
            }) = answer
            else {
                return Err(link.unexpected(STEP, EXPECTED, &answer));
            };
            if first != from || total as usize > NAMES_MAX {
                let got = format!("buffers from {first} of {total}");
                return Err(link.wrong(STEP, EXPECTED, got));
            }
            let is_last = buffers.is_empty() || from as usize + buffers.len() >= total as usize;
            status.clients = clients;
            status.total_bytes_max = (total_bytes_max != u64::MAX).then_some(total_bytes_max);
            status.buffers.extend(buffers);
            if is_last {
                return Ok(status);
            }
        }
    }

    /// The bytes of all buffers.
    pub fn bytes(&self) -> u64 {
        self.buffers.iter().map(|buffer| buffer.bytes).fold(0, u64::saturating_add)
    }

    /// The descriptors of all buffers.
    pub fn descriptors(&self) -> u64 {
        self.buffers.iter().map(|buffer| u64::from(buffer.descriptors)).sum()
    }
}
