//! The connection of an importer: one question at a time, each with a time limit.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::connect;
use vmm_sys::process;

use crate::address::Address;
use crate::error::{AtStep, Refusal, ShareError};
use crate::os::peer_process;
use crate::socket::{Received, Waited, message_room, new_socket, receive, send, wait};
use crate::steps::step;
use crate::wire::{Frame, Message};

/// Answers to earlier questions that are passed over before the connection is given up.
const STALE_MAX: usize = 16;
/// How long a connection waits before it tries again, where the exporter's queue is full.
const CONNECT_PAUSE: Duration = Duration::from_millis(1);

#[derive(Debug)]
pub(crate) struct Link {
    line: Mutex<Line>,
    timeout: Duration,
    gone: AtomicBool,
    /// The process at the other end, whose forks may have the connection open for longer than itself.
    owner: Option<OwnedFd>,
    exporter: [u8; 16],
}

#[derive(Debug)]
struct Line {
    socket: OwnedFd,
    request: u32,
    room: Vec<u8>,
}

/// A message and the descriptors that came with it.
pub(crate) type Answer = (Message, Vec<OwnedFd>);

impl Link {
    pub(crate) fn connect(address: &Address, timeout: Duration) -> Result<Link, ShareError> {
        const STEP: &str = "connecting";
        const LISTENS: &str = "an exporter or a `vmm-pool serve` that listens there";
        let name = address.to_socket(STEP)?;
        let socket = new_socket().at(STEP)?;
        let deadline = Instant::now() + timeout;
        loop {
            match connect(&socket, &name) {
                Ok(()) => break,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if Instant::now() < deadline => {
                    std::thread::sleep(CONNECT_PAUSE);
                }
                Err(Errno::AGAIN) => {
                    return Err(ShareError::Timeout { step: STEP, after: timeout });
                }
                Err(cause) => return Err(address.failed(STEP, cause, LISTENS)),
            }
        }
        step!("importer-connected");
        let owner = peer_process(&socket);
        let line = Mutex::new(Line { socket, request: 0, room: message_room() });
        let gone = AtomicBool::new(false);
        let mut link = Link { line, timeout, gone, owner, exporter: [0; 16] };
        match link.ask("being let in", Message::Hello, 0)? {
            (Message::Welcome { exporter }, _) => link.exporter = exporter,
            (other, _) => return Err(link.unexpected("being let in", "welcome", &other)),
        }
        Ok(link)
    }

    /// The exporter's number.
    pub(super) fn exporter(&self) -> [u8; 16] {
        self.exporter
    }

    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Whether the connection is known to have ended.
    pub(super) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }

    fn owner(&self) -> Option<BorrowedFd<'_>> {
        self.owner.as_ref().map(AsFd::as_fd)
    }

    /// Whether the other side is there and has the connection open: one system call.
    pub(super) fn is_open(&self) -> bool {
        if self.is_gone() {
            return false;
        }
        // Whoever asks a question now is going to find out itself.
        let Some(line) = self.line.try_lock() else { return true };
        let closed = PollFlags::empty();
        let waited = wait(&line.socket, self.owner(), closed, Instant::now());
        if matches!(waited, Ok(Waited::Ready | Waited::Ended)) {
            self.gone.store(true, Ordering::Relaxed);
        }
        !self.is_gone()
    }

    /// Asks, and waits for the answer, which may carry as many descriptors. A refusal is an error.
    pub(crate) fn ask(
        &self,
        step: &'static str,
        message: Message,
        descriptors_max: usize,
    ) -> Result<Answer, ShareError> {
        if process::is_forked_child() {
            return Err(ShareError::Forked { step });
        }
        let mut line = self.line.lock();
        if self.is_gone() {
            return Err(gone(step));
        }
        let deadline = Instant::now() + self.timeout;
        line.request = line.request.wrapping_add(1);
        let frame = Frame { request: line.request, message };
        self.send(step, &line, &frame, deadline)?;
        for _ in 0..STALE_MAX {
            let (frame, descriptors) = self.receive(step, &mut line, deadline, descriptors_max)?;
            // A refusal without a number comes before the exporter has read anything.
            if frame.request == line.request || frame.request == 0 {
                return match frame.message {
                    Message::Refused { reason, text } => self.refused(step, reason, text),
                    message => Ok((message, descriptors)),
                };
            }
        }
        Err(self.wrong(step, "the answer", "answers to other questions".to_owned()))
    }

    fn send(
        &self,
        step: &'static str,
        line: &Line,
        frame: &Frame,
        deadline: Instant,
    ) -> Result<(), ShareError> {
        loop {
            match send(&line.socket, frame, &[]) {
                Ok(()) => return Ok(()),
                // What it had to say before it closed, a refusal, can still be read.
                Err(Errno::PIPE | Errno::CONNRESET) => return Ok(()),
                Err(Errno::AGAIN) => self.wait(step, line, PollFlags::OUT, deadline)?,
                Err(error) => return Err(error).at(step),
            }
        }
    }

    fn receive(
        &self,
        step: &'static str,
        line: &mut Line,
        deadline: Instant,
        descriptors_max: usize,
    ) -> Result<(Frame, Vec<OwnedFd>), ShareError> {
        loop {
            let Line { socket, room, .. } = &mut *line;
            match receive(&*socket, descriptors_max, room).at(step)? {
                Received::Frame(frame, descriptors) => return Ok((frame, descriptors)),
                Received::Nothing => self.wait(step, line, PollFlags::IN, deadline)?,
                Received::End => return Err(self.end(step)),
                Received::Wrong(error) => {
                    self.gone.store(true, Ordering::Relaxed);
                    return Err(error.at(step));
                }
                Received::NoRoom => {
                    return Err(ShareError::Io { step, cause: Errno::MFILE.into() });
                }
            }
        }
    }

    fn wait(
        &self,
        step: &'static str,
        line: &Line,
        events: PollFlags,
        deadline: Instant,
    ) -> Result<(), ShareError> {
        match wait(&line.socket, self.owner(), events, deadline).at(step)? {
            Waited::Ready => Ok(()),
            Waited::Ended => Err(self.end(step)),
            Waited::Late => Err(ShareError::Timeout { step, after: self.timeout }),
        }
    }

    fn refused<T>(
        &self,
        step: &'static str,
        reason: Refusal,
        why: String,
    ) -> Result<T, ShareError> {
        match reason {
            Refusal::Withdrawn => Err(ShareError::Withdrawn { step }),
            Refusal::Peer | Refusal::Full | Refusal::Request => {
                self.gone.store(true, Ordering::Relaxed);
                Err(ShareError::Refused { step, reason, why })
            }
            _ => Err(ShareError::Refused { step, reason, why }),
        }
    }

    fn end(&self, step: &'static str) -> ShareError {
        self.gone.store(true, Ordering::Relaxed);
        gone(step)
    }

    /// An answer that makes no sense: nothing more is asked.
    pub(crate) fn wrong(&self, step: &'static str, expected: &str, got: String) -> ShareError {
        self.gone.store(true, Ordering::Relaxed);
        ShareError::Protocol { step, expected: expected.to_owned(), got }
    }

    /// An answer to another question.
    pub(crate) fn unexpected(
        &self,
        step: &'static str,
        expected: &str,
        got: &Message,
    ) -> ShareError {
        self.wrong(step, expected, got.name().to_owned())
    }
}

fn gone(step: &'static str) -> ShareError {
    ShareError::OwnerGone { step }
}
