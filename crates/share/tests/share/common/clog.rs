//! Descriptors on their way between processes, as many as a user may have: he can send no more.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
    sendmsg, socketpair,
};

/// Descriptors in one message.
const AT_ONCE: usize = 100;
/// A user whom nobody is.
const NOBODY: libc::uid_t = 65_534;

/// The two ends, the second of which is never read. Dropped, the way is free again.
pub(crate) struct Clog(#[allow(dead_code, reason = "it has descriptors in it")] [OwnedFd; 2]);

impl Clog {
    /// Fills the way. The process becomes nobody's if it is root's, whom the limit does not bind.
    pub(crate) fn new() -> Clog {
        // SAFETY: changes who this process is, in all of its threads, and no memory.
        let is_bound =
            unsafe { libc::geteuid() != 0 || libc::setresuid(NOBODY, NOBODY, NOBODY) == 0 };
        assert!(is_bound, "{}", std::io::Error::last_os_error());
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (one, other) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let descriptors = [one.as_fd(); AT_ONCE];
        let refused = (0..1000).find_map(|_| {
            let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(AT_ONCE))];
            let mut control = SendAncillaryBuffer::new(&mut room);
            assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
            sendmsg(&one, &[IoSlice::new(b"x")], &mut control, SendFlags::empty()).err()
        });
        assert_eq!(refused, Some(Errno::TOOMANYREFS));
        Clog([one, other])
    }
}
