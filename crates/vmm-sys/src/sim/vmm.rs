//! Reserve, create, map, unmap, release: the VMM calls. Access is in its own file.
//!
//! Each call checks everything, then changes something, then writes its price on the bill. Prices
//! are per chunk: one unmap of N mappings costs as much as N unmaps. Physical memory that comes
//! free is paid for by the call that dropped the last reference, be it a release or an unmap.

use super::answer::{Answer, Refused};
use super::physical::Handle;
use super::regions::{AccessTable, Backing, Region};
use super::state::State;
use super::{Sim, costs};
use crate::call::Call;
use crate::error::{DriverResult, ResultCode, explain};
use crate::types::{
    Access, ChunkHandle, ChunkProps, DeviceId, GranularityKind, HandleTypes, Location, PointerInfo,
};

impl Sim {
    /// Sizes and addresses go by the granularity of the exact properties.
    pub(super) fn do_granularity(
        &self,
        props: &ChunkProps,
        kind: GranularityKind,
    ) -> DriverResult<u64> {
        // Answers for devices that do not exist too (row D-C2).
        self.call(Call::MemGetAllocationGranularity, |state| {
            Ok(state.config.granularity_bytes(props, kind))
        })
    }

    /// Rows D-R1 to D-R7. A hint is tried first and never promised (row D-R4); without one the best
    /// fit is taken, so that long programs do not creep through the address space.
    pub(super) fn do_address_reserve(
        &self,
        bytes: u64,
        align_bytes: u64,
        hint: u64,
    ) -> DriverResult<u64> {
        self.call(Call::MemAddressReserve, |state| {
            let granularity = state.config.address_granularity();
            if bytes == 0 || !bytes.is_multiple_of(granularity) {
                return Err(Refused::invalid_value(explain::alignment(None, bytes, granularity)));
            }
            if align_bytes != 0 && !align_bytes.is_power_of_two() {
                return Err(Refused::invalid_value(format_args!(
                    "alignment {align_bytes} is no power of two"
                )));
            }
            if !hint.is_multiple_of(granularity) {
                // Taken hints are moved, crooked ones are refused (row D-R4).
                return Err(Refused::invalid_value(explain::alignment(
                    Some(hint),
                    bytes,
                    granularity,
                )));
            }
            let hint = (hint != 0 && state.config.honour_hints).then_some(hint);
            let fits = bytes <= state.config.max_reservation_bytes;
            let align = match state.config.honour_alignment {
                true => align_bytes.max(granularity),
                false => granularity,
            };
            match fits.then(|| state.space.reserve(bytes, align, hint)).flatten() {
                Some(address) => {
                    state.bill(costs::reserve_ns(bytes));
                    Ok(address)
                }
                None => Err(Refused::new(ResultCode::OUT_OF_MEMORY).because(format_args!(
                    "no {bytes} bytes of addresses left: {} of {} reserved",
                    state.space.reserved_bytes(),
                    state.config.address_space_bytes
                ))),
            }
        })
    }

    /// Row D-F1: exactly one reservation, and nothing mapped in it, not even by a chunk that lies
    /// across two ranges.
    pub(super) fn do_address_free(&self, address: u64, bytes: u64) -> DriverResult<()> {
        self.call(Call::MemAddressFree, |state| {
            if !state.space.is_range(address, bytes) {
                return Err(Refused::invalid_value(format_args!(
                    "{address:#x} and {bytes} bytes are not what one reserve gave"
                )));
            }
            if state.any_region_in(address, bytes) {
                return Err(Refused::invalid_value("something is still mapped in the range"));
            }
            state.space.free(address, bytes);
            state.bill(costs::address_free_ns(bytes));
            Ok(())
        })
    }

    /// Rows D-C1 to D-C8. Memory is committed here, not at map or first touch (row D-C4).
    pub(super) fn do_create(&self, bytes: u64, props: &ChunkProps) -> DriverResult<ChunkHandle> {
        self.call(Call::MemCreate, |state| {
            match props.location {
                Location::Device(device) => {
                    state.device(device)?;
                }
                Location::HostNuma(node) if node < state.config.host_nodes => {}
                Location::HostNuma(_) | Location::Host => {
                    return Err(Refused::invalid_value(format_args!(
                        "no memory can be made at {}",
                        props.location
                    )));
                }
            }
            let granularity = state.config.granularity(props).minimum;
            if bytes == 0 || !bytes.is_multiple_of(granularity) {
                return Err(Refused::invalid_value(explain::alignment(None, bytes, granularity)));
            }
            state.config.permit(Call::MemCreate, props)?;
            state.make_room(props.location);
            let physical = state.add_physical(*props, bytes)?;
            let exportable = state.physical[physical].exportable();
            state.bill(match props.location {
                Location::Device(_) => costs::create_ns(bytes, exportable),
                Location::Host | Location::HostNuma(_) => costs::create_host_ns(bytes),
            });
            Ok(state.add_handle(physical, false))
        })
    }

    /// Rows D-H1 and D-H2: one reference less. Costs little unless it was the last of all.
    pub(super) fn do_release(&self, chunk: ChunkHandle) -> DriverResult<()> {
        self.call(Call::MemRelease, |state| {
            let freed = state.drop_handle_reference(chunk)?;
            if freed > 0 {
                state.bill(costs::release_ns(freed));
            }
            Ok(())
        })
    }

    /// Row D-H3: the handle value that the mapping was made through, with one more reference.
    pub(super) fn do_retain(&self, address: u64) -> DriverResult<ChunkHandle> {
        self.call(Call::MemRetainAllocationHandle, |state| match state.region_at(address) {
            Some((_, Region { backing: Backing::Chunk { handle, .. }, .. })) => {
                let handle = *handle;
                if let Some(entry) = state.handles.get_mut(&handle.0) {
                    entry.references += 1;
                }
                Ok(handle)
            }
            _ => Err(no_chunk_at(address)),
        })
    }

    /// What the chunk was created with. Works as long as the handle value lives (row D-H2).
    pub(super) fn do_properties(&self, chunk: ChunkHandle) -> DriverResult<ChunkProps> {
        self.call(Call::MemGetAllocationProperties, |state| {
            let &Handle { physical, imported, .. } = state.handle(chunk)?;
            let props = state.physical[physical].props;
            // Row D-X12: what it was made with is told to its maker only.
            Ok(match imported {
                true => ChunkProps { handle_types: HandleTypes::NONE, rdma: false, ..props },
                false => props,
            })
        })
    }

    /// Rows D-M1 to D-M4. The size is looked at before the address, as the real driver answers. An
    /// alias is a mapping like any other.
    pub(super) fn do_map(
        &self,
        address: u64,
        bytes: u64,
        offset: u64,
        chunk: ChunkHandle,
    ) -> DriverResult<()> {
        self.call(Call::MemMap, |state| {
            let physical_index = state.handle(chunk)?.physical;
            let physical = &state.physical[physical_index];
            if offset != 0 || bytes != physical.bytes {
                return Err(Refused::new(ResultCode::NOT_SUPPORTED).because(format_args!(
                    "{bytes} bytes at offset {offset} of a chunk of {}: only whole chunks map",
                    physical.bytes
                )));
            }
            let granularity = state.config.granularity(&physical.props).minimum;
            if !address.is_multiple_of(granularity) {
                return Err(Refused::invalid_value(explain::alignment(
                    Some(address),
                    bytes,
                    granularity,
                )));
            }
            state.all_reserved(address, bytes)?;
            if state.any_region_in(address, bytes) {
                return Err(Refused::invalid_value(format_args!(
                    "{address:#x} and {bytes} bytes are not all unmapped"
                )));
            }
            state.config.permit(Call::MemMap, &physical.props)?;
            let cost = costs::map_ns(physical.exportable(), physical.props.rdma);
            state.bill(cost);
            if let Some(handle) = state.handles.get_mut(&chunk.0) {
                handle.mappings += 1;
            }
            let id = state.next_region_id();
            let backing = Backing::Chunk { handle: chunk, physical: physical_index };
            let region = Region { bytes, backing, access: AccessTable::NONE, id };
            state.regions.insert(address, region);
            Ok(())
        })
    }

    /// Rows D-U1 to D-U4. Work that is running or queued is not waited for: it finds out by itself.
    pub(super) fn do_unmap(&self, address: u64, bytes: u64) -> DriverResult<()> {
        self.call(Call::MemUnmap, |state| {
            let granularity = state.config.address_granularity();
            if bytes == 0 || !bytes.is_multiple_of(granularity) {
                return Err(Refused::invalid_value(explain::alignment(
                    Some(address),
                    bytes,
                    granularity,
                )));
            }
            state.all_reserved(address, bytes)?;
            // Holes are fine (row D-U2), halves are not (row D-U1).
            let starts = state.whole_regions(address, bytes)?;
            let mut cost = 0;
            for start in starts {
                cost += state.unmap_region(start);
            }
            state.bill(cost.max(costs::base_ns(Call::MemUnmap)));
            Ok(())
        })
    }

    /// Row D-P1: the one chunk, or the one legacy allocation, that is there, for a device that has
    /// access to it.
    pub(super) fn do_address_range(
        &self,
        device: DeviceId,
        address: u64,
    ) -> DriverResult<(u64, u64)> {
        self.call_on(Call::MemGetAddressRange, device, |state| match state.region_at(address) {
            Some((_, region)) if region.access.get(Location::Device(device)) == Access::None => {
                Err(Refused::new(ResultCode::NOT_FOUND)
                    .because(format_args!("{device} has no access at {address:#x}")))
            }
            Some((start, region)) => Ok((start, region.bytes)),
            None => Err(Refused::new(ResultCode::NOT_FOUND)
                .because(format_args!("nothing is mapped at {address:#x}"))),
        })
    }

    /// Row D-P2. The home of the memory follows what is mapped now (row D-V1).
    pub(super) fn do_pointer_info(&self, address: u64) -> DriverResult<PointerInfo> {
        self.call(Call::PointerGetAttributes, |state| {
            let Some((_, region)) = state.region_at(address) else {
                return Ok(UNKNOWN_POINTER);
            };
            let context_of = |device: DeviceId| {
                let context = state.devices[device.0 as usize].context.as_ref();
                context.map(|context| context.handle)
            };
            Ok(match region.backing {
                Backing::Chunk { physical, .. } => {
                    let home = state.physical[physical].props.location.device();
                    PointerInfo {
                        memory_type: if home.is_some() { 2 } else { 1 },
                        device: home.unwrap_or(NO_DEVICE),
                        context: None,
                        legacy_ipc_capable: false,
                    }
                }
                Backing::Legacy { device, from_pool, .. } => PointerInfo {
                    memory_type: 2,
                    device,
                    context: context_of(device),
                    legacy_ipc_capable: !from_pool,
                },
                Backing::Pinned => PointerInfo {
                    memory_type: 1,
                    device: DeviceId(0),
                    context: context_of(DeviceId(0)),
                    legacy_ipc_capable: false,
                },
            })
        })
    }

    /// Row D-P3: only memory of `cuMemAlloc` has such a handle.
    pub(super) fn do_legacy_ipc_export(&self, device: DeviceId, address: u64) -> DriverResult<()> {
        self.call_on(Call::IpcGetMemHandle, device, |state| match state.region_at(address) {
            Some((_, Region { backing: Backing::Legacy { from_pool: false, .. }, .. })) => Ok(()),
            _ => Err(Refused::invalid_value("only memory of cuMemAlloc has a legacy IPC handle")),
        })
    }
}

/// The ordinal of memory that is no device's.
const NO_DEVICE: DeviceId = DeviceId(u32::MAX);

/// What the driver says of an address that it knows nothing of: no error.
const UNKNOWN_POINTER: PointerInfo =
    PointerInfo { memory_type: 0, device: NO_DEVICE, context: None, legacy_ipc_capable: false };

pub(super) fn no_chunk_at(address: u64) -> Refused {
    Refused::invalid_value(format_args!("nothing is mapped at {address:#x}"))
}

impl State {
    /// The starts of the mappings in a span of addresses, none of which may stick out of it.
    pub(super) fn whole_regions(&self, address: u64, bytes: u64) -> Answer<Vec<u64>> {
        let end = address + bytes;
        let sticks_out =
            |start: u64, region: &Region| start < address || start + region.bytes > end;
        if let Some((start, region)) = self.region_at(address)
            && sticks_out(start, region)
        {
            return Err(half_of(start, region.bytes));
        }
        let mut starts = Vec::new();
        for (&start, region) in self.regions.range(address..end) {
            if sticks_out(start, region) {
                return Err(half_of(start, region.bytes));
            }
            starts.push(start);
        }
        Ok(starts)
    }

    /// Takes one mapping away at once, whatever runs (row D-U4). Returns the cost.
    fn unmap_region(&mut self, start: u64) -> u64 {
        let Some(region) = self.regions.remove(&start) else { return 0 };
        let Backing::Chunk { handle, physical } = region.backing else { return 0 };
        let home = self.physical[physical].props.location;
        let cost = costs::unmap_ns(region.bytes, self.physical[physical].exportable());
        for device in region.access.granted().collect::<Vec<_>>() {
            self.count_peer(home, device, false);
        }
        let freed = self.drop_mapping_reference(handle);
        cost + if freed > 0 { costs::release_ns(freed) } else { 0 }
    }
}

fn half_of(start: u64, bytes: u64) -> Refused {
    Refused::invalid_value(format_args!(
        "the mapping at {start:#x} of {bytes} bytes is not wholly inside"
    ))
}
