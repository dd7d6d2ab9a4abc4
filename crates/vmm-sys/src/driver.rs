//! The contract: one method a driver call, the same for the real driver and the simulated device.
//!
//! # States
//!
//! An address is *unreserved*, *reserved*, or *mapped*; what a device may do with a mapped address
//! is a property of the mapping, and starts as nothing. A chunk lives as long as something refers
//! to it: a handle (from create, retain or import), a mapping, or an exported descriptor.
//!
//! ```text
//! unreserved --address_reserve--> reserved --map--> mapped --set_access--> mapped + access
//!            <--address_free-----          <-unmap-
//! ```
//!
//! # Who validates
//!
//! The caller. An implementation passes its arguments on and gives back the driver's answer with
//! the numbers that explain it; it adds no checks of its own. What the driver answers to a wrong
//! call is part of the contract: `docs/DRIVER.md` lists it row by row (ids `D-…`), and the
//! conformance suite runs each row on every implementation.
//!
//! # Contexts and threads
//!
//! Methods that need a current context take the device whose primary context is made current for
//! the call; the caller's own current context is as before when they return, also on errors. All
//! methods may be called from any thread.
//!
//! # Safety
//!
//! A device address is a number to the host, and the driver checks it, so calls that take only
//! numbers and descriptors are safe: the worst a wrong one does is fault a kernel. Calls that take
//! a handle which the driver dereferences, or host memory, are `unsafe fn`; the objects in
//! [`crate::object`] discharge these conditions once, by ownership. Where a method says *live*, the
//! handle came from this driver and was not destroyed.

use std::fmt::Debug;
use std::os::fd::{BorrowedFd, OwnedFd};

use crate::call::{Call, CallLedger};
use crate::error::DriverResult;
use crate::types::*;

/// A CUDA driver, real or simulated. See the [module page](self) for the common rules.
pub trait Driver: Send + Sync + Debug {
    /// Which one this is.
    fn kind(&self) -> DriverKind;

    /// Counts and times of all calls made through this driver.
    fn ledger(&self) -> &CallLedger;

    /// Whether calls have become pointless: the process is exiting, or this is a forked child (row
    /// D-K1). `Drop` of every object asks this first and then stays silent.
    fn is_gone(&self) -> bool;

    /// The calls that this driver is too old to have. They answer `CUDA_ERROR_NOT_FOUND`, those
    /// of dma-bufs and interprocess events `CUDA_ERROR_NOT_SUPPORTED`; all else works.
    fn missing_calls(&self) -> Vec<Call>;

    // ---- machine ----

    /// `cuDriverGetVersion`: 1000 x major + 10 x minor.
    fn driver_version(&self) -> DriverResult<u32>;
    /// `cuDeviceGetCount`.
    fn device_count(&self) -> DriverResult<u32>;
    /// `cuDeviceGetName`.
    fn device_name(&self, device: DeviceId) -> DriverResult<String>;
    /// `cuDeviceGetUuid`.
    fn device_uuid(&self, device: DeviceId) -> DriverResult<Uuid>;
    /// `cuDeviceTotalMem`, in bytes.
    fn device_total_bytes(&self, device: DeviceId) -> DriverResult<u64>;
    /// `cuDeviceGetAttribute`. An attribute is no promise (row D-C7).
    fn device_attribute(&self, device: DeviceId, attribute: DeviceAttribute) -> DriverResult<i32>;
    /// `cuDeviceCanAccessPeer`.
    fn can_access_peer(&self, device: DeviceId, peer: DeviceId) -> DriverResult<bool>;
    /// `cuDeviceGetP2PAttribute`.
    fn peer_attribute(
        &self,
        attribute: PeerAttribute,
        device: DeviceId,
        peer: DeviceId,
    ) -> DriverResult<i32>;

    // ---- contexts ----

    /// `cuDevicePrimaryCtxRetain`: one reference; the first makes the context.
    fn primary_context_retain(&self, device: DeviceId) -> DriverResult<ContextHandle>;
    /// `cuDevicePrimaryCtxRelease`: gives one reference back.
    fn primary_context_release(&self, device: DeviceId) -> DriverResult<()>;
    /// `cuCtxGetCurrent` of the calling thread.
    fn context_current(&self) -> DriverResult<Option<ContextHandle>>;
    /// `cuCtxSetCurrent` of the calling thread.
    ///
    /// # Safety
    /// The context is live.
    unsafe fn context_set_current(&self, context: Option<ContextHandle>) -> DriverResult<()>;
    /// `cuCtxSynchronize`: waits for all work of the device's primary context.
    fn device_synchronize(&self, device: DeviceId) -> DriverResult<()>;
    /// `cuMemGetInfo`.
    fn mem_info(&self, device: DeviceId) -> DriverResult<MemInfo>;

    // ---- addresses and chunks (the VMM calls) ----

    /// `cuMemGetAllocationGranularity`, in bytes.
    fn granularity(&self, props: &ChunkProps, kind: GranularityKind) -> DriverResult<u64>;
    /// `cuMemAddressReserve`: `align_bytes` 0 is the granularity; a `hint` is no promise (row D-R4).
    fn address_reserve(&self, bytes: u64, align_bytes: u64, hint: u64) -> DriverResult<u64>;
    /// `cuMemAddressFree`: exactly what one reserve gave, with nothing mapped in it (row D-F1).
    fn address_free(&self, address: u64, bytes: u64) -> DriverResult<()>;
    /// `cuMemCreate`: physical memory is committed now, all zero (rows D-C4, D-C5).
    fn create(&self, bytes: u64, props: &ChunkProps) -> DriverResult<ChunkHandle>;
    /// `cuMemRelease`: gives the handle's reference back; mappings keep the memory (row D-H1).
    ///
    /// # Safety
    /// The handle is live, and the caller owns the reference.
    unsafe fn release(&self, chunk: ChunkHandle) -> DriverResult<()>;
    /// `cuMemRetainAllocationHandle`: the chunk behind a mapped address, one more reference.
    fn retain(&self, address: u64) -> DriverResult<ChunkHandle>;
    /// `cuMemGetAllocationPropertiesFromHandle`.
    ///
    /// # Safety
    /// The handle is live.
    unsafe fn properties(&self, chunk: ChunkHandle) -> DriverResult<ChunkProps>;
    /// `cuMemMap`: the whole chunk, `offset` 0 (row D-M1), with no access yet (row D-A6).
    ///
    /// # Safety
    /// The handle is live.
    unsafe fn map(
        &self,
        address: u64,
        bytes: u64,
        offset: u64,
        chunk: ChunkHandle,
    ) -> DriverResult<()>;
    /// `cuMemUnmap`: whole mappings. Does not wait for work that uses them (row D-U4).
    fn unmap(&self, address: u64, bytes: u64) -> DriverResult<()>;
    /// `cuMemSetAccess`: over whole mappings (rows D-A1, D-A2; a hole: D-A9).
    fn set_access(&self, address: u64, bytes: u64, grants: &[AccessGrant]) -> DriverResult<()>;
    /// `cuMemGetAccess`: what `location` may do at `address`.
    fn get_access(&self, address: u64, location: Location) -> DriverResult<Access>;
    /// `cuMemExportToShareableHandle` as a POSIX descriptor; it keeps the memory (row D-X6).
    ///
    /// # Safety
    /// The handle is live.
    unsafe fn export_fd(&self, chunk: ChunkHandle) -> DriverResult<OwnedFd>;
    /// `cuMemImportFromShareableHandle` of a POSIX descriptor: a handle of its own (row D-X2).
    fn import_fd(&self, descriptor: BorrowedFd<'_>) -> DriverResult<ChunkHandle>;
    /// `cuMemGetAddressRange`: base and bytes of the one chunk mapped there, as `device` sees it:
    /// memory of another device is not found without access (row D-P1).
    fn address_range(&self, device: DeviceId, address: u64) -> DriverResult<(u64, u64)>;
    /// `cuPointerGetAttributes`.
    fn pointer_info(&self, address: u64) -> DriverResult<PointerInfo>;
    /// `cuIpcGetMemHandle`, the answer dropped: mapped chunks are refused (row D-P3).
    fn legacy_ipc_export(&self, device: DeviceId, address: u64) -> DriverResult<()>;
    /// `cuMemGetHandleForAddressRange(DMA_BUF_FD)`: for other drivers; it keeps the memory (row D-X9).
    fn dma_buf(&self, device: DeviceId, address: u64, bytes: u64) -> DriverResult<OwnedFd>;

    // ---- the driver's own allocators (what the pool is measured against) ----

    /// `cuMemAlloc`.
    fn mem_alloc(&self, device: DeviceId, bytes: u64) -> DriverResult<u64>;
    /// `cuMemFree`: waits for all work of the device, and keeps others waiting (row D-N18).
    fn mem_free(&self, device: DeviceId, address: u64) -> DriverResult<()>;
    /// `cuMemAllocAsync`.
    ///
    /// # Safety
    /// The stream is live.
    unsafe fn mem_alloc_async(
        &self,
        device: DeviceId,
        bytes: u64,
        stream: StreamHandle,
    ) -> DriverResult<u64>;
    /// `cuMemFreeAsync`.
    ///
    /// # Safety
    /// The stream is live.
    unsafe fn mem_free_async(
        &self,
        device: DeviceId,
        address: u64,
        stream: StreamHandle,
    ) -> DriverResult<()>;
    /// `cuMemPoolSetAttribute(RELEASE_THRESHOLD)` of the device's default pool, in bytes.
    fn mem_pool_set_release_threshold(&self, device: DeviceId, bytes: u64) -> DriverResult<()>;

    // ---- page-locked host memory ----

    /// `cuMemHostAlloc` (portable, mapped), zeroed.
    fn host_alloc(&self, device: DeviceId, bytes: u64) -> DriverResult<PinnedAddress>;
    /// `cuMemFreeHost`: waits for all work of the device, and keeps others waiting (row D-N18).
    ///
    /// # Safety
    /// The address came from [`Driver::host_alloc`], and nothing uses it any more.
    unsafe fn host_free(&self, device: DeviceId, address: PinnedAddress) -> DriverResult<()>;

    // ---- copies and kernels ----

    /// A synchronous copy or fill on the legacy stream, with `device`'s context current. When it returns
    /// the bytes are there for work of every stream.
    ///
    /// # Safety
    /// Host addresses in `transfer` are valid for its length; device addresses were given out by this
    /// driver (with unified addressing the driver would follow a host address in their place).
    unsafe fn copy(&self, device: DeviceId, transfer: &Transfer) -> DriverResult<()>;
    /// The same, enqueued on a stream.
    ///
    /// # Safety
    /// As [`Driver::copy`], host memory until the stream has passed the copy; the stream is live.
    unsafe fn copy_async(
        &self,
        device: DeviceId,
        transfer: &Transfer,
        stream: StreamHandle,
    ) -> DriverResult<()>;
    /// `cuLaunchKernel` of a built-in kernel.
    ///
    /// # Safety
    /// The stream is live; device addresses were given out by this driver. Touching a mapping
    /// without access, or none, faults the context for good (row D-M6).
    unsafe fn launch(
        &self,
        device: DeviceId,
        kernel: &ProbeKernel,
        stream: StreamHandle,
    ) -> DriverResult<()>;
    /// `cuLaunchHostFunc`: in stream order, on a driver thread. It must make no driver call.
    ///
    /// # Safety
    /// The stream is live.
    unsafe fn launch_host_function(
        &self,
        device: DeviceId,
        stream: StreamHandle,
        function: Box<dyn FnOnce() + Send>,
    ) -> DriverResult<()>;

    // ---- streams ----

    /// `cuStreamCreate(CU_STREAM_NON_BLOCKING)`, in the device's primary context.
    fn stream_create(&self, device: DeviceId) -> DriverResult<StreamHandle>;
    /// `cuStreamCreate(CU_STREAM_DEFAULT)`: ordered with the legacy stream in both directions.
    fn stream_create_blocking(&self, device: DeviceId) -> DriverResult<StreamHandle>;
    /// `cuStreamDestroy`: returns at once, work goes on.
    ///
    /// # Safety
    /// The stream is live, owned by the caller, and not used afterwards.
    unsafe fn stream_destroy(&self, device: DeviceId, stream: StreamHandle) -> DriverResult<()>;
    /// `cuStreamGetId`.
    ///
    /// # Safety
    /// The stream is live.
    unsafe fn stream_id(&self, device: DeviceId, stream: StreamHandle) -> DriverResult<StreamId>;
    /// `cuStreamQuery`: whether all work is done.
    ///
    /// # Safety
    /// The stream is live.
    unsafe fn stream_query(&self, device: DeviceId, stream: StreamHandle) -> DriverResult<bool>;
    /// `cuStreamSynchronize`.
    ///
    /// # Safety
    /// The stream is live.
    unsafe fn stream_synchronize(&self, device: DeviceId, stream: StreamHandle)
    -> DriverResult<()>;
    /// `cuStreamWaitEvent`: later work of the stream waits for the event; works across devices.
    ///
    /// # Safety
    /// Stream and event are live.
    unsafe fn stream_wait_event(
        &self,
        device: DeviceId,
        stream: StreamHandle,
        event: EventHandle,
    ) -> DriverResult<()>;
    /// `cuStreamWaitValue32(GEQ)`: holds the stream until the word at `address` is at least
    /// `value` (rows D-V5, D-V7). The host writes the word with [`PinnedAddress`]'s own memory.
    ///
    /// # Safety
    /// The stream is live; the word stays allocated until the wait is over.
    unsafe fn stream_wait_value32(
        &self,
        device: DeviceId,
        stream: StreamHandle,
        address: PinnedAddress,
        value: u32,
    ) -> DriverResult<()>;

    // ---- events ----

    /// `cuEventCreate(CU_EVENT_DISABLE_TIMING)`.
    fn event_create(&self, device: DeviceId) -> DriverResult<EventHandle>;
    /// `cuEventCreate(CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS)`: not everywhere (row D-X7).
    fn event_create_interprocess(&self, device: DeviceId) -> DriverResult<EventHandle>;
    /// `cuIpcGetEventHandle`: the name of an interprocess event for other processes.
    ///
    /// # Safety
    /// The event is live.
    unsafe fn ipc_event_handle(
        &self,
        device: DeviceId,
        event: EventHandle,
    ) -> DriverResult<IpcEventHandle>;
    /// `cuIpcOpenEventHandle`: an event of another process, as one of `device` here.
    fn ipc_event_open(
        &self,
        device: DeviceId,
        handle: &IpcEventHandle,
    ) -> DriverResult<EventHandle>;
    /// `cuEventDestroy`.
    ///
    /// # Safety
    /// The event is live, owned by the caller, and not used afterwards.
    unsafe fn event_destroy(&self, device: DeviceId, event: EventHandle) -> DriverResult<()>;
    /// `cuEventRecord`: the event's context must be the stream's.
    ///
    /// # Safety
    /// Event and stream are live.
    unsafe fn event_record(
        &self,
        device: DeviceId,
        event: EventHandle,
        stream: StreamHandle,
    ) -> DriverResult<()>;
    /// `cuEventQuery`: true once passed, or if never recorded. Harms captures unless the calling
    /// thread is in relaxed mode (rows D-G2, D-G3, D-G4).
    ///
    /// # Safety
    /// The event is live.
    unsafe fn event_query(&self, device: DeviceId, event: EventHandle) -> DriverResult<bool>;
    /// `cuEventSynchronize`.
    ///
    /// # Safety
    /// The event is live.
    unsafe fn event_synchronize(&self, device: DeviceId, event: EventHandle) -> DriverResult<()>;

    // ---- capture and graphs ----

    /// `cuStreamBeginCapture`.
    ///
    /// # Safety
    /// The stream is live.
    unsafe fn capture_begin(
        &self,
        device: DeviceId,
        stream: StreamHandle,
        mode: CaptureMode,
    ) -> DriverResult<()>;
    /// `cuStreamEndCapture`.
    ///
    /// # Safety
    /// The stream is live.
    unsafe fn capture_end(
        &self,
        device: DeviceId,
        stream: StreamHandle,
    ) -> DriverResult<GraphHandle>;
    /// `cuStreamGetCaptureInfo`.
    ///
    /// # Safety
    /// The stream is live.
    unsafe fn capture_info(
        &self,
        device: DeviceId,
        stream: StreamHandle,
    ) -> DriverResult<CaptureInfo>;
    /// `cuThreadExchangeStreamCaptureMode` of the calling thread: sets `mode`, returns the old one.
    fn exchange_capture_mode(&self, mode: CaptureMode) -> DriverResult<CaptureMode>;
    /// `cuGraphInstantiate`.
    ///
    /// # Safety
    /// The graph is live.
    unsafe fn graph_instantiate(
        &self,
        device: DeviceId,
        graph: GraphHandle,
    ) -> DriverResult<GraphExecHandle>;
    /// `cuGraphLaunch`.
    ///
    /// # Safety
    /// Graph and stream are live.
    unsafe fn graph_launch(
        &self,
        device: DeviceId,
        graph: GraphExecHandle,
        stream: StreamHandle,
    ) -> DriverResult<()>;
    /// `cuGraphDestroy`.
    ///
    /// # Safety
    /// The graph is live, owned by the caller, and not used afterwards.
    unsafe fn graph_destroy(&self, device: DeviceId, graph: GraphHandle) -> DriverResult<()>;
    /// `cuGraphExecDestroy`.
    ///
    /// # Safety
    /// The graph is live, owned by the caller, and not used afterwards.
    unsafe fn graph_exec_destroy(
        &self,
        device: DeviceId,
        graph: GraphExecHandle,
    ) -> DriverResult<()>;
}
