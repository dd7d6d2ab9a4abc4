//! What the machine says of itself: the questions that need no context.
//!
//! Answering them makes no context on any device: a program that looks at all GPUs must not take
//! memory on those it does not use. Attributes can be overridden by the builder, and are no
//! promises anyway (row D-C7).

use super::Sim;
use super::answer::{Answer, Refused};
use super::builder::{Config, Link};
use super::costs::since_version;
use crate::call::Call;
use crate::error::DriverResult;
use crate::types::{DeviceAttribute, DeviceId, PeerAttribute, Uuid};

impl Config {
    fn attribute(&self, device: DeviceId, attribute: DeviceAttribute) -> Answer<i32> {
        let entry = &self.devices[device.0 as usize];
        if let Some(value) = entry.attributes.get(&(attribute as i32)) {
            return Ok(*value);
        }
        let since = attribute_since(attribute);
        if self.driver_version < since {
            return Err(Refused::invalid_value(format_args!(
                "driver {} does not know attribute {}",
                self.driver_version, attribute as i32
            )));
        }
        Ok(match attribute {
            DeviceAttribute::MultiprocessorCount => 132,
            // Events of another process would need its clock: see docs/SIMULATOR.md.
            DeviceAttribute::Integrated | DeviceAttribute::IpcEventSupported => 0,
            DeviceAttribute::PciBusId => 0x10 + entry.physical_index as i32,
            DeviceAttribute::PciDeviceId | DeviceAttribute::PciDomainId => 0,
            DeviceAttribute::ComputeCapabilityMajor => 9,
            DeviceAttribute::ComputeCapabilityMinor => 0,
            DeviceAttribute::HostNumaId => (device.0 % self.host_nodes.max(1)) as i32,
            DeviceAttribute::HostNumaVmmSupported => i32::from(self.host_nodes > 0),
            // Fabric too: it says 1 and then refuses, as the measured machine does (row D-C7).
            DeviceAttribute::UnifiedAddressing
            | DeviceAttribute::VirtualMemoryManagementSupported
            | DeviceAttribute::HandleTypePosixFdSupported
            | DeviceAttribute::GpuDirectRdmaWithVmmSupported
            | DeviceAttribute::MemoryPoolsSupported
            | DeviceAttribute::GpuDirectRdmaSupported
            | DeviceAttribute::DmaBufSupported
            | DeviceAttribute::HandleTypeFabricSupported => 1,
        })
    }

    pub(super) fn link(&self, a: DeviceId, b: DeviceId) -> Link {
        let row = self.links.get(a.0 as usize);
        row.and_then(|row| row.get(b.0 as usize)).copied().unwrap_or(Link::None)
    }
}

fn attribute_since(attribute: DeviceAttribute) -> u32 {
    match attribute {
        DeviceAttribute::VirtualMemoryManagementSupported
        | DeviceAttribute::HandleTypePosixFdSupported => 10_020,
        DeviceAttribute::GpuDirectRdmaWithVmmSupported => 11_000,
        DeviceAttribute::MemoryPoolsSupported | DeviceAttribute::GpuDirectRdmaSupported => 11_020,
        DeviceAttribute::DmaBufSupported => 11_070,
        DeviceAttribute::IpcEventSupported => 12_000,
        DeviceAttribute::HandleTypeFabricSupported => 12_030,
        DeviceAttribute::HostNumaId => 12_020,
        DeviceAttribute::HostNumaVmmSupported => 12_050,
        _ => 0,
    }
}

impl Sim {
    /// What the builder said.
    pub(super) fn do_driver_version(&self) -> DriverResult<u32> {
        self.ask(Call::DriverGetVersion, None, |state| Ok(state.config.driver_version))
    }

    /// Those that came later than the version that the builder said.
    pub(super) fn do_missing_calls(&self) -> Vec<Call> {
        let version = self.state.lock().config.driver_version;
        Call::ALL.iter().copied().filter(|call| since_version(*call) > version).collect()
    }

    /// As many as were built.
    pub(super) fn do_device_count(&self) -> DriverResult<u32> {
        self.ask(Call::DeviceGetCount, None, |state| Ok(state.devices.len() as u32))
    }

    /// The same for all.
    pub(super) fn do_device_name(&self, device: DeviceId) -> DriverResult<String> {
        self.ask(Call::DeviceGetName, Some(device), |state| {
            state.device(device)?;
            Ok("Simulated GPU".to_owned())
        })
    }

    /// The same for the same physical GPU in every process, whatever its ordinal there.
    pub(super) fn do_device_uuid(&self, device: DeviceId) -> DriverResult<Uuid> {
        self.ask(Call::DeviceGetUuid, Some(device), |state| {
            state.device(device)?;
            Ok(state.config.devices[device.0 as usize].uuid())
        })
    }

    /// What the builder said.
    pub(super) fn do_device_total_bytes(&self, device: DeviceId) -> DriverResult<u64> {
        self.ask(Call::DeviceTotalMem, Some(device), |state| {
            state.device(device)?;
            Ok(state.config.devices[device.0 as usize].bytes)
        })
    }

    /// The true value, or what the builder was told to claim.
    pub(super) fn do_device_attribute(
        &self,
        device: DeviceId,
        attribute: DeviceAttribute,
    ) -> DriverResult<i32> {
        self.ask(Call::DeviceGetAttribute, Some(device), |state| {
            state.device(device)?;
            state.config.attribute(device, attribute)
        })
    }

    /// Whether the two are linked. Makes no context.
    pub(super) fn do_can_access_peer(
        &self,
        device: DeviceId,
        peer: DeviceId,
    ) -> DriverResult<bool> {
        self.ask(Call::DeviceCanAccessPeer, Some(device), |state| {
            state.device(device)?;
            state.device(peer)?;
            Ok(device != peer && state.config.link(device, peer) != Link::None)
        })
    }

    /// What the link is like. Makes no context.
    pub(super) fn do_peer_attribute(
        &self,
        attribute: PeerAttribute,
        device: DeviceId,
        peer: DeviceId,
    ) -> DriverResult<i32> {
        self.ask(Call::DeviceGetP2pAttribute, Some(device), |state| {
            state.device(device)?;
            state.device(peer)?;
            if device == peer {
                return Err(Refused::new(crate::ResultCode::INVALID_DEVICE)
                    .because("a device is not its own peer"));
            }
            let link = state.config.link(device, peer);
            Ok(match attribute {
                PeerAttribute::PerformanceRank => i32::from(link != Link::NvLink),
                PeerAttribute::AccessSupported => i32::from(link != Link::None),
                PeerAttribute::NativeAtomicSupported => i32::from(link == Link::NvLink),
            })
        })
    }
}
