//! Export and import of chunks as descriptors, and page-locked host memory.
//!
//! An import of a chunk of this very simulator is a second handle to the same memory, counted once.
//! A chunk of another simulator (another process, or another machine of this one) becomes memory of
//! the local device with the same UUID. A descriptor whose device is not visible here is refused.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::os::fd::{BorrowedFd, OwnedFd};

use super::Sim;
use super::answer::{Answer, Refused};
use super::bytes::Store;
use super::physical::Physical;
use super::regions::{AccessTable, Backing, Region};
use super::share::{self, ExportedHome, ExportedProps};
use super::state::State;
use crate::call::Call;
use crate::error::{DriverResult, ResultCode};
use crate::types::{ChunkHandle, ChunkProps, DeviceId, HandleTypes, Location, PinnedAddress};

/// Page-locked memory is given out in pages.
const PAGE_BYTES: usize = 4096;

impl Sim {
    /// Rows D-X1 and D-X6. The bytes move to a memfd now, if they are not in one yet.
    pub(super) fn do_export_fd(&self, chunk: ChunkHandle) -> DriverResult<OwnedFd> {
        self.call(Call::MemExportToShareableHandle, |state| {
            let index = state.handle(chunk)?.physical;
            let props = state.physical[index].props;
            if !props.handle_types.contains(HandleTypes::POSIX_FD) {
                return Err(Refused::invalid_value(
                    "the chunk was not created with handle type POSIX descriptor",
                ));
            }
            state.config.permit(Call::MemExportToShareableHandle, &props)?;
            let home = match props.location {
                Location::Device(device) => {
                    ExportedHome::Gpu(state.config.devices[device.0 as usize].uuid())
                }
                Location::HostNuma(node) => ExportedHome::HostNuma(node),
                Location::Host => return Err(Refused::invalid_value("no such memory")),
            };
            state.retire_exports();
            let physical = &mut state.physical[index];
            let exported = ExportedProps {
                bytes: physical.bytes,
                home,
                handle_types: props.handle_types,
                rdma: props.rdma,
            };
            if let Store::Sparse(content) = &physical.store {
                let shared = share::make_shared(&exported, content).map_err(os_refusal)?;
                physical.store = Store::Shared(shared);
            }
            let shared = physical.shared().ok_or_else(|| Refused::new(ResultCode::UNKNOWN))?;
            shared.export().map_err(os_refusal)
        })
    }

    /// Rows D-X2 to D-X4. A chunk of this simulator gets one more handle value; a foreign one is
    /// counted here too, as the GPU is the same.
    pub(super) fn do_import_fd(&self, descriptor: BorrowedFd<'_>) -> DriverResult<ChunkHandle> {
        self.call(Call::MemImportFromShareableHandle, |state| {
            let Some((exported, identity)) = share::inspect(descriptor) else {
                return Err(Refused::new(ResultCode::UNKNOWN)
                    .because("the descriptor is no exported chunk"));
            };
            let known = |physical: &Physical| {
                physical.shared().is_some_and(|shared| shared.identity == identity)
            };
            let found = state.physical.iter().find(|(_, physical)| known(physical));
            if let Some(index) = found.map(|(index, _)| index) {
                state
                    .config
                    .permit(Call::MemImportFromShareableHandle, &state.physical[index].props)?;
                // It may have been let go of, and kept by this very descriptor since.
                if let Some(shared) = state.physical[index].shared() {
                    shared.hold().map_err(os_refusal)?;
                }
                return Ok(state.add_handle(index, true));
            }
            let props = ChunkProps {
                location: state.local_home(exported.home)?,
                handle_types: exported.handle_types,
                rdma: exported.rdma,
            };
            state.config.permit(Call::MemImportFromShareableHandle, &props)?;
            state.make_room(props.location);
            let shared = share::adopt(descriptor).map_err(os_refusal)?;
            let index = state.adopt_physical(props, exported.bytes, shared)?;
            Ok(state.add_handle(index, true))
        })
    }

    /// Real memory of this process: its address is the same for host and device.
    pub(super) fn do_host_alloc(
        &self,
        device: DeviceId,
        bytes: u64,
    ) -> DriverResult<PinnedAddress> {
        self.call_on(Call::MemHostAlloc, device, |state| {
            state.refuse_unsafe_in_capture()?;
            let layout = pinned_layout(bytes)?;
            // SAFETY: the layout has a size of at least one page.
            let memory = unsafe { alloc_zeroed(layout) };
            if memory.is_null() {
                return Err(Refused::new(ResultCode::OUT_OF_MEMORY)
                    .because(format_args!("{bytes} bytes of host memory")));
            }
            let address = memory.expose_provenance() as u64;
            let id = state.next_region_id();
            let access = AccessTable::ALL;
            let region = Region { bytes, backing: Backing::Pinned, access, id };
            state.regions.insert(address, region);
            state.pinned.insert(address, bytes);
            Ok(PinnedAddress(address))
        })
    }

    /// Waits for all work of the device (row D-N18). A stream of another device that still waits
    /// for a word in it faults.
    pub(super) fn do_host_free(
        &self,
        device: DeviceId,
        address: PinnedAddress,
    ) -> DriverResult<()> {
        self.call_on(Call::MemFreeHost, device, |state| {
            state.refuse_unsafe_in_capture()?;
            let check = |state: &State| match state.pinned.contains_key(&address.0) {
                true => Ok(()),
                false => Err(Refused::invalid_value(format_args!(
                    "no page-locked memory starts at {:#x}",
                    address.0
                ))),
            };
            check(state)?;
            self.drain_device_alone(state, device)?;
            // Another thread may have freed it meanwhile.
            check(state)?;
            state.free_pinned(address.0);
            Ok(())
        })
    }
}

pub(super) fn os_refusal(error: std::io::Error) -> Refused {
    Refused::new(ResultCode::OPERATING_SYSTEM).because(error)
}

/// How much memory stands behind an allocation, the same at its end as at its start.
fn pinned_layout(bytes: u64) -> Answer<Layout> {
    let refused = || Refused::invalid_value(format_args!("{bytes} bytes of host memory"));
    let size = usize::try_from(bytes).ok().filter(|size| *size > 0).ok_or_else(refused)?;
    let size = size.checked_next_multiple_of(PAGE_BYTES).ok_or_else(refused)?;
    Layout::from_size_align(size, PAGE_BYTES).map_err(|_| refused())
}

impl State {
    /// Where another process's memory lies in this process's words.
    fn local_home(&self, home: ExportedHome) -> Answer<Location> {
        match home {
            ExportedHome::HostNuma(node) => Ok(Location::HostNuma(node)),
            ExportedHome::Gpu(uuid) => {
                let same = |device: &super::builder::DeviceConfig| device.uuid() == uuid;
                match self.config.devices.iter().position(same) {
                    Some(index) => Ok(Location::Device(DeviceId(index as u32))),
                    None => Err(Refused::new(ResultCode::INVALID_DEVICE)
                        .because(format_args!("{uuid} is not visible in this process"))),
                }
            }
        }
    }

    /// Whether bytes lie in page-locked memory of this driver.
    pub(super) fn is_pinned(&self, address: u64, bytes: u64) -> bool {
        let found = self.pinned.range(..=address).next_back();
        found.is_some_and(|(start, length)| {
            (address - start).checked_add(bytes).is_some_and(|end| end <= *length)
        })
    }

    /// Takes an allocation out of all books, then frees it.
    fn free_pinned(&mut self, address: u64) {
        let Some(bytes) = self.pinned.remove(&address) else { return };
        self.regions.remove(&address);
        if let Ok(layout) = pinned_layout(bytes) {
            let memory = std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
            // SAFETY: allocated by `do_host_alloc` with the layout of the same size, and taken out
            // of `pinned` just now, so it is freed once.
            unsafe { dealloc(memory, layout) };
        }
    }
}

impl Drop for State {
    fn drop(&mut self) {
        let left: Vec<u64> = self.pinned.keys().copied().collect();
        for address in left {
            self.free_pinned(address);
        }
    }
}
