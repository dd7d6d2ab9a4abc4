//! Where an exporter listens.

use std::fmt;
use std::path::PathBuf;

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
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Path(path) => write!(f, "{}", path.display()),
            Address::Abstract(name) => write!(f, "@{name}"),
        }
    }
}
