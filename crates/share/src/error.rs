//! What can go wrong, with the step at which it did.

use std::io;
use std::time::Duration;

use vmm_sys::{DriverError, Uuid};

fn text(cause: &Option<DriverError>) -> String {
    cause.as_ref().map_or(String::new(), |cause| format!(" ({cause})"))
}

/// A step of sharing that did not succeed. Nothing is left of it: no descriptor, no mapping, no
/// memory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ShareError {
    /// The operating system refused.
    #[error("{step}: {cause}")]
    Io {
        /// What was tried.
        step: &'static str,
        /// Its answer.
        cause: io::Error,
    },
    /// The other side refused.
    #[error("{step}: refused by the other side: {why} ({reason})")]
    Refused {
        /// What was asked for.
        step: &'static str,
        /// The kind of refusal.
        reason: Refusal,
        /// In its words.
        why: String,
    },
    /// The other side does not keep to the protocol. The connection is closed.
    #[error("{step}: the other side sent {got}; expected {expected}")]
    Protocol {
        /// What was waited for or read.
        step: &'static str,
        /// What would have been right.
        expected: String,
        /// What came.
        got: String,
    },
    /// The other side speaks another version of the protocol.
    #[error("{step}: the other side speaks version {theirs} of the protocol; expected {ours}")]
    Version {
        /// What was read.
        step: &'static str,
        /// The version here.
        ours: u16,
        /// The version there.
        theirs: u16,
    },
    /// The memory behind the import is not the buffer's any more: refresh it.
    #[error("{step}: the import has generation {have}, the buffer {now}: refresh it")]
    Lagging {
        /// What was tried.
        step: &'static str,
        /// The import's generation.
        have: u64,
        /// The buffer's.
        now: u64,
    },
    /// The owner is changing the memory.
    #[error("{step}: the owner is changing the buffer's memory; try again")]
    Changing {
        /// What was tried.
        step: &'static str,
    },
    /// The owner has taken the offer back. What is mapped stays until it is dropped.
    #[error("{step}: the owner has withdrawn the buffer")]
    Withdrawn {
        /// What was tried.
        step: &'static str,
    },
    /// The owner's process has ended or closed the connection. What is mapped stays until it is
    /// dropped.
    #[error("{step}: the owner is gone")]
    OwnerGone {
        /// What was tried.
        step: &'static str,
    },
    /// The memory lies on a GPU that this process does not see.
    #[error("{step}: memory of {uuid}, which is not visible in this process")]
    NotVisibleHere {
        /// What was tried.
        step: &'static str,
        /// The GPU.
        uuid: Uuid,
    },
    /// The import was made for reading only.
    #[error("{step}: the import may only be read")]
    NotPermitted {
        /// What was tried.
        step: &'static str,
    },
    /// A number is beyond a limit.
    #[error("{step}: {value} of {what} is too many: at most {max}")]
    TooLarge {
        /// What was tried.
        step: &'static str,
        /// What was counted.
        what: &'static str,
        /// How many were asked for.
        value: u64,
        /// The limit.
        max: u64,
    },
    /// A part of the bytes has no memory behind it, or lies outside of the import.
    #[error("{step}: {bytes} bytes at offset {offset} are not all mapped")]
    NotMapped {
        /// What was tried.
        step: &'static str,
        /// Where it starts.
        offset: u64,
        /// Its length.
        bytes: u64,
    },
    /// The time given is over.
    #[error("{step}: not done after {after:?}")]
    Timeout {
        /// What was waited for.
        step: &'static str,
        /// How long.
        after: Duration,
    },
    /// The buffer has grown beyond the addresses that the import can have where it lies. Reopen it:
    /// it gets another address.
    #[error(
        "{step}: the buffer ends at {need_bytes} bytes, the import's addresses at {have_bytes}, and \
         those behind are taken{}: reopen it, or open it with room",
        text(.cause)
    )]
    NeedsReopen {
        /// What was tried.
        step: &'static str,
        /// Where the buffer ends.
        need_bytes: u64,
        /// Where the addresses end.
        have_bytes: u64,
        /// What the driver answered, if it gave none at all.
        cause: Option<DriverError>,
    },
    /// This process is the child of a fork: the connection and the memory are its parent's.
    #[error("{step}: not possible in the child of a fork")]
    Forked {
        /// What was tried.
        step: &'static str,
    },
    /// An argument that cannot be right.
    #[error("{what} = {value}: expected {expected}")]
    BadArgument {
        /// Its name.
        what: &'static str,
        /// What was given.
        value: String,
        /// What would be accepted.
        expected: String,
    },
    /// The driver refused.
    #[error("{step}: {cause}")]
    Driver {
        /// What was tried.
        step: &'static str,
        /// Its answer.
        cause: DriverError,
    },
    /// The pool refused.
    #[error("{step}: {cause}")]
    Pool {
        /// What was tried.
        step: &'static str,
        /// Its answer.
        cause: vmm_pool::Error,
    },
}

/// Why an exporter refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Refusal {
    /// Its rule does not let this peer in.
    Peer,
    /// It serves as many clients as it may.
    Full,
    /// Nothing is offered by that name or number.
    Unknown,
    /// The offer does not include that access.
    Access,
    /// The offer was withdrawn.
    Withdrawn,
    /// The memory is being changed, or was since the description was given: ask again.
    Changed,
    /// The request was not understood, or came at the wrong time.
    Request,
    /// It could not make what was asked for.
    Failed,
    /// It would be more than the other side may have, or than there is to have.
    Limit,
    /// There is such a thing already, and it is not as asked for.
    Differs,
    /// The other side does not serve that GPU.
    Device,
}

impl Refusal {
    /// All of them, in the order of their numbers on the wire, from 1.
    const ALL: [Refusal; 11] = [
        Refusal::Peer,
        Refusal::Full,
        Refusal::Unknown,
        Refusal::Access,
        Refusal::Withdrawn,
        Refusal::Changed,
        Refusal::Request,
        Refusal::Failed,
        Refusal::Limit,
        Refusal::Differs,
        Refusal::Device,
    ];

    pub(crate) fn code(self) -> u16 {
        Refusal::ALL.iter().position(|it| *it == self).map_or(0, |at| at as u16 + 1)
    }

    pub(crate) fn from_code(code: u16) -> Option<Refusal> {
        Refusal::ALL.get(usize::from(code).checked_sub(1)?).copied()
    }
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Refusal::Peer => "this process is not let in",
            Refusal::Full => "too many clients",
            Refusal::Unknown => "nothing by that name",
            Refusal::Access => "that access is not offered",
            Refusal::Withdrawn => "withdrawn",
            Refusal::Changed => "the memory changes",
            Refusal::Request => "not understood",
            Refusal::Failed => "it failed",
            Refusal::Limit => "beyond a limit",
            Refusal::Differs => "another one has that name",
            Refusal::Device => "not a GPU that is served",
        })
    }
}

/// Names the step of an error of the operating system.
pub(crate) trait AtStep<T> {
    /// The same result, with the step.
    fn at(self, step: &'static str) -> Result<T, ShareError>;
}

impl<T> AtStep<T> for Result<T, rustix::io::Errno> {
    fn at(self, step: &'static str) -> Result<T, ShareError> {
        self.map_err(|cause| ShareError::Io { step, cause: cause.into() })
    }
}

impl<T> AtStep<T> for io::Result<T> {
    fn at(self, step: &'static str) -> Result<T, ShareError> {
        self.map_err(|cause| ShareError::Io { step, cause })
    }
}

impl<T> AtStep<T> for Result<T, DriverError> {
    fn at(self, step: &'static str) -> Result<T, ShareError> {
        self.map_err(|cause| ShareError::Driver { step, cause })
    }
}

impl<T> AtStep<T> for Result<T, vmm_pool::Error> {
    fn at(self, step: &'static str) -> Result<T, ShareError> {
        self.map_err(|cause| ShareError::Pool { step, cause })
    }
}
