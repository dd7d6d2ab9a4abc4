//! The tries. Each owns what it makes, so that whatever fails, everything goes back.

use std::os::fd::AsFd;
use std::sync::Arc;

use super::{Abilities, DeviceFacts, Finding, Granularity, LinkFacts, Topology, Tried};
use crate::driver::Driver;
use crate::error::{DriverError, DriverResult, ResultCode};
use crate::object::{Chunk, Mapping, Range};
use crate::types::{
    AccessGrant, ChunkProps, DeviceAttribute, DeviceId, GranularityKind, HandleTypes, Location,
    PeerAttribute,
};

pub(super) fn topology(driver: &Arc<dyn Driver>, devices: &[DeviceId]) -> DriverResult<Topology> {
    let driver_version = driver.driver_version()?;
    let facts: DriverResult<Vec<_>> =
        devices.iter().map(|&device| facts_of(driver, device)).collect();
    let links = devices.iter().flat_map(|&owner| links_to(driver, devices, owner)).collect();
    Ok(Topology { driver_version, devices: facts?, links })
}

fn facts_of(driver: &Arc<dyn Driver>, device: DeviceId) -> DriverResult<DeviceFacts> {
    let plain = ChunkProps::on_device(device);
    let exportable = ChunkProps { handle_types: HandleTypes::POSIX_FD, ..plain };
    let rdma = ChunkProps { rdma: true, ..plain };
    let number = |attribute| driver.device_attribute(device, attribute);
    // A negative node is the driver's word for "unknown".
    let numa_node = number(DeviceAttribute::HostNumaId).ok().and_then(|n| u32::try_from(n).ok());
    Ok(DeviceFacts {
        device,
        uuid: driver.device_uuid(device)?,
        name: driver.device_name(device)?,
        total_bytes: driver.device_total_bytes(device)?,
        numa_node,
        integrated: number(DeviceAttribute::Integrated).is_ok_and(|value| value != 0),
        plain: granularity_of(driver, &plain),
        exportable: granularity_of(driver, &exportable),
        rdma: granularity_of(driver, &rdma),
        abilities: abilities_of(driver, device, numa_node),
    })
}

fn granularity_of(driver: &Arc<dyn Driver>, props: &ChunkProps) -> DriverResult<Granularity> {
    Ok(Granularity {
        minimum_bytes: driver.granularity(props, GranularityKind::Minimum)?,
        recommended_bytes: driver.granularity(props, GranularityKind::Recommended)?,
    })
}

pub(super) fn vmm(driver: &Arc<dyn Driver>, device: DeviceId) -> Finding {
    let attribute = DeviceAttribute::VirtualMemoryManagementSupported;
    finding(driver, device, attribute, ChunkProps::on_device(device), |_| Ok(()))
}

fn finding(
    driver: &Arc<dyn Driver>,
    device: DeviceId,
    attribute: DeviceAttribute,
    props: ChunkProps,
    more: impl FnOnce(&Chunk) -> DriverResult<()>,
) -> Finding {
    Finding {
        advertised: driver.device_attribute(device, attribute).ok().map(|value| value != 0),
        tried: judge(try_memory(driver, &props, device, more)),
    }
}

fn abilities_of(driver: &Arc<dyn Driver>, device: DeviceId, numa_node: Option<u32>) -> Abilities {
    let plain = ChunkProps::on_device(device);
    let tried = |attribute, props| finding(driver, device, attribute, props, |_| Ok(()));
    Abilities {
        vmm: vmm(driver, device),
        export_fd: finding(
            driver,
            device,
            DeviceAttribute::HandleTypePosixFdSupported,
            ChunkProps { handle_types: HandleTypes::POSIX_FD, ..plain },
            export_and_import,
        ),
        fabric: tried(
            DeviceAttribute::HandleTypeFabricSupported,
            ChunkProps { handle_types: HandleTypes::FABRIC, ..plain },
        ),
        rdma: tried(
            DeviceAttribute::GpuDirectRdmaWithVmmSupported,
            ChunkProps { rdma: true, ..plain },
        ),
        host_numa: tried(
            DeviceAttribute::HostNumaVmmSupported,
            ChunkProps { location: Location::HostNuma(numa_node.unwrap_or(0)), ..plain },
        ),
    }
}

/// One granule of `props`, mapped and granted to `device`, then all of it given back.
fn try_memory(
    driver: &Arc<dyn Driver>,
    props: &ChunkProps,
    device: DeviceId,
    more: impl FnOnce(&Chunk) -> DriverResult<()>,
) -> DriverResult<()> {
    let mapping = map_one(driver, props)?;
    mapping.set_access(&[AccessGrant::read_write(device)])?;
    more(mapping.chunk())?;
    // Not left to the drop: a refusal to unmap is part of the finding.
    mapping.unmap().map(drop).map_err(|(_, error)| error)
}

fn map_one(driver: &Arc<dyn Driver>, props: &ChunkProps) -> DriverResult<Mapping> {
    let bytes = driver.granularity(props, GranularityKind::Minimum)?;
    let range = Range::reserve(driver, bytes, bytes, 0)?;
    let chunk = Chunk::create(driver, bytes, props)?;
    Mapping::map(&range, 0, Arc::new(chunk))
}

fn export_and_import(chunk: &Chunk) -> DriverResult<()> {
    let descriptor = chunk.export_fd()?;
    Chunk::import_fd(chunk.driver(), descriptor.as_fd(), chunk.bytes(), chunk.props()).map(drop)
}

/// What every other device may do with the memory of `owner`: one chunk, granted to each in turn.
fn links_to(driver: &Arc<dyn Driver>, devices: &[DeviceId], owner: DeviceId) -> Vec<LinkFacts> {
    let peers = devices.iter().copied().filter(|&device| device != owner);
    let mapping = map_one(driver, &ChunkProps::on_device(owner));
    peers
        .map(|accessor| {
            let grant = match &mapping {
                Ok(mapping) => mapping.set_access(&[AccessGrant::read_write(accessor)]),
                Err(error) => Err(error.clone()),
            };
            let ask = |attribute| driver.peer_attribute(attribute, accessor, owner).ok();
            LinkFacts {
                accessor,
                owner,
                access: Finding {
                    advertised: driver.can_access_peer(accessor, owner).ok(),
                    tried: judge(grant),
                },
                rank: ask(PeerAttribute::PerformanceRank),
                native_atomics: ask(PeerAttribute::NativeAtomicSupported).map(|value| value != 0),
            }
        })
        .collect()
}

/// Whether an error speaks about the ability, or about the moment.
fn judge(result: DriverResult<()>) -> Tried {
    let Err(error) = result else { return Tried::Works };
    if is_a_verdict(&error) { Tried::Refused(error) } else { Tried::Undecided(error) }
}

/// `CUDA_ERROR_UNKNOWN` is one: platforms that advertise the RDMA flag answer so at set access. A lost
/// context has codes of its own.
fn is_a_verdict(error: &DriverError) -> bool {
    matches!(
        error.code(),
        ResultCode::UNKNOWN
            | ResultCode::INVALID_VALUE
            | ResultCode::INVALID_DEVICE
            | ResultCode::NOT_FOUND
            | ResultCode::NOT_PERMITTED
            | ResultCode::NOT_SUPPORTED
            | ResultCode::PEER_ACCESS_UNSUPPORTED
            | ResultCode::SYSTEM_NOT_READY
    )
}
