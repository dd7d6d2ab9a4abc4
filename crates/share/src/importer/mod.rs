//! [`Importer`]: maps buffers of other processes here.

mod body;
mod fetch;
mod import;
mod layout;
mod leftovers;
mod link;
mod refresh;
mod space;
mod uses;

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmm_sys::object::{Event, Range};
use vmm_sys::{AccessGrant, DeviceId, Driver, IpcEventHandle, Location};

use crate::address::Address;
use crate::error::{AtStep, ShareError};
use crate::page::NoticeReader;
use crate::steps::step;
use crate::wire::{Home, Message, NAME_BYTES_MAX, Ordering};

use body::Body;
use fetch::Cache;
use layout::{Gpus, Layout};
pub(crate) use link::Link;
use space::Space;

pub use import::{Import, ImportState, ImportedPiece};
pub use leftovers::retry_leftovers;
pub use refresh::Refreshed;
pub use uses::ImportUse;

/// Parts of an import's bytes: range, offset there, length.
type Parts = Vec<(Range, u64, u64)>;

/// What an importer wants to do with a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Reads only.
    Read,
    /// Reads and writes.
    ReadWrite,
}

/// How an importer connects and maps.
#[derive(Clone, Debug)]
pub struct ImporterOptions {
    driver: Arc<dyn Driver>,
    devices: Vec<DeviceId>,
    timeout: Duration,
    drop_patience: Duration,
}

impl ImporterOptions {
    /// The usual: each import is mapped for the GPUs on which its memory lies (device 0 for memory of
    /// the host); 5 s for each step.
    pub fn new(driver: Arc<dyn Driver>) -> ImporterOptions {
        ImporterOptions {
            driver,
            devices: Vec::new(),
            timeout: Duration::from_secs(5),
            drop_patience: Duration::from_secs(1),
        }
    }

    /// The devices that get access, as this process numbers them.
    pub fn devices(mut self, devices: impl IntoIterator<Item = DeviceId>) -> Self {
        self.devices = devices.into_iter().collect();
        self
    }

    /// How long each step of the other side may take.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// How long the drop of an import waits for work that uses it, before it leaves the memory to a
    /// later try ([`retry_leftovers`]). Default: 1 s.
    pub fn drop_patience(mut self, patience: Duration) -> Self {
        self.drop_patience = patience;
        self
    }
}

/// A connection to an exporter. Imports keep it open.
pub struct Importer {
    shared: Arc<Shared>,
}

/// What the imports of one connection share.
#[derive(Debug)]
struct Shared {
    link: Link,
    driver: Arc<dyn Driver>,
    gpus: Gpus,
    cache: Cache,
    options: ImporterOptions,
}

impl Importer {
    /// Connects to an exporter of this machine.
    ///
    /// # Errors
    /// [`ShareError::Refused`] says why one is not let in; [`ShareError::Timeout`],
    /// [`ShareError::Version`], [`ShareError::Protocol`], the operating system's; the driver's.
    pub fn connect(address: &Address, options: ImporterOptions) -> Result<Importer, ShareError> {
        let driver = options.driver.clone();
        if driver.is_gone() {
            return Err(ShareError::Forked { step: "connecting" });
        }
        let gpus = Gpus::ask(&*driver)?;
        let count = driver.device_count().at("counting the GPUs")?;
        if let Some(device) = options.devices.iter().find(|it| it.0 >= count) {
            return Err(ShareError::BadArgument {
                what: "devices",
                value: device.to_string(),
                expected: format!("ordinals below {count}"),
            });
        }
        let link = Link::connect(address, options.timeout)?;
        step!("importer-welcomed");
        let shared = Shared { link, driver, gpus, cache: Cache::default(), options };
        Ok(Importer { shared: Arc::new(shared) })
    }

    /// Opens a buffer by its name and maps what it has now, at an address of its own.
    ///
    /// # Errors
    /// [`ShareError::Refused`] (not offered, or not for writing); [`ShareError::NotVisibleHere`];
    /// [`ShareError::Changing`] if the owner changes the memory all the time; the errors of
    /// [`Importer::connect`]; the driver's. Nothing is mapped or open then.
    pub fn open(&self, name: &str, access: Access) -> Result<Import, ShareError> {
        open(&self.shared, name, access, 0)
    }

    /// The same, with addresses for a buffer of `room_bytes`, so that it can grow in place here.
    ///
    /// # Errors
    /// As [`Importer::open`].
    pub fn open_with_room(
        &self,
        name: &str,
        access: Access,
        room_bytes: u64,
    ) -> Result<Import, ShareError> {
        open(&self.shared, name, access, room_bytes)
    }

    /// The connection, for questions of another kind.
    pub(crate) fn link(&self) -> &Link {
        &self.shared.link
    }

    /// Whether the owner's process still has the connection open: one system call. After its end the
    /// imports say [`ImportState::OwnerGone`].
    pub fn is_owner_alive(&self) -> bool {
        self.shared.link.is_open()
    }

    /// The exporter's number, of 128 random bits: another run of it has another.
    pub fn exporter_id(&self) -> [u8; 16] {
        self.shared.link.exporter()
    }
}

impl fmt::Debug for Importer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Importer({:x?})", self.exporter_id())
    }
}

/// What the exporter says of a buffer at the opening.
struct Opened {
    export: u64,
    chunk_bytes: u64,
    page: NoticeReader,
    ordering: Ordering,
}

fn open(
    shared: &Arc<Shared>,
    name: &str,
    access: Access,
    room_bytes: u64,
) -> Result<Import, ShareError> {
    retry_leftovers();
    let Opened { export, chunk_bytes, page, ordering } = ask_to_open(&shared.link, name, access)?;
    step!("importer-opened");
    let deadline = Instant::now() + shared.link.timeout();
    let mut pause = Pause::default();
    let (layout, chunks) = loop {
        let layout = layout::describe(&shared.link, export, deadline)?;
        layout::check(&shared.link, &*shared.driver, &shared.gpus, &layout)?;
        let caches = (&shared.gpus, &shared.cache);
        if let Some(chunks) =
            fetch::chunks((&shared.link, &shared.driver), caches, export, &layout)?
        {
            break (layout, chunks);
        }
        if !pause.wait(deadline) {
            return Err(ShareError::Changing { step: "opening" });
        }
    };
    let devices = devices(shared, &layout)?;
    let granted = match access {
        Access::Read => vmm_sys::Access::Read,
        Access::ReadWrite => vmm_sys::Access::ReadWrite,
    };
    let grant = |device| AccessGrant { location: Location::Device(device), access: granted };
    let grants = devices.iter().copied().map(grant).collect();
    let bytes = layout.end_bytes().max(room_bytes).max(1).next_multiple_of(chunk_bytes);
    let mut space = Space::reserve(&shared.driver, bytes, grants)?;
    space.place("mapping", &layout.pieces, &chunks)?;
    let event = open_event(shared, ordering)?;
    let known = (name, export, access);
    let body = Body::new(
        (shared.clone(), devices),
        known,
        (page, event, chunk_bytes),
        (space, layout.generation),
    );
    Ok(Import::new(body))
}

fn ask_to_open(link: &Link, name: &str, access: Access) -> Result<Opened, ShareError> {
    const STEP: &str = "opening";
    const CHUNK_BYTES_MAX: u64 = 1 << 47;
    if name.is_empty() || name.len() > NAME_BYTES_MAX {
        return Err(ShareError::BadArgument {
            what: "name",
            value: name.to_owned(),
            expected: "1 to 255 bytes".to_owned(),
        });
    }
    let write = access == Access::ReadWrite;
    let (answer, mut files) = link.ask(STEP, Message::Open { name: name.to_owned(), write }, 1)?;
    let Message::Opened { export, write: theirs, chunk_bytes, ordering } = answer else {
        return Err(link.unexpected(STEP, "opened", &answer));
    };
    let file: Option<OwnedFd> = files.pop();
    let (Some(file), true) = (file, theirs == write) else {
        return Err(link.wrong(STEP, "a notice page and that access", "something else".to_owned()));
    };
    if chunk_bytes == 0 || chunk_bytes > CHUNK_BYTES_MAX {
        return Err(link.wrong(STEP, "the length of a chunk", chunk_bytes.to_string()));
    }
    Ok(Opened { export, chunk_bytes, page: NoticeReader::open(file)?, ordering })
}

/// The event by which the owner tells the order of its work, if it does it so.
fn open_event(shared: &Shared, ordering: Ordering) -> Result<Option<Event>, ShareError> {
    let Ordering::Event { device, handle } = ordering else { return Ok(None) };
    let Location::Device(device) = shared.gpus.location(Home::Gpu(device))? else {
        return Ok(None);
    };
    let event = Event::open(&shared.driver, device, &IpcEventHandle(handle));
    event.map(Some).at("opening the owner's event")
}

/// Who gets access: those named, or those on which the memory lies.
fn devices(shared: &Shared, layout: &Layout) -> Result<Vec<DeviceId>, ShareError> {
    if !shared.options.devices.is_empty() {
        return Ok(shared.options.devices.clone());
    }
    let mut devices = Vec::new();
    for piece in &layout.pieces {
        if let Location::Device(device) = shared.gpus.location(piece.home)?
            && !devices.contains(&device)
        {
            devices.push(device);
        }
    }
    if devices.is_empty() {
        devices.push(DeviceId(0));
    }
    Ok(devices)
}

/// Waits a little longer each time.
#[derive(Debug)]
struct Pause(Duration);

impl Default for Pause {
    fn default() -> Pause {
        Pause(Duration::from_micros(20))
    }
}

impl Pause {
    const MOST: Duration = Duration::from_millis(2);

    /// Whether the waiting has lasted for some turns.
    fn is_long(&self) -> bool {
        self.0 >= Self::MOST
    }

    /// Waits for a moment, unless the time is over: says so.
    fn wait(&mut self, deadline: Instant) -> bool {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return false;
        }
        std::thread::sleep(self.0.min(left));
        self.0 = (self.0 * 2).min(Self::MOST);
        true
    }
}
