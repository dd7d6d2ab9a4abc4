//! The pool under replay: a lane a stream, everything else as a user would have it.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use vmm_pool::{Buffer, ChunkSize, DebugMode, Error, Lane, Placement, Pool, text};
use vmm_sys::object::Stream;
use vmm_sys::{CallCounts, DeviceId, Driver, DriverKind};

use super::context::CurrentContext;
use super::{create_streams, driver_time};
use crate::replay::{Cause, DriverTime, Extent, Target};

/// The settings of a pool that a replay can vary.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PoolOptions {
    /// How large growth chunks are.
    pub chunk: ChunkSize,
    /// Which placement serves large blocks.
    pub placement: Placement,
    /// Fraction over peak live bytes up to which new memory is made before free chunks are moved.
    pub soft_limit: Option<f64>,
    /// When an idle lane is emptied.
    pub idle_lanes: IdleLanes,
    /// Whether stray writes are looked for.
    pub debug_mode: DebugMode,
    /// Whether the pool has its thread, whose calls come when they come. `None`: on a GPU, and not on
    /// the simulated device, where a replay makes the same calls each time.
    pub background: Option<bool>,
}

impl Default for PoolOptions {
    fn default() -> PoolOptions {
        PoolOptions {
            chunk: ChunkSize::Auto,
            placement: Placement::default(),
            soft_limit: Some(0.01),
            idle_lanes: IdleLanes::Auto,
            debug_mode: DebugMode::Off,
            background: None,
        }
    }
}

/// When an idle lane is emptied for others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IdleLanes {
    /// On a GPU after the pool's own time. Not on the simulated device: the figures there shall not
    /// depend on how fast this machine is.
    #[default]
    Auto,
    /// After so many milliseconds; never, if none are named.
    After(Option<u64>),
}

impl FromStr for IdleLanes {
    type Err = String;

    fn from_str(text: &str) -> Result<IdleLanes, String> {
        if text == "auto" {
            return Ok(IdleLanes::Auto);
        }
        let after = text::ms_or_off(text).map(IdleLanes::After);
        after.map_err(|error| format!("{error}, or `auto`"))
    }
}

impl fmt::Display for IdleLanes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            IdleLanes::Auto => f.write_str("auto"),
            IdleLanes::After(None) => f.write_str("off"),
            IdleLanes::After(Some(ms)) => write!(f, "{ms}"),
        }
    }
}

impl PoolOptions {
    /// Makes a pool on one device.
    ///
    /// # Errors
    /// A setting was refused, or the driver failed.
    pub fn build(&self, driver: &Arc<dyn Driver>, device: DeviceId) -> Result<Pool, Error> {
        let builder = Pool::builder(driver.clone())
            .device(device)
            .chunk(self.chunk)
            .placement(self.placement)
            .soft_limit(self.soft_limit)
            .debug_mode(self.debug_mode);
        let builder = match (self.idle_lanes, driver.kind()) {
            (IdleLanes::Auto, DriverKind::Cuda) => builder,
            (IdleLanes::Auto, DriverKind::Sim) => builder.idle_lane_ms(None),
            (IdleLanes::After(ms), _) => builder.idle_lane_ms(ms),
        };
        let usual = driver.kind() == DriverKind::Cuda;
        builder.background(self.background.unwrap_or(usual)).build()
    }
}

/// A pool with its lanes.
pub struct PoolTarget {
    pool: Pool,
    driver: Arc<dyn Driver>,
    device: DeviceId,
    streams: Vec<Stream>,
    lanes: Vec<Lane>,
    /// Last, so that it is dropped last.
    _context: CurrentContext,
}

impl PoolTarget {
    /// A fresh pool, with `streams` streams and a lane for each.
    ///
    /// # Errors
    /// A setting was refused, or the driver failed.
    pub fn new(
        driver: &Arc<dyn Driver>,
        device: DeviceId,
        options: &PoolOptions,
        streams: usize,
    ) -> Result<PoolTarget, Cause> {
        // Time inside driver calls is taken out of the pool's own.
        driver.ledger().set_timing(true);
        let context = CurrentContext::enter(driver, device)?;
        let pool = options.build(driver, device)?;
        let streams = create_streams(driver, device, streams)?;
        let lanes = streams.iter().map(|stream| pool.lane(stream)).collect::<Result<_, _>>()?;
        let driver = driver.clone();
        Ok(PoolTarget { pool, driver, device, streams, lanes, _context: context })
    }

    pub(super) fn streams(&self) -> &[Stream] {
        &self.streams
    }
}

impl Target for PoolTarget {
    type Block = Buffer;
    const IS_DRIVER: bool = false;

    fn alloc(&self, bytes: u64, stream: usize) -> Result<Buffer, Cause> {
        Ok(self.lanes[stream].alloc(bytes)?)
    }

    fn cross(&self, block: &mut Buffer, stream: usize) -> Result<(), Cause> {
        Ok(block.record_stream(&self.streams[stream])?)
    }

    fn free(&self, block: Buffer) -> Result<(), Cause> {
        drop(block);
        Ok(())
    }

    fn extent(&self, block: &Buffer) -> Extent {
        Extent { address: block.address(), bytes: block.bytes() }
    }

    fn begin_pass(&self) -> Result<(), Cause> {
        self.pool.reset_peaks();
        Ok(())
    }

    fn sample(&self) -> Result<(), Cause> {
        Ok(()) // the pool keeps its own peaks
    }

    fn peak_held_bytes(&self) -> Result<u64, Cause> {
        let stats = self.pool.device_stats(self.device);
        stats.map(|stats| stats.peak_held_bytes).ok_or_else(|| "the pool lost its device".into())
    }

    /// Also asks the pool to check its own books, as nothing is live now.
    fn settle(&self) -> Result<(), Cause> {
        self.driver.device_synchronize(self.device)?;
        Ok(self.pool.verify()?)
    }

    fn driver_calls(&self) -> CallCounts {
        self.driver.ledger().snapshot()
    }

    fn driver_time(&self) -> DriverTime {
        driver_time()
    }
}
