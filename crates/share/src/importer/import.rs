//! [`Import`]: a buffer of another process, mapped here.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmm_sys::object::{RelaxedCapture, Stream};
use vmm_sys::{DeviceId, Location};

use super::body::Body;
use super::refresh::Refreshed;
use super::space::Space;
use super::uses::ImportUse;
use super::{Access, Pause};
use crate::error::{AtStep, ShareError};

/// What an import is worth now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ImportState {
    /// What is mapped is the buffer's memory.
    Current,
    /// The owner is changing the memory.
    Changing,
    /// The owner has changed the memory: refresh.
    Lagging {
        /// The import's generation.
        have: u64,
        /// The buffer's.
        now: u64,
    },
    /// The owner has taken the offer back. What is mapped stays until the drop.
    Withdrawn,
    /// The owner's process is gone. What is mapped stays until the drop, and nobody changes it.
    OwnerGone,
}

/// A piece of an import.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ImportedPiece {
    /// Its number, which the exporter never gives to other memory.
    pub id: u64,
    /// Where it begins, from the start of the buffer.
    pub offset: u64,
    /// Its length in bytes.
    pub bytes: u64,
    /// Its address here.
    pub address: u64,
    /// Where its memory lies, as this process names it.
    pub location: Location,
}

/// A buffer of another process, mapped at an address of this one.
///
/// Who owns the physical memory: the other process; what is mapped here stays until it is unmapped
/// here, whatever happens there. Is the address stable: yes, until the drop. Who may access: the
/// devices that were named at the connection, for reading, or for writing if that was asked for and
/// offered.
///
/// When the owner changes the memory behind the buffer, the import says so ([`Import::check`]) and
/// hands out nothing that is stale, until [`Import::refresh`] has followed.
pub struct Import {
    body: Arc<Body>,
}

impl Import {
    pub(super) fn new(body: Body) -> Import {
        Import { body: Arc::new(body) }
    }

    /// Its name at the exporter.
    pub fn name(&self) -> &str {
        &self.body.name
    }

    /// The first address, the same until the drop. [`Import::address_for`] looks whether it may be
    /// used.
    pub fn address(&self) -> u64 {
        self.read_space(Space::address)
    }

    /// The addresses, in bytes: memory is behind the [`pieces`](Import::pieces).
    pub fn reserved_bytes(&self) -> u64 {
        self.read_space(Space::bytes)
    }

    /// The memory that is mapped, in bytes.
    pub fn bytes(&self) -> u64 {
        self.read_space(|space| space.placed.values().map(|it| it.piece.bytes).sum())
    }

    /// The length of the buffer's chunks.
    pub fn chunk_bytes(&self) -> u64 {
        self.body.chunk_bytes
    }

    /// The generation of what is mapped.
    pub fn generation(&self) -> u64 {
        self.body.generation()
    }

    /// Whether it may be written.
    pub fn access(&self) -> Access {
        self.body.access
    }

    /// The pieces, by offset.
    pub fn pieces(&self) -> Vec<ImportedPiece> {
        let gpus = &self.body.shared.gpus;
        self.read_space(|space| {
            let pieces = space.placed.values().map(|it| it.piece);
            let described = pieces.filter_map(|piece| {
                Some(ImportedPiece {
                    id: piece.id,
                    offset: piece.offset,
                    bytes: piece.bytes,
                    address: space.address() + piece.offset,
                    // Found when it was mapped.
                    location: gpus.location(piece.home).ok()?,
                })
            });
            described.collect()
        })
    }

    /// What it is worth now: one load from shared memory. That the owner is gone is known here once
    /// something was asked of it: see [`Importer::is_owner_alive`](super::Importer::is_owner_alive).
    pub fn check(&self) -> ImportState {
        self.body.state()
    }

    /// The address of these bytes, if all of them are mapped and are the buffer's now.
    ///
    /// # Errors
    /// [`ShareError::Lagging`], [`ShareError::Changing`], [`ShareError::Withdrawn`],
    /// [`ShareError::NotMapped`].
    pub fn address_for(&self, bytes: Range<u64>) -> Result<u64, ShareError> {
        const STEP: &str = "asking for an address";
        self.body.check_current(STEP)?;
        self.check_mapped(STEP, &bytes)?;
        Ok(self.address() + bytes.start)
    }

    /// Says that work of `stream` is going to use the import: hold the answer until that work is
    /// enqueued. An owner that changes the memory afterwards does not wait for that work: the old
    /// memory stays mapped under it, and is not the buffer's any more.
    ///
    /// # Errors
    /// As [`Import::address_for`]; [`ShareError::BadArgument`] if the stream is another driver's or
    /// its device was granted no access.
    pub fn use_on(&self, stream: &Stream) -> Result<ImportUse, ShareError> {
        let shared = &self.body.shared;
        let same = std::ptr::addr_eq(Arc::as_ptr(stream.driver()), Arc::as_ptr(&shared.driver));
        if !same || !self.devices().contains(&stream.device()) {
            return Err(ShareError::BadArgument {
                what: "stream",
                value: format!("{stream:?}"),
                expected: format!("a stream of this driver on one of {:?}", self.devices()),
            });
        }
        self.body.begin_use("using an import")?;
        Ok(ImportUse::new(self.body.clone(), stream))
    }

    /// The devices that have access.
    pub fn devices(&self) -> &[DeviceId] {
        &self.body.devices
    }

    /// Follows the buffer: memory that left it is unmapped once its users are done, memory that came
    /// is mapped, and only that is fetched from the owner. All or nothing. It never unmaps under
    /// running work that was announced by [`Import::use_on`]: it waits for it, for `patience` at most.
    ///
    /// # Errors
    /// [`ShareError::Timeout`] if users are not done in time; [`ShareError::NeedsReopen`] if the
    /// addresses do not suffice; [`ShareError::Changing`], [`ShareError::Withdrawn`],
    /// [`ShareError::OwnerGone`]; the driver's. The import is then as before.
    pub fn refresh(&self, patience: Duration) -> Result<Refreshed, ShareError> {
        self.body.refresh(patience)
    }

    /// Opens the buffer once more, at another address with room for `room_bytes`. Nothing is fetched
    /// that this import has. It stays as it is.
    ///
    /// # Errors
    /// As [`Importer::open`](super::Importer::open).
    pub fn reopen(&self, room_bytes: u64) -> Result<Import, ShareError> {
        super::open(&self.body.shared, &self.body.name, self.body.access, room_bytes)
    }

    /// Has later work of `stream` come after the owner's work of that sequence
    /// ([`Offer::publish`](crate::Offer::publish)) and all before it. Where the driver shares events
    /// between processes, the calling thread waits until the sequence was published, and the stream
    /// for its work; elsewhere the thread waits for the work itself.
    ///
    /// # Errors
    /// [`ShareError::Timeout`]; [`ShareError::OwnerGone`] if it ended before; the driver's.
    pub fn wait_published(
        &self,
        sequence: u64,
        stream: &Stream,
        timeout: Duration,
    ) -> Result<(), ShareError> {
        const STEP: &str = "waiting for the owner's work";
        let deadline = Instant::now() + timeout;
        let mut pause = Pause::default();
        while self.published() < sequence {
            // Asked now and then, as that is a system call. It may have told just before it ended.
            if pause.is_long() && !self.body.shared.link.is_open() && self.published() < sequence {
                return Err(ShareError::OwnerGone { step: STEP });
            }
            if !pause.wait(deadline) {
                return Err(ShareError::Timeout { step: STEP, after: timeout });
            }
        }
        match &self.body.event {
            // What an event says after its maker's end is not defined.
            Some(_) if !self.body.shared.link.is_open() => {
                Err(ShareError::OwnerGone { step: STEP })
            }
            Some(event) => stream.wait_event(event).at(STEP),
            None => Ok(()),
        }
    }

    /// The last sequence that [`Import::wait_published`] would not wait for on the host: 0 before the
    /// first.
    pub fn published(&self) -> u64 {
        match self.body.event {
            Some(_) => self.body.page.recorded(),
            None => self.body.page.done(),
        }
    }

    /// Copies bytes from `offset` to the host and waits.
    ///
    /// # Errors
    /// As [`Import::address_for`]; the driver's.
    pub fn read(&self, offset: u64, target: &mut [u8]) -> Result<(), ShareError> {
        const STEP: &str = "reading an import";
        let (device, parts, _using) = self.host_use(STEP, offset, target.len())?;
        let _relaxed = RelaxedCapture::enter(&self.body.shared.driver).at(STEP)?;
        let mut rest = target;
        for (range, at, bytes) in parts {
            // Parts of a slice's length.
            let (part, others) = rest.split_at_mut(bytes as usize);
            range.read(device, at, part).at(STEP)?;
            rest = others;
        }
        Ok(())
    }

    /// Copies bytes from the host to `offset` and waits.
    ///
    /// # Errors
    /// [`ShareError::NotPermitted`] if it was opened for reading; as [`Import::address_for`]; the
    /// driver's.
    pub fn write(&self, offset: u64, source: &[u8]) -> Result<(), ShareError> {
        const STEP: &str = "writing to an import";
        if self.body.access == Access::Read {
            return Err(ShareError::NotPermitted { step: STEP });
        }
        let (device, parts, _using) = self.host_use(STEP, offset, source.len())?;
        let _relaxed = RelaxedCapture::enter(&self.body.shared.driver).at(STEP)?;
        let mut rest = source;
        for (range, at, bytes) in parts {
            let (part, others) = rest.split_at(bytes as usize);
            range.write(device, at, part).at(STEP)?;
            rest = others;
        }
        Ok(())
    }

    fn host_use(
        &self,
        step: &'static str,
        offset: u64,
        bytes: usize,
    ) -> Result<(DeviceId, super::Parts, HostUse<'_>), ShareError> {
        let bytes = offset..offset.saturating_add(bytes as u64);
        let device = self.devices().first().copied();
        let device = device.ok_or(ShareError::NotPermitted { step })?;
        self.body.begin_use(step)?;
        let using = HostUse(&self.body);
        self.check_mapped(step, &bytes)?;
        let space = self.body.space.lock();
        let parts = space.as_ref().map_or_else(Vec::new, |space| space.parts(bytes));
        Ok((device, parts, using))
    }

    fn check_mapped(&self, step: &'static str, bytes: &Range<u64>) -> Result<(), ShareError> {
        match self.read_space(|space| space.is_mapped(bytes)) {
            true => Ok(()),
            false => Err(ShareError::NotMapped {
                step,
                offset: bytes.start,
                bytes: bytes.end.saturating_sub(bytes.start),
            }),
        }
    }

    fn read_space<T: Default>(&self, read: impl FnOnce(&Space) -> T) -> T {
        self.body.space.lock().as_ref().map(read).unwrap_or_default()
    }
}

/// A read or a write from the host that is under way.
struct HostUse<'a>(&'a Body);

impl Drop for HostUse<'_> {
    fn drop(&mut self) {
        self.0.uses.end();
    }
}

impl fmt::Debug for Import {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, address) = (self.name(), self.address());
        write!(f, "Import({name:?}, {} bytes at {address:#x}, {:?})", self.bytes(), self.check())
    }
}
