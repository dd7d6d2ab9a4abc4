//! The driver's own allocators: `cuMemAlloc`, and the stream-ordered pool of `cuMemAllocAsync`.
//!
//! They are here to be measured against, so their costs and their footprint are modelled, and
//! their placement is plain best fit. Memory of the stream-ordered pool comes back when the free
//! has its turn in its stream (the real pool reuses it earlier within that stream), and the pool
//! keeps what its release threshold allows.

use std::collections::{BTreeMap, BTreeSet};

use super::answer::{Answer, Refused};
use super::regions::{AccessTable, Backing, Region};
use super::state::State;
use super::timeline::Op;
use super::{Sim, costs};
use crate::call::Call;
use crate::error::DriverResult;
use crate::types::{Access, ChunkProps, DeviceId, Location, StreamHandle};

const ALIGN: u64 = 512;
/// What the device gives memory in.
const BLOCK_BYTES: u64 = 2 << 20;
/// From here on an allocation of `cuMemAlloc` has blocks of its own.
const OWN_BLOCK_BYTES: u64 = 1 << 20;
/// What the stream-ordered pool grows by.
const POOL_GROWTH_BYTES: u64 = 32 << 20;

/// Addresses handed out best fit from blocks.
///
/// Invariant: `by_size` holds exactly the stretches of `free`; `whole` exactly the blocks that are
/// one free stretch; `held_bytes` is the sum of the blocks.
#[derive(Debug, Default)]
pub(super) struct AddressArena {
    /// Block start to length.
    blocks: BTreeMap<u64, u64>,
    /// Free stretches: start to length. A stretch never crosses a block border.
    free: BTreeMap<u64, u64>,
    by_size: BTreeSet<(u64, u64)>,
    whole: BTreeSet<u64>,
    held_bytes: u64,
}

impl AddressArena {
    fn add_block(&mut self, start: u64, bytes: u64) {
        self.blocks.insert(start, bytes);
        self.held_bytes += bytes;
        self.insert_free(start, bytes);
    }

    /// Books a free stretch.
    fn insert_free(&mut self, start: u64, bytes: u64) {
        self.free.insert(start, bytes);
        self.by_size.insert((bytes, start));
        if self.blocks.get(&start) == Some(&bytes) {
            self.whole.insert(start);
        }
    }

    /// Takes a free stretch off the books: its length.
    fn remove_free(&mut self, start: u64) -> Option<u64> {
        let bytes = self.free.remove(&start)?;
        self.by_size.remove(&(bytes, start));
        self.whole.remove(&start);
        Some(bytes)
    }

    /// The smallest stretch that is large enough.
    fn take(&mut self, bytes: u64) -> Option<u64> {
        let &(length, start) = self.by_size.range((bytes, 0)..).next()?;
        self.remove_free(start);
        if length > bytes {
            self.insert_free(start + bytes, length - bytes);
        }
        Some(start)
    }

    /// Puts a stretch back, joined with its free neighbours in the same block.
    fn give(&mut self, address: u64, bytes: u64) {
        let Some((&block, &block_bytes)) = self.blocks.range(..=address).next_back() else {
            return;
        };
        let (mut start, mut end) = (address, address + bytes);
        if let Some((&before, &length)) = self.free.range(block..address).next_back()
            && before + length == address
        {
            self.remove_free(before);
            start = before;
        }
        if end < block + block_bytes
            && let Some(length) = self.remove_free(end)
        {
            end += length;
        }
        self.insert_free(start, end - start);
    }

    /// Takes a wholly free block out.
    fn remove_free_block(&mut self) -> Option<(u64, u64)> {
        let start = self.whole.first().copied()?;
        let bytes = self.remove_free(start)?;
        self.blocks.remove(&start);
        self.held_bytes -= bytes;
        Some((start, bytes))
    }
}

/// A device's stream-ordered pool.
#[derive(Debug, Default)]
pub(super) struct AsyncPool {
    arena: AddressArena,
    /// What the pool keeps when memory comes back, in bytes.
    release_threshold: u64,
}

impl Sim {
    /// Takes memory of the device in blocks of 2 MiB. Forbidden during captures (rows D-G2, D-G3).
    pub(super) fn do_mem_alloc(&self, device: DeviceId, bytes: u64) -> DriverResult<u64> {
        self.call_on(Call::MemAlloc, device, |state| {
            state.refuse_unsafe_in_capture()?;
            let rounded = rounded(bytes)?;
            state.make_room(Location::Device(device));
            let address = if rounded >= OWN_BLOCK_BYTES {
                state.add_block(device, rounded.next_multiple_of(BLOCK_BYTES))?
            } else {
                state.small_alloc(device, rounded)?
            };
            state.add_legacy(device, address, rounded, false);
            state.bill(costs::mem_alloc_ns(bytes));
            Ok(address)
        })
    }

    /// Waits for all work of the device, and charges the wait (rows D-N1, D-N18).
    pub(super) fn do_mem_free(&self, device: DeviceId, address: u64) -> DriverResult<()> {
        self.call_on(Call::MemFree, device, |state| {
            state.refuse_unsafe_in_capture()?;
            let (owner, from_pool) = state.legacy_at(address)?;
            self.drain_device_alone(state, owner)?;
            state.report_fault(device)?;
            if from_pool {
                state.pool_free(address);
            } else {
                state.legacy_free(address);
            }
            Ok(())
        })
    }

    /// Grows the pool where nothing in it fits.
    pub(super) fn do_mem_alloc_async(
        &self,
        device: DeviceId,
        bytes: u64,
        stream: StreamHandle,
    ) -> DriverResult<u64> {
        self.call_on(Call::MemAllocAsync, device, |state| {
            let rounded = rounded(bytes)?;
            let id = state.own_stream(device, stream)?;
            // The address comes at once; an order with the stream's work is not needed, as memory
            // comes back to the pool only when its free has had its turn.
            state.refuse_captured_stream(id)?;
            state.make_room(Location::Device(device));
            let address = state.pool_alloc(device, rounded)?;
            state.add_legacy(device, address, rounded, true);
            Ok(address)
        })
    }

    /// In stream order.
    pub(super) fn do_mem_free_async(
        &self,
        device: DeviceId,
        address: u64,
        stream: StreamHandle,
    ) -> DriverResult<()> {
        self.call_on(Call::MemFreeAsync, device, |state| {
            let id = state.own_stream(device, stream)?;
            let (_, from_pool) = state.legacy_at(address)?;
            if !from_pool {
                return Err(Refused::invalid_value("not memory of a stream-ordered pool"));
            }
            state.submit(id, Op::PoolFree { address })
        })
    }

    /// What the pool keeps.
    pub(super) fn do_set_release_threshold(
        &self,
        device: DeviceId,
        bytes: u64,
    ) -> DriverResult<()> {
        self.call_on(Call::MemPoolSetAttribute, device, |state| {
            state.device_mut(device)?.pool.release_threshold = bytes;
            Ok(())
        })
    }
}

fn rounded(bytes: u64) -> Answer<u64> {
    match bytes.checked_next_multiple_of(ALIGN) {
        Some(rounded) if bytes > 0 => Ok(rounded),
        _ => Err(Refused::invalid_value(format_args!("{bytes} bytes cannot be allocated"))),
    }
}

impl State {
    /// Addresses and memory of the device, together.
    fn add_block(&mut self, device: DeviceId, bytes: u64) -> Answer<u64> {
        self.commit(Location::Device(device), bytes)?;
        match self.space.take(bytes, BLOCK_BYTES, None) {
            Some(address) => Ok(address),
            None => {
                self.uncommit(Location::Device(device), bytes);
                Err(Refused::new(crate::ResultCode::OUT_OF_MEMORY).because("no addresses left"))
            }
        }
    }

    /// Addresses and memory back to the device.
    fn remove_block(&mut self, device: DeviceId, start: u64, bytes: u64) {
        self.space.give(start, bytes);
        self.uncommit(Location::Device(device), bytes);
    }

    /// From the small blocks of the device, or a new one.
    fn small_alloc(&mut self, device: DeviceId, bytes: u64) -> Answer<u64> {
        if let Some(address) = self.device_mut(device)?.small_blocks.take(bytes) {
            return Ok(address);
        }
        let block = self.add_block(device, BLOCK_BYTES)?;
        let arena = &mut self.device_mut(device)?.small_blocks;
        arena.add_block(block, BLOCK_BYTES);
        arena.take(bytes).ok_or_else(|| Refused::new(crate::ResultCode::OUT_OF_MEMORY))
    }

    /// From the pool, or from what it grows by; the growth is on the bill.
    fn pool_alloc(&mut self, device: DeviceId, bytes: u64) -> Answer<u64> {
        if let Some(address) = self.device_mut(device)?.pool.arena.take(bytes) {
            return Ok(address);
        }
        let growth = bytes.next_multiple_of(POOL_GROWTH_BYTES);
        let block = self.add_block(device, growth)?;
        self.bill_ns += growth / POOL_GROWTH_BYTES * costs::ASYNC_POOL_GROWTH_NS;
        let arena = &mut self.device_mut(device)?.pool.arena;
        arena.add_block(block, growth);
        arena.take(bytes).ok_or_else(|| Refused::new(crate::ResultCode::OUT_OF_MEMORY))
    }

    /// Makes an allocation visible at its address: all zero, for its owner alone.
    fn add_legacy(&mut self, device: DeviceId, address: u64, bytes: u64, from_pool: bool) {
        let physical = self.add_uncounted(ChunkProps::on_device(device), bytes);
        let mut access = AccessTable::NONE;
        access.set(Location::Device(device), Access::ReadWrite);
        let backing = Backing::Legacy { physical, device, from_pool };
        let id = self.next_region_id();
        self.regions.insert(address, Region { bytes, backing, access, id });
    }

    /// The owner of the allocation that starts at an address, and whether the pool's.
    fn legacy_at(&self, address: u64) -> Answer<(DeviceId, bool)> {
        match self.regions.get(&address).map(|region| region.backing) {
            Some(Backing::Legacy { device, from_pool, .. }) => Ok((device, from_pool)),
            _ => Err(Refused::invalid_value(format_args!("no allocation starts at {address:#x}"))),
        }
    }

    /// Takes an allocation off its address: its owner and size.
    fn remove_legacy(&mut self, address: u64) -> Option<(DeviceId, u64)> {
        let region = self.regions.get(&address)?;
        let Backing::Legacy { physical, device, .. } = region.backing else { return None };
        let bytes = region.bytes;
        self.regions.remove(&address);
        self.drop_physical_reference(physical);
        Some((device, bytes))
    }

    /// Gives an allocation of `cuMemAlloc` back, and its block if that is empty now.
    fn legacy_free(&mut self, address: u64) {
        let Some((device, bytes)) = self.remove_legacy(address) else { return };
        if bytes >= OWN_BLOCK_BYTES {
            return self.remove_block(device, address, bytes.next_multiple_of(BLOCK_BYTES));
        }
        let Ok(entry) = self.device_mut(device) else { return };
        entry.small_blocks.give(address, bytes);
        while let Some((start, bytes)) =
            self.device_mut(device).ok().and_then(|entry| entry.small_blocks.remove_free_block())
        {
            self.remove_block(device, start, bytes);
        }
    }

    /// A stream-ordered free has its turn.
    pub(super) fn pool_free(&mut self, address: u64) {
        let Some((device, bytes)) = self.remove_legacy(address) else { return };
        let Ok(entry) = self.device_mut(device) else { return };
        entry.pool.arena.give(address, bytes);
        self.trim_pool(device);
    }

    /// Gives back what the pool holds beyond its release threshold: at a free, and whenever the
    /// host synchronises, which is what brings a threshold lowered later to bear.
    pub(super) fn trim_pool(&mut self, device: DeviceId) {
        loop {
            let Ok(entry) = self.device_mut(device) else { return };
            let pool = &mut entry.pool;
            if pool.arena.held_bytes <= pool.release_threshold {
                return;
            }
            let Some((start, bytes)) = pool.arena.remove_free_block() else { return };
            self.remove_block(device, start, bytes);
        }
    }

    /// The end of a context takes its allocations with it.
    pub(super) fn free_legacy_of(&mut self, device: DeviceId) {
        let mine = |region: &Region| match region.backing {
            Backing::Legacy { device: owner, from_pool, .. } if owner == device => Some(from_pool),
            _ => None,
        };
        let found: Vec<(u64, bool)> = self
            .regions
            .iter()
            .filter_map(|(start, region)| Some((*start, mine(region)?)))
            .collect();
        for (address, from_pool) in found {
            if from_pool {
                self.pool_free(address);
            } else {
                self.legacy_free(address);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::Driver;

    #[test]
    fn a_lowered_release_threshold_acts_at_the_next_synchronisation() {
        let sim = Sim::builder().build();
        let device = DeviceId(0);
        let stream = sim.stream_create(device).unwrap();
        let free_bytes = || sim.mem_info(device).unwrap().free_bytes;
        let before = free_bytes();
        sim.mem_pool_set_release_threshold(device, u64::MAX).unwrap();
        // SAFETY: the stream is live.
        unsafe {
            let address = sim.mem_alloc_async(device, 1 << 20, stream).unwrap();
            sim.mem_free_async(device, address, stream).unwrap();
            sim.stream_synchronize(device, stream).unwrap();
        }
        assert!(free_bytes() < before, "kept");
        sim.mem_pool_set_release_threshold(device, 0).unwrap();
        assert!(free_bytes() < before, "still kept");
        sim.device_synchronize(device).unwrap();
        assert_eq!(free_bytes(), before);
    }

    #[test]
    fn blocks_join_again_and_leave_whole() {
        let mut arena = AddressArena::default();
        arena.add_block(BLOCK_BYTES, BLOCK_BYTES);
        arena.add_block(2 * BLOCK_BYTES, BLOCK_BYTES);
        let taken: Vec<u64> = (0..4).map(|_| arena.take(1 << 19).unwrap()).collect();
        let other = arena.take(1 << 20).unwrap();
        assert_eq!(other, 2 * BLOCK_BYTES);
        assert_eq!(arena.remove_free_block(), None);
        for address in [taken[1], taken[3], taken[0], taken[2]] {
            arena.give(address, 1 << 19);
        }
        assert_eq!(arena.remove_free_block(), Some((BLOCK_BYTES, BLOCK_BYTES)));
        assert_eq!(arena.remove_free_block(), None);
        assert_eq!(arena.held_bytes, BLOCK_BYTES);
    }
}
