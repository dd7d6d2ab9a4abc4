//! [`ElasticBuffer`]: a range of addresses of its own, whose memory comes and goes.
//!
//! ```
//! # use vmm_pool::Pool;
//! # use vmm_sys::{DeviceId, Driver, object::Stream, sim::Sim};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let driver: std::sync::Arc<dyn Driver> = Sim::builder().build();
//! # let stream = Stream::create(&driver, DeviceId(0))?;
//! let pool = Pool::builder(driver.clone()).build()?;
//! let cache = pool.elastic(DeviceId(0)).capacity_bytes(1 << 40).build()?; // 1 TiB costs nothing
//! cache.grow_to(256 << 20)?; // now it has 256 MiB, at an address that never changes
//! {
//!     let _using = cache.use_on(&stream)?; // work of `stream` uses it
//!     // … launch kernels, replay graphs …
//! }
//! cache.shrink_to(64 << 20)?; // the rest goes once that work is done; nobody waits
//! # Ok(())
//! # }
//! ```
//!
//! `body`, `state`: what it is made of, and who may change it. `growth`, `commit`, `decommit`: memory
//! comes and goes; `borrow`: from lenders too. `access`: which devices may use it. `uses`: which
//! streams do; `copy`: copies within it; `bytes`: reads and writes from the host. `share`: one chunk at
//! several addresses. `scrub`: zeroing what others used; `outside`: descriptors for other processes and
//! drivers. `hooks`: who is told of changes. `ahead`: growth in the background. `terms`, `prepare`,
//! `relocate`, `take_back`: other places for the memory, by way of `door`, which keeps users out
//! meanwhile, and `copier`; asked for by `migrate` and `sleep`, by a lender (`recall`), by the pool
//! when a home has room again (`homecoming`) and when a device is short (`relief`). `progress`: what
//! others do for somebody. `alias`: addresses of a move that stay mapped. `stats`: figures and pieces.
//! `verify`: the walker.

pub(crate) mod access;
pub(crate) mod ahead;
mod alias;
pub(crate) mod body;
mod borrow;
mod builder;
mod bytes;
pub(crate) mod commit;
pub(crate) mod copier;
mod copy;
mod decommit;
pub(crate) mod door;
pub(crate) mod error;
mod growth;
pub(crate) mod homecoming;
mod hooks;
pub(crate) mod migrate;
pub(crate) mod operation;
mod outside;
mod prepare;
mod progress;
pub(crate) mod recall;
pub(crate) mod relief;
mod relocate;
mod scrub;
mod share;
pub(crate) mod sleep;
mod state;
pub(crate) mod stats;
mod take_back;
mod terms;
mod uses;
pub(crate) mod verify;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use vmm_sys::object::Stream;
use vmm_sys::{Access, DeviceId};

pub use ahead::{AheadState, GrowAhead};
pub use builder::ElasticBuilder;
pub use error::{ElasticError, LenderAnswer, PeerFault, Refusal};
pub(crate) use growth::by_distance;
pub use growth::{Grown, Growth};
pub use hooks::{BackingChange, BackingHook, Cause, Phase};
pub use migrate::{Migration, MigrationState, Move};
pub use outside::DmaBuf;
pub use recall::{NotRecalled, Recall};
pub use sleep::{Contents, Slept};
pub use stats::{ElasticStats, Piece};
pub use terms::Moved;
pub use uses::Use;

use crate::budget::Budget;
use crate::error::Error;
use crate::lane::Wait;
use crate::place::Place;
use crate::pool::PoolInner;
use crate::room::{self, Room};
use crate::turn::Turn;
use access::Word;
use body::Holder;
use commit::How;

/// Addresses of its own, for a capacity that is reserved at once, and physical memory behind them
/// that grows and shrinks in place by whole chunks.
///
/// Who owns the physical memory: the buffer alone; no chunk is shared with another buffer. Is the address stable: yes,
/// until the drop, whatever happens to the memory. Who may access: its home, and the devices that
/// the pool's policy and [`grant`](ElasticBuffer::grant) name.
///
/// The pool cannot see kernels: whatever uses the buffer says so with
/// [`use_on`](ElasticBuffer::use_on). Contents of memory that was committed anew are undefined.
///
/// Operations that change the memory run one at a time, whichever threads ask; figures and the
/// address never wait for one. It keeps its pool open.
pub struct ElasticBuffer {
    body: Holder,
    pool: Arc<PoolInner>,
}

impl ElasticBuffer {
    /// The device address, the same until the drop.
    pub fn address(&self) -> u64 {
        self.body.address()
    }

    /// The device whose memory it takes unless told otherwise.
    pub fn device(&self) -> DeviceId {
        self.body.home()
    }

    /// What can be committed, in bytes: reserved addresses.
    pub fn capacity_bytes(&self) -> u64 {
        self.body.shape.capacity_bytes
    }

    /// The length of a chunk: memory comes and goes by multiples of it.
    pub fn chunk_bytes(&self) -> u64 {
        self.body.shape.chunk_bytes
    }

    /// Its addresses with memory behind them, in bytes.
    pub fn committed_bytes(&self) -> u64 {
        self.body.committed_bytes()
    }

    /// Counts the changes of the memory behind the addresses.
    pub fn generation(&self) -> u64 {
        self.body.state().generation
    }

    /// The figures.
    pub fn stats(&self) -> ElasticStats {
        stats::stats(&self.body)
    }

    /// The physical pieces, by offset. They cover what is committed exactly.
    pub fn pieces(&self) -> Vec<Piece> {
        stats::pieces(&self.body)
    }

    /// Commits whatever is missing below `bytes`, rounded up to whole chunks. Returns the bytes
    /// committed anew. All or nothing: after an error the buffer is as it was, and
    /// [`shrink_to`](ElasticBuffer::shrink_to) takes back exactly what came.
    ///
    /// # Errors
    /// [`ElasticError::BeyondCapacity`], [`ElasticError::OverQuota`], [`Error::OutOfMemory`] after
    /// everything that could help was tried, [`ElasticError::NoPeer`] if a device that has access
    /// cannot use the memory, the driver's.
    pub fn grow_to(&self, bytes: u64) -> Result<u64, Error> {
        self.commit(0..bytes)
    }

    /// Commits whatever is missing in these bytes, whole chunks, anywhere within the capacity.
    ///
    /// # Errors
    /// As [`ElasticBuffer::grow_to`].
    pub fn commit(&self, range: Range<u64>) -> Result<u64, Error> {
        Ok(self.grow(range)?.bytes)
    }

    /// As [`ElasticBuffer::commit`], with memory of another place: of another device of the pool,
    /// or of the host. The places of one buffer's chunks may differ.
    ///
    /// The caller has chosen the place, so it counts as lent there but needs no lending budget, is
    /// not called back, and stays.
    ///
    /// # Errors
    /// As [`ElasticBuffer::grow_to`]; [`ElasticError::UnknownPlace`].
    pub fn commit_from(&self, place: Place, range: Range<u64>) -> Result<u64, Error> {
        Ok(self.grow(Growth::range(range).at(place))?.bytes)
    }

    /// Commits whatever is missing, as [`ElasticBuffer::commit`] does; what the home cannot give
    /// although everything was tried there is borrowed from those whom the request names
    /// ([`Growth::borrow_from`]), and the answer says so. All or nothing, over all places.
    ///
    /// ```
    /// # use vmm_pool::{Growth, Place, Pool};
    /// # use vmm_sys::{DeviceId, Driver, sim::Sim};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let driver: std::sync::Arc<dyn Driver> = Sim::builder().devices(2).device_bytes(1 << 30).build();
    /// let (home, neighbour) = (DeviceId(0), DeviceId(1));
    /// let pool = Pool::builder(driver).device(home).device(neighbour).lend(neighbour, 512 << 20).build()?;
    /// let cache = pool.elastic(home).capacity_bytes(2 << 30).build()?;
    /// let grown = cache.grow(Growth::to(1280 << 20).borrow_from_any())?;
    /// assert_eq!(grown.borrowed, [(Place::Device(neighbour), 256 << 20)]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`ElasticBuffer::grow_to`]; [`ElasticError::NobodyLends`] says what each lender answered;
    /// [`ElasticError::UnknownPlace`] if one is no place of the pool's.
    pub fn grow(&self, growth: impl Into<Growth>) -> Result<Grown, Error> {
        let growth = growth.into();
        let slots = growth.slots(&self.body)?;
        let operation = self.body.operate()?;
        self.body.check_awake()?;
        let place = growth.place.unwrap_or(Place::Device(self.device()));
        let how = How { place, turn: Turn::Requester, wait: Wait::Yes };
        operation.commit(slots.into_iter(), how, &growth.lenders)
    }

    /// What it could grow by now: see [`Pool::room`](crate::Pool::room), in its own chunks. Its quota
    /// and capacity are not counted.
    pub fn room(&self) -> Room {
        let props = |place| self.body.props(place);
        room::room(self.pool.places(), self.device(), props, self.chunk_bytes())
    }

    /// What its quota leaves, in bytes; `u64::MAX` if it has none. Others may share the quota.
    pub fn quota_room_bytes(&self) -> u64 {
        self.body.shape.quota.as_ref().map_or(u64::MAX, Budget::room_bytes)
    }

    /// Asks the background thread to do what [`ElasticBuffer::grow_to`] does, and returns at once.
    /// Requests that have not begun are joined: the largest counts. In a pool without that thread
    /// it is done here.
    ///
    /// # Errors
    /// [`ElasticError::BeyondCapacity`]; later ones are in the answer.
    pub fn grow_ahead(&self, bytes: u64) -> Result<GrowAhead, Error> {
        if vmm_sys::process::is_forked_child() {
            return Err(Error::DriverGone);
        }
        self.body.slots_over(0, bytes)?;
        let growth = self.body.ahead.ask(bytes);
        if !self.pool.places().signal.wake() {
            ahead::serve(&self.body, Turn::Requester);
        }
        Ok(growth)
    }

    /// Takes away all memory beyond `bytes`, rounded up to whole chunks. Returns the bytes taken.
    /// Waits for nothing: the memory goes once the work of its users is done.
    ///
    /// # Errors
    /// [`ElasticError::Busy`], [`Error::DriverGone`].
    pub fn shrink_to(&self, bytes: u64) -> Result<u64, Error> {
        let chunk_bytes = self.chunk_bytes();
        let keep_bytes = bytes.min(self.capacity_bytes()).next_multiple_of(chunk_bytes);
        self.decommit(keep_bytes..self.body.range.bytes())
    }

    /// Takes away the chunks that lie wholly in these bytes. Returns the bytes taken. The
    /// addresses stay the buffer's: using them before memory is committed there again is a fault.
    ///
    /// # Errors
    /// As [`ElasticBuffer::shrink_to`].
    pub fn decommit(&self, range: Range<u64>) -> Result<u64, Error> {
        let chunk_bytes = self.chunk_bytes();
        let first = range.start.div_ceil(chunk_bytes);
        let end = range.end.min(self.body.range.bytes()) / chunk_bytes;
        let operation = self.body.operate()?;
        self.body.check_awake()?;
        if end <= first {
            return Ok(0);
        }
        // Below the capacity's number of slots.
        let slots = self.body.state().slots_in(first as u32..end as u32);
        Ok(operation.decommit(slots.into_iter(), Cause::Decommit))
    }

    /// Says that work of `stream` is going to use the buffer: hold the answer until that work,
    /// graph launches included, is enqueued.
    ///
    /// # Errors
    /// [`ElasticError::NoAccess`] if the stream's device has no access to the buffer,
    /// [`ElasticError::StillUsed`] if its memory has earlier users on a stream that is being captured,
    /// [`Error::UnknownDevice`] if the stream belongs to another driver.
    pub fn use_on(&self, stream: &Stream) -> Result<Use, Error> {
        uses::Uses::begin(&self.body, stream)
    }

    /// Lets `device` use the buffer, memory that is committed later included. All or nothing; the
    /// pool's policy says nothing of `device` to this buffer from then on.
    /// [`Access::None`] takes its access away: work of that device that still uses the buffer
    /// faults, so wait for it first.
    ///
    /// # Errors
    /// [`ElasticError::NoPeer`] names a pair that cannot work together,
    /// [`ElasticError::HomeAccess`] if `device` is the home; the driver's.
    pub fn grant(&self, device: DeviceId, access: Access) -> Result<(), Error> {
        self.body.operate()?.grant(device, access, Word::Buffer)
    }

    /// Takes the access of `device` away: see [`ElasticBuffer::grant`].
    ///
    /// # Errors
    /// As [`ElasticBuffer::grant`].
    pub fn revoke(&self, device: DeviceId) -> Result<(), Error> {
        self.grant(device, Access::None)
    }

    /// What `device` may do with the buffer.
    pub fn access(&self, device: DeviceId) -> Access {
        self.body.state().access.get(&device).copied().unwrap_or(Access::None)
    }

    #[cfg(test)]
    pub(crate) fn body(&self) -> &body::Body {
        &self.body
    }

    /// Calls `hook` before and after each change of the memory behind the addresses, until the
    /// answer is dropped.
    ///
    /// Whoever registered the memory with a NIC, a collective library or another process lets go of
    /// it in [`Phase::Before`], and registers anew in [`Phase::After`] or [`Phase::Failed`]. The
    /// hook runs in the thread that makes the change, the background thread included, with no lock
    /// held: it may call the pool and this buffer, but change the memory only of other buffers that
    /// nobody is changing ([`ElasticError::Busy`]). One that panics is logged, and does no harm.
    pub fn on_backing_change(
        &self,
        hook: impl Fn(&BackingChange) + Send + Sync + 'static,
    ) -> BackingHook {
        self.body.hooks.add(hook)
    }
}

impl fmt::Debug for ElasticBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "ElasticBuffer({} of {} bytes at {:#x} of {})",
            self.committed_bytes(),
            self.capacity_bytes(),
            self.address(),
            self.device()
        )
    }
}
