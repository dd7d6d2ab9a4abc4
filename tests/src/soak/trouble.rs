//! What an operation of the soak ends with.

use std::fmt;

use vmm_kv::KvError;
use vmm_pool::{ElasticError, Error, Place};
use vmm_share::ShareError;
use vmm_sys::DriverError;

/// An operation that was not done.
#[derive(Debug)]
pub(super) enum Trouble {
    /// As it may be while others are at work: the word is counted.
    Refused(&'static str),
    /// A fault.
    Wrong(String),
}

/// One operation of a thread.
pub(super) type Step = Result<(), Trouble>;

/// There was nothing to do it with.
pub(super) const NOTHING: Step = Err(Trouble::Refused("nothing there"));

impl Trouble {
    pub(super) fn wrong(text: impl fmt::Display) -> Trouble {
        Trouble::Wrong(text.to_string())
    }
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Trouble::Refused(why) => write!(f, "refused: {why}"),
            Trouble::Wrong(text) => f.write_str(text),
        }
    }
}

impl From<Error> for Trouble {
    fn from(error: Error) -> Trouble {
        match &error {
            error if error.is_out_of_memory() => Trouble::Refused("short of memory"),
            Error::LaneClosed => Trouble::Refused("lane closed"),
            Error::Elastic(ElasticError::Asleep) => Trouble::Refused("asleep"),
            Error::Elastic(ElasticError::InUse { .. }) => Trouble::Refused("in use"),
            Error::Elastic(ElasticError::StillUsed { .. }) => Trouble::Refused("still used"),
            // A pool may have no memory of the host.
            Error::Elastic(ElasticError::UnknownPlace { place: Place::HostNuma(_) }) => {
                Trouble::Refused("no memory of the host")
            }
            // A move that nobody had begun when its buffer ended.
            Error::Elastic(ElasticError::Ended) => Trouble::Refused("ended"),
            Error::Elastic(ElasticError::UnknownTag { .. }) => Trouble::Refused("no such tag"),
            _ => Trouble::Wrong(format!("{error} ({error:?})")),
        }
    }
}

impl From<KvError> for Trouble {
    fn from(error: KvError) -> Trouble {
        match error {
            KvError::Pool(error) => error.into(),
            KvError::TooManySequences { .. } => Trouble::Refused("too many sequences"),
            error if error.is_shortage() => Trouble::Refused("short of memory"),
            error => Trouble::Wrong(format!("{error} ({error:?})")),
        }
    }
}

impl From<DriverError> for Trouble {
    fn from(error: DriverError) -> Trouble {
        Trouble::wrong(error)
    }
}

impl From<ShareError> for Trouble {
    fn from(error: ShareError) -> Trouble {
        match error {
            ShareError::Lagging { .. } | ShareError::Changing { .. } => {
                Trouble::Refused("shared memory is changing")
            }
            error => Trouble::Wrong(format!("{error} ({error:?})")),
        }
    }
}

impl From<std::io::Error> for Trouble {
    fn from(error: std::io::Error) -> Trouble {
        Trouble::wrong(error)
    }
}
