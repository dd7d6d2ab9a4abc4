//! One connection of an exporter: what was asked, and the answer.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use rustix::io::Errno;

use super::core::{Core, Job};
use super::offer::OfferCore;
use crate::error::Refusal;
use crate::os::peer_process;
use crate::socket::{Received, receive, send};
use crate::steps::step;
use crate::wire::{Frame, LAYOUT_PIECES_MAX, Message};

/// A request for descriptors that waits for them.
#[derive(Debug)]
struct Pending {
    request: u32,
    offer: Arc<OfferCore>,
    generation: u64,
    pieces: Vec<u64>,
    until: Instant,
    /// They were there, and could not be sent.
    unsent: Option<Vec<Arc<OwnedFd>>>,
}

/// An export's board that is to be sent.
#[derive(Debug)]
struct Opening {
    opened: Frame,
    offer: Arc<OfferCore>,
    until: Instant,
}

/// What becomes of descriptors that a user has too many of on their way between processes already
/// (`ETOOMANYREFS`): they are tried again until the time is over.
const CROWDED: &str = "too many descriptors of this user are on their way between processes";

/// A connection.
#[derive(Debug)]
pub(super) struct Client {
    pub(super) number: u64,
    pub(super) socket: OwnedFd,
    /// The process at the other end, whose forks may have the connection open for longer than itself.
    pub(super) process: Option<OwnedFd>,
    /// Until when it has to say who it is.
    greet_until: Option<Instant>,
    opening: Option<Opening>,
    pending: Option<Pending>,
    /// The request that the keeper is going to answer.
    kept: Option<u32>,
}

/// The connection is over, and why. `None`: the other side has closed it.
pub(super) struct Cut(pub(super) Option<String>);

type Step<T> = Result<T, Cut>;

fn cut<T>(why: impl Into<String>) -> Step<T> {
    Err(Cut(Some(why.into())))
}

impl Client {
    pub(super) fn new(number: u64, socket: OwnedFd, greet_until: Instant) -> Client {
        let (process, greet_until) = (peer_process(&socket), Some(greet_until));
        Client { number, socket, process, greet_until, opening: None, pending: None, kept: None }
    }

    /// Whether it may ask now: one request at a time.
    pub(super) fn listens(&self) -> bool {
        self.opening.is_none() && self.pending.is_none() && self.kept.is_none()
    }

    /// When something has to have happened.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.pending.as_ref().map(|it| it.until).or(self.greet_until)
    }

    /// Takes one message, if there is one.
    pub(super) fn read(&mut self, core: &Core, room: &mut [u8]) -> Step<()> {
        match receive(&self.socket, 0, room) {
            Ok(Received::Frame(frame, _)) => self.answer(core, frame),
            Ok(Received::Nothing) => Ok(()),
            Ok(Received::End) => Err(Cut(None)),
            Ok(Received::Wrong(error)) => {
                let why = format!("no message: {error:?}");
                // It is cut whether or not it reads this.
                let _ = self.refuse(0, Refusal::Request, &why);
                cut(why)
            }
            Ok(Received::NoRoom) => cut("descriptors came where none belong"),
            Err(error) => cut(format!("the connection failed: {error}")),
        }
    }

    fn answer(&mut self, core: &Core, Frame { request, message }: Frame) -> Step<()> {
        match (message, self.greet_until) {
            (Message::Hello, Some(_)) => {
                step!("exporter-hello");
                self.greet_until = None;
                self.send(request, Message::Welcome { exporter: core.id })
            }
            (Message::Open { name, write }, None) => self.open(core, request, &name, write),
            (Message::Describe { export, first }, None) => {
                self.describe(core, request, export, first)
            }
            (Message::Fetch { export, generation, pieces }, None) => {
                step!("exporter-fetch");
                let Some(offer) = core.by_export(export) else {
                    return self.refuse(request, Refusal::Withdrawn, "no such export");
                };
                let until = Instant::now() + core.plan.timeout;
                self.pending =
                    Some(Pending { request, offer, generation, pieces, until, unsent: None });
                self.resume(core)
            }
            (Message::Owner(question), None) if core.keeper.is_some() => {
                self.kept = Some(request);
                let answer = core.keeper.as_ref().and_then(|it| it.ask(self.number, question));
                self.answer_kept(answer)
            }
            (other, _) => {
                let why = format!("{} at the wrong time", other.name());
                let _ = self.refuse(request, Refusal::Request, &why);
                cut(why)
            }
        }
    }

    fn open(&mut self, core: &Core, request: u32, name: &str, write: bool) -> Step<()> {
        step!("exporter-open");
        let Some(offer) = core.by_name(name) else {
            return self.refuse(request, Refusal::Unknown, &format!("{name:?} is not offered"));
        };
        if write && !offer.writable {
            return self.refuse(request, Refusal::Access, &format!("{name:?} may only be read"));
        }
        if let Some(keeper) = &core.keeper
            && let Err((reason, why)) = keeper.open(self.number, name, write)
        {
            return self.refuse(request, reason, &why);
        }
        let opened = Message::Opened {
            export: offer.export,
            write,
            chunk_bytes: offer.chunk_bytes,
            ordering: offer.publisher.ordering.clone(),
        };
        let opened = Frame { request, message: opened };
        self.opening = Some(Opening { opened, offer, until: Instant::now() + core.plan.timeout });
        self.finish_open()
    }

    fn finish_open(&mut self) -> Step<()> {
        let Some(Opening { opened, offer, until }) = &self.opening else { return Ok(()) };
        match self.pass(opened, &[offer.board.file()])? {
            true => {
                step!("exporter-opened");
            }
            false if Instant::now() < *until => return Ok(()),
            false => self.refuse(opened.request, Refusal::Failed, CROWDED)?,
        }
        self.opening = None;
        Ok(())
    }

    fn describe(&self, core: &Core, request: u32, export: u64, first: u32) -> Step<()> {
        step!("exporter-describe");
        let Some(offer) = core.by_export(export) else {
            return self.refuse(request, Refusal::Withdrawn, "no such export");
        };
        let Some(layout) = offer.layout() else {
            return self.refuse(request, Refusal::Changed, "being described anew");
        };
        let Ok(total) = u32::try_from(layout.entries.len()) else {
            return self.refuse(request, Refusal::Failed, "too many pieces");
        };
        let part = layout.entries.iter().skip(first as usize).take(LAYOUT_PIECES_MAX);
        let pieces = part.copied().collect();
        let generation = layout.generation;
        self.send(request, Message::Layout { generation, total, first, pieces })?;
        step!("exporter-described");
        Ok(())
    }

    /// Sends the descriptors that were asked for, if they are there; asks for them if not.
    pub(super) fn resume(&mut self, core: &Core) -> Step<()> {
        let Some(mut pending) = self.pending.take() else { return Ok(()) };
        if let Some((reason, why)) = self.refusal(core, &pending) {
            core.forget_client(self.number);
            return self.refuse(pending.request, reason, &why);
        }
        let Pending { request, ref offer, generation, ref pieces, .. } = pending;
        let made = pending.unsent.take().or_else(|| offer.shelf.lock().take(pieces));
        let Some(descriptors) = made else {
            core.request(Job { client: self.number, offer: offer.clone(), pieces: pieces.clone() });
            self.pending = Some(pending);
            return Ok(());
        };
        let message = Message::Pieces { generation, pieces: pieces.clone() };
        let borrowed: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
        if !self.pass(&Frame { request, message }, &borrowed)? {
            pending.unsent = Some(descriptors);
            self.pending = Some(pending);
            return Ok(());
        }
        step!("exporter-sent");
        drop(descriptors);
        core.note_sent(self.number);
        Ok(())
    }

    /// Why what is asked for cannot be given.
    fn refusal(&self, core: &Core, pending: &Pending) -> Option<(Refusal, String)> {
        if let Some(why) = core.take_failure(self.number) {
            return Some((Refusal::Failed, why));
        }
        let notice = pending.offer.board.notice();
        if notice.withdrawn {
            return Some((Refusal::Withdrawn, "withdrawn".to_owned()));
        }
        let layout = pending.offer.layout().filter(|it| it.generation == pending.generation);
        let Some(layout) = layout else {
            let why = format!("generation {} is not the present one", pending.generation);
            return Some((Refusal::Changed, why));
        };
        let unknown = pending.pieces.iter().find(|id| layout.entry(**id).is_none());
        if let Some(id) = unknown {
            return Some((Refusal::Unknown, format!("there is no piece {id}")));
        }
        let why = match &pending.unsent {
            Some(_) => CROWDED,
            None => "the descriptors were not made in time",
        };
        (pending.until <= Instant::now()).then(|| (Refusal::Failed, why.to_owned()))
    }

    /// Looks at the clock.
    pub(super) fn tick(&mut self, core: &Core, now: Instant) -> Step<()> {
        if self.greet_until.is_some_and(|until| until <= now) {
            return cut("it never said who it is");
        }
        if self.kept.is_some() {
            let answer = core.keeper.as_ref().and_then(|it| it.answer(self.number));
            self.answer_kept(answer)?;
        }
        self.finish_open()?;
        self.resume(core)
    }

    /// Passes on what the keeper says, if it does by now.
    fn answer_kept(&mut self, answer: Option<Message>) -> Step<()> {
        let Some(answer) = answer else { return Ok(()) };
        match self.kept.take() {
            Some(request) => self.send(request, answer),
            None => Ok(()),
        }
    }

    pub(super) fn refuse(&self, request: u32, reason: Refusal, text: &str) -> Step<()> {
        self.send(request, Message::Refused { reason, text: text.to_owned() })
    }

    /// Sends descriptors. False: not now, for the user has too many on their way ([`CROWDED`]).
    fn pass(&self, frame: &Frame, descriptors: &[BorrowedFd<'_>]) -> Step<bool> {
        match send(&self.socket, frame, descriptors) {
            Err(Errno::TOOMANYREFS) => Ok(false),
            sent => self.check(sent).map(|()| true),
        }
    }

    fn send(&self, request: u32, message: Message) -> Step<()> {
        self.check(send(&self.socket, &Frame { request, message }, &[]))
    }

    /// Whoever keeps to the protocol reads each answer before the next question, so there is always
    /// room: nothing is kept for others.
    fn check(&self, sent: rustix::io::Result<()>) -> Step<()> {
        match sent {
            Ok(()) => Ok(()),
            Err(Errno::PIPE | Errno::CONNRESET) => Err(Cut(None)),
            Err(Errno::AGAIN) => cut("it does not read the answers"),
            Err(error) => cut(format!("the connection failed: {error}")),
        }
    }
}
