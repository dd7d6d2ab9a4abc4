//! Physical memory and the references to it: handles, mappings, exported descriptors.
//!
//! A chunk lives as long as anything refers to it (rows D-H1, D-X6). A handle *value* lives as
//! long as it has references or a mapping made through it: after the last release it still maps
//! elsewhere while a mapping stands (row D-H2), which is what the real driver does.

use std::sync::Arc;

use super::answer::{Answer, Refused};
use super::builder::Config;
use super::bytes::Store;
use super::dma_buf::DmaBuf;
use super::share::SharedBytes;
use super::state::State;
use crate::error::{ResultCode, explain};
use crate::types::{ChunkHandle, ChunkProps, HandleTypes, Location};

/// Up to this many chunks stay shared after their descriptors were closed.
pub(super) const SHARED_CHUNKS_MIN: usize = 32;

/// One piece of physical memory.
#[derive(Debug)]
pub(super) struct Physical {
    pub(super) props: ChunkProps,
    pub(super) bytes: u64,
    /// What is booked at the location: 0 for legacy allocations, whose blocks are booked.
    pub(super) counted_bytes: u64,
    pub(super) store: Store,
    /// Handle values, mappings and legacy allocations that refer to it.
    pub(super) references: u32,
    /// Whether access was ever granted: page tables are there, and the next grant is cheaper.
    pub(super) granted_before: bool,
    /// Dma-bufs that were made of addresses where it was mapped.
    pub(super) dma_bufs: Vec<Arc<DmaBuf>>,
}

/// What a handle value stands for.
#[derive(Debug)]
pub(super) struct Handle {
    pub(super) physical: usize,
    /// References from create, retain and import.
    pub(super) references: u32,
    /// Mappings made through this value.
    pub(super) mappings: u32,
    /// Whether it came from an import: its properties name no handle types then (row D-X12).
    pub(super) imported: bool,
}

impl Physical {
    pub(super) fn exportable(&self) -> bool {
        self.props.handle_types != HandleTypes::NONE
    }

    /// The bytes, if they are shared.
    pub(super) fn shared(&self) -> Option<&SharedBytes> {
        match &self.store {
            Store::Shared(shared) => Some(shared),
            Store::Sparse(_) => None,
        }
    }

    /// Whether another process, or a descriptor that was given out, refers to the memory.
    fn in_use_elsewhere(&self) -> bool {
        self.shared().is_some_and(SharedBytes::in_use_elsewhere)
            || self.dma_bufs.iter().any(|dma_buf| dma_buf.is_open())
    }
}

impl State {
    /// Where memory of this location is counted, if the location exists.
    fn used_bytes_mut(&mut self, location: Location) -> Option<&mut u64> {
        match location {
            Location::Device(device) => {
                self.devices.get_mut(device.0 as usize).map(|device| &mut device.used_bytes)
            }
            Location::HostNuma(node) => self.host_used_bytes.get_mut(node as usize),
            Location::Host => None,
        }
    }

    /// What a location has in all.
    fn capacity_bytes(config: &Config, location: Location) -> u64 {
        match location {
            Location::Device(device) => {
                config.devices.get(device.0 as usize).map_or(0, |device| device.bytes)
            }
            Location::HostNuma(_) => config.host_node_bytes,
            Location::Host => 0,
        }
    }

    /// Commits bytes at a location, or says that they are not there (row D-C3).
    pub(super) fn commit(&mut self, location: Location, bytes: u64) -> Answer<()> {
        let capacity = Self::capacity_bytes(&self.config, location);
        let Some(used) = self.used_bytes_mut(location) else {
            return Err(Refused::invalid_value(format_args!("no memory at {location}")));
        };
        let free = capacity.saturating_sub(*used);
        if bytes > free {
            return Err(Refused::new(ResultCode::OUT_OF_MEMORY).because(format_args!(
                "{bytes} bytes asked of {location}, {free} of {capacity} free"
            )));
        }
        *used += bytes;
        Ok(())
    }

    /// Gives committed bytes back.
    pub(super) fn uncommit(&mut self, location: Location, bytes: u64) {
        if let Some(used) = self.used_bytes_mut(location) {
            *used = used.saturating_sub(bytes);
        }
    }

    /// New memory, committed and all zero.
    pub(super) fn add_physical(&mut self, props: ChunkProps, bytes: u64) -> Answer<usize> {
        self.commit(props.location, bytes)?;
        let index = self.insert_physical(props, bytes, bytes);
        self.physical[index].references = 0;
        Ok(index)
    }

    /// Zeroed bytes in a block that is booked already, with one reference.
    pub(super) fn add_uncounted(&mut self, props: ChunkProps, bytes: u64) -> usize {
        self.insert_physical(props, bytes, 0)
    }

    /// With one reference, of the caller.
    fn insert_physical(&mut self, props: ChunkProps, bytes: u64, counted_bytes: u64) -> usize {
        self.physical.insert(Physical {
            props,
            bytes,
            counted_bytes,
            store: Store::new(),
            references: 1,
            granted_before: false,
            dma_bufs: Vec::new(),
        })
    }

    /// Memory that another process made; it is counted here too, as the GPU is the same.
    pub(super) fn adopt_physical(
        &mut self,
        props: ChunkProps,
        bytes: u64,
        shared: SharedBytes,
    ) -> Answer<usize> {
        let index = self.add_physical(props, bytes)?;
        self.physical[index].store = Store::Shared(shared);
        Ok(index)
    }

    /// A new handle value with one reference.
    pub(super) fn add_handle(&mut self, physical: usize, imported: bool) -> ChunkHandle {
        let value = self.next_chunk_handle;
        self.next_chunk_handle += 0x100;
        self.handles.insert(value, Handle { physical, references: 1, mappings: 0, imported });
        self.physical[physical].references += 1;
        ChunkHandle(value)
    }

    /// What a handle value stands for.
    pub(super) fn handle(&self, chunk: ChunkHandle) -> Answer<&Handle> {
        self.handles.get(&chunk.0).ok_or_else(|| Refused::invalid_value(explain::HANDLE_LIFE))
    }

    /// Takes one reference off a handle value. Returns the bytes that came free.
    pub(super) fn drop_handle_reference(&mut self, chunk: ChunkHandle) -> Answer<u64> {
        let handle = self.handles.get_mut(&chunk.0).filter(|handle| handle.references > 0);
        let Some(handle) = handle else {
            return Err(Refused::invalid_value(explain::HANDLE_LIFE));
        };
        handle.references -= 1;
        Ok(self.collect_handle(chunk))
    }

    /// Takes one mapping off a handle value. Returns the bytes that came free.
    pub(super) fn drop_mapping_reference(&mut self, chunk: ChunkHandle) -> u64 {
        if let Some(handle) = self.handles.get_mut(&chunk.0) {
            handle.mappings -= 1;
        }
        self.collect_handle(chunk)
    }

    /// Forgets a handle value that has neither references nor mappings.
    fn collect_handle(&mut self, chunk: ChunkHandle) -> u64 {
        let Some(handle) = self.handles.get(&chunk.0) else { return 0 };
        if handle.references > 0 || handle.mappings > 0 {
            return 0;
        }
        let physical = handle.physical;
        self.handles.remove(&chunk.0);
        self.drop_physical_reference(physical)
    }

    /// Takes one reference off physical memory. Returns the bytes that came free.
    pub(super) fn drop_physical_reference(&mut self, index: usize) -> u64 {
        let physical = &mut self.physical[index];
        physical.references -= 1;
        if physical.references > 0 {
            return 0;
        }
        if let Some(shared) = physical.shared() {
            shared.let_go();
        }
        if physical.in_use_elsewhere() {
            // Nothing here refers to it, but a descriptor does (rows D-X6, D-X9).
            if !self.orphans.contains(&index) {
                self.orphans.push(index);
            }
            return 0;
        }
        self.orphans.retain(|orphan| *orphan != index);
        self.remove_physical(index)
    }

    /// Gives the memory back. Returns the bytes that came free.
    fn remove_physical(&mut self, index: usize) -> u64 {
        let physical = self.physical.remove(index);
        self.uncommit(physical.props.location, physical.counted_bytes);
        physical.counted_bytes
    }

    /// Frees memory whose last descriptor was closed since. Costs nothing while there are no
    /// exports that outlived their handles.
    pub(super) fn collect_orphans(&mut self) {
        let mut orphans = std::mem::take(&mut self.orphans);
        orphans.retain(|&index| {
            let physical = &self.physical[index];
            let revived = physical.references > 0;
            let held = physical.in_use_elsewhere();
            if !revived && !held {
                self.remove_physical(index);
            }
            !revived && held
        });
        self.orphans = orphans;
    }

    /// Takes the bytes of chunks that no descriptor refers to any more back into this process, so
    /// that the number of open descriptors depends on live exports only. Looked at when the number
    /// of shared chunks has doubled: each look is a system call a chunk.
    pub(super) fn retire_exports(&mut self) {
        let shared = self.physical.iter().filter(|(_, it)| it.shared().is_some()).count();
        if shared < self.shared_chunks_max {
            return;
        }
        let mut left = 0;
        for (_, physical) in &mut self.physical {
            let bytes = physical.bytes;
            let Some(shared) = physical.shared() else { continue };
            if shared.in_use_elsewhere() {
                left += 1;
            } else if let Ok(content) = shared.take_back(bytes) {
                physical.store = Store::Sparse(content);
            }
        }
        self.shared_chunks_max = (2 * left).max(SHARED_CHUNKS_MIN);
    }
}
