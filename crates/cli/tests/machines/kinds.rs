//! The machines.

use vmm_sys::sim::{Link, Property, SimBuilder};
use vmm_sys::{Call, DeviceAttribute, ResultCode};

/// A machine, and what must be read in its line at least.
pub(crate) struct Machine {
    pub(crate) build: fn(SimBuilder) -> SimBuilder,
    /// Calls that always fail, whatever for.
    pub(crate) fails: &'static [(Call, ResultCode)],
    pub(crate) expected: &'static [&'static str],
}

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

const NO: ResultCode = ResultCode::NOT_SUPPORTED;

macro_rules! machine {
    ($build:expr, $($expected:literal),+) => {
        Machine { build: $build, fails: &[], expected: &[$($expected),+] }
    };
    (fails $call:expr, $code:expr, $($expected:literal),+) => {
        Machine {
            build: |sim| sim,
            fails: &[($call, $code)],
            expected: &[$($expected),+],
        }
    };
}

fn attribute(sim: SimBuilder, attribute: DeviceAttribute, value: i32) -> SimBuilder {
    sim.attribute(0, attribute, value)
}

/// The order is that of the page.
pub(crate) const MACHINES: &[(&str, Machine)] = &[
    ("one healthy device", machine!(|sim| sim, "works")),
    ("two linked devices", machine!(|sim| sim.devices(2), "works")),
    (
        "virtual GPU: VMM denied by the attribute",
        machine!(
            |sim| attribute(sim, DeviceAttribute::VirtualMemoryManagementSupported, 0),
            "refused when it is built",
            "cuDeviceGetAttribute"
        ),
    ),
    (
        "VMM advertised, granularity refused",
        machine!(
            fails Call::MemGetAllocationGranularity, NO,
            "refused when it is built", "cuMemGetAllocationGranularity"
        ),
    ),
    (
        "VMM advertised, create refused",
        machine!(
            |sim| sim.refuse(Property::Any, Call::MemCreate, NO),
            "refused when it is built",
            "cuMemCreate"
        ),
    ),
    (
        "VMM advertised, map refused",
        machine!(
            |sim| sim.refuse(Property::Any, Call::MemMap, NO),
            "refused when it is built",
            "cuMemMap"
        ),
    ),
    (
        "VMM advertised, set access refused",
        machine!(
            |sim| sim.refuse(Property::Any, Call::MemSetAccess, ResultCode::UNKNOWN),
            "refused when it is built",
            "cuMemSetAccess"
        ),
    ),
    (
        "MIG slice, or confidential computing: two devices, no link",
        machine!(|sim| sim.devices(2).links(Link::None), "works without peers"),
    ),
    ("two devices over PCIe", machine!(|sim| sim.devices(2).links(Link::Pcie), "works")),
    (
        "ten devices, memory granted to eight peers at most",
        machine!(|sim| sim.devices(10).max_peers(8), "works"),
    ),
    (
        "two devices, memory granted to nobody",
        machine!(|sim| sim.devices(2).max_peers(0), "works without peers"),
    ),
    ("granularity 4 KiB", machine!(|sim| sim.granularity(4 * KIB, 2 * MIB), "works")),
    ("granularity 64 KiB", machine!(|sim| sim.granularity(64 * KIB, 64 * KIB), "works")),
    (
        "granularity 512 MiB",
        machine!(|sim| sim.granularity(512 * MIB, 512 * MIB).device_bytes(8 * GIB), "works"),
    ),
    (
        "minimum 2 MiB, recommended 32 MiB",
        machine!(|sim| sim.granularity(2 * MIB, 32 * MIB), "works"),
    ),
    (
        "exportable memory only in 32 MiB",
        machine!(|sim| sim.granularity_exportable(32 * MIB, 32 * MIB), "works"),
    ),
    (
        "host memory only in 64 KiB",
        machine!(|sim| sim.granularity_host(64 * KIB, 64 * KIB), "works"),
    ),
    (
        "reservations of at most 16 GiB",
        machine!(|sim| sim.max_reservation_bytes(16 * GIB), "works"),
    ),
    ("reservations of at most 1 GiB", machine!(|sim| sim.max_reservation_bytes(GIB), "works")),
    ("1 GiB of addresses in all", machine!(|sim| sim.address_space_bytes(GIB), "works")),
    (
        "no addresses at all",
        machine!(
            |sim| sim.max_reservation_bytes(0),
            "refused when it is built",
            "cuMemAddressReserve"
        ),
    ),
    ("a device of 256 GiB", machine!(|sim| sim.device_bytes(256 * GIB), "works")),
    ("a device of 64 MiB", machine!(|sim| sim.device_bytes(64 * MIB), "works")),
    (
        "no host NUMA memory",
        machine!(
            |sim| attribute(sim.host_numa_nodes(0, 0), DeviceAttribute::HostNumaVmmSupported, 0),
            "works without host memory"
        ),
    ),
    (
        "host memory advertised, create refused",
        machine!(
            |sim| sim.refuse(Property::HostNuma, Call::MemCreate, NO),
            "works without host memory"
        ),
    ),
    (
        "host memory advertised, set access refused",
        machine!(
            |sim| sim.refuse(Property::HostNuma, Call::MemSetAccess, ResultCode::INVALID_VALUE),
            "works without host memory"
        ),
    ),
    (
        "descriptors advertised, create refused",
        machine!(|sim| sim.refuse(Property::PosixFd, Call::MemCreate, NO), "works without export"),
    ),
    (
        "descriptors advertised, export refused",
        machine!(
            |sim| sim.refuse(
                Property::PosixFd,
                Call::MemExportToShareableHandle,
                ResultCode::NOT_PERMITTED
            ),
            "works without export"
        ),
    ),
    (
        "RDMA advertised, set access refused (WSL2)",
        machine!(
            |sim| sim.refuse(Property::Rdma, Call::MemSetAccess, ResultCode::UNKNOWN),
            "works"
        ),
    ),
    (
        "a driver of CUDA 10.1: no VMM",
        machine!(|sim| sim.driver_version(10_010), "refused when", "cuMemGetAllocationGranularity"),
    ),
    (
        "a driver of CUDA 10.2",
        machine!(|sim| sim.driver_version(10_020), "refused when", "cuStreamGetId"),
    ),
    (
        "a driver of CUDA 11.0",
        machine!(|sim| sim.driver_version(11_000), "refused when", "cuStreamGetId"),
    ),
    (
        "a driver of CUDA 11.8",
        machine!(|sim| sim.driver_version(11_080), "refused when", "cuStreamGetId"),
    ),
    ("a driver of CUDA 12.0", machine!(|sim| sim.driver_version(12_000), "works")),
];
