//! Where an exporter listens.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::str::FromStr;

use rustix::io::Errno;
use rustix::net::SocketAddrUnix;

use crate::error::{AtStep, ShareError};

/// The address of an exporter on this machine.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Address {
    /// A socket in the file system.
    Path(PathBuf),
    /// A name without a file, which goes with its last socket. Everybody on the machine (in the
    /// namespace of networks) can connect, so the exporter's rule alone decides.
    Abstract(String),
}

impl Address {
    pub(crate) fn to_socket(&self, step: &'static str) -> Result<SocketAddrUnix, ShareError> {
        match self {
            Address::Path(path) => SocketAddrUnix::new(path).at(step),
            Address::Abstract(name) => SocketAddrUnix::new_abstract_name(name.as_bytes()).at(step),
        }
    }

    /// What the system said of the address, which it does not name itself, and what would do.
    pub(crate) fn failed(&self, step: &'static str, cause: Errno, expected: &str) -> ShareError {
        let cause = io::Error::from(cause);
        let words = format!("{self}: {cause}; expected {expected}");
        ShareError::Io { step, cause: io::Error::new(cause.kind(), words) }
    }
}

impl FromStr for Address {
    type Err = ShareError;

    /// Reads what [`Address`] is displayed as: a path, or `@` and a name without a file.
    ///
    /// # Errors
    /// [`ShareError::BadArgument`] for an empty one, or one with a zero byte.
    fn from_str(text: &str) -> Result<Address, ShareError> {
        if text.contains('\0') || text.trim_start_matches('@').is_empty() {
            return Err(ShareError::BadArgument {
                what: "address",
                value: text.escape_debug().to_string(),
                expected: "a path, or @ and a name".to_owned(),
            });
        }
        Ok(match text.strip_prefix('@') {
            Some(name) => Address::Abstract(name.to_owned()),
            None => Address::Path(text.into()),
        })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Path(path) => write!(f, "{}", path.display()),
            Address::Abstract(name) => write!(f, "@{name}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_read_as_it_is_displayed() {
        for text in ["/run/weights.sock", "weights", "@weights"] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
        for text in ["", "@", "@@", "a\0b"] {
            assert!(matches!(text.parse::<Address>(), Err(ShareError::BadArgument { .. })));
        }
    }
}
