//! The second process: what a descriptor is exported to, or imported from.
//!
//! The two talk over a pair of Unix sockets, which the second process finds as its standard input.
//! A message is four numbers, and at most one descriptor beside them (`SCM_RIGHTS`). The first
//! process sends one [`Order`], the second does it and sends its replies.

use std::io::{self, Error, ErrorKind};
use std::mem;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crate::driver::Driver;
use crate::types::{DeviceId, IpcEventHandle};

use super::bench::Bench;
use super::orders::{Parts, obey};
use super::outcome::{Step, Stop};
use super::scratch::Scratch;

/// How long either side waits for the other: opening a GPU takes a second or two.
const PATIENCE: Duration = Duration::from_secs(30);

/// What the first process wants: see [`super::orders`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Make an exportable chunk, fill it, send its descriptor, give everything back, exit.
    Export,
    /// Import the descriptor sent along, let the second device read it, and count wrong words.
    Import,
    /// Import the descriptor sent along for reading, and write it all the same.
    Read,
    /// Import the descriptor sent along, and tell its properties.
    Properties,
    /// Import the descriptor sent along, and read it behind an event.
    Follow,
}

impl Order {
    pub(super) fn from_number(number: u64) -> Option<Order> {
        const ALL: [Order; 5] =
            [Order::Export, Order::Import, Order::Read, Order::Properties, Order::Follow];
        ALL.into_iter().find(|order| *order as u64 == number)
    }
}

/// Four numbers: order or result, length in bytes, first word of the pattern, device.
type Message = [u64; 4];

pub(super) const DONE: u64 = 100;
const FAILED: u64 = 101;
const GO_ON: u64 = 102;

/// The second process, seen from the first. Dropped while it still runs, it is ended.
pub(crate) struct Second {
    child: Child,
    socket: UnixStream,
}

impl Second {
    pub(crate) fn start(mut command: Command) -> io::Result<Second> {
        let (socket, theirs) = UnixStream::pair()?;
        socket.set_read_timeout(Some(PATIENCE))?;
        let child = command.stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).spawn()?;
        Ok(Second { child, socket })
    }

    /// Sends an order; the numbers are bytes, first word and device.
    pub(crate) fn order(
        &self,
        order: Order,
        [bytes, value, device]: [u64; 3],
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Step<()> {
        Ok(send(&self.socket, [order as u64, bytes, value, device], descriptor)?)
    }

    /// Sends what [`Order::Follow`] takes besides.
    pub(crate) fn send_handle(&self, handle: &IpcEventHandle) -> Step<()> {
        for half in handle.0.chunks_exact(size_of::<Message>()) {
            send(&self.socket, words_of(half), None)?;
        }
        Ok(())
    }

    /// Lets an order go on that waits in its middle.
    pub(crate) fn go_on(&self) -> Step<()> {
        Ok(send(&self.socket, [GO_ON, 0, 0, 0], None)?)
    }

    /// A reply to an order: three numbers of its own, and a descriptor if it made one.
    pub(crate) fn reply(&self) -> Step<([u64; 3], Option<OwnedFd>)> {
        let ([word, first, second, third], descriptor) = receive(&self.socket)?;
        if word == DONE {
            Ok(([first, second, third], descriptor))
        } else {
            Err(Stop::Failed("the second process failed; it says why on stderr".into()))
        }
    }

    /// Waits until the second process has exited, well or badly.
    pub(crate) fn wait_for_exit(&mut self) -> Step<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return if status.success() {
                    Ok(())
                } else {
                    Err(Stop::Failed(format!("the second process ended with {status}")))
                };
            }
            if Instant::now() > deadline {
                return Err(Stop::Failed(format!("the second process runs after {PATIENCE:?}")));
            }
            thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Second {
    fn drop(&mut self) {
        // Both fail only if it has ended already, which is what they are for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The whole life of the second process: takes one order from its standard input and does it.
///
/// # Errors
/// When standard input is no socket of a first process, or the order cannot be done; the text says
/// what failed, and the first process has been told.
pub fn serve_second_process(driver: &Arc<dyn Driver>) -> Result<(), String> {
    let stdin = io::stdin().as_fd().try_clone_to_owned().map_err(|error| error.to_string())?;
    let socket = UnixStream::from(stdin);
    let text = |error: Error| format!("talking to the first process: {error}");
    let ([order, bytes, value, device], descriptor) = receive(&socket).map_err(text)?;
    let bench = u32::try_from(device).map_err(|error| error.to_string()).and_then(|ordinal| {
        Bench::new(Arc::clone(driver), DeviceId(ordinal)).map_err(|error| error.to_string())
    });
    let done = bench.and_then(|bench| {
        let scratch = Scratch::new(&bench);
        let parts = Parts { bytes, value: value as u32, descriptor, socket: &socket };
        let step = obey(&scratch, order, &parts);
        let trouble = scratch.clean_up();
        match step {
            // That one leaves a broken context behind, from which little can be given back.
            Ok(()) if trouble.is_empty() || order == Order::Read as u64 => Ok(()),
            Ok(()) => Err(trouble.join("; ")),
            Err(Stop::Failed(text) | Stop::Skipped(text)) => Err(text),
        }
    });
    done.inspect_err(|_| {
        // If even that fails, the first process sees this one end.
        let _ = send(&socket, [FAILED, 0, 0, 0], None);
    })
}

// ---- messages ----

/// Room for one descriptor's control message, aligned as the kernel wants it.
#[repr(C, align(8))]
struct Control([u8; 64]);

pub(super) fn send(
    socket: &UnixStream,
    message: Message,
    descriptor: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let mut bytes = message.map(u64::to_ne_bytes).concat();
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let mut control = Control([0; 64]);
    // SAFETY: all-zero bytes are a valid `msghdr`: null pointers and zero lengths.
    let mut header: libc::msghdr = unsafe { mem::zeroed() };
    header.msg_iov = &raw mut part;
    header.msg_iovlen = 1;
    if let Some(descriptor) = descriptor {
        let length = size_of::<RawFd>() as u32;
        // SAFETY: `control` has room for the header and one descriptor (24 of 64 bytes), is
        // aligned for it, and outlives the call; the macros stay within `msg_controllen`.
        unsafe {
            header.msg_control = control.0.as_mut_ptr().cast();
            header.msg_controllen = libc::CMSG_SPACE(length) as usize;
            let first = libc::CMSG_FIRSTHDR(&raw const header);
            (*first).cmsg_level = libc::SOL_SOCKET;
            (*first).cmsg_type = libc::SCM_RIGHTS;
            (*first).cmsg_len = libc::CMSG_LEN(length) as usize;
            libc::CMSG_DATA(first).cast::<RawFd>().write_unaligned(descriptor.as_raw_fd());
        }
    }
    // SAFETY: the header points to live buffers of the lengths it states. MSG_NOSIGNAL: a peer
    // that is gone is an error here, not a signal.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const header, libc::MSG_NOSIGNAL) };
    match usize::try_from(sent) {
        Ok(sent) if sent == bytes.len() => Ok(()),
        Ok(sent) => Err(Error::new(ErrorKind::WriteZero, format!("{sent} bytes of a message"))),
        Err(_) => Err(Error::last_os_error()),
    }
}

pub(super) fn receive(socket: &UnixStream) -> io::Result<(Message, Option<OwnedFd>)> {
    let mut bytes = [0; size_of::<Message>()];
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let mut control = Control([0; 64]);
    // SAFETY: all-zero bytes are a valid `msghdr`.
    let mut header: libc::msghdr = unsafe { mem::zeroed() };
    header.msg_iov = &raw mut part;
    header.msg_iovlen = 1;
    header.msg_control = control.0.as_mut_ptr().cast();
    header.msg_controllen = control.0.len();
    // SAFETY: the header points to live buffers of the lengths it states.
    let received =
        unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut header, libc::MSG_CMSG_CLOEXEC) };
    if received < 0 {
        return Err(Error::last_os_error());
    }
    // SAFETY: the kernel wrote the control messages and their length into the header; a message of
    // rights holds at least one descriptor, which is open and belongs to nobody but us.
    let descriptor = unsafe {
        let first = libc::CMSG_FIRSTHDR(&raw const header);
        (!first.is_null() && (*first).cmsg_type == libc::SCM_RIGHTS).then(|| {
            let raw = libc::CMSG_DATA(first).cast::<RawFd>().read_unaligned();
            OwnedFd::from_raw_fd(raw)
        })
    };
    if received.unsigned_abs() != bytes.len() {
        return Err(Error::new(ErrorKind::UnexpectedEof, "the other process ended early"));
    }
    Ok((words_of(&bytes), descriptor))
}

/// The numbers that are in the bytes of a message.
fn words_of(bytes: &[u8]) -> Message {
    let mut message = [0; 4];
    for (number, chunk) in message.iter_mut().zip(bytes.chunks_exact(8)) {
        let mut word = [0; 8];
        word.copy_from_slice(chunk);
        *number = u64::from_ne_bytes(word);
    }
    message
}

/// What [`Second::send_handle`] sends.
pub(super) fn receive_handle(socket: &UnixStream) -> io::Result<IpcEventHandle> {
    let mut handle = IpcEventHandle([0; 64]);
    for half in handle.0.chunks_exact_mut(size_of::<Message>()) {
        let (message, _) = receive(socket)?;
        half.copy_from_slice(&message.map(u64::to_ne_bytes).concat());
    }
    Ok(handle)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::{Read, Write};

    #[test]
    fn messages_carry_numbers_and_a_descriptor() {
        let (left, right) = UnixStream::pair().unwrap();
        let (mut reader, writer) = io::pipe().unwrap();
        send(&left, [1, 2, 3, u64::MAX], Some(writer.as_fd())).unwrap();
        send(&left, [4, 5, 6, 7], None).unwrap();
        drop(writer);
        let (message, descriptor) = receive(&right).unwrap();
        assert_eq!(message, [1, 2, 3, u64::MAX]);
        File::from(descriptor.unwrap()).write_all(b"alive").unwrap();
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, "alive");
        let (message, descriptor) = receive(&right).unwrap();
        assert_eq!((message, descriptor.is_none()), ([4, 5, 6, 7], true));
        drop(left);
        assert_eq!(receive(&right).unwrap_err().kind(), ErrorKind::UnexpectedEof);
    }
}
