//! Settings: given to the builder as they come, validated once into plain numbers ([`Plan`]).

mod environment;
pub mod text;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

use vmm_sys::caught::caught;
use vmm_sys::topology;
use vmm_sys::{
    Access, Call, ChunkProps, DeviceId, Driver, DriverError, GranularityKind, ResultCode,
};

use crate::depot::Terms;
use crate::elastic::error::ElasticError;
use crate::error::Error;
use crate::host::HostSettings;
use crate::place::Place;
use crate::trace::Recorder;
use crate::turn::Turn;

/// A lane that rested so long is emptied: longer than the pauses of work that goes on (a step, a
/// checkpoint, a quiet moment of a server), and so long that bringing everything back, some 30 us a
/// chunk, is lost in it. Allocators of host memory take the same time to let go of pages.
const IDLE_LANE_MS: u64 = 10_000;
/// Smallest and largest growth chunk that [`ChunkSize::Auto`] chooses.
const AUTO_CHUNK_MIN_BYTES: u64 = 2 << 20;
const AUTO_CHUNK_MAX_BYTES: u64 = 32 << 20;
// Lanes align their ranges to it, and the directory wants no two lanes in one page.
const _: () = assert!(AUTO_CHUNK_MAX_BYTES >= 1 << crate::directory::PAGE_SHIFT);

/// How large the physical chunks are that a lane grows by. The one knob that matters: 2 MiB is
/// tightest, 32 MiB is the fastest start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChunkSize {
    /// A power of two near the lane's peak live bytes / 256, within 2..32 MiB.
    Auto,
    /// Always this many bytes: a power of two, and a multiple of the granularity.
    Fixed(u64),
}

pub use vmm_heap::Placement;

/// What a pool does so that errors of its users show, at a price.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum DebugMode {
    /// Nothing.
    #[default]
    Off,
    /// Each block has mappings of its own, with unmapped addresses behind them, and is unmapped when
    /// it is freed and its users are done: stray work faults instead of harming others' memory.
    Guard,
}

/// The settings of a pool, as given. [`crate::PoolBuilder`] fills it.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) devices: Vec<DeviceId>,
    pub(crate) chunk: ChunkSize,
    pub(crate) placement: Placement,
    pub(crate) soft_limit: Option<f64>,
    pub(crate) limit_bytes: Option<u64>,
    pub(crate) stock_low_bytes: u64,
    pub(crate) stock_high_bytes: u64,
    pub(crate) background: bool,
    pub(crate) idle_lane_ms: Option<u64>,
    /// Whether chunks of elastic buffers can be exported, unless a buffer says otherwise.
    pub(crate) exportable: bool,
    /// Whether memory of one tag is zeroed before another gets it.
    pub(crate) scrub_between_tags: bool,
    /// Owner, who else may use its memory, and how.
    pub(crate) access: Vec<(DeviceId, DeviceId, Access)>,
    /// Host nodes that may give memory.
    pub(crate) hosts: Vec<HostSettings>,
    /// Places that lend to buffers whose home is elsewhere, and how much.
    pub(crate) lends: Vec<(Place, u64)>,
    /// Whether borrowed memory comes home by itself.
    pub(crate) return_home: bool,
    pub(crate) debug_mode: DebugMode,
    /// Where to record what the pool is asked.
    pub(crate) trace: Option<PathBuf>,
    /// Settings that came out of the environment.
    origins: Vec<Origin>,
}

/// Where a setting came from, so that an error can name it.
#[derive(Clone, Debug)]
struct Origin {
    /// As errors name it.
    setting: &'static str,
    variable: &'static str,
    value: OsString,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            devices: Vec::new(),
            chunk: ChunkSize::Auto,
            placement: Placement::FirstFit,
            soft_limit: Some(0.01),
            limit_bytes: None,
            stock_low_bytes: 0,
            stock_high_bytes: u64::MAX,
            background: true,
            idle_lane_ms: Some(IDLE_LANE_MS),
            exportable: false,
            scrub_between_tags: false,
            access: Vec::new(),
            hosts: Vec::new(),
            lends: Vec::new(),
            return_home: true,
            debug_mode: DebugMode::Off,
            trace: None,
            origins: Vec::new(),
        }
    }
}

/// The validated settings of one device's pool: plain numbers that later code cannot misuse.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) device: DeviceId,
    pub(crate) props: ChunkProps,
    /// The driver's granularity for `props`: the length of a slot.
    pub(crate) granularity_bytes: u64,
    pub(crate) chunk: ChunkSize,
    pub(crate) chunk_min_bytes: u64,
    pub(crate) chunk_max_bytes: u64,
    pub(crate) placement: Placement,
    pub(crate) soft_limit: Option<f64>,
    pub(crate) limit_bytes: u64,
    pub(crate) stock_low_bytes: u64,
    pub(crate) stock_high_bytes: u64,
    /// After which time without use a lane is emptied for others.
    pub(crate) idle_lane_ms: Option<u64>,
    pub(crate) debug_mode: DebugMode,
    /// What elastic buffers whose home is elsewhere may borrow.
    pub(crate) lends_bytes: u64,
    /// What a lane reserves first; it is extended by need.
    pub(crate) reserve_bytes: u64,
    /// Largest alignment a request may ask for: every range starts at a multiple of it.
    pub(crate) align_max_bytes: u64,
    /// Largest request that is not refused outright.
    pub(crate) request_max_bytes: u64,
}

impl Plan {
    /// The device as a place of memory.
    pub(crate) fn terms(&self) -> Terms {
        Terms {
            plain: self.props,
            warmer: self.device,
            granularity_bytes: self.granularity_bytes,
            stock_chunk_bytes: self.stock_chunk_bytes(),
            limit_bytes: self.limit_bytes,
            stock_high_bytes: self.stock_high_bytes,
            lends_bytes: self.lends_bytes,
            lends_to_any: true,
        }
    }

    /// The length of chunks made ahead of need: the longest that growth asks for, since long
    /// chunks cost least a byte and the stock serves shorter needs by creation.
    pub(crate) fn stock_chunk_bytes(&self) -> u64 {
        self.chunk_max_bytes
    }
}

impl Settings {
    /// The name of the setting in errors.
    pub(crate) const TRACE: &str = "trace";

    /// What a pool behaves by, for the reader of a trace.
    pub(crate) fn in_words(&self) -> String {
        let off = |bytes: Option<u64>| bytes.map_or("off".to_owned(), |bytes| bytes.to_string());
        let chunk = match self.chunk {
            ChunkSize::Auto => "auto".to_owned(),
            ChunkSize::Fixed(bytes) => bytes.to_string(),
        };
        format!(
            "chunk {chunk}, placement {}, soft limit {}, limit {}, stock {} to {}, idle lanes {}, \
             debug mode {}",
            text::placement_name(self.placement),
            self.soft_limit.map_or("off".to_owned(), |fraction| fraction.to_string()),
            off(self.limit_bytes),
            self.stock_low_bytes,
            off(Some(self.stock_high_bytes).filter(|bytes| *bytes != u64::MAX)),
            self.idle_lane_ms.map_or("off".to_owned(), |ms| format!("{ms} ms")),
            text::debug_mode_name(self.debug_mode),
        )
    }

    /// Starts the recording, if one is asked for.
    pub(crate) fn start_recorder(&self) -> Result<Option<Arc<Recorder>>, Error> {
        let Some(path) = &self.trace else { return Ok(None) };
        Recorder::start(path, self).map(Some).map_err(|error| self.blame_variable(error))
    }

    /// Which other devices may use the memory of `owner`, and how; the last word of each counts.
    pub(crate) fn policy(&self, owner: DeviceId) -> Vec<(DeviceId, Access)> {
        let named =
            self.access.iter().filter(|(of, accessor, _)| *of == owner && *accessor != owner);
        let latest: BTreeMap<DeviceId, Access> =
            named.map(|(_, accessor, access)| (*accessor, *access)).collect();
        latest.into_iter().filter(|(_, access)| *access != Access::None).collect()
    }

    /// What a place lends, if anything was said of it.
    pub(crate) fn lends(&self, place: Place) -> Option<u64> {
        self.lends.iter().find(|(of, _)| *of == place).map(|(_, bytes)| *bytes)
    }

    /// Refuses lenders that the pool does not know.
    pub(crate) fn check_lenders(&self) -> Result<(), Error> {
        self.lends.iter().try_for_each(|&(place, _)| {
            let is_known = match place {
                Place::Device(device) => self.devices.contains(&device),
                Place::HostNuma(node) => self.hosts.iter().any(|host| host.node == node),
            };
            if is_known { Ok(()) } else { Err(ElasticError::UnknownPlace { place }.into()) }
        })
    }

    fn refuse(setting: &'static str, value: impl ToString, expected: String) -> Error {
        Error::BadSetting { setting, value: value.to_string(), expected }
    }

    /// Checks the settings against what `device` says of itself, after trying that the device can
    /// serve a pool at all.
    pub(crate) fn validate(
        &self,
        driver: &Arc<dyn Driver>,
        device: DeviceId,
    ) -> Result<Plan, Error> {
        self.check(driver, device).map_err(|error| self.blame_variable(error))
    }

    fn check(&self, driver: &Arc<dyn Driver>, device: DeviceId) -> Result<Plan, Error> {
        let count = caught(Call::DeviceGetCount, || driver.device_count())?;
        if device.0 >= count {
            return Err(Self::refuse("device", device.0, format!("an ordinal below {count}")));
        }
        probe(driver, device)?;
        let props = ChunkProps::on_device(device);
        let granularity_bytes = caught(Call::MemGetAllocationGranularity, || {
            driver.granularity(&props, GranularityKind::Minimum)
        })?;
        if !granularity_bytes.is_power_of_two() || granularity_bytes < vmm_heap::GRANULE_BYTES {
            let expected = format!("a power of two of at least {} bytes", vmm_heap::GRANULE_BYTES);
            return Err(Self::refuse("granularity of the driver", granularity_bytes, expected));
        }
        if let Some(fraction) = self.soft_limit
            && !(fraction.is_finite() && (0.0..=1000.0).contains(&fraction))
        {
            return Err(Self::refuse("soft limit", fraction, "a fraction in 0..=1000".into()));
        }
        if self.stock_low_bytes > self.stock_high_bytes {
            let expected = format!("at most the high mark, {} bytes", self.stock_high_bytes);
            return Err(Self::refuse("low mark of the stock", self.stock_low_bytes, expected));
        }
        if self.idle_lane_ms == Some(0) {
            let expected = "at least 1 millisecond, or off";
            return Err(Self::refuse("time of an idle lane", 0, expected.into()));
        }
        let (chunk_min_bytes, chunk_max_bytes) = self.chunk_bounds(granularity_bytes)?;
        // Advice only: a device that cannot say its size can still be used (its limit is what the
        // driver refuses).
        let told_bytes =
            caught(Call::DeviceTotalMem, || driver.device_total_bytes(device)).unwrap_or(0);
        let total_bytes = told_bytes.max(64 * chunk_max_bytes);
        let limit_bytes = match self.limit_bytes {
            Some(limit) if limit < granularity_bytes => {
                let expected = format!("at least the granularity, {granularity_bytes} bytes");
                return Err(Self::refuse("limit", limit, expected));
            }
            Some(limit) => limit - limit % granularity_bytes,
            None => u64::MAX,
        };
        if self.stock_low_bytes > self.limit_bytes.unwrap_or(u64::MAX) {
            let expected = "at most the limit".into();
            return Err(Self::refuse("low mark of the stock", self.stock_low_bytes, expected));
        }
        let align_max_bytes = chunk_max_bytes.max(AUTO_CHUNK_MAX_BYTES);
        Ok(Plan {
            device,
            props,
            granularity_bytes,
            chunk: self.chunk,
            chunk_min_bytes,
            chunk_max_bytes,
            placement: self.placement,
            soft_limit: self.soft_limit,
            limit_bytes,
            // The limit may have been rounded down.
            stock_low_bytes: self.stock_low_bytes.min(limit_bytes),
            stock_high_bytes: self.stock_high_bytes,
            idle_lane_ms: self.idle_lane_ms,
            debug_mode: self.debug_mode,
            lends_bytes: self.lends(Place::Device(device)).unwrap_or(0),
            // A quarter of the device, so that hundreds of lanes fit in the 128 TiB of addresses.
            reserve_bytes: (total_bytes / 4).next_power_of_two().max(align_max_bytes),
            align_max_bytes,
            request_max_bytes: request_max_bytes(granularity_bytes, told_bytes),
        })
    }

    fn chunk_bounds(&self, granularity_bytes: u64) -> Result<(u64, u64), Error> {
        match self.chunk {
            ChunkSize::Auto => {
                let min = AUTO_CHUNK_MIN_BYTES.max(granularity_bytes);
                Ok((min, AUTO_CHUNK_MAX_BYTES.max(min)))
            }
            ChunkSize::Fixed(bytes)
                if bytes.is_power_of_two() && bytes >= granularity_bytes && bytes <= 1 << 34 =>
            {
                Ok((bytes, bytes))
            }
            ChunkSize::Fixed(bytes) => Err(Self::refuse(
                "chunk",
                bytes,
                format!(
                    "a power of two from {granularity_bytes} bytes (the granularity) to 16 GiB"
                ),
            )),
        }
    }
}

/// Calls that no lane can do without and that the try below does not make: who a stream is (CUDA 12.0), and
/// whether it is captured.
const NEEDED: [Call; 2] = [Call::StreamGetId, Call::StreamGetCaptureInfo];

/// Tries once that virtual memory management works on the device: what an attribute promises may
/// be refused by any later call, and the first allocation is too late to find out.
fn probe(driver: &Arc<dyn Driver>, device: DeviceId) -> Result<(), Error> {
    // One turn for all calls of the try: it is short, and made once.
    let found = Turn::Requester.with(|| topology::try_vmm(driver, device));
    let Err(cause) = found.usable() else { return check_calls(driver, device) };
    if cause.is_out_of_memory() {
        // A full device is not an unable one, and building needs no memory.
        vmm_sys::say!(warn, %cause, "virtual memory management could not be tried: memory is short");
        return Ok(());
    }
    Err(unsupported(device, cause))
}

fn check_calls(driver: &Arc<dyn Driver>, device: DeviceId) -> Result<(), Error> {
    let missing = driver.missing_calls();
    let Some(call) = NEEDED.into_iter().find(|call| missing.contains(call)) else { return Ok(()) };
    let cause = DriverError::new(call, ResultCode::NOT_FOUND).on(device);
    Err(unsupported(device, cause.because("the driver is too old to have this call")))
}

fn unsupported(device: DeviceId, cause: DriverError) -> Error {
    if cause.is_driver_gone() || cause.is_sticky() {
        return cause.into();
    }
    if cause.is_out_of_addresses() {
        return Error::OutOfAddresses { bytes: AUTO_CHUNK_MIN_BYTES, cause };
    }
    Error::Unsupported { device, step: cause.call(), cause }
}

/// The largest request that is not refused outright. Far above the device's memory, were it even
/// told wrongly, since what the device says is advice; far below where sums of sizes or numbers of
/// slots could wrap. A hopeless request must not make tables for addresses that nobody can fill.
fn request_max_bytes(granularity_bytes: u64, device_bytes: u64) -> u64 {
    let addressable = (1 << 46).min(granularity_bytes << 25);
    match device_bytes {
        0 => addressable,
        told => addressable.min(told.saturating_mul(4).max(64 << 30)),
    }
}
