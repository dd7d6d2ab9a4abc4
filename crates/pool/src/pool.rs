//! [`Pool`]: the façade. [`PoolBuilder`] validates its settings once.

mod builder;
mod facts;
mod recall;
mod room;
mod stock;

use std::sync::Arc;
use std::time::Duration;

use vmm_sys::object::Stream;
use vmm_sys::{Access, DeviceId, Driver, DriverError};

pub use builder::PoolBuilder;

use crate::access_matrix::AccessMatrix;
use crate::background::Background;
use crate::balance::Balancer;
use crate::device::Device;
use crate::elastic::operation::Operation;
use crate::elastic::{self, Contents, ElasticBuilder, ElasticError, ElasticStats, Slept};
use crate::error::Error;
use crate::host::Host;
use crate::ladder::Callbacks;
use crate::lane::{self, Lane, LaneCell, Wait};
use crate::lanes::{LaneRef, Lanes};
use crate::obstacle;
use crate::places::Places;
use crate::policy;
use crate::stats::{DeviceStats, PoolStats};
use crate::sync::atomic::Ordering;
use crate::trace::Recorder;
use crate::turn::Turn;

/// A pool of GPU memory over some of a host's devices. Clones share it.
///
/// Lanes stay open until the pool is dropped or [`Pool::close_lane`]; buffers may outlive the pool,
/// and then keep their own lane's memory until the last of them is dropped.
#[derive(Clone, Debug)]
pub struct Pool(Arc<PoolInner>);

/// What the handles share.
#[derive(Debug)]
pub(crate) struct PoolInner {
    places: Arc<Places>,
    /// Whom its devices ask when memory is short.
    callbacks: Arc<Callbacks>,
    exportable: bool,
    scrub_between_tags: bool,
    recorder: Option<Arc<Recorder>>,
    /// Held for its `Drop`, which ends the thread.
    _background: Option<Background>,
}

impl PoolInner {
    pub(crate) fn places(&self) -> &Arc<Places> {
        &self.places
    }

    /// Whether chunks of elastic buffers can be exported, unless a buffer says otherwise.
    pub(crate) fn exportable(&self) -> bool {
        self.exportable
    }

    /// Whether memory of one tag is zeroed before another gets it.
    pub(crate) fn tells_tags_apart(&self) -> bool {
        self.scrub_between_tags
    }

    pub(crate) fn recorder(&self) -> Option<&Arc<Recorder>> {
        self.recorder.as_ref()
    }
}

impl Pool {
    /// Starts the settings of a pool on `driver`.
    pub fn builder(driver: Arc<dyn Driver>) -> PoolBuilder {
        PoolBuilder::new(driver)
    }

    fn device(&self, device: DeviceId) -> Result<&Arc<Device>, Error> {
        if vmm_sys::process::is_forked_child() {
            return Err(Error::DriverGone);
        }
        self.0.places.device(device).ok_or(Error::UnknownDevice { device })
    }

    /// The lane of `stream`, made at the first call. Keep it: looking it up takes a lock.
    ///
    /// A lane belongs to (device, stream identity), not to a handle value: handles 0 and 1 are one
    /// lane, and [`Stream::per_thread`] has one for each thread. Any number of threads may use a
    /// lane; the memory is in the order of the lane's stream, whoever asked for it.
    ///
    /// # Errors
    /// [`Error::UnknownDevice`] if the pool does not manage the stream's device, or the stream is
    /// another driver's.
    pub fn lane(&self, stream: &Stream) -> Result<Lane, Error> {
        let device = self.device(stream.device())?;
        if !std::ptr::addr_eq(Arc::as_ptr(stream.driver()), Arc::as_ptr(&self.0.places.driver)) {
            return Err(Error::UnknownDevice { device: stream.device() });
        }
        let mut lanes = device.lanes.lock();
        let is_open = |lane: &LaneRef| lane.lock().is_some_and(|state| !state.closing);
        let lane = match lanes.of(stream.id()).filter(is_open) {
            Some(lane) => lane,
            None => {
                let lane = LaneCell::open(device.clone(), stream.clone(), self.0.recorder());
                lanes.add(stream.id(), lane);
                lane
            }
        };
        let ended = if stream.is_per_thread() { ended_lanes(&lanes) } else { Vec::new() };
        drop(lanes);
        ended.into_iter().for_each(|lane| lane::close(lane, true));
        Ok(Lane::new(lane, device.clone(), stream.clone(), self.0.clone()))
    }

    /// Says that `stream` is about to be gone: its lane takes no further requests, and gives
    /// everything back with its last buffer, behind the work enqueued on the stream. Waits for
    /// nothing.
    ///
    /// For a stream taken by its raw handle, with nothing that keeps it alive, call this after the
    /// last work that uses the lane's memory was enqueued, launches of graphs with memory of the
    /// stream's captures included, and destroy it afterwards: the end of that work is recorded now,
    /// and the handle is not used for the stream's lanes any more. Other streams are kept alive by
    /// the lane.
    ///
    /// Returns whether the stream may be destroyed now. It may not while it is being captured, for
    /// then nothing can be recorded on it (nor if the driver refused the record): keep it, and call
    /// this again after the capture.
    ///
    /// A stream that gets the same handle value later is another stream with another lane (row
    /// D-S1). Lanes of threads that have ended are closed when a lane for another thread is made.
    pub fn close_lane(&self, stream: &Stream) -> bool {
        self.try_close_lane(stream).unwrap_or(false)
    }

    /// The same for who wants to know why not: `false` only says that the stream is being captured.
    ///
    /// # Errors
    /// The driver's, which refused to record the end of the stream's work: keep the stream, and call this
    /// again.
    pub fn try_close_lane(&self, stream: &Stream) -> Result<bool, DriverError> {
        obstacle::forget();
        match self.may_go(stream) {
            true => Ok(true),
            false => obstacle::take().map_or(Ok(false), Err),
        }
    }

    /// Closes the lanes of a stream, and says whether none needs it any more.
    fn may_go(&self, stream: &Stream) -> bool {
        let Ok(device) = self.device(stream.device()) else { return true };
        if device.driver.is_gone() {
            return true;
        }
        let is_mine = |lane: &LaneRef| lane.lock().is_some_and(|it| it.stream.id() == stream.id());
        let mut lanes = device.lanes.lock().all();
        lanes.retain(is_mine);
        for lane in &lanes {
            match lane.lock().map(|state| state.is_private) {
                Some(true) => lane::gate_for_good(*lane),
                Some(false) => lane::close(*lane, true),
                None => {}
            }
        }
        let needs_handle = |lane: LaneRef| lane.lock().is_some_and(|it| it.needs_handle());
        let is_needed = lanes.into_iter().any(needs_handle);
        !stream.is_borrowed() || !is_needed && device.is_done_with(stream.id())
    }

    /// Starts the settings of an elastic buffer with home `device`: addresses of its own, whose
    /// memory grows and shrinks in place.
    pub fn elastic(&self, device: DeviceId) -> ElasticBuilder {
        ElasticBuilder::new(self.0.clone(), device)
    }

    /// Looks now whether a cold buffer is to move ([`PoolBuilder::balance`]), as the background
    /// thread does every 100 ms. Does nothing in a pool without balance, and waits for no move.
    pub fn rebalance(&self) {
        if vmm_sys::process::is_forked_child() {
            return;
        }
        if let Some(balancer) = &self.0.places.balancer {
            balancer.look(&self.0.places, true);
        }
    }

    /// Puts every elastic buffer with this tag to sleep: see [`ElasticBuffer::sleep`](crate::ElasticBuffer::sleep). Stops at the
    /// first that cannot; those before sleep, and it can be asked again.
    ///
    /// # Errors
    /// As [`ElasticBuffer::sleep`](crate::ElasticBuffer::sleep); [`ElasticError::UnknownTag`] if no buffer has the tag.
    pub fn sleep(&self, tag: &str, contents: Contents, patience: Duration) -> Result<Slept, Error> {
        self.of_tag(tag, |operation| operation.sleep(contents, patience))
    }

    /// Wakes every elastic buffer with this tag: see [`ElasticBuffer::wake`](crate::ElasticBuffer::wake). Stops at the first
    /// that cannot; those before are awake, and it can be asked again.
    ///
    /// # Errors
    /// As [`ElasticBuffer::wake`](crate::ElasticBuffer::wake); [`ElasticError::UnknownTag`] if no buffer has the tag.
    pub fn wake(&self, tag: &str) -> Result<Slept, Error> {
        self.of_tag(tag, |operation| operation.wake(Duration::ZERO))
    }

    fn of_tag(
        &self,
        tag: &str,
        change: impl Fn(&Operation<'_>) -> Result<Option<u64>, Error>,
    ) -> Result<Slept, Error> {
        if vmm_sys::process::is_forked_child() {
            return Err(Error::DriverGone);
        }
        let mut bodies = self.0.places.bodies();
        bodies.retain(|body| body.shape.tag.as_deref() == Some(tag));
        if bodies.is_empty() {
            return Err(ElasticError::UnknownTag { tag: tag.into() }.into());
        }
        let mut slept = Slept::default();
        for body in bodies {
            let Some(operation) = body.operate_unless_ended()? else { continue };
            if let Some(bytes) = change(&operation)? {
                slept.add(bytes);
            }
        }
        Ok(slept)
    }

    /// Chunks that stand at addresses of elastic buffers (count): the driver has a limit for the mappings
    /// of a context. Looks at no chunk.
    pub fn elastic_mappings(&self) -> u64 {
        let bodies = self.0.places.bodies();
        bodies.iter().map(|body| body.committed_bytes() / body.shape.chunk_bytes).sum()
    }

    /// The figures of every elastic buffer.
    pub fn elastic_stats(&self) -> Vec<ElasticStats> {
        let bodies = self.0.places.bodies();
        bodies.iter().map(|body| elastic::stats::stats(body)).collect()
    }

    /// Lets `accessor` use the memory of `owner`, or, with [`Access::None`], not any more: buffers of
    /// lanes, elastic buffers unless they were built to differ, and everything that comes later.
    /// All or nothing. Work that still uses what is taken away faults: wait for it first.
    ///
    /// # Errors
    /// [`ElasticError::NoPeer`](crate::ElasticError::NoPeer) names a pair that cannot work together;
    /// [`Error::UnknownDevice`]; [`ElasticError::HomeAccess`](crate::ElasticError::HomeAccess);
    /// [`ElasticError::Busy`](crate::ElasticError::Busy) from a hook; the driver's.
    pub fn grant(&self, owner: DeviceId, accessor: DeviceId, access: Access) -> Result<(), Error> {
        self.device(owner)?;
        policy::change(&self.0.places, owner, accessor, access)
    }

    /// What every device may do with the memory of every other: policy, buffers, what was found
    /// out, links. Pairs that nobody named are not touched.
    pub fn access_matrix(&self) -> AccessMatrix {
        if vmm_sys::process::is_forked_child() {
            return AccessMatrix::default();
        }
        crate::access_matrix::read(&self.0.places)
    }

    /// The figures of every device; of none in a forked child.
    pub fn stats(&self) -> PoolStats {
        if vmm_sys::process::is_forked_child() {
            return PoolStats::default();
        }
        let devices = self.0.places.devices.iter().map(|d| (d.plan.device, d.stats())).collect();
        let hosts = self.0.places.hosts.iter().map(Host::stats).collect();
        let balance = self.0.places.balancer.as_ref().map(Balancer::stats);
        let mut broken: Vec<_> =
            self.0.places.devices.iter().flat_map(|device| device.wrecks.broken()).collect();
        broken.extend(self.0.places.bodies().iter().filter_map(|body| body.broken()));
        let thread_panics = self.0.places.thread_panics.load(Ordering::Relaxed);
        PoolStats { devices, hosts, balance, broken, thread_panics }
    }

    /// The figures of one device, if the pool manages it.
    pub fn device_stats(&self, device: DeviceId) -> Option<DeviceStats> {
        self.device(device).ok().map(|device| device.stats())
    }

    /// Starts new peaks from the present figures.
    pub fn reset_peaks(&self) {
        if vmm_sys::process::is_forked_child() {
            return;
        }
        for device in &self.0.places.devices {
            device.reset_peaks();
        }
        self.0.places.hosts.iter().for_each(|host| host.depot.reset_peak());
    }

    /// Walks the whole pool and checks the invariants of docs/INVARIANTS.md.
    ///
    /// # Errors
    /// The first that does not hold, in words.
    pub fn verify(&self) -> Result<(), String> {
        if vmm_sys::process::is_forked_child() {
            return Err(Error::DriverGone.to_string());
        }
        self.0.places.devices.iter().try_for_each(|device| crate::verify::device(device))?;
        elastic::verify::buffers(&self.0.places)
    }

    /// The driver.
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.0.places.driver
    }

    /// The devices the pool manages.
    pub fn devices(&self) -> impl Iterator<Item = DeviceId> + '_ {
        self.0.places.devices.iter().map(|d| d.plan.device)
    }
}

/// Lanes of threads that have ended: nobody enqueues anything on their streams any more.
fn ended_lanes(lanes: &Lanes) -> Vec<LaneRef> {
    let ended = |lane: &LaneRef| {
        lane.lock()
            .is_some_and(|state| state.stream.has_ended() && !state.closing && !state.is_private)
    };
    lanes.all().into_iter().filter(ended).collect()
}

impl Drop for PoolInner {
    fn drop(&mut self) {
        if vmm_sys::process::is_forked_child() {
            vmm_sys::process::keep_in_forked_child(&self.places);
            return;
        }
        self.places.mover.end();
        for device in &self.places.devices {
            let lanes = device.lanes.lock().all();
            lanes.into_iter().for_each(|lane| lane::close(lane, false));
        }
        // Nobody comes by later.
        for site in self.places.sites() {
            site.sweep(Wait::Yes, Turn::Requester);
        }
    }
}
