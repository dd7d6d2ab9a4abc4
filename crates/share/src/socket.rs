//! Messages and descriptors over a socket. No call here waits but [`wait`].

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg,
    sendmsg, socket_with,
};

use crate::wire::{DESCRIPTORS_MAX, Frame, MESSAGE_BYTES_MAX, WireError};

/// Room for the descriptors of one message.
const CONTROL_BYTES: usize = rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX));

/// A socket that keeps messages apart, never waits, and is not inherited by other programs.
pub(crate) fn new_socket() -> rustix::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

/// Sends one message whole.
pub(crate) fn send(
    socket: impl AsFd,
    frame: &Frame,
    descriptors: &[BorrowedFd<'_>],
) -> rustix::io::Result<()> {
    let bytes = frame.encode();
    let mut room = [MaybeUninit::uninit(); CONTROL_BYTES];
    let mut control = SendAncillaryBuffer::new(&mut room);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(Errno::INVAL);
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    loop {
        match sendmsg(socket.as_fd(), &[IoSlice::new(&bytes)], &mut control, flags) {
            Err(Errno::INTR) => {}
            // Messages are not split.
            Ok(_) => return Ok(()),
            Err(error) => return Err(error),
        }
    }
}

/// What came.
#[derive(Debug)]
pub(crate) enum Received {
    Frame(Frame, Vec<OwnedFd>),
    /// Nothing yet.
    Nothing,
    /// The other end is closed.
    End,
    /// No message. What came with it is closed.
    Wrong(WireError),
    /// Descriptors were left out, as this process may not open more.
    NoRoom,
}

/// Takes one message, with at most `descriptors_max` descriptors: more is an error, and all are
/// closed.
pub(crate) fn receive(
    socket: impl AsFd,
    descriptors_max: usize,
    room: &mut [u8],
) -> rustix::io::Result<Received> {
    let mut control_room = [MaybeUninit::uninit(); CONTROL_BYTES];
    let control_bytes = match descriptors_max {
        // The kernel closes what there is no room for.
        0 => 0,
        _ => CONTROL_BYTES,
    };
    let mut control = RecvAncillaryBuffer::new(&mut control_room[..control_bytes]);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let message = loop {
        match recvmsg(socket.as_fd(), &mut [IoSliceMut::new(room)], &mut control, flags) {
            // A reset is told once, when the other end was closed with something unread; what it had
            // said before comes behind.
            Err(Errno::INTR | Errno::CONNRESET) => {}
            Err(Errno::AGAIN) => return Ok(Received::Nothing),
            other => break other?,
        }
    };
    let mut descriptors = Vec::new();
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = part {
            descriptors.extend(rights);
        }
    }
    let wrong = |expected, got: &str| {
        Ok(Received::Wrong(WireError::Malformed { expected, got: got.to_owned() }))
    };
    if message.flags.contains(ReturnFlags::TRUNC) {
        return wrong("a message of at most 65536 bytes", "a longer one");
    }
    if message.flags.contains(ReturnFlags::CTRUNC) {
        // Fewer than fit came: it was this process's limit, not the sender.
        return match descriptors_max > 0 && descriptors.len() < DESCRIPTORS_MAX {
            true => Ok(Received::NoRoom),
            false => wrong("fewer descriptors", "more than belong to the message"),
        };
    }
    if message.bytes == 0 && descriptors.is_empty() {
        return Ok(Received::End);
    }
    if descriptors.len() > descriptors_max {
        return wrong("fewer descriptors", "more than belong to the message");
    }
    match Frame::decode(room.get(..message.bytes).unwrap_or_default()) {
        Ok(frame) => Ok(Received::Frame(frame, descriptors)),
        Err(error) => Ok(Received::Wrong(error)),
    }
}

/// Room for one message.
pub(crate) fn message_room() -> Vec<u8> {
    vec![0; MESSAGE_BYTES_MAX]
}

/// What ended a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waited {
    /// The socket has what was waited for, or is closed at the other end.
    Ready,
    /// It has not, and the process at the other end is no more.
    Ended,
    /// The time is over.
    Late,
}

/// What to poll for news of a peer: whether `socket` has one of `events` or is closed at the other end, and
/// whether `process` has ended. Without a process the socket stands for it, with nothing but its end.
pub(crate) fn watch<'a>(
    socket: BorrowedFd<'a>,
    events: PollFlags,
    process: Option<BorrowedFd<'a>>,
) -> [PollFd<'a>; 2] {
    let (process, end) = process.map_or((socket, PollFlags::empty()), |it| (it, PollFlags::IN));
    [PollFd::from_borrowed_fd(socket, events), PollFd::from_borrowed_fd(process, end)]
}

/// Waits until `socket` has one of `events`, or is closed at the other end, or `process` has ended, or the
/// time is over.
pub(crate) fn wait(
    socket: impl AsFd,
    process: Option<BorrowedFd<'_>>,
    events: PollFlags,
    deadline: Instant,
) -> rustix::io::Result<Waited> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let mut fds = watch(socket.as_fd(), events, process);
        match poll(&mut fds, Some(&timespec(left))) {
            Err(Errno::INTR) => {}
            Ok(0) if left.is_zero() => return Ok(Waited::Late),
            Ok(0) => {}
            Ok(_) => {
                let is_ready = !fds[0].revents().is_empty();
                return Ok(if is_ready { Waited::Ready } else { Waited::Ended });
            }
            Err(error) => return Err(error),
        }
    }
}

/// Rounded up to a millisecond's fraction that the kernel takes.
pub(crate) fn timespec(time: Duration) -> Timespec {
    let time = time.min(Duration::from_secs(3600));
    Timespec { tv_sec: time.as_secs() as i64, tv_nsec: i64::from(time.subsec_nanos()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Message;
    use rustix::net::socketpair;
    use std::fs::File;
    use std::io::{Read, Write};

    fn pair() -> (OwnedFd, OwnedFd) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
    }

    fn hello() -> Frame {
        Frame { request: 1, message: Message::Hello }
    }

    #[test]
    fn a_message_comes_with_its_descriptors_which_are_not_inherited() {
        let (left, right) = pair();
        let (mut reader, writer) = std::io::pipe().unwrap();
        send(&left, &hello(), &[writer.as_fd()]).unwrap();
        drop(writer);
        let mut room = message_room();
        let Received::Frame(frame, mut descriptors) = receive(&right, 1, &mut room).unwrap() else {
            panic!("no message")
        };
        assert_eq!((frame, descriptors.len()), (hello(), 1));
        let descriptor = descriptors.remove(0);
        let flags = rustix::io::fcntl_getfd(&descriptor).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
        File::from(descriptor).write_all(b"alive").unwrap();
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, "alive");
        assert!(matches!(receive(&right, 1, &mut room).unwrap(), Received::Nothing));
        drop(left);
        assert!(matches!(receive(&right, 1, &mut room).unwrap(), Received::End));
    }

    #[test]
    fn descriptors_that_nobody_asked_for_are_closed() {
        let (left, right) = pair();
        let mut room = message_room();
        for (sent, taken) in [(1, 0), (2, 1), (128, 1), (128, 127)] {
            let (mut reader, writer) = std::io::pipe().unwrap();
            send(&left, &hello(), &vec![writer.as_fd(); sent]).unwrap();
            drop(writer);
            let received = receive(&right, taken, &mut room).unwrap();
            assert!(matches!(received, Received::Wrong(_)), "{received:?}");
            // The last of them is closed when there is an end.
            let late = Instant::now() + Duration::from_secs(10);
            assert_eq!(wait(&reader, None, PollFlags::IN, late).unwrap(), Waited::Ready);
            assert_eq!(reader.read(&mut [0]).unwrap(), 0);
        }
    }

    #[test]
    fn a_wait_ends() {
        let (left, right) = pair();
        let soon = || Instant::now() + Duration::from_millis(5);
        assert!(wait(&right, None, PollFlags::IN, soon()).unwrap() == Waited::Late);
        send(&left, &hello(), &[]).unwrap();
        assert!(wait(&right, None, PollFlags::IN, soon()).unwrap() == Waited::Ready);
    }
}
