//! What each call costs on the machine that was measured (two H200, driver 580): medians, in
//! nanoseconds, linear between the measured chunk sizes and beyond them.
//!
//! Ratios are what this is for; absolute times move from machine to machine. Calls that were not
//! measured get a small round number, named as such below.

use crate::call::Call;

const MIB: u64 = 1 << 20;
const US: u64 = 1000;

/// Points of (bytes, nanoseconds), ascending.
type Curve = &'static [(u64, u64)];

const CREATE: Curve =
    &[(2 * MIB, 14 * US), (32 * MIB, 10 * US), (128 * MIB, 13 * US), (512 * MIB, 70 * US)];
const ACCESS_FRESH: Curve = &[
    (2 * MIB, 37 * US),
    (8 * MIB, 35 * US),
    (16 * MIB, 40 * US),
    (32 * MIB, 74 * US),
    (64 * MIB, 140 * US),
    (512 * MIB, 670 * US),
];
const ACCESS_AGAIN: Curve =
    &[(2 * MIB, 30 * US), (32 * MIB, 27 * US), (128 * MIB, 31 * US), (512 * MIB, 45 * US)];
const UNMAP: Curve = &[(2 * MIB, 20_500), (32 * MIB, 17_800)];
const RELEASE: Curve = &[(2 * MIB, 18 * US), (32 * MIB, 27 * US), (512 * MIB, 290 * US)];

/// What a grant to a peer adds to a mapping that its owner can use too.
pub(super) const ACCESS_PEER_NS: u64 = 25 * US;
/// A grant to a peer alone.
pub(super) const ACCESS_PEER_ALONE_NS: u64 = 27 * US;
/// Bringing the link of a pair up, while no mapping of that pair is alive.
pub(super) const LINK_UP_NS: u64 = 935 * US;
/// Growing the driver's own stream-ordered pool by 32 MiB.
pub(super) const ASYNC_POOL_GROWTH_NS: u64 = 416 * US;

/// A value on a curve: below the measured sizes the first point, beyond them the last slope, but no
/// less than the last point.
fn on_curve(curve: Curve, bytes: u64) -> u64 {
    let Some(&(first_bytes, first_ns)) = curve.first() else { return 0 };
    if bytes <= first_bytes || curve.len() == 1 {
        return first_ns;
    }
    let upper = curve.iter().position(|point| point.0 >= bytes).unwrap_or(curve.len() - 1);
    let ((x0, y0), (x1, y1)) = (curve[upper - 1], curve[upper]);
    let slope_num = i128::from(y1) - i128::from(y0);
    let y = i128::from(y0) + slope_num * i128::from(bytes - x0) / i128::from(x1 - x0);
    let y = u64::try_from(y).unwrap_or(0);
    if bytes > x1 { y.max(y1) } else { y }
}

/// `cuMemCreate` on a device.
pub(super) fn create_ns(bytes: u64, exportable: bool) -> u64 {
    on_curve(CREATE, bytes) + if exportable { 11 * US } else { 0 }
}

/// `cuMemCreate` on a host NUMA node: 246 ms a GiB.
pub(super) fn create_host_ns(bytes: u64) -> u64 {
    bytes / MIB * 240_234
}

/// `cuMemMap`.
pub(super) fn map_ns(exportable: bool, rdma: bool) -> u64 {
    match (exportable, rdma) {
        (_, true) => 8 * US,
        (true, false) => 3 * US,
        (false, false) => 1300,
    }
}

/// The owner's part of `cuMemSetAccess` on one mapping.
pub(super) fn access_ns(bytes: u64, mapped_before: bool, exportable: bool) -> u64 {
    let curve = if mapped_before { ACCESS_AGAIN } else { ACCESS_FRESH };
    on_curve(curve, bytes) + if exportable { 18 * US } else { 0 }
}

/// `cuMemUnmap` of one mapping.
pub(super) fn unmap_ns(bytes: u64, exportable: bool) -> u64 {
    on_curve(UNMAP, bytes) + if exportable { 18 * US } else { 0 }
}

/// Giving physical memory back, whichever call drops the last reference.
pub(super) fn release_ns(bytes: u64) -> u64 {
    on_curve(RELEASE, bytes)
}

/// `cuMemAddressReserve`.
pub(super) fn reserve_ns(bytes: u64) -> u64 {
    if (32 * MIB..=128 * MIB).contains(&bytes) { 10 * US } else { 2500 }
}

/// `cuMemAddressFree`.
pub(super) fn address_free_ns(bytes: u64) -> u64 {
    if (32 * MIB..=128 * MIB).contains(&bytes) { 9 * US } else { 3 * US }
}

/// `cuMemAlloc`: measured up to 2 MiB; beyond, as fresh memory costs per byte.
pub(super) fn mem_alloc_ns(bytes: u64) -> u64 {
    56 * US + bytes.saturating_sub(2 * MIB) / MIB * 1300
}

/// The cost of a call whose cost depends on nothing, or of one that was refused.
pub(super) fn base_ns(call: Call) -> u64 {
    match call {
        // Measured.
        Call::EventRecord | Call::StreamWaitEvent => 400,
        Call::EventQuery => 1600,
        Call::StreamGetId => 80,
        Call::MemGetInfo => 7 * US,
        Call::MemExportToShareableHandle => 650 * US,
        Call::MemImportFromShareableHandle => 42 * US,
        Call::MemGetHandleForAddressRange => 50 * US,
        Call::MemAlloc => 56 * US,
        Call::MemFree => 47 * US,
        Call::MemAllocAsync => 540,
        Call::MemFreeAsync => 660,
        Call::MemRelease => 2 * US,
        // Not measured: enqueueing work.
        Call::MemcpyHtoDAsync
        | Call::MemcpyDtoHAsync
        | Call::MemcpyDtoDAsync
        | Call::MemcpyPeerAsync
        | Call::MemsetD8Async
        | Call::LaunchKernel
        | Call::LaunchHostFunc
        | Call::StreamWaitValue32
        | Call::GraphLaunch => 2 * US,
        // Not measured: making and dropping things.
        Call::StreamCreate | Call::StreamDestroy | Call::GraphInstantiate => 10 * US,
        Call::MemHostAlloc | Call::MemFreeHost => 50 * US,
        // Not measured: questions.
        Call::CtxGetCurrent | Call::CtxSetCurrent | Call::DeviceGetAttribute => 50,
        _ => 500,
    }
}

/// The first driver version that has a call: a driver older than that answers
/// `CUDA_ERROR_NOT_FOUND`.
pub(super) fn since_version(call: Call) -> u32 {
    match call {
        Call::MemAddressReserve
        | Call::MemAddressFree
        | Call::MemCreate
        | Call::MemRelease
        | Call::MemMap
        | Call::MemUnmap
        | Call::MemSetAccess
        | Call::MemGetAccess
        | Call::MemGetAllocationGranularity
        | Call::MemGetAllocationProperties
        | Call::MemExportToShareableHandle
        | Call::MemImportFromShareableHandle => 10_020,
        Call::MemRetainAllocationHandle => 11_000,
        Call::MemAllocAsync
        | Call::MemFreeAsync
        | Call::DeviceGetDefaultMemPool
        | Call::MemPoolSetAttribute => 11_020,
        Call::ThreadExchangeStreamCaptureMode | Call::StreamGetCaptureInfo => 10_010,
        Call::StreamGetId => 12_000,
        _ => 0,
    }
}

/// Durations of work on the GPU, from measured bandwidths. 1 GB/s is 1 byte a nanosecond.
pub(super) mod work {
    use super::{Curve, MIB, on_curve};

    /// Bytes a microsecond of a kernel at its own memory, the neighbour's, the host's.
    const LOCAL_READ: u64 = 4_370_000;
    const LOCAL_WRITE: u64 = 3_660_000;
    const PEER_READ: u64 = 373_000;
    const PEER_WRITE: u64 = 369_000;
    const HOST: u64 = 51_000;
    const HOST_COPY: u64 = 54_000;
    /// Copies between GPUs, in nanoseconds for the whole piece.
    const PEER_COPY: Curve =
        &[(0, 0), (2 * MIB, 7_884), (32 * MIB, 88_768), (1024 * MIB, 2_711_470)];
    const PCIE_SLOWDOWN: u64 = 8;

    /// Where the memory is, seen from the GPU that works.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(in crate::sim) enum Distance {
        Local,
        Neighbour,
        NeighbourOverPcie,
        Host,
    }

    fn nanos(bytes: u64, bytes_per_us: u64) -> u64 {
        (u128::from(bytes) * 1000 / u128::from(bytes_per_us)) as u64
    }

    pub(in crate::sim) fn kernel_read_ns(distance: Distance, bytes: u64) -> u64 {
        match distance {
            Distance::Local => nanos(bytes, LOCAL_READ),
            Distance::Neighbour => nanos(bytes, PEER_READ),
            Distance::NeighbourOverPcie => nanos(bytes, PEER_READ) * PCIE_SLOWDOWN,
            Distance::Host => nanos(bytes, HOST),
        }
    }

    pub(in crate::sim) fn kernel_write_ns(distance: Distance, bytes: u64) -> u64 {
        match distance {
            Distance::Local => nanos(bytes, LOCAL_WRITE),
            Distance::Neighbour => nanos(bytes, PEER_WRITE),
            Distance::NeighbourOverPcie => nanos(bytes, PEER_WRITE) * PCIE_SLOWDOWN,
            Distance::Host => nanos(bytes, HOST),
        }
    }

    /// A copy whose slower side is at `distance`.
    pub(in crate::sim) fn copy_ns(distance: Distance, bytes: u64) -> u64 {
        match distance {
            Distance::Local => nanos(bytes, LOCAL_READ) + nanos(bytes, LOCAL_WRITE),
            Distance::Neighbour => on_curve(PEER_COPY, bytes),
            Distance::NeighbourOverPcie => on_curve(PEER_COPY, bytes) * PCIE_SLOWDOWN,
            Distance::Host => nanos(bytes, HOST_COPY),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measured_points_come_out_exactly_and_the_rest_between() {
        assert_eq!(access_ns(32 * MIB, false, false), 74 * US);
        assert_eq!(access_ns(32 * MIB, true, false), 27 * US);
        let between = access_ns(48 * MIB, false, false);
        assert_eq!(between, 107 * US);
        assert_eq!(access_ns(4096, false, false), 37 * US);
        assert!(access_ns(1024 * MIB, false, false) > 1_200 * US);
        assert_eq!(unmap_ns(1 << 40, false), 17_800);
    }

    #[test]
    fn the_measured_sums_of_a_gibibyte_are_met() {
        // Fresh, in 32 MiB chunks: 2,700 us; from stock 930; unmap 570 (within 5 %).
        let near = |ns: u64, us: u64| ns.abs_diff(us * US) * 20 <= us * US;
        let map = map_ns(false, false);
        let bytes = 32 * MIB;
        assert!(near(32 * (create_ns(bytes, false) + map + access_ns(bytes, false, false)), 2_700));
        assert!(near(32 * (map + access_ns(bytes, true, false)), 930));
        assert!(near(32 * unmap_ns(bytes, false), 570));
        let bytes = 2 * MIB;
        assert!(near(
            512 * (create_ns(bytes, false) + map + access_ns(bytes, false, false)),
            26_700
        ));
        assert!(near(512 * (map + access_ns(bytes, true, false)), 16_700));
        assert!(near(512 * unmap_ns(bytes, false), 10_500));
        assert!(near(create_host_ns(1024 * MIB), 246_000));
    }

    #[test]
    fn copies_run_at_the_measured_speed() {
        use work::{Distance, copy_ns};
        let gb_per_s = |bytes: u64| bytes / copy_ns(Distance::Neighbour, bytes);
        assert_eq!(gb_per_s(2 * MIB), 266);
        assert!((376..=380).contains(&gb_per_s(32 * MIB)), "{}", gb_per_s(32 * MIB));
        assert!((390..=397).contains(&gb_per_s(1024 * MIB)));
        assert!((378..=397).contains(&gb_per_s(256 * MIB)), "{}", gb_per_s(256 * MIB));
    }
}
