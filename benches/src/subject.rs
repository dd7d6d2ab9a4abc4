//! What is measured, behind two verbs.
//!
//! Every workload is generic over its subject, so that all of them run the same loop, each with the
//! subject's own code inlined.

use std::convert::Infallible;
use std::sync::Arc;

use vmm_heap::{Heap, HeapConfig};
use vmm_pool::{Buffer, Lane, Placement, Pool};
use vmm_pool_cli::replay::{Cause, Target};
use vmm_sys::object::Stream;
use vmm_sys::{DeviceId, Driver};

/// Hands out blocks and takes them back.
pub trait Subject {
    /// What is held for one allocation.
    type Block;
    /// Its own report of a failure.
    type Error: Into<Cause>;

    /// Takes a block of `bytes`.
    ///
    /// # Errors
    /// The subject's own.
    fn alloc(&mut self, bytes: u64) -> Result<Self::Block, Self::Error>;

    /// Gives a block back.
    ///
    /// # Errors
    /// The subject's own.
    fn free(&mut self, block: Self::Block) -> Result<(), Self::Error>;

    /// How often memory was missing (count), for a subject whose growth shows nowhere else: that of
    /// the others shows in the driver's ledger.
    fn misses(&self) -> u64 {
        0
    }
}

/// A lane of a pool with default settings: one stream, one lock, statistics on.
#[derive(Debug)]
pub struct PoolLane {
    lane: Lane,
}

impl PoolLane {
    /// What a pool with this placement is called in the records.
    pub fn name(placement: Placement) -> &'static str {
        match placement {
            Placement::FirstFit => "pool-first-fit",
            Placement::Buddy => "pool-buddy",
        }
    }

    /// A new pool with one lane. The lane keeps the pool.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(
        driver: &Arc<dyn Driver>,
        device: DeviceId,
        placement: Placement,
    ) -> Result<PoolLane, Cause> {
        let pool = Pool::builder(driver.clone()).device(device).placement(placement).build()?;
        PoolLane::of(&pool, device)
    }

    /// A lane of its own, on a new stream, in a pool that others may use too.
    ///
    /// # Errors
    /// The driver's.
    pub fn of(pool: &Pool, device: DeviceId) -> Result<PoolLane, Cause> {
        let stream = Stream::create(pool.driver(), device)?;
        Ok(PoolLane { lane: pool.lane(&stream)? })
    }
}

impl Subject for PoolLane {
    type Block = Buffer;
    type Error = vmm_pool::Error;

    #[inline]
    fn alloc(&mut self, bytes: u64) -> Result<Buffer, vmm_pool::Error> {
        self.lane.alloc(bytes)
    }

    #[inline]
    fn free(&mut self, block: Buffer) -> Result<(), vmm_pool::Error> {
        drop(block);
        Ok(())
    }
}

/// The placement alone: no lock, no statistics, no driver. What a lane adds is the difference.
pub struct BareHeap {
    heap: Heap,
    end_bytes: u64,
    misses: u64,
}

/// What a heap grows by, as a lane with many live bytes does.
const HEAP_GROWTH_BYTES: u64 = 32 << 20;
/// What a lane aligns to if it is not told otherwise.
const HEAP_ALIGN_BYTES: u64 = 256;

impl BareHeap {
    /// What a heap with this placement is called in the records.
    pub fn name(placement: Placement) -> &'static str {
        match placement {
            Placement::FirstFit => "heap-first-fit",
            Placement::Buddy => "heap-buddy",
        }
    }

    /// An empty heap that grows by pretending to map memory.
    pub fn new(placement: Placement) -> BareHeap {
        let heap = Heap::new(HeapConfig { placement, ..HeapConfig::default() });
        BareHeap { heap, end_bytes: 0, misses: 0 }
    }

    #[cold]
    fn grow(&mut self, bytes: u64) -> Result<u64, Cause> {
        self.misses += 1;
        if self.heap.drain()
            && let Ok(block) = self.heap.alloc(bytes, HEAP_ALIGN_BYTES)
        {
            return Ok(block.offset);
        }
        let unit = bytes.next_power_of_two().max(HEAP_GROWTH_BYTES);
        let start = self.end_bytes.next_multiple_of(unit);
        self.heap.insert_free(self.end_bytes, start + unit - self.end_bytes);
        self.end_bytes = start + unit;
        Ok(self.heap.alloc(bytes, HEAP_ALIGN_BYTES)?.offset)
    }
}

impl Subject for BareHeap {
    type Block = u64;
    type Error = Cause;

    #[inline]
    fn alloc(&mut self, bytes: u64) -> Result<u64, Cause> {
        match self.heap.alloc(bytes, HEAP_ALIGN_BYTES) {
            Ok(block) => Ok(block.offset),
            Err(_) => self.grow(bytes),
        }
    }

    #[inline]
    fn free(&mut self, block: u64) -> Result<(), Cause> {
        self.heap.free(block)?;
        Ok(())
    }

    fn misses(&self) -> u64 {
        self.misses
    }
}

/// Hands out numbers: what remains is the loop's own cost.
#[derive(Debug, Default)]
pub struct Nothing;

impl Subject for Nothing {
    type Block = u64;
    type Error = NeverFails;

    #[inline]
    fn alloc(&mut self, bytes: u64) -> Result<u64, NeverFails> {
        Ok(bytes)
    }

    #[inline]
    fn free(&mut self, _block: u64) -> Result<(), NeverFails> {
        Ok(())
    }
}

/// The error of a subject that has none.
#[derive(Debug)]
pub struct NeverFails(Infallible);

impl From<NeverFails> for Cause {
    fn from(never: NeverFails) -> Cause {
        match never.0 {}
    }
}

/// One of the driver's own allocators, on one stream.
pub struct Peer<T>(pub T);

impl<T: Target> Subject for Peer<T> {
    type Block = T::Block;
    type Error = Cause;

    #[inline]
    fn alloc(&mut self, bytes: u64) -> Result<T::Block, Cause> {
        self.0.alloc(bytes, 0)
    }

    #[inline]
    fn free(&mut self, block: T::Block) -> Result<(), Cause> {
        self.0.free(block)
    }
}

#[cfg(test)]
mod tests {
    use vmm_pool_cli::target::{CudaMalloc, CudaMallocAsync};
    use vmm_sys::Call;
    use vmm_sys::sim::Sim;

    use super::*;
    use crate::work::{Live, Sizes};

    /// Replaces 100 blocks of 1 MiB among 10, and says which calls that took.
    fn calls_of<S: Subject>(driver: &Arc<dyn Driver>, subject: S) -> vmm_sys::CallCounts {
        let mut live = Live::new(subject, Sizes::one(1 << 20), 10).unwrap();
        let before = driver.ledger().snapshot();
        live.replace(100).map_err(Into::into).unwrap();
        let calls = driver.ledger().snapshot().since(&before);
        live.end().unwrap();
        calls
    }

    #[test]
    fn a_pair_of_the_drivers_own_allocators_is_two_calls() {
        let driver: Arc<dyn Driver> = Sim::builder().build();
        let calls = calls_of(&driver, Peer(CudaMalloc::new(&driver, DeviceId(0)).unwrap()));
        assert_eq!((calls.of(Call::MemAlloc), calls.of(Call::MemFree)), (100, 100));
        let peer = CudaMallocAsync::new(&driver, DeviceId(0), 1).unwrap();
        let calls = calls_of(&driver, Peer(peer));
        assert_eq!((calls.of(Call::MemAllocAsync), calls.of(Call::MemFreeAsync)), (100, 100));
        assert_eq!(calls.total(), 200, "{calls}");
    }
}
