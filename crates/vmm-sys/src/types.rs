//! The words of the contract: plain values with their units, no behaviour that needs a driver.
//!
//! Device addresses are plain `u64` numbers: the host never dereferences them. Sizes are `u64` bytes.

mod work;

use std::fmt;

pub use work::{ProbeKernel, Transfer};

/// The ordinal of a GPU in this process, as `CUDA_VISIBLE_DEVICES` left it. Never sent to another
/// process: there, name a device by its [`Uuid`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceId(pub u32);

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device {}", self.0)
    }
}

/// The identity of a physical GPU, the same in every process.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Uuid(pub [u8; 16]);

impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GPU-")?;
        for (index, byte) in self.0.iter().enumerate() {
            if matches!(index, 4 | 6 | 8 | 10) {
                write!(f, "-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Where physical memory lies, or who is granted access to it (`CUmemLocation`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Location {
    /// A GPU.
    Device(DeviceId),
    /// The host, wherever (only as a grantee, and refused on the machines measured: row D-A3).
    Host,
    /// One NUMA node of the host.
    HostNuma(u32),
}

impl Location {
    /// The device, if this is one.
    pub fn device(self) -> Option<DeviceId> {
        match self {
            Location::Device(device) => Some(device),
            Location::Host | Location::HostNuma(_) => None,
        }
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Location::Device(device) => write!(f, "{device}"),
            Location::Host => write!(f, "the host"),
            Location::HostNuma(node) => write!(f, "host NUMA node {node}"),
        }
    }
}

/// The kinds of handle a chunk can be exported as, fixed when it is created
/// (`CUmemAllocationHandleType`, a bit set).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HandleTypes(u32);

impl HandleTypes {
    /// Not exportable.
    pub const NONE: HandleTypes = HandleTypes(0);
    /// A POSIX file descriptor.
    pub const POSIX_FD: HandleTypes = HandleTypes(1);
    /// A fabric handle.
    pub const FABRIC: HandleTypes = HandleTypes(8);

    /// The driver's bits.
    pub fn bits(self) -> u32 {
        self.0
    }

    /// From the driver's bits.
    pub fn from_bits(bits: u32) -> HandleTypes {
        HandleTypes(bits)
    }

    /// Whether every kind of `other` is in `self`.
    pub fn contains(self, other: HandleTypes) -> bool {
        self.0 & other.0 == other.0
    }
}

/// The properties of a chunk, fixed when it is created (`CUmemAllocationProp`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkProps {
    /// Where the memory lies.
    pub location: Location,
    /// How it can be exported.
    pub handle_types: HandleTypes,
    /// Whether a NIC may read it directly (`gpuDirectRDMACapable`).
    pub rdma: bool,
}

impl ChunkProps {
    /// Plain memory of one GPU: not exportable, no RDMA flag.
    pub fn on_device(device: DeviceId) -> ChunkProps {
        ChunkProps {
            location: Location::Device(device),
            handle_types: HandleTypes::NONE,
            rdma: false,
        }
    }
}

/// Which granularity is asked for (`CUmemAllocationGranularity_flags`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GranularityKind {
    /// Sizes and addresses must be multiples of it.
    Minimum,
    /// Sizes and addresses should be multiples of it, for speed.
    Recommended,
}

/// What a location may do with a mapping (`CUmemAccess_flags`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Access {
    /// Nothing: what every fresh mapping starts with, for its owner too (row D-A6).
    None,
    /// Reads only.
    Read,
    /// Reads and writes.
    ReadWrite,
}

/// One entry of a set-access call (`CUmemAccessDesc`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AccessGrant {
    /// Who is granted.
    pub location: Location,
    /// What it may do.
    pub access: Access,
}

impl AccessGrant {
    /// Reads and writes for one GPU.
    pub fn read_write(device: DeviceId) -> AccessGrant {
        AccessGrant { location: Location::Device(device), access: Access::ReadWrite }
    }
}

/// A reference to a chunk (`CUmemGenericAllocationHandle`). A plain number: copying it copies no
/// reference. [`crate::object::Chunk`] is the owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ChunkHandle(pub u64);

/// A stream (`CUstream`). 0 and 1 name the legacy stream, 2 the calling thread's own stream.
/// Values are given out again after a destroy (row D-S1): identity is [`StreamId`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StreamHandle(pub u64);

impl StreamHandle {
    /// The null stream: the legacy stream of the current context.
    pub const NULL: StreamHandle = StreamHandle(0);
    /// `CU_STREAM_LEGACY`.
    pub const LEGACY: StreamHandle = StreamHandle(1);
    /// `CU_STREAM_PER_THREAD`.
    pub const PER_THREAD: StreamHandle = StreamHandle(2);
}

/// The identity of a stream (`cuStreamGetId`): never given out twice in a process (row D-S1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamId(pub u64);

/// An event (`CUevent`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EventHandle(pub u64);

/// An event's name in other processes (`CUipcEventHandle`): plain bytes, to be sent as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct IpcEventHandle(pub [u8; 64]);

/// A context (`CUcontext`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ContextHandle(pub u64);

/// A captured graph (`CUgraph`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GraphHandle(pub u64);

/// A graph ready to launch (`CUgraphExec`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GraphExecHandle(pub u64);

/// Page-locked host memory that GPUs and [`crate::Driver::stream_wait_value32`] can see
/// (`cuMemHostAlloc`). A plain host address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PinnedAddress(pub u64);

/// What stream capture forbids to other threads (`CUstreamCaptureMode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CaptureMode {
    /// Unsafe calls are forbidden to every thread.
    Global,
    /// Unsafe calls are forbidden to the capturing thread.
    ThreadLocal,
    /// Nothing is forbidden.
    Relaxed,
}

/// Whether a stream is being captured (`CUstreamCaptureStatus`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CaptureStatus {
    /// No.
    None,
    /// Yes.
    Active,
    /// It was, until an illegal call; it has still to be ended.
    Invalidated,
}

/// State of a capture (`cuStreamGetCaptureInfo`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CaptureInfo {
    /// Whether the stream is being captured.
    pub status: CaptureStatus,
    /// Identity of the capture sequence; 0 unless active. Streams that joined by an event share it.
    pub id: u64,
}

/// What `cuMemGetInfo` says. Advice only: see the field reports on unified memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MemInfo {
    /// Bytes that can still be created.
    pub free_bytes: u64,
    /// Bytes of the device.
    pub total_bytes: u64,
}

/// What the driver knows of an address (`cuPointerGetAttributes`), as in row D-P2.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PointerInfo {
    /// 0 unknown to the driver, 1 host, 2 device, 3 array, 4 unified.
    pub memory_type: u32,
    /// The device whose memory backs the address; `u32::MAX` if that is none.
    pub device: DeviceId,
    /// The context it belongs to: none for mapped chunks.
    pub context: Option<ContextHandle>,
    /// Whether `cuIpcGetMemHandle` would take it.
    pub legacy_ipc_capable: bool,
}

/// Values under the driver's own numbers.
macro_rules! numbered {
    ($(#[$about:meta])* $name:ident { $($(#[$word:meta])* $value:ident = $number:literal,)* }) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(i32)]
        pub enum $name {
            $($(#[$word])* $value = $number,)*
        }

        impl $name {
            /// The one that the driver knows by this number.
            pub fn of_number(number: i32) -> Option<$name> {
                match number {
                    $($number => Some($name::$value),)*
                    _ => None,
                }
            }
        }
    };
}

numbered! {
    /// A device attribute that the pool or the doctor asks for (`CUdevice_attribute`).
    DeviceAttribute {
        /// Number of multiprocessors.
        MultiprocessorCount = 16,
        /// Whether the GPU shares physical memory with the host.
        Integrated = 18,
        /// PCI bus.
        PciBusId = 33,
        /// PCI device.
        PciDeviceId = 34,
        /// Unified addressing.
        UnifiedAddressing = 41,
        /// PCI domain.
        PciDomainId = 50,
        /// Compute capability, major.
        ComputeCapabilityMajor = 75,
        /// Compute capability, minor.
        ComputeCapabilityMinor = 76,
        /// The VMM calls.
        VirtualMemoryManagementSupported = 102,
        /// Export as POSIX descriptor.
        HandleTypePosixFdSupported = 103,
        /// `gpuDirectRDMACapable` on VMM memory.
        GpuDirectRdmaWithVmmSupported = 110,
        /// Stream-ordered pools.
        MemoryPoolsSupported = 115,
        /// GPUDirect RDMA at all.
        GpuDirectRdmaSupported = 116,
        /// dma-buf export.
        DmaBufSupported = 124,
        /// Events that other processes can open.
        IpcEventSupported = 125,
        /// Fabric handles (an attribute is not a promise: row D-C7).
        HandleTypeFabricSupported = 128,
        /// The host NUMA node next to the GPU.
        HostNumaId = 134,
        /// Host NUMA memory through the VMM calls.
        HostNumaVmmSupported = 141,
    }
}

numbered! {
    /// A property of a pair of devices (`CUdevice_P2PAttribute`).
    PeerAttribute {
        /// Relative link performance; 0 is the fastest.
        PerformanceRank = 1,
        /// Whether access is supported.
        AccessSupported = 2,
        /// Native atomics over the link.
        NativeAtomicSupported = 3,
    }
}

/// Which driver stands behind the contract.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DriverKind {
    /// `libcuda`.
    Cuda,
    /// The simulated device.
    Sim,
}

impl fmt::Display for DriverKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DriverKind::Cuda => "cuda",
            DriverKind::Sim => "sim",
        })
    }
}
