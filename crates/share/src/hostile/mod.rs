//! Peers that do not keep to the protocol, on both sides.

mod exporters;
mod importers;

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::net::{bind, connect, listen};

use crate::address::Address;
use crate::socket::new_socket;

/// An address that no other test uses.
pub(crate) fn address() -> Address {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!("vmm-share-hostile-{}-{number}.sock", std::process::id());
    Address::Path(std::env::temp_dir().join(name))
}

fn path(address: &Address) -> PathBuf {
    match address {
        Address::Path(path) => path.clone(),
        Address::Abstract(_) => panic!("these tests use paths"),
    }
}

/// A socket that listens there.
pub(crate) fn listener(address: &Address) -> OwnedFd {
    let socket = new_socket().unwrap();
    bind(&socket, &address.to_socket("test").unwrap()).unwrap();
    listen(&socket, 8).unwrap();
    socket
}

/// A socket that is connected to there.
pub(crate) fn connected(address: &Address) -> OwnedFd {
    let socket = new_socket().unwrap();
    connect(&socket, &address.to_socket("test").unwrap()).unwrap();
    socket
}

/// Sends bytes as they are.
pub(crate) fn send_raw(
    socket: &OwnedFd,
    bytes: &[u8],
    descriptors: &[OwnedFd],
) -> rustix::io::Result<()> {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    use std::io::IoSlice;
    use std::mem::MaybeUninit;
    use std::os::fd::AsFd;
    let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut control = SendAncillaryBuffer::new(&mut room);
    if !borrowed.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(&borrowed)));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags).map(drop)
}
