//! What needs `unsafe`: a shared page, and who the peer is. All else of this crate is safe code.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::AtomicU64;

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Length of a shared page.
pub(crate) const PAGE_BYTES: usize = 4096;
/// Words of a shared page that are used.
pub(crate) const PAGE_WORDS: usize = 8;

/// A page of a file that several processes have mapped, as atomic words.
#[derive(Debug)]
pub(crate) struct SharedPage {
    start: NonNull<AtomicU64>,
}

// SAFETY: the page is only used through atomic words, which any thread may do.
unsafe impl Send for SharedPage {}
// SAFETY: as above.
unsafe impl Sync for SharedPage {}

impl SharedPage {
    /// Maps the first page of `file`. The caller has made sure that the file has that many bytes and
    /// cannot be made shorter: a page that is not there would be a signal.
    pub(crate) fn map(file: impl AsFd, writable: bool) -> io::Result<SharedPage> {
        let protection = match writable {
            true => ProtFlags::READ | ProtFlags::WRITE,
            false => ProtFlags::READ,
        };
        // SAFETY: a new mapping at an address of the kernel's choice harms no other memory.
        let start = unsafe {
            mmap(ptr::null_mut(), PAGE_BYTES, protection, MapFlags::SHARED, file.as_fd(), 0)?
        };
        let start = NonNull::new(start.cast::<AtomicU64>());
        start.map(|start| SharedPage { start }).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
    }

    /// The words. Those of a page that was mapped for reading must only be loaded.
    pub(crate) fn words(&self) -> &[AtomicU64; PAGE_WORDS] {
        // SAFETY: the mapping is a page long, aligned to a page, and lives as long as `self`; any bits
        // are a value of an integer. Other processes write the words, so they are atomic. A load of a
        // word of eight bytes needs no permission to write.
        unsafe { self.start.cast::<[AtomicU64; PAGE_WORDS]>().as_ref() }
    }
}

impl Drop for SharedPage {
    fn drop(&mut self) {
        // SAFETY: `self` owns the mapping, and no reference to it outlives `self`.
        let unmapped = unsafe { munmap(self.start.as_ptr().cast(), PAGE_BYTES) };
        debug_assert!(unmapped.is_ok());
    }
}

/// Who is at the other end of a connection, as the kernel noted it when it was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PeerCredentials {
    /// The process, as this one's namespace of processes knows it; 0 if it does not.
    pub pid: u32,
    /// Its user.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
}

/// Asks the kernel. Not through rustix, whose type has no room for a process without a number here.
pub(crate) fn peer_credentials(socket: impl AsFd) -> io::Result<PeerCredentials> {
    let none = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let peer = socket_option(socket, libc::SO_PEERCRED, none)?;
    Ok(PeerCredentials { pid: peer.pid as u32, uid: peer.uid, gid: peer.gid })
}

/// The process at the other end of a connection (`SO_PEERPIDFD`, Linux 6.5): readable once it has ended.
/// `None`: the kernel does not say, or this process may have no descriptor more.
pub(crate) fn peer_process(socket: impl AsFd) -> Option<OwnedFd> {
    let process: libc::c_int = socket_option(socket, libc::SO_PEERPIDFD, -1).ok()?;
    // SAFETY: the kernel made this descriptor for the call, and nobody else knows it.
    (process >= 0).then(|| unsafe { OwnedFd::from_raw_fd(process) })
}

/// An option of a socket whose value is one of plain numbers.
fn socket_option<T: Copy>(socket: impl AsFd, option: libc::c_int, none: T) -> io::Result<T> {
    let mut value = none;
    let mut bytes = size_of::<T>() as libc::socklen_t;
    // SAFETY: `value` is writable for `bytes` bytes during the call, and numbers with any bits are values
    // of its type; the descriptor is open.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            (&raw mut value).cast(),
            &raw mut bytes,
        )
    };
    match result {
        0 => Ok(value),
        _ => Err(io::Error::last_os_error()),
    }
}
