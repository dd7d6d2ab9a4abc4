//! [`OwnerClient`]: a worker's side.

use std::collections::HashSet;
use std::fmt;

use parking_lot::Mutex;

use crate::address::Address;
use crate::error::ShareError;
use crate::importer::{Access, Import, Importer, ImporterOptions};
use crate::steps::step;
use crate::wire::{Message, NAME_BYTES_MAX, OwnerMessage};

use super::OwnerDevice;

/// What a worker wants to have from an owner process.
#[derive(Clone, Debug)]
pub struct NamedBuffer {
    name: String,
    bytes: u64,
    chunk_bytes: u64,
    device: OwnerDevice,
    others_write: bool,
    succeed: bool,
}

impl NamedBuffer {
    /// A buffer of that name and length, rounded up to whole chunks, on the owner's device 0. Others
    /// may read it.
    pub fn new(name: &str, bytes: u64) -> NamedBuffer {
        NamedBuffer {
            name: name.to_owned(),
            bytes,
            chunk_bytes: 0,
            device: OwnerDevice::Index(0),
            others_write: false,
            succeed: false,
        }
    }

    /// The length of its chunks. Default: the owner's choice.
    pub fn chunk_bytes(mut self, bytes: u64) -> Self {
        self.chunk_bytes = bytes;
        self
    }

    /// Where it is made. Default: the owner's device 0.
    pub fn device(mut self, device: OwnerDevice) -> Self {
        self.device = device;
        self
    }

    /// Whether others may write too, if it is created now. Default: no.
    pub fn others_write(mut self, on: bool) -> Self {
        self.others_write = on;
        self
    }

    /// Whether this worker takes the place of the one that created it, if that has gone: then it may
    /// write. Only for the same user. Default: no.
    pub fn succeed(mut self, on: bool) -> Self {
        self.succeed = on;
        self
    }
}

/// A worker's connection to an owner process. It holds what it has created, found or opened until it
/// leaves it, or until the client and all its imports are dropped, or the process ends.
pub struct OwnerClient {
    importer: Importer,
    /// What the owner holds for this client.
    held: Mutex<HashSet<String>>,
}

impl OwnerClient {
    /// Connects to an owner process of this machine.
    ///
    /// # Errors
    /// As [`Importer::connect`].
    pub fn connect(address: &Address, options: ImporterOptions) -> Result<OwnerClient, ShareError> {
        let importer = Importer::connect(address, options)?;
        Ok(OwnerClient { importer, held: Mutex::default() })
    }

    /// Has the owner make the buffer, unless it is there already, and maps it: for writing if it was
    /// created, or if this worker may write, else for reading. Says whether it was created: of several
    /// workers at the same time, one is told so.
    ///
    /// A new buffer is zero.
    ///
    /// # Errors
    /// [`ShareError::Refused`]: beyond a limit, before any memory is made; another length, chunk or
    /// device than that of what is there; a device that is not served; the pool's refusal in its words.
    /// Those of [`Importer::open`].
    pub fn create_or_find(&self, wanted: &NamedBuffer) -> Result<(Import, bool), ShareError> {
        const STEP: &str = "creating a buffer";
        check_name(&wanted.name)?;
        if wanted.bytes == 0 {
            return Err(bad("bytes", "0", "at least 1"));
        }
        let NamedBuffer { name, bytes, chunk_bytes, device, others_write, succeed } =
            wanted.clone();
        let question =
            OwnerMessage::Create { name, bytes, chunk_bytes, device, others_write, succeed };
        step!("worker-create");
        let (created, write) = match self.ask(STEP, question)? {
            OwnerMessage::Created { created, write } => (created, write),
            other => return Err(self.unexpected(STEP, "created", other)),
        };
        step!("worker-created");
        let access = if write { Access::ReadWrite } else { Access::Read };
        Ok((self.open(&wanted.name, access)?, created))
    }

    /// Maps a buffer that is there.
    ///
    /// # Errors
    /// As [`Importer::open`]. Nothing more is held then than before.
    pub fn open(&self, name: &str, access: Access) -> Result<Import, ShareError> {
        match self.importer.open(name, access) {
            Ok(import) => {
                self.held.lock().insert(name.to_owned());
                Ok(import)
            }
            Err(error) => {
                // The owner may hold it since the question. One that does not answer is gone, and holds
                // nothing for anybody.
                if !self.held.lock().contains(name)
                    && !matches!(error, ShareError::BadArgument { .. })
                {
                    let _ = self.leave(name);
                }
                Err(error)
            }
        }
    }

    /// Does not hold the buffer any more: its lease begins, if nobody else does. What is mapped here
    /// stays until it is dropped.
    ///
    /// # Errors
    /// [`ShareError::OwnerGone`] and others of the connection; a name that is not held is none.
    pub fn leave(&self, name: &str) -> Result<(), ShareError> {
        check_name(name)?;
        self.done("leaving a buffer", OwnerMessage::Leave { name: name.to_owned() })?;
        step!("worker-left");
        self.held.lock().remove(name);
        Ok(())
    }

    /// Ends a buffer, whoever holds it: they see it withdrawn, and keep what they have mapped.
    ///
    /// # Errors
    /// [`ShareError::Refused`] if there is none, or another user has created it.
    pub fn release(&self, name: &str) -> Result<(), ShareError> {
        check_name(name)?;
        self.done("releasing a buffer", OwnerMessage::Release { name: name.to_owned() })?;
        step!("worker-released");
        Ok(())
    }

    /// Whether the owner process still has the connection open: one system call.
    pub fn is_owner_alive(&self) -> bool {
        self.importer.is_owner_alive()
    }

    fn done(&self, step: &'static str, question: OwnerMessage) -> Result<(), ShareError> {
        match self.ask(step, question)? {
            OwnerMessage::Done => Ok(()),
            other => Err(self.unexpected(step, "done", other)),
        }
    }

    fn ask(&self, step: &'static str, question: OwnerMessage) -> Result<OwnerMessage, ShareError> {
        let link = self.importer.link();
        match link.ask(step, Message::Owner(question), 0)? {
            (Message::Owner(answer), _) => Ok(answer),
            (other, _) => Err(link.unexpected(step, "an owner's answer", &other)),
        }
    }

    fn unexpected(&self, step: &'static str, expected: &str, got: OwnerMessage) -> ShareError {
        self.importer.link().unexpected(step, expected, &Message::Owner(got))
    }
}

impl fmt::Debug for OwnerClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OwnerClient({:?})", self.importer)
    }
}

fn check_name(name: &str) -> Result<(), ShareError> {
    match name.len() {
        1..=NAME_BYTES_MAX => Ok(()),
        _ => Err(bad("name", name, "1 to 255 bytes")),
    }
}

fn bad(what: &'static str, value: &str, expected: &str) -> ShareError {
    ShareError::BadArgument { what, value: value.to_owned(), expected: expected.to_owned() }
}
