//! [`Pool`]: the façade, and the builder that validates once.

use std::sync::Arc;

use vmm_sys::object::Stream;
use vmm_sys::{DeviceId, Driver};

use crate::background::Background;
use crate::budget::Budget;
use crate::config::{ChunkSize, Placement, Settings};
use crate::device::{Device, Shortage};
use crate::error::Error;
use crate::ladder::{self, Callback};
use crate::lane::{self, Lane, LaneCell, Wait};
use crate::lanes::{LaneRef, Lanes};
use crate::out_of_memory::{Asked, OutOfMemory};
use crate::stats::{DeviceStats, PoolStats};
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
    driver: Arc<dyn Driver>,
    devices: Vec<Arc<Device>>,
    recorder: Option<Arc<Recorder>>,
    /// Held for its `Drop`, which ends the thread.
    _background: Option<Background>,
}

impl PoolInner {
    pub(crate) fn recorder(&self) -> Option<&Arc<Recorder>> {
        self.recorder.as_ref()
    }
}

/// Settings of a pool; see [`Pool::builder`].
#[derive(Clone, Debug)]
pub struct PoolBuilder {
    driver: Arc<dyn Driver>,
    settings: Settings,
    budgets: Vec<(DeviceId, Budget)>,
    callbacks: Vec<Callback>,
}

impl PoolBuilder {
    /// Adds a device. Without any, the pool manages device 0. Devices not named are never touched.
    pub fn device(mut self, device: DeviceId) -> Self {
        if !self.settings.devices.contains(&device) {
            self.settings.devices.push(device);
        }
        self
    }

    /// How large the chunks are that lanes grow by. Default: [`ChunkSize::Auto`].
    pub fn chunk(mut self, chunk: ChunkSize) -> Self {
        self.settings.chunk = chunk;
        self
    }

    /// How large blocks are placed. Default: first fit by address, the denser one.
    pub fn placement(mut self, placement: Placement) -> Self {
        self.settings.placement = placement;
        self
    }

    /// While a lane holds at most (1 + this) x its peak live bytes it takes new memory; beyond, it
    /// reuses its own free chunks first. `None` is off: then a warm lane never calls the driver.
    /// Default: 0.01.
    pub fn soft_limit(mut self, fraction: Option<f64>) -> Self {
        self.settings.soft_limit = fraction;
        self
    }

    /// The most physical memory the pool may own on each device, in bytes; rounded down to the
    /// granularity. Default: none.
    pub fn limit_bytes(mut self, bytes: u64) -> Self {
        self.settings.limit_bytes = Some(bytes);
        self
    }

    /// The marks of each device's stock, in bytes. Below `low` the background thread makes chunks
    /// ahead of need; above `high` chunks that come back are released. Default: 0 and no end.
    pub fn stock_marks(mut self, low_bytes: u64, high_bytes: u64) -> Self {
        self.settings.stock_low_bytes = low_bytes;
        self.settings.stock_high_bytes = high_bytes;
        self
    }

    /// Whether a thread keeps the marks and retires old mappings in the background. Without it,
    /// requests do that work when they come. Default: true.
    pub fn background(mut self, on: bool) -> Self {
        self.settings.background = on;
        self
    }

    /// Memory of `device` counts against `budget` too, which other pools may share. The last one
    /// given counts. Default: none.
    pub fn budget(mut self, device: DeviceId, budget: Budget) -> Self {
        self.budgets.push((device, budget));
        self
    }

    /// Asked, in the order given, when nothing of the pool's own helps a request: `callback` gets
    /// the device and the bytes asked for, and says whether it freed something. It runs with no
    /// lock held and may allocate and free.
    pub fn on_shortage(
        mut self,
        callback: impl Fn(DeviceId, u64) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.callbacks.push(Callback(Arc::new(callback)));
        self
    }

    /// Records what the pool is asked in the file at `path`, as `vmm-pool replay` reads it: for bug
    /// reports, since all lanes share one lock meanwhile. A file that stands there is overwritten;
    /// `%p` in the name is the number of the process. Default: nothing is recorded.
    pub fn trace_to(mut self, path: impl Into<std::path::PathBuf>) -> Self {
        self.settings.trace = Some(path.into());
        self
    }

    /// Takes every setting that a `VMM_POOL_…` variable of the process environment names, in place
    /// of the builder's own. docs/CONFIGURATION.md lists them. A variable of that prefix with
    /// another name is warned of; an empty one counts as not set.
    ///
    /// # Errors
    /// [`Error::BadSetting`] names the variable, its value, and what is expected.
    pub fn environment(mut self) -> Result<Self, Error> {
        self.settings.merge_environment()?;
        Ok(self)
    }

    /// Builds the pool: each device is tried once, settings are checked, and stock is made up to
    /// the low mark.
    ///
    /// # Errors
    /// [`Error::Unsupported`] names the device and the call that it refuses; [`Error::BadSetting`]
    /// names the setting; the driver's errors; out of memory if the low mark cannot be stocked.
    pub fn build(self) -> Result<Pool, Error> {
        let PoolBuilder { driver, mut settings, budgets, callbacks } = self;
        if settings.devices.is_empty() {
            settings.devices.push(DeviceId(0));
        }
        let span = tracing::debug_span!("vmm_pool.build", devices = settings.devices.len());
        let _entered = span.enter();
        let mut devices = Vec::with_capacity(settings.devices.len());
        for device in &settings.devices {
            let plan = settings.validate(&driver, *device)?;
            let budget = budgets.iter().rev().find(|(of, _)| of == device).map(|(_, b)| b.clone());
            let device = Device::new(driver.clone(), plan, budget, callbacks.clone());
            devices.push(Arc::new(device));
        }
        for device in &devices {
            ladder::register(device);
            let (low, high) = (device.plan.stock_low_bytes, device.plan.stock_high_bytes);
            fill(device, low, high)?;
        }
        let recorder = settings.start_recorder()?;
        let background = settings.background.then(|| Background::start(devices.clone())).flatten();
        Ok(Pool(Arc::new(PoolInner { driver, devices, recorder, _background: background })))
    }
}

/// Makes chunks until the shelf holds `bytes`. Returns the bytes made.
fn fill(device: &Device, bytes: u64, most_bytes: u64) -> Result<u64, Error> {
    if bytes == 0 {
        return Ok(0);
    }
    let span = tracing::debug_span!("vmm_pool.stock", device = device.plan.device.0, bytes);
    let _entered = span.enter();
    device.stock_up(bytes, most_bytes, Turn::Requester, &|| false).map_err(
        |shortage| match shortage {
            Shortage::Limit => stock_shortage(device, bytes, None),
            Shortage::Driver(error) if error.is_out_of_memory() => {
                stock_shortage(device, bytes, Some(error))
            }
            Shortage::Driver(error) => error.into(),
        },
    )
}

/// The device is not asked for its free memory: it may have no context yet, and asking would make
/// one, which takes memory.
fn stock_shortage(device: &Device, bytes: u64, cause: Option<vmm_sys::DriverError>) -> Error {
    let granularity_bytes = device.plan.granularity_bytes;
    let rounded_bytes = bytes.checked_next_multiple_of(granularity_bytes).unwrap_or(bytes);
    let asked = Asked { bytes, rounded_bytes, may_wait: true };
    Error::OutOfMemory(Box::new(OutOfMemory::new(device, asked, None, None, cause)))
}

impl Pool {
    /// Starts the settings of a pool on `driver`.
    pub fn builder(driver: Arc<dyn Driver>) -> PoolBuilder {
        PoolBuilder {
            driver,
            settings: Settings::default(),
            budgets: Vec::new(),
            callbacks: Vec::new(),
        }
    }

    fn device(&self, device: DeviceId) -> Result<&Arc<Device>, Error> {
        let found = self.0.devices.iter().find(|d| d.plan.device == device);
        found.ok_or(Error::UnknownDevice { device })
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
        if vmm_sys::process::is_forked_child() {
            return Err(Error::DriverGone);
        }
        let device = self.device(stream.device())?;
        if !std::ptr::addr_eq(Arc::as_ptr(stream.driver()), Arc::as_ptr(&self.0.driver)) {
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
    /// last work that uses the lane's memory was enqueued, and destroy it afterwards: the end of
    /// that work is recorded now, and the handle is not used for the lane any more (unless the
    /// recording failed, as it does while the stream is being captured). Other streams are kept
    /// alive by the lane.
    ///
    /// A stream that gets the same handle value later is another stream with another lane (row
    /// D-S1). Lanes of threads that have ended are closed when a lane for another thread is made.
    pub fn close_lane(&self, stream: &Stream) {
        let Ok(device) = self.device(stream.device()) else { return };
        let lane = device.lanes.lock().of(stream.id());
        lane.into_iter().for_each(|lane| lane::close(lane, true));
    }

    /// Makes chunks ahead of need until the stock of `device` holds `bytes`. Returns the bytes
    /// made.
    ///
    /// # Errors
    /// Out of memory, of the limit or of the driver; what was made stays in the stock.
    pub fn prefill(&self, device: DeviceId, bytes: u64) -> Result<u64, Error> {
        fill(self.device(device)?, bytes, u64::MAX)
    }

    /// Gives everything idle on `device` back to the driver: free chunks of every lane, and the
    /// stock. Waits for the work that may still use it. Returns the bytes given back.
    ///
    /// # Errors
    /// [`Error::UnknownDevice`].
    pub fn trim(&self, device: DeviceId) -> Result<u64, Error> {
        let device = self.device(device)?;
        if device.driver.is_gone() {
            return Err(Error::DriverGone);
        }
        let span = tracing::debug_span!("vmm_pool.trim", device = device.plan.device.0);
        let _entered = span.enter();
        let before = device.held_bytes();
        let lanes = device.lanes.lock().all();
        for lane in lanes {
            lane::trim(lane, Wait::Yes, Turn::Requester);
        }
        device.leaving.sweep(device, Wait::Yes, Turn::Requester);
        device.release_stock(0, Turn::Requester);
        Ok(before.saturating_sub(device.held_bytes()))
    }

    /// The figures of every device.
    pub fn stats(&self) -> PoolStats {
        let devices = self.0.devices.iter().map(|d| (d.plan.device, d.stats())).collect();
        PoolStats { devices }
    }

    /// The figures of one device, if the pool manages it.
    pub fn device_stats(&self, device: DeviceId) -> Option<DeviceStats> {
        self.device(device).ok().map(|device| device.stats())
    }

    /// Starts new peaks from the present figures.
    pub fn reset_peaks(&self) {
        for device in &self.0.devices {
            device.reset_peaks();
        }
    }

    /// Walks the whole pool and checks the invariants of docs/INVARIANTS.md.
    ///
    /// # Errors
    /// The first that does not hold, in words.
    pub fn verify(&self) -> Result<(), String> {
        self.0.devices.iter().try_for_each(|device| crate::verify::device(device))
    }

    /// The driver.
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.0.driver
    }

    /// The devices the pool manages.
    pub fn devices(&self) -> impl Iterator<Item = DeviceId> + '_ {
        self.0.devices.iter().map(|d| d.plan.device)
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
            return;
        }
        for device in &self.devices {
            let lanes = device.lanes.lock().all();
            lanes.into_iter().for_each(|lane| lane::close(lane, false));
            // Nobody comes by later.
            device.leaving.sweep(device, Wait::Yes, Turn::Requester);
        }
    }
}
