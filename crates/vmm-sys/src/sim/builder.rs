//! What the simulated machine is made of: the builder, and the plain values it resolves to.
//!
//! Numbers outside their range are brought into it (devices 1 to 16, granularities powers of two
//! from 4 KiB): a simulated machine that cannot exist would teach nothing.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::Sim;
use super::lies::{Property, Refusal};
use crate::call::Call;
use crate::error::ResultCode;
use crate::types::{
    ChunkProps, DeviceAttribute, GranularityKind, HandleTypes, Location, MemInfo, Uuid,
};

/// The most devices a simulated machine has.
pub const DEVICES_MAX: usize = 16;

/// Streams of one device that were made before one waited, on the measured machine (row D-N2).
const STREAM_SLOTS: usize = 34;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const TIB: u64 = 1 << 40;

/// How two devices reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// Not at all: grants are refused.
    None,
    /// Over PCIe, at 1/8 of NVLink's speed.
    Pcie,
    /// Over NVLink.
    NvLink,
}

/// When work on streams is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimeMode {
    /// As soon as its turn comes. Only holds, gates and busy work (spin kernels) keep a stream.
    Instant,
    /// After its modelled duration on the virtual clock: see [`Sim::advance`].
    Modelled,
}

/// Minimum and recommended granularity of one kind of memory, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Granularity {
    pub(super) minimum: u64,
    pub(super) recommended: u64,
}

impl Granularity {
    fn new(minimum: u64, recommended: u64) -> Granularity {
        let minimum = minimum.clamp(4096, GIB).next_power_of_two();
        let recommended = recommended.clamp(minimum, GIB).next_power_of_two();
        Granularity { minimum, recommended }
    }

    fn max(self, other: Granularity) -> Granularity {
        Granularity {
            minimum: self.minimum.max(other.minimum),
            recommended: self.recommended.max(other.recommended),
        }
    }
}

/// One simulated GPU.
#[derive(Clone, Debug)]
pub(super) struct DeviceConfig {
    pub(super) bytes: u64,
    /// Which physical GPU this is: the same number is the same GPU in every process.
    pub(super) physical_index: u32,
    pub(super) attributes: BTreeMap<i32, i32>,
}

impl DeviceConfig {
    /// The same in every process that simulates this physical GPU.
    pub(super) fn uuid(&self) -> Uuid {
        let mut bytes = *b"simulated-gpu-00";
        bytes[14] = b'0' + (self.physical_index / 10 % 10) as u8;
        bytes[15] = b'0' + (self.physical_index % 10) as u8;
        Uuid(bytes)
    }
}

/// The resolved machine. Never changes once built.
#[derive(Clone, Debug)]
pub(super) struct Config {
    pub(super) devices: Vec<DeviceConfig>,
    pub(super) links: Vec<Vec<Link>>,
    pub(super) host_nodes: u32,
    pub(super) host_node_bytes: u64,
    pub(super) plain: Granularity,
    pub(super) exportable: Option<Granularity>,
    pub(super) rdma: Option<Granularity>,
    pub(super) host: Option<Granularity>,
    pub(super) address_space_bytes: u64,
    pub(super) max_reservation_bytes: u64,
    pub(super) max_peers: usize,
    pub(super) seed: u64,
    pub(super) driver_version: u32,
    pub(super) context_bytes: u64,
    pub(super) stream_slots: usize,
    pub(super) honour_hints: bool,
    pub(super) honour_alignment: bool,
    pub(super) told_memory: Option<MemInfo>,
    pub(super) time: TimeMode,
    pub(super) blocked_limit: Duration,
    pub(super) host_function_grace: Duration,
    pub(super) refusals: Vec<Refusal>,
}

impl Config {
    /// The granularity of chunks with these properties: the coarsest that applies.
    pub(super) fn granularity(&self, props: &ChunkProps) -> Granularity {
        let base = match props.location {
            Location::Device(_) => self.plain,
            Location::Host | Location::HostNuma(_) => self.host.unwrap_or(self.plain),
        };
        let exportable = self.exportable.filter(|_| props.handle_types != HandleTypes::NONE);
        let rdma = self.rdma.filter(|_| props.rdma);
        [exportable, rdma].into_iter().flatten().fold(base, Granularity::max)
    }

    /// The granularity of addresses: the finest that any chunk has, as a reservation does not say
    /// what will be mapped there.
    pub(super) fn address_granularity(&self) -> u64 {
        [Some(self.plain), self.exportable, self.rdma, self.host]
            .into_iter()
            .flatten()
            .map(|granularity| granularity.minimum)
            .min()
            .unwrap_or(self.plain.minimum)
    }

    pub(super) fn granularity_bytes(&self, props: &ChunkProps, kind: GranularityKind) -> u64 {
        let granularity = self.granularity(props);
        match kind {
            GranularityKind::Minimum => granularity.minimum,
            GranularityKind::Recommended => granularity.recommended,
        }
    }
}

/// Makes a [`Sim`]. Starts from the machine that was measured: one H200-like device, 2 MiB
/// granularity everywhere, all pairs linked by NVLink.
#[derive(Clone, Debug)]
pub struct SimBuilder {
    config: Config,
    default_link: Link,
    linked: Vec<(usize, usize, Link)>,
}

impl SimBuilder {
    pub(super) fn new() -> SimBuilder {
        let refuse_fabric = Refusal {
            property: Property::Fabric,
            call: Call::MemCreate,
            code: ResultCode::NOT_PERMITTED,
        };
        let config = Config {
            devices: vec![DeviceConfig {
                bytes: 150_754_820_096,
                physical_index: 0,
                attributes: BTreeMap::new(),
            }],
            links: Vec::new(),
            host_nodes: 2,
            host_node_bytes: TIB,
            plain: Granularity::new(2 * MIB, 2 * MIB),
            exportable: None,
            rdma: None,
            host: None,
            // A little less than 128 TiB: 31 reservations of 4 TiB fit (row D-R7).
            address_space_bytes: 128 * TIB - 64 * GIB,
            max_reservation_bytes: u64::MAX,
            max_peers: DEVICES_MAX,
            seed: 0,
            driver_version: 13000,
            context_bytes: 0,
            stream_slots: STREAM_SLOTS,
            honour_hints: true,
            honour_alignment: true,
            told_memory: None,
            time: TimeMode::Instant,
            blocked_limit: Duration::from_secs(20),
            host_function_grace: Duration::from_millis(50),
            refusals: vec![refuse_fabric],
        };
        SimBuilder { config, default_link: Link::NvLink, linked: Vec::new() }
    }

    /// Number of devices, 1 to 16. New ones have the size of device 0.
    pub fn devices(mut self, count: usize) -> SimBuilder {
        let first = self.config.devices[0].clone();
        self.config.devices.resize(count.clamp(1, DEVICES_MAX), first);
        for (index, device) in self.config.devices.iter_mut().enumerate() {
            device.physical_index = index as u32;
        }
        self
    }

    /// Which physical GPUs this process sees, in which order, as `CUDA_VISIBLE_DEVICES` would say;
    /// sets the number of devices too. The same number is the same GPU (the same UUID) everywhere.
    pub fn visible(self, physical_indices: &[u32]) -> SimBuilder {
        let mut builder = self.devices(physical_indices.len());
        for (device, index) in builder.config.devices.iter_mut().zip(physical_indices) {
            device.physical_index = *index;
        }
        builder
    }

    /// Memory of every device, in bytes.
    pub fn device_bytes(mut self, bytes: u64) -> SimBuilder {
        for device in &mut self.config.devices {
            device.bytes = bytes;
        }
        self
    }

    /// Memory of one device, in bytes. Call it after [`SimBuilder::devices`].
    pub fn device_bytes_of(mut self, device: usize, bytes: u64) -> SimBuilder {
        if let Some(device) = self.config.devices.get_mut(device) {
            device.bytes = bytes;
        }
        self
    }

    /// What links every pair.
    pub fn links(mut self, link: Link) -> SimBuilder {
        self.default_link = link;
        self
    }

    /// What links one pair, both ways.
    pub fn link(mut self, a: usize, b: usize, link: Link) -> SimBuilder {
        self.linked.push((a, b, link));
        self
    }

    /// Number of host NUMA nodes, and the bytes of each.
    pub fn host_numa_nodes(mut self, nodes: u32, bytes_each: u64) -> SimBuilder {
        self.config.host_nodes = nodes;
        self.config.host_node_bytes = bytes_each;
        self
    }

    /// Granularity of plain device memory, and of whatever has none of its own.
    pub fn granularity(mut self, minimum: u64, recommended: u64) -> SimBuilder {
        self.config.plain = Granularity::new(minimum, recommended);
        self
    }

    /// Granularity of memory with a handle type (applies where it is coarser).
    pub fn granularity_exportable(mut self, minimum: u64, recommended: u64) -> SimBuilder {
        self.config.exportable = Some(Granularity::new(minimum, recommended));
        self
    }

    /// Granularity of memory with the RDMA flag (applies where it is coarser).
    pub fn granularity_rdma(mut self, minimum: u64, recommended: u64) -> SimBuilder {
        self.config.rdma = Some(Granularity::new(minimum, recommended));
        self
    }

    /// Granularity of host memory.
    pub fn granularity_host(mut self, minimum: u64, recommended: u64) -> SimBuilder {
        self.config.host = Some(Granularity::new(minimum, recommended));
        self
    }

    /// Bytes of addresses that can be reserved in all, at most 128 TiB.
    pub fn address_space_bytes(mut self, bytes: u64) -> SimBuilder {
        self.config.address_space_bytes = bytes.min(128 * TIB);
        self
    }

    /// The largest single reservation, in bytes.
    pub fn max_reservation_bytes(mut self, bytes: u64) -> SimBuilder {
        self.config.max_reservation_bytes = bytes;
        self
    }

    /// To how many peers the memory of one device can be granted at a time.
    pub fn max_peers(mut self, peers: usize) -> SimBuilder {
        self.config.max_peers = peers;
        self
    }

    /// Seed of everything random (faults).
    pub fn seed(mut self, seed: u64) -> SimBuilder {
        self.config.seed = seed;
        self
    }

    /// What `cuDriverGetVersion` says, 1000 x major + 10 x minor. Calls that such a driver does
    /// not have answer `CUDA_ERROR_NOT_FOUND`.
    pub fn driver_version(mut self, version: u32) -> SimBuilder {
        self.config.driver_version = version;
        self
    }

    /// Device memory that a context takes, in bytes. Default 0, so that small devices are usable
    /// to the last byte.
    pub fn context_bytes(mut self, bytes: u64) -> SimBuilder {
        self.config.context_bytes = bytes;
        self
    }

    /// How many streams a device's context has room for at first. Making one more waits for all
    /// work of the device, held streams included, and makes room for 32 (row D-N2). Default 34, as
    /// was measured; `usize::MAX` never waits.
    pub fn stream_slots(mut self, count: usize) -> SimBuilder {
        self.config.stream_slots = count;
        self
    }

    /// Overrides an attribute: the device says so, whether it is true or not.
    pub fn attribute(
        mut self,
        device: usize,
        attribute: DeviceAttribute,
        value: i32,
    ) -> SimBuilder {
        if let Some(device) = self.config.devices.get_mut(device) {
            device.attributes.insert(attribute as i32, value);
        }
        self
    }

    /// Memory with `property` is refused by `call` (create, map, set access, export or import)
    /// with `code`, whatever the attributes say. The newest rule of a pair counts;
    /// `ResultCode::SUCCESS` takes a rule back, the built-in one for fabric handles too.
    pub fn refuse(mut self, property: Property, call: Call, code: ResultCode) -> SimBuilder {
        self.config.refusals.retain(|rule| (rule.property, rule.call) != (property, call));
        if code != ResultCode::SUCCESS {
            self.config.refusals.push(Refusal { property, call, code });
        }
        self
    }

    /// Whether a free address hint is followed (the real driver usually does; row D-R4).
    pub fn honour_hints(mut self, honour: bool) -> SimBuilder {
        self.config.honour_hints = honour;
        self
    }

    /// Whether the alignment that a reservation asks for is kept; some platforms were seen to answer
    /// with any multiple of the granularity. Default true, as was measured (row D-R3).
    pub fn honour_alignment(mut self, honour: bool) -> SimBuilder {
        self.config.honour_alignment = honour;
        self
    }

    /// What `cuMemGetInfo` says of every device, whatever is true.
    pub fn tells_memory(mut self, told: MemInfo) -> SimBuilder {
        self.config.told_memory = Some(told);
        self
    }

    /// When work on streams is done. Default [`TimeMode::Instant`].
    pub fn time(mut self, time: TimeMode) -> SimBuilder {
        self.config.time = time;
        self
    }

    /// How long a call waits, in real time, for a stream that only a test or another thread can
    /// release; then it answers `CUDA_ERROR_LAUNCH_TIMEOUT` and names the stream. Default 20 s.
    pub fn blocked_limit(mut self, limit: Duration) -> SimBuilder {
        self.config.blocked_limit = limit;
        self
    }

    /// How long, in real time, a call that starts a host function waits for it before it returns,
    /// so that quick functions are done when the call is. Default 50 ms.
    pub fn host_function_grace(mut self, grace: Duration) -> SimBuilder {
        self.config.host_function_grace = grace;
        self
    }

    /// The machine.
    pub fn build(self) -> Arc<Sim> {
        let count = self.config.devices.len();
        let mut config = self.config;
        config.links = vec![vec![self.default_link; count]; count];
        for (a, b, link) in self.linked {
            if a < count && b < count {
                config.links[a][b] = link;
                config.links[b][a] = link;
            }
        }
        Sim::from_config(config)
    }
}
