//! Memory of the pool for [`cuda_core`], NVIDIA's own Rust crate, by its hook for foreign allocations.
//!
//! cuda-core's accesses hold the block until their work is done, on whatever stream, so nobody has to tell the
//! pool of streams. The block goes back when the last view and the last access are gone.
//! docs/integrations/cuda-core.md has an example.

use std::sync::Arc;

use cuda_core::{Context, DeviceAllocation, RawDeviceBuffer, Stream};
use vmm_pool::{Buffer, Lane, Pool};
use vmm_sys::{DeviceId, DriverError, StreamHandle};

/// Why there is no block.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// The context is one of another device than the memory.
    #[error("a context of device {context}, and memory of device {memory}: expected the same")]
    OtherDevice {
        /// The context's.
        context: usize,
        /// The lane's.
        memory: u32,
    },
    /// The pool's answer.
    #[error(transparent)]
    Pool(#[from] vmm_pool::Error),
    /// The driver's answer.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

/// The lane of a stream of cuda-core's, which keeps the stream alive.
///
/// # Errors
/// A device that the pool does not manage, and the driver's answers.
pub fn lane_of(pool: &Pool, stream: &Arc<Stream>) -> Result<Lane, Failure> {
    // An ordinal comes from a C int.
    let device = DeviceId(stream.context().ordinal() as u32);
    let handle = StreamHandle(stream.cu_stream().addr() as u64);
    let keep = Box::new(stream.clone());
    // SAFETY: `keep` holds the stream, and the stream its context, the device's primary one.
    let stream =
        unsafe { vmm_sys::object::Stream::from_raw(pool.driver(), device, handle, Some(keep))? };
    Ok(pool.lane(&stream)?)
}

/// A block of the pool that cuda-core's buffers can lie in.
#[derive(Debug)]
pub struct PoolBlock {
    buffer: Buffer,
    context: Arc<Context>,
}

impl PoolBlock {
    /// Takes `bytes` from a lane, for use on any stream of `context`, the primary one of the lane's device.
    ///
    /// Waits for what is enqueued on the lane's stream: work that had the memory before may still run there,
    /// and nothing would order another stream behind it.
    ///
    /// # Errors
    /// [`Failure::OtherDevice`], and what [`Lane::alloc`] answers.
    pub fn alloc(lane: &Lane, context: &Arc<Context>, bytes: u64) -> Result<PoolBlock, Failure> {
        // SAFETY: what is enqueued from now on comes behind the wait.
        let block = unsafe { PoolBlock::alloc_in_order(lane, context, bytes)? };
        lane.stream().synchronize()?;
        Ok(block)
    }

    /// The same without the wait.
    ///
    /// # Safety
    /// The first use on each stream is ordered behind what is enqueued on the lane's stream now: it is that
    /// stream, or one that joined it.
    ///
    /// # Errors
    /// As [`PoolBlock::alloc`].
    pub unsafe fn alloc_in_order(
        lane: &Lane,
        context: &Arc<Context>,
        bytes: u64,
    ) -> Result<PoolBlock, Failure> {
        let memory = lane.device().0;
        if context.ordinal() != memory as usize {
            return Err(Failure::OtherDevice { context: context.ordinal(), memory });
        }
        Ok(PoolBlock { buffer: lane.alloc(bytes)?, context: context.clone() })
    }

    /// The block as cuda-core's bytes, all of it.
    pub fn into_storage(self) -> RawDeviceBuffer {
        let bytes = self.len_bytes();
        RawDeviceBuffer::foreign(Arc::new(self), bytes)
    }
}

// SAFETY: a buffer's address, length and memory stay as they are until it is dropped, and the context is
// held; it is the primary one of the device, in which the pool's memory is accessible.
unsafe impl DeviceAllocation for PoolBlock {
    fn device_ptr(&self) -> u64 {
        self.buffer.address()
    }

    fn len_bytes(&self) -> usize {
        self.buffer.bytes() as usize
    }

    fn context(&self) -> Arc<Context> {
        self.context.clone()
    }
}

/// The example of its page.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/integrations/cuda-core.md")]
mod page {}
