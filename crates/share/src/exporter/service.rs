//! The thread that talks to importers. It waits for nobody: each socket is asked without waiting, and
//! what has to be made is made by the other thread.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};

use vmm_sys::caught::thrown;

use super::client::{Client, Cut};
use super::core::{Core, count};
use crate::error::Refusal;
use crate::os::peer_credentials;
use crate::socket::{message_room, timespec, watch};
use crate::steps::step;

/// Connections taken in one turn.
const ACCEPTS_AT_ONCE: usize = 16;
/// How long nobody is let in after the process had no descriptor left for one.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// How often a client that waits for something is looked at, whatever else happens.
const LOOK: Duration = Duration::from_millis(2);

/// What a look at a client found.
#[derive(Clone, Copy, Default)]
struct News {
    /// It has sent something, or closed the connection.
    is_ready: bool,
    /// Its process has.
    has_ended: bool,
}

pub(super) struct Service<'a> {
    core: &'a Core,
    listener: OwnedFd,
    clients: Vec<Client>,
    last_client: u64,
    accept_at: Instant,
    room: Vec<u8>,
}

impl Service<'_> {
    pub(super) fn new(core: &Core, listener: OwnedFd) -> Service<'_> {
        Service {
            core,
            listener,
            clients: Vec::new(),
            last_client: 0,
            accept_at: Instant::now(),
            room: message_room(),
        }
    }

    pub(super) fn run(mut self) {
        while !self.core.stops() {
            let (news, knock) = match self.wait() {
                Ok(found) => found,
                Err(error) => {
                    vmm_sys::say!(error, %error, "an exporter cannot wait for its clients; it ends");
                    return;
                }
            };
            self.serve(&news);
            if knock {
                self.accept();
            }
        }
    }

    /// Waits until there is news: of which clients, and whether somebody new wants something.
    fn wait(&self) -> rustix::io::Result<(Vec<News>, bool)> {
        let now = Instant::now();
        let knocks = if self.accept_at <= now { PollFlags::IN } else { PollFlags::empty() };
        let mut fds =
            vec![PollFd::new(&self.core.waker, PollFlags::IN), PollFd::new(&self.listener, knocks)];
        fds.extend(self.clients.iter().flat_map(|client| {
            let events = if client.listens() { PollFlags::IN } else { PollFlags::empty() };
            watch(client.socket.as_fd(), events, client.process.as_ref().map(AsFd::as_fd))
        }));
        let timeout = self.timeout(now).map(timespec);
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
        let mut told = fds.iter().skip(2).map(|fd| !fd.revents().is_empty());
        let mut news = Vec::with_capacity(self.clients.len());
        while let (Some(is_ready), Some(has_ended)) = (told.next(), told.next()) {
            news.push(News { is_ready, has_ended });
        }
        let knock = fds.get(1).is_some_and(|fd| fd.revents().contains(PollFlags::IN));
        let mut count = [0; 8];
        // Nothing to read is the usual case.
        let _ = rustix::io::read(&self.core.waker, &mut count);
        Ok((news, knock))
    }

    fn timeout(&self, now: Instant) -> Option<Duration> {
        let pause = (self.accept_at > now).then_some(self.accept_at);
        let looks = self.clients.iter().any(|it| !it.listens()).then(|| now + LOOK);
        let deadlines = self.clients.iter().filter_map(Client::deadline);
        let first = deadlines.chain(pause).chain(looks).min()?;
        Some(first.saturating_duration_since(now))
    }

    /// One message of each that has one, and a look at the clock for all.
    fn serve(&mut self, news: &[News]) {
        let now = Instant::now();
        let (core, room) = (self.core, &mut self.room);
        let mut news = news.iter().copied().chain(std::iter::repeat(News::default()));
        self.clients.retain_mut(|client| {
            let news = news.next().unwrap_or_default();
            let serve = || match (news.is_ready, client.listens()) {
                (true, true) => client.read(core, room).and_then(|()| client.tick(core, now)),
                // It was asked for nothing, so this is its end.
                (true, false) => Err(Cut(None)),
                // What it had to say is read.
                (false, _) if news.has_ended => Err(Cut(None)),
                (false, _) => client.tick(core, now),
            };
            // The thread serves others: a panic is the end of one.
            let served = thrown(serve).unwrap_or(Err(Cut(Some("its turn panicked".to_owned()))));
            let Err(Cut(why)) = served else { return true };
            if let Some(why) = why {
                count(&core.counts.cut);
                vmm_sys::say!(warn, client = client.number, why, "an importer was cut off");
            }
            core.forget_client(client.number);
            if let Some(keeper) = &core.keeper {
                keeper.gone(client.number);
            }
            false
        });
        core.counts.clients.store(self.clients.len() as u64, Ordering::Relaxed);
    }

    fn accept(&mut self) {
        for _ in 0..ACCEPTS_AT_ONCE {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            match accept_with(&self.listener, flags) {
                Ok(socket) => self.admit(socket),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(Errno::AGAIN) => return,
                Err(error) => {
                    vmm_sys::say!(warn, %error, "an importer could not be let in");
                    self.accept_at = Instant::now() + ACCEPT_PAUSE;
                    return;
                }
            }
        }
    }

    fn admit(&mut self, socket: OwnedFd) {
        step!("exporter-accepted");
        count(&self.core.counts.accepted);
        let peer = peer_credentials(&socket);
        self.last_client += 1;
        let until = Instant::now() + self.core.plan.timeout;
        let client = Client::new(self.last_client, socket, until);
        let refusal = match &peer {
            Err(error) => Some((Refusal::Peer, format!("who it is could not be found: {error}"))),
            Ok(peer) if !self.core.plan.rule.admits(peer) => {
                Some((Refusal::Peer, format!("user {} is not let in", peer.uid)))
            }
            Ok(_) if self.clients.len() >= self.core.plan.clients_max => {
                Some((Refusal::Full, format!("{} clients already", self.clients.len())))
            }
            Ok(_) => None,
        };
        match refusal {
            None => {
                if let (Some(keeper), Ok(peer)) = (&self.core.keeper, peer) {
                    keeper.came(client.number, peer);
                }
                self.clients.push(client);
            }
            Some((reason, why)) => {
                count(&self.core.counts.refused);
                // It is closed whether or not it reads this.
                let _ = client.refuse(0, reason, &why);
            }
        }
        self.core.counts.clients.store(self.clients.len() as u64, Ordering::Relaxed);
    }
}
