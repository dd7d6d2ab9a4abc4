//! What the engine asks of an allocator.

use vmm_sys::CallCounts;

use super::Cause;

/// Where a block lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First byte.
    pub address: u64,
    /// Bytes that the holder may use.
    pub bytes: u64,
}

/// The time that driver calls of the calling thread have taken so far.
///
/// Two figures, because on the simulated device they differ: its calls take host time to simulate
/// and are *charged* what the call would cost on a GPU. On a GPU both are the measured time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DriverTime {
    /// Host nanoseconds that passed inside driver calls.
    pub spent_ns: u64,
    /// Nanoseconds that the calls are reported with.
    pub charged_ns: u64,
}

impl DriverTime {
    /// What was added after `earlier`.
    pub fn since(self, earlier: DriverTime) -> DriverTime {
        DriverTime {
            spent_ns: self.spent_ns - earlier.spent_ns,
            charged_ns: self.charged_ns - earlier.charged_ns,
        }
    }
}

/// An allocator under replay.
pub trait Target {
    /// What it hands out for one allocation.
    type Block;

    /// Whether an operation *is* a driver call. Then the mean time of an operation includes the
    /// time inside the driver; else it is the allocator's own host time.
    const IS_DRIVER: bool;

    /// Allocates on the stream with this index.
    ///
    /// # Errors
    /// The allocator's own report.
    fn alloc(&self, bytes: u64, stream: usize) -> Result<Self::Block, Cause>;

    /// Tells the allocator that work on another stream uses the block.
    ///
    /// # Errors
    /// The allocator's own report.
    fn cross(&self, block: &mut Self::Block, stream: usize) -> Result<(), Cause>;

    /// Frees, in the order of the block's own stream.
    ///
    /// # Errors
    /// The allocator's own report.
    fn free(&self, block: Self::Block) -> Result<(), Cause>;

    /// Where the block lies.
    fn extent(&self, block: &Self::Block) -> Extent;

    /// A pass begins: peaks start from what is held now.
    ///
    /// # Errors
    /// A driver call failed.
    fn begin_pass(&self) -> Result<(), Cause>;

    /// Called now and then during a timed pass, and when live bytes are at their peak, outside of
    /// every measured time: for allocators whose held memory can only be asked of the driver.
    ///
    /// # Errors
    /// A driver call failed.
    fn sample(&self) -> Result<(), Cause>;

    /// The most physical memory held since [`Target::begin_pass`], in bytes.
    ///
    /// # Errors
    /// A driver call failed.
    fn peak_held_bytes(&self) -> Result<u64, Cause>;

    /// Waits until the GPU has nothing left to do.
    ///
    /// # Errors
    /// A driver call failed.
    fn settle(&self) -> Result<(), Cause>;

    /// The driver calls made so far.
    fn driver_calls(&self) -> CallCounts;

    /// The time inside driver calls of this thread so far.
    fn driver_time(&self) -> DriverTime;
}
