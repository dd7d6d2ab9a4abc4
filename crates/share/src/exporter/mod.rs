//! [`Exporter`]: offers buffers of this process to others.

mod client;
mod core;
mod keeper;
mod maker;
mod offer;
mod publish;
mod rule;
mod service;
mod shelf;

use std::fmt;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{bind, connect, listen};
use vmm_pool::ElasticBuffer;
use vmm_sys::process;

use self::core::{Core, Plan};
use crate::address::Address;
use crate::error::{AtStep, ShareError};
use crate::socket::new_socket;
use crate::wire::NAME_BYTES_MAX;

pub use self::core::ExporterStats;
pub(crate) use keeper::Keeper;
pub use offer::Offer;
pub use rule::PeerRule;

use offer::OfferCore;
use service::Service;

/// How long the drop waits for the threads.
const STOP_PATIENCE: Duration = Duration::from_secs(5);
/// Connections that wait to be let in.
const BACKLOG: i32 = 64;

/// What importers may do with an offered buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Offered {
    /// Reads only: what is mapped through this crate is mapped for reading.
    Read,
    /// Reads, and writes for those who ask for it.
    ReadWrite,
}

/// Offers buffers of this process to others, over a socket of this machine. Dropped, it stops to
/// serve: those who have a buffer keep it, and learn that the owner is gone.
///
/// Two threads of its own serve it; neither waits for a client.
pub struct Exporter {
    core: Arc<Core>,
    address: Address,
    /// The file of the socket, by which another one at the same path is told apart.
    file: Option<(PathBuf, u64, u64)>,
}

/// Settings of an [`Exporter`].
#[derive(Clone, Debug)]
pub struct ExporterBuilder {
    plan: Plan,
}

impl Exporter {
    /// An exporter with the usual settings: processes of the same user, 64 at a time; descriptors are
    /// made ahead, at most 4096 of them.
    pub fn builder() -> ExporterBuilder {
        let plan = Plan {
            rule: PeerRule::SameUser,
            clients_max: 64,
            descriptors_max: 4096,
            reserve: 64,
            ahead: true,
            timeout: Duration::from_secs(5),
        };
        ExporterBuilder { plan }
    }

    /// Where it listens.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Offers a buffer by a name, until the answer is dropped. The buffer must have been built
    /// exportable. It goes on to grow, shrink, move and sleep as before: importers are told.
    ///
    /// # Errors
    /// [`ShareError::BadArgument`] for a name that is empty, too long or taken, or a buffer that is
    /// not exportable; the operating system's.
    pub fn offer(
        &self,
        name: &str,
        buffer: &Arc<ElasticBuffer>,
        offered: Offered,
    ) -> Result<Offer, ShareError> {
        if process::is_forked_child() {
            return Err(ShareError::Forked { step: "offering" });
        }
        let bad = |what, value: &str, expected: &str| {
            Err(ShareError::BadArgument {
                what,
                value: value.to_owned(),
                expected: expected.to_owned(),
            })
        };
        if name.is_empty() || name.len() > NAME_BYTES_MAX {
            return bad("name", name, "1 to 255 bytes");
        }
        if !buffer.is_exportable() {
            return bad("buffer", &format!("{buffer:?}"), "one that was built exportable");
        }
        let writable = offered == Offered::ReadWrite;
        let offer =
            self.core.add(name, |export| OfferCore::new((export, name), buffer, writable))?;
        // An error drops it, and so takes the name back.
        let offer = Offer::new(offer, &self.core, buffer)?;
        self.core.look_again(&offer.core);
        Ok(offer)
    }

    /// Has the service look whether its clients have answers.
    pub(crate) fn wake(&self) {
        self.core.wake_service();
    }

    /// The figures.
    pub fn stats(&self) -> ExporterStats {
        self.core.stats()
    }
}

impl ExporterBuilder {
    /// Who is let in. Default: processes of the same user.
    pub fn rule(mut self, rule: PeerRule) -> Self {
        self.plan.rule = rule;
        self
    }

    /// How many importers may be connected at a time. Default: 64.
    pub fn clients_max(mut self, clients: usize) -> Self {
        self.plan.clients_max = clients;
        self
    }

    /// How many descriptors may be kept at most: fewer if the process may not open as many. What goes
    /// beyond is made when it is asked for, and closed when it was sent. Default: 4096.
    pub fn descriptors_max(mut self, descriptors: usize) -> Self {
        self.plan.descriptors_max = descriptors;
        self
    }

    /// How many descriptors are left to the rest of the process. Default: 64.
    pub fn descriptors_reserved(mut self, descriptors: usize) -> Self {
        self.plan.reserve = descriptors;
        self
    }

    /// Whether descriptors are made before somebody asks for them. Default: true.
    pub fn ahead(mut self, on: bool) -> Self {
        self.plan.ahead = on;
        self
    }

    /// How long a client may take for its first word, and a step of its own for it. Default: 5 s.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.plan.timeout = timeout;
        self
    }

    /// Listens. A file that a dead exporter left at the path is replaced.
    ///
    /// # Errors
    /// [`ShareError::BadArgument`] for settings that leave nobody in; the operating system's: that
    /// the address is in use, above all.
    pub fn bind(self, address: Address) -> Result<Exporter, ShareError> {
        self.bind_with(address, None)
    }

    /// The same, with somebody who answers the questions that an exporter does not.
    pub(crate) fn bind_with(
        self,
        address: Address,
        keeper: Option<Arc<dyn Keeper>>,
    ) -> Result<Exporter, ShareError> {
        const STEP: &str = "starting an exporter";
        if process::is_forked_child() {
            return Err(ShareError::Forked { step: STEP });
        }
        if self.plan.clients_max == 0 {
            return Err(ShareError::BadArgument {
                what: "clients_max",
                value: "0".to_owned(),
                expected: "at least 1".to_owned(),
            });
        }
        let socket = listen_at(&address)?;
        let file = match &address {
            Address::Path(path) => {
                let mode = if matches!(self.plan.rule, PeerRule::SameUser) { 0o600 } else { 0o666 };
                fs::set_permissions(path, fs::Permissions::from_mode(mode)).at(STEP)?;
                let found = fs::metadata(path).at(STEP)?;
                Some((path.clone(), found.dev(), found.ino()))
            }
            Address::Abstract(_) => None,
        };
        let exporter = Exporter { core: Arc::new(Core::new(self.plan, keeper)?), address, file };
        exporter.start(socket)?;
        Ok(exporter)
    }
}

impl Exporter {
    fn start(&self, socket: OwnedFd) -> Result<(), ShareError> {
        let serve = move |core: &Core| Service::new(core, socket).run();
        self.spawn("vmm-share-serve", serve)?;
        self.spawn("vmm-share-make", maker::run)
    }

    fn spawn(
        &self,
        name: &str,
        run: impl FnOnce(&Core) + Send + 'static,
    ) -> Result<(), ShareError> {
        /// Says that the thread has ended, whatever it ended by.
        struct Running(Arc<Core>);
        impl Drop for Running {
            fn drop(&mut self) {
                self.0.end_thread();
            }
        }
        self.core.begin_thread();
        let running = Running(self.core.clone());
        let spawned = thread::Builder::new().name(name.to_owned()).spawn(move || run(&running.0));
        spawned.map(drop).at("starting an exporter's thread")
    }
}

/// A socket that listens there.
fn listen_at(address: &Address) -> Result<OwnedFd, ShareError> {
    const STEP: &str = "listening";
    const FREE: &str = "a place that may be written to, and where nobody listens";
    let name = address.to_socket(STEP)?;
    let socket = new_socket().at(STEP)?;
    match (bind(&socket, &name), address) {
        (Err(Errno::ADDRINUSE), Address::Path(path)) if is_left_over(path)? => {
            fs::remove_file(path).at(STEP)?;
            bind(&socket, &name).at(STEP)?;
        }
        (bound, _) => bound.map_err(|cause| address.failed(STEP, cause, FREE))?,
    }
    listen(&socket, BACKLOG).at(STEP)?;
    Ok(socket)
}

/// Whether there is a socket to which nobody listens any more.
fn is_left_over(path: &Path) -> Result<bool, ShareError> {
    const STEP: &str = "looking for another exporter";
    if !fs::symlink_metadata(path).at(STEP)?.file_type().is_socket() {
        return Ok(false);
    }
    let name = Address::Path(path.to_owned()).to_socket(STEP)?;
    let socket = new_socket().at(STEP)?;
    Ok(connect(&socket, &name) == Err(Errno::CONNREFUSED))
}

impl fmt::Debug for Exporter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Exporter({})", self.address)
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        // Sockets, file and threads are the parent's.
        if process::is_forked_child() {
            return;
        }
        if let Some((path, device, inode)) = &self.file
            && let Ok(found) = fs::symlink_metadata(path)
            && (found.dev(), found.ino()) == (*device, *inode)
            && let Err(error) = fs::remove_file(path)
            && error.kind() != io::ErrorKind::NotFound
        {
            vmm_sys::say!(warn, %error, "an exporter's socket could not be removed");
        }
        if !self.core.stop(STOP_PATIENCE) {
            vmm_sys::say!(warn, "an exporter's threads are still busy; they end on their own");
        }
    }
}
