//! The driver's own allocators, through the same contract as the pool: what it is measured
//! against.
//!
//! On a GPU their calls are not taken apart by the ledger's clock: that would add to the very time
//! that is being measured.

use std::sync::Arc;

use vmm_sys::object::{Event, Stream};
use vmm_sys::{CallCounts, DeviceId, Driver, DriverKind, DriverResult};

use super::context::CurrentContext;
use super::held::HeldWatch;
use super::{create_streams, driver_time};
use crate::replay::{Cause, DriverTime, Extent, Target};

/// What a program gets for no bytes: the driver refuses such requests, so nobody makes them.
const NOTHING: Extent = Extent { address: 0, bytes: 0 };

/// What both have in common.
struct Common {
    driver: Arc<dyn Driver>,
    device: DeviceId,
    held: HeldWatch,
    /// Last, so that it is dropped last.
    _context: CurrentContext,
}

impl Common {
    fn new(driver: &Arc<dyn Driver>, device: DeviceId) -> DriverResult<Common> {
        // What simulating a call takes must be known, to be taken out.
        driver.ledger().set_timing(driver.kind() == DriverKind::Sim);
        // The context takes memory of its own: it has to be there before the watch starts.
        let context = CurrentContext::enter(driver, device)?;
        let held = HeldWatch::start(driver, device)?;
        Ok(Common { driver: driver.clone(), device, held, _context: context })
    }

    fn peak_held_bytes(&self) -> DriverResult<u64> {
        self.held.look()?;
        Ok(self.held.peak_bytes())
    }
}

/// `cuMemAlloc` and `cuMemFree`. Streams mean nothing to it: a free waits for the whole device.
pub struct CudaMalloc(Common);

impl CudaMalloc {
    /// On one device.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(driver: &Arc<dyn Driver>, device: DeviceId) -> Result<CudaMalloc, Cause> {
        Ok(CudaMalloc(Common::new(driver, device)?))
    }
}

impl Target for CudaMalloc {
    type Block = Extent;
    const IS_DRIVER: bool = true;

    fn alloc(&self, bytes: u64, _stream: usize) -> Result<Extent, Cause> {
        if bytes == 0 {
            return Ok(NOTHING);
        }
        let address = self.0.driver.mem_alloc(self.0.device, bytes)?;
        Ok(Extent { address, bytes })
    }

    fn cross(&self, _block: &mut Extent, _stream: usize) -> Result<(), Cause> {
        Ok(())
    }

    fn free(&self, block: Extent) -> Result<(), Cause> {
        if block == NOTHING {
            return Ok(());
        }
        Ok(self.0.driver.mem_free(self.0.device, block.address)?)
    }

    fn extent(&self, block: &Extent) -> Extent {
        *block
    }

    fn begin_pass(&self) -> Result<(), Cause> {
        Ok(self.0.held.reset()?)
    }

    fn sample(&self) -> Result<(), Cause> {
        Ok(self.0.held.look()?)
    }

    fn peak_held_bytes(&self) -> Result<u64, Cause> {
        Ok(self.0.peak_held_bytes()?)
    }

    fn settle(&self) -> Result<(), Cause> {
        Ok(self.0.driver.device_synchronize(self.0.device)?)
    }

    fn driver_calls(&self) -> CallCounts {
        self.0.driver.ledger().snapshot()
    }

    fn driver_time(&self) -> DriverTime {
        driver_time()
    }
}

/// `cuMemAllocAsync` and `cuMemFreeAsync` on the device's default pool, told to keep all it has
/// (release threshold at its maximum), as every program does that wants speed from it.
pub struct CudaMallocAsync {
    streams: Vec<Stream>,
    /// Recorded anew for each block that crosses: a wait takes the record that stands at its time.
    crossed: Event,
    /// Last, for the sake of the context in it.
    common: Common,
}

/// A block of [`CudaMallocAsync`].
#[derive(Debug)]
pub struct AsyncBlock {
    extent: Extent,
    stream: usize,
    /// The other stream that uses it.
    other: Option<usize>,
}

impl CudaMallocAsync {
    /// On one device, with streams of its own.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(
        driver: &Arc<dyn Driver>,
        device: DeviceId,
        streams: usize,
    ) -> Result<CudaMallocAsync, Cause> {
        let common = Common::new(driver, device)?;
        let streams = create_streams(driver, device, streams)?;
        let crossed = Event::create(driver, device)?;
        driver.mem_pool_set_release_threshold(device, u64::MAX)?;
        Ok(CudaMallocAsync { common, streams, crossed })
    }
}

impl Target for CudaMallocAsync {
    type Block = AsyncBlock;
    const IS_DRIVER: bool = true;

    #[allow(unsafe_code, reason = "the contract takes a stream as a handle")]
    fn alloc(&self, bytes: u64, stream: usize) -> Result<AsyncBlock, Cause> {
        let Common { driver, device, .. } = &self.common;
        if bytes == 0 {
            return Ok(AsyncBlock { extent: NOTHING, stream, other: None });
        }
        // SAFETY: the stream is live: `self` owns it.
        let address =
            unsafe { driver.mem_alloc_async(*device, bytes, self.streams[stream].handle())? };
        Ok(AsyncBlock { extent: Extent { address, bytes }, stream, other: None })
    }

    fn cross(&self, block: &mut AsyncBlock, stream: usize) -> Result<(), Cause> {
        block.other = Some(stream);
        Ok(())
    }

    #[allow(unsafe_code, reason = "the contract takes a stream as a handle")]
    fn free(&self, block: AsyncBlock) -> Result<(), Cause> {
        if block.extent == NOTHING {
            return Ok(());
        }
        let stream = &self.streams[block.stream];
        if let Some(other) = block.other {
            // The caller's part of the bargain: the free comes after the other stream's work.
            self.crossed.record(&self.streams[other])?;
            stream.wait_event(&self.crossed)?;
        }
        let Common { driver, device, .. } = &self.common;
        // SAFETY: the stream is live: `self` owns it.
        unsafe { driver.mem_free_async(*device, block.extent.address, stream.handle())? };
        Ok(())
    }

    fn extent(&self, block: &AsyncBlock) -> Extent {
        block.extent
    }

    fn begin_pass(&self) -> Result<(), Cause> {
        Ok(self.common.held.reset()?)
    }

    fn sample(&self) -> Result<(), Cause> {
        Ok(self.common.held.look()?)
    }

    fn peak_held_bytes(&self) -> Result<u64, Cause> {
        Ok(self.common.peak_held_bytes()?)
    }

    fn settle(&self) -> Result<(), Cause> {
        Ok(self.common.driver.device_synchronize(self.common.device)?)
    }

    fn driver_calls(&self) -> CallCounts {
        self.common.driver.ledger().snapshot()
    }

    fn driver_time(&self) -> DriverTime {
        driver_time()
    }
}

impl Drop for CudaMallocAsync {
    fn drop(&mut self) {
        let Common { driver, device, .. } = &self.common;
        // Gives the default pool's memory back, for whoever is measured next: with a threshold of
        // 0 it goes at the next synchronisation. A failure costs them memory, and shows there.
        let _ = driver.mem_pool_set_release_threshold(*device, 0);
        let _ = driver.device_synchronize(*device);
    }
}
