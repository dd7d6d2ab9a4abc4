//! [`PoolBuilder`]: the settings of a pool, and the building of it.

use std::sync::Arc;
use std::time::Duration;

use vmm_sys::{Access, DeviceId, Driver};

use super::stock::fill;
use super::{Pool, PoolInner};
use crate::background::Background;
use crate::balance::{Balance, Balancer};
use crate::budget::Budget;
use crate::config::{ChunkSize, DebugMode, Placement, Settings};
use crate::device::Device;
use crate::error::Error;
use crate::host::{Host, HostSettings};
use crate::idle::Clock;
use crate::ladder::{self, Callbacks, Relief, Reliefs};
use crate::place::Place;
use crate::places::Places;

/// Settings of a pool; see [`Pool::builder`].
#[derive(Clone, Debug)]
pub struct PoolBuilder {
    driver: Arc<dyn Driver>,
    settings: Settings,
    budgets: Vec<(DeviceId, Budget)>,
    callbacks: Callbacks,
    reliefs: Reliefs,
    clock: Clock,
    balance: Option<Balance>,
}

impl PoolBuilder {
    pub(super) fn new(driver: Arc<dyn Driver>) -> PoolBuilder {
        PoolBuilder {
            driver,
            settings: Settings::default(),
            budgets: Vec::new(),
            callbacks: Callbacks::default(),
            reliefs: Reliefs::default(),
            clock: Clock::default(),
            balance: None,
        }
    }

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

    /// While a device holds at most (1 + this) x the peak of what its lanes together had alive,
    /// lanes take new memory; beyond, they reuse their own free chunks first, then those of other
    /// lanes that no stream uses any more. Nobody waits for that. `None` is off: then chunks stay
    /// where they are while memory can be had, and a warm lane never calls the driver.
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

    /// Whether a thread keeps the marks, retires old mappings and empties idle lanes in the
    /// background. Without it, requests do that work when they come. Default: true.
    pub fn background(mut self, on: bool) -> Self {
        self.settings.background = on;
        self
    }

    /// A lane that was not used for `ms` milliseconds, and at most a quarter more, gives its wholly
    /// free chunks to the device's stock, for other lanes; beyond the stock's high mark they go back
    /// to the driver. Used again, it brings them back as any miss does. `None` is off: chunks then
    /// leave a lane only when memory is short, or by [`Pool::trim`]. Default: 10,000.
    pub fn idle_lane_ms(mut self, ms: Option<u64>) -> Self {
        self.settings.idle_lane_ms = ms;
        self
    }

    /// What the pool does so that errors of its users show. Default: [`DebugMode::Off`].
    pub fn debug_mode(mut self, mode: DebugMode) -> Self {
        self.settings.debug_mode = mode;
        self
    }

    /// Where the pool reads the time that idle memory is judged by: since some fixed moment, and
    /// never backwards. It must not call the pool. For tests and simulations. Default: the monotonic
    /// clock of the system.
    pub fn clock(mut self, now: impl Fn() -> Duration + Send + Sync + 'static) -> Self {
        self.clock = Clock(Arc::new(now));
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
        self,
        callback: impl Fn(DeviceId, u64) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.callbacks.push(callback);
        self
    }

    /// Asked after the callbacks, for requests that may borrow ([`crate::Request::may_borrow`]), to make
    /// room by means of a neighbour. Then, and without it, the pool makes room itself if it can: what
    /// was borrowed from the device moves home, and buffers that are
    /// [`movable`](crate::ElasticBuilder::movable) to devices that lend.
    pub fn neighbour(mut self, relief: impl Relief + 'static) -> Self {
        self.reliefs.neighbour = Some(Arc::new(relief));
        self
    }

    /// As [`PoolBuilder::neighbour`], by means of the host's memory, and asked last; the
    /// pool moves to the nodes of the host that lend.
    pub fn host(mut self, relief: impl Relief + 'static) -> Self {
        self.reliefs.host = Some(Arc::new(relief));
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

    /// The same, of variables that `lookup` gives: for programs whose settings come from elsewhere than
    /// the environment of the process.
    ///
    /// # Errors
    /// As [`PoolBuilder::environment`].
    pub fn variables(
        mut self,
        lookup: &dyn Fn(&str) -> Option<std::ffi::OsString>,
    ) -> Result<Self, Error> {
        self.settings.merge(lookup)?;
        Ok(self)
    }

    /// Lets `accessor` use the memory of `owner`, a device of this pool: buffers of its lanes, and
    /// its elastic buffers unless one says otherwise. The pair is tried when the pool is built, by
    /// reading bytes. The last word about a pair counts. Default: every device uses its own memory.
    pub fn access(mut self, owner: DeviceId, accessor: DeviceId, access: Access) -> Self {
        self.settings.access.push((owner, accessor, access));
        self
    }

    /// Whether chunks of elastic buffers can be exported to other processes, unless a buffer says
    /// otherwise. Such chunks cost 10 to 18 us a call more. Default: false.
    pub fn exportable(mut self, on: bool) -> Self {
        self.settings.exportable = on;
        self
    }

    /// Whether the owners of elastic buffers are told apart by their tags: memory that buffers of one tag
    /// used is zeroed before those of another, or of none, get it, and lanes get none that a tag used.
    /// Default: false.
    pub fn scrub_between_tags(mut self, on: bool) -> Self {
        self.settings.scrub_between_tags = on;
        self
    }

    /// Lets chunks of elastic buffers lie in the memory of a NUMA node of the host, `limit_bytes` at
    /// most. The background thread keeps `stock_bytes` of it ready, since making it is slow: 246 ms
    /// a GiB. Nothing goes there unless somebody names the place. The last word about a node
    /// counts. Default: no node.
    pub fn host_memory(mut self, node: u32, limit_bytes: u64, stock_bytes: u64) -> Self {
        self.settings.hosts.retain(|known| known.node != node);
        let lends_bytes = None;
        self.settings.hosts.push(HostSettings { node, limit_bytes, stock_bytes, lends_bytes });
        self
    }

    /// Lets elastic buffers whose home is elsewhere borrow memory of `place`, `budget_bytes` at most
    /// together, when their home is short ([`Growth::borrow_from`](crate::Growth::borrow_from)).
    /// What it gives is counted on both sides, and can be called back ([`Pool::recall`]). The last
    /// word about a place counts.
    ///
    /// Default: a device lends nothing. A node of the host lends, to those who name it, all that
    /// [`PoolBuilder::host_memory`] lets the pool have there; with this it lends to those who name
    /// nobody too. Memory that is placed somewhere by name needs no budget.
    pub fn lend(mut self, place: impl Into<Place>, budget_bytes: u64) -> Self {
        let place = place.into();
        self.settings.lends.retain(|(known, _)| *known != place);
        self.settings.lends.push((place, budget_bytes));
        self
    }

    /// Whether borrowed memory moves to its buffer's home by itself: when the home has room for all
    /// that the buffer borrowed and an eighth more, at the earliest a second after it last borrowed,
    /// and while no guard of it is alive. It needs the background thread. What was placed elsewhere
    /// by name stays there. Default: true.
    pub fn return_home(mut self, on: bool) -> Self {
        self.settings.return_home = on;
        self
    }

    /// Moves cold elastic buffers that allow it from a full device to an empty one, in the
    /// background: see [`Balance`]. Without a background thread, [`Pool::rebalance`] looks. Off unless
    /// said so.
    pub fn balance(mut self, balance: Balance) -> Self {
        self.balance = Some(balance);
        self
    }

    /// Builds the pool: each device is tried once, settings are checked, and stock is made up to
    /// the low mark.
    ///
    /// # Errors
    /// [`Error::Unsupported`] names the device and the call that it refuses; [`Error::BadSetting`]
    /// names the setting; the driver's errors; out of memory if the low mark cannot be stocked;
    /// [`ElasticError::NoPeer`](crate::ElasticError::NoPeer) names a pair of devices that cannot do
    /// what the policy says, [`ElasticError::NoHostMemory`](crate::ElasticError::NoHostMemory) a node
    /// whose memory they cannot use;
    /// [`ElasticError::UnknownPlace`](crate::ElasticError::UnknownPlace) a lender that is no place of
    /// the pool's.
    pub fn build(self) -> Result<Pool, Error> {
        let PoolBuilder { driver, mut settings, budgets, callbacks, reliefs, clock, balance } =
            self;
        balance.map_or(Ok(()), |balance| balance.check())?;
        if settings.devices.is_empty() {
            settings.devices.push(DeviceId(0));
        }
        settings.check_lenders()?;
        let _within = vmm_sys::within!("vmm_pool.build", devices = settings.devices.len());
        let callbacks = Arc::new(callbacks);
        let mut devices = Vec::with_capacity(settings.devices.len());
        for device in &settings.devices {
            let plan = settings.validate(&driver, *device)?;
            let budget = budgets.iter().rev().find(|(of, _)| of == device).map(|(_, b)| b.clone());
            let (callbacks, reliefs) = (callbacks.clone(), reliefs.clone());
            let (clock, policy) = (clock.clone(), settings.policy(*device));
            let device =
                Device::new(driver.clone(), plan, budget, callbacks, reliefs, clock, policy);
            devices.push(Arc::new(device));
        }
        for device in &devices {
            ladder::register(device);
            let (low, high) = (device.plan.stock_low_bytes, device.plan.stock_high_bytes);
            fill(device, low, high)?;
        }
        let recorder = settings.start_recorder()?;
        let open = |host: &HostSettings| {
            let lends_bytes = settings.lends(Place::HostNuma(host.node));
            Host::open(HostSettings { lends_bytes, ..*host }, &devices, clock.clone())
        };
        let hosts: Result<Vec<Host>, Error> = settings.hosts.iter().map(open).collect();
        let balancer = balance.map(|balance| Balancer::new(balance, clock.clone()));
        let returns_home = settings.return_home;
        let places = Arc::new(Places::new(driver, devices, hosts?, balancer, returns_home));
        for device in &places.devices {
            device.belongs_to(&places);
            let owner = device.plan.device;
            for (accessor, _) in settings.policy(owner) {
                places.peers.ensure(&places, owner, accessor)?;
            }
        }
        let background = settings.background.then(|| Background::start(places.clone())).flatten();
        let inner = PoolInner {
            places,
            callbacks,
            exportable: settings.exportable,
            scrub_between_tags: settings.scrub_between_tags,
            recorder,
            _background: background,
        };
        Ok(Pool(Arc::new(inner)))
    }
}
