//! Frees with GPU work behind them: [`Late`] puts work on a block's streams just before the block is
//! freed, that ends a set time later. So nothing that was freed is idle at once, as in a program
//! whose GPU runs behind its host.

use std::sync::Arc;
use std::time::Duration;

use vmm_pool::Buffer;
use vmm_sys::object::Stream;
use vmm_sys::sim::Sim;
use vmm_sys::{CallCounts, DeviceId, Driver, DriverResult};

use super::gates::Gates;
use super::{PoolOptions, PoolTarget};
use crate::replay::{Cause, DriverTime, Extent, Target};

/// A driver on which work can be made to end late.
#[derive(Clone, Debug)]
pub enum LateDriver {
    /// The simulated device: work takes virtual time.
    Sim(Arc<Sim>),
    /// A GPU: streams wait for words of host memory, which a thread writes.
    Gpu(Arc<dyn Driver>),
}

/// What keeps the streams busy.
enum Work {
    Sim(Arc<Sim>, DeviceId),
    Gpu(Gates),
}

/// The pool, with work behind every free.
pub struct Late {
    // First, so that its end finds the streams going on.
    pool: PoolTarget,
    work: Work,
    late_us: u64,
}

/// A block, and the streams that use it.
pub struct LateBlock {
    buffer: Buffer,
    home: usize,
    other: Option<usize>,
}

impl Late {
    /// A fresh pool as [`PoolTarget::new`] makes it; what is freed is in use for `late_us`
    /// microseconds more.
    ///
    /// # Errors
    /// A setting was refused, or the driver failed.
    pub fn new(
        driver: &LateDriver,
        device: DeviceId,
        options: &PoolOptions,
        streams: usize,
        late_us: u64,
    ) -> Result<Late, Cause> {
        let contract: Arc<dyn Driver> = match driver {
            LateDriver::Sim(sim) => sim.clone(),
            LateDriver::Gpu(driver) => driver.clone(),
        };
        let pool = PoolTarget::new(&contract, device, options, streams)?;
        let work = match driver {
            LateDriver::Sim(sim) => Work::Sim(sim.clone(), device),
            LateDriver::Gpu(driver) => {
                let late = Duration::from_micros(late_us);
                Work::Gpu(Gates::start(driver, device, pool.streams(), late)?)
            }
        };
        Ok(Late { pool, work, late_us })
    }

    fn keep_busy(&self, stream: usize) -> DriverResult<()> {
        match &self.work {
            Work::Sim(sim, device) => {
                let stream: &Stream = &self.pool.streams()[stream];
                sim.keep_busy(*device, stream.handle(), self.late_us)
            }
            Work::Gpu(gates) => gates.hold(stream),
        }
    }
}

impl Target for Late {
    type Block = LateBlock;
    const IS_DRIVER: bool = false;

    fn alloc(&self, bytes: u64, stream: usize) -> Result<LateBlock, Cause> {
        Ok(LateBlock { buffer: self.pool.alloc(bytes, stream)?, home: stream, other: None })
    }

    fn cross(&self, block: &mut LateBlock, stream: usize) -> Result<(), Cause> {
        block.other = Some(stream);
        self.pool.cross(&mut block.buffer, stream)
    }

    fn free(&self, block: LateBlock) -> Result<(), Cause> {
        self.keep_busy(block.home)?;
        if let Some(other) = block.other {
            self.keep_busy(other)?;
        }
        self.pool.free(block.buffer)
    }

    fn extent(&self, block: &LateBlock) -> Extent {
        self.pool.extent(&block.buffer)
    }

    fn begin_pass(&self) -> Result<(), Cause> {
        self.pool.begin_pass()
    }

    fn sample(&self) -> Result<(), Cause> {
        self.pool.sample()
    }

    fn peak_held_bytes(&self) -> Result<u64, Cause> {
        self.pool.peak_held_bytes()
    }

    fn settle(&self) -> Result<(), Cause> {
        self.pool.settle()
    }

    fn driver_calls(&self) -> CallCounts {
        self.pool.driver_calls()
    }

    fn driver_time(&self) -> DriverTime {
        self.pool.driver_time()
    }
}
